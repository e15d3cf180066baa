"""Reference for stochastic rounding in NumPy, as specified in docs/rounding.md."""

from __future__ import annotations

import numpy as np
import torch

U64 = np.uint64


def row_numbers(ids: np.ndarray, seed: int) -> np.ndarray:
    """Computes the start and step of each row's random sequence, uint32 `[n, 2]`."""
    z = ids.astype(np.int64).view(U64) * U64(0x9E3779B97F4A7C15) + U64(seed & (2**64 - 1))
    for _ in range(2):
        z = (z ^ (z >> U64(32))) * U64(0xD6E8FEB86659FD93)
    return np.stack([z >> U64(32), z & U64(2**32 - 1)], axis=1).astype(np.uint32)


def random_bits(numbers: np.ndarray, dim: int) -> np.ndarray:
    """Computes a random word for each element, uint32 `[n, dim]`."""
    return numbers[:, :1] + np.arange(dim, dtype=np.uint32) * numbers[:, 1:]


def rounded(values: torch.Tensor, dtype: torch.dtype, random: np.ndarray) -> torch.Tensor:
    """Rounds float32 `values` `[n, dim]` to `dtype`; computed from neighbours and probabilities, not by bit
    operations.
    """
    below = _toward_zero(values, dtype)
    nearest = values.to(dtype)
    largest = torch.finfo(dtype).max
    magnitude = below.abs().view(torch.int16)
    above = torch.where(values < 0, -1.0, 1.0).to(dtype) * (magnitude + 1).view(dtype)
    distance = (values.double() - below.double()).abs() / (above.double() - below.double()).abs()
    kept = 16 if dtype is torch.bfloat16 else 13
    chance = torch.from_numpy((random >> np.uint32(32 - kept)).astype(np.float64)) / 2**kept
    # The probability is truncated to the resolution of the random number; only subnormal float16 has a remainder.
    up = torch.floor(distance * 2**kept) / 2**kept + chance >= 1
    by_chance = torch.where(up, above, below)
    return torch.where(values.abs() <= largest, by_chance, nearest)


def _toward_zero(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    nearest = values.to(dtype)
    too_far = nearest.double().abs() > values.double().abs()
    return torch.where(too_far, (nearest.abs().view(torch.int16) - 1).view(dtype).copysign(nearest), nearest)
