"""A generated click log: skewed categories, one of them multi-hot, dense features, and labels from a known model."""

from __future__ import annotations

import torch
from support.clicks import ClickData, JaggedIds
from support.generated import clicks, power_law
from support.hashing import hash_numbers
from torch import Generator, Tensor

VOCABULARIES = {"user": 40_000, "item": 20_000, "shop": 8_000, "query": 30_000, "city": 4_000}
TAGS, MOST_TAGS = 20_000, 5
DENSE = 8
EXPONENT = 1.1
LATENT = 4


def _effects(vocabulary: int, generator: Generator) -> Tensor:
    return torch.randn(vocabulary, generator=generator)


def _affinity(users: Tensor, items: Tensor, generator: Generator) -> Tensor:
    """Returns a preference that depends on user and item together: the product of their vectors."""
    likes = torch.randn(VOCABULARIES["user"], LATENT, generator=generator)
    has = torch.randn(VOCABULARIES["item"], LATENT, generator=generator)
    affinity: Tensor = (likes[users] * has[items]).sum(1) / LATENT**0.5
    return affinity


def _draw_tags(samples: int, generator: Generator) -> JaggedIds:
    lengths = torch.randint(0, MOST_TAGS + 1, (samples,), generator=generator)
    return JaggedIds(power_law(int(lengths.sum()), TAGS, EXPONENT, generator), lengths)


def _tag_score(tags: JaggedIds, generator: Generator) -> Tensor:
    sample = torch.arange(tags.lengths.numel()).repeat_interleave(tags.lengths)
    return torch.zeros(tags.lengths.numel()).index_add_(0, sample, _effects(TAGS, generator)[tags.values])


def generated_clicks(samples: int, seed: int) -> ClickData:
    """Generates a click log; the same seed gives the same log."""
    generator = Generator().manual_seed(seed)
    ranks = {name: power_law(samples, size, EXPONENT, generator) for name, size in VOCABULARIES.items()}
    tags = _draw_tags(samples, generator)
    dense = torch.randn(samples, DENSE, generator=generator)

    score = dense @ torch.randn(DENSE, generator=generator) / DENSE**0.5 + 0.5 * dense[:, 0] * dense[:, 1]
    score += sum(_effects(size, generator)[ranks[name]] for name, size in VOCABULARIES.items())
    score += _tag_score(tags, generator) / MOST_TAGS**0.5
    score += _affinity(ranks["user"], ranks["item"], generator)

    features = {name: JaggedIds.single(hash_numbers(name, rank)) for name, rank in ranks.items()}
    features["tags"] = JaggedIds(hash_numbers("tags", tags.values), tags.lengths)
    return ClickData(dense, features, clicks(score, 2.5, generator))
