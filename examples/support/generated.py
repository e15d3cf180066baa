"""Parts of a generated click log: power-law ids, and clicks drawn from a known model."""

from __future__ import annotations

import torch
from torch import Generator, Tensor


def power_law(count: int, vocabulary: int, exponent: float, generator: Generator) -> Tensor:
    """Draws ranks, int64 [count]; rank k has a probability proportional to (k + 1) ** -exponent."""
    weights = torch.arange(1, vocabulary + 1, dtype=torch.float64).pow(-exponent)
    upper = torch.cumsum(weights, 0) / weights.sum()
    draws = torch.rand(count, generator=generator, dtype=torch.float64)
    return torch.searchsorted(upper, draws).clamp_(max=vocabulary - 1)


def clicks(scores: Tensor, spread: float, generator: Generator) -> Tensor:
    """Draws labels, float32 0 or 1; the log-odds of a click are the scores, scaled to a standard deviation of `spread`.

    The spread limits the quality of any model, because clicks stay random: with a spread of 2.5, the best possible AUC
    is about 0.88.
    """
    log_odds = (scores - scores.mean()) / scores.std() * spread - 1.0
    return torch.bernoulli(torch.sigmoid(log_odds), generator=generator)
