"""Generated histories: items belong to topics, a user likes a few topics, some items are popular."""

from __future__ import annotations

import torch
from support.clicks import ClickData, JaggedIds
from support.generated import clicks, power_law
from support.hashing import hash_numbers
from torch import Generator, Tensor

ITEMS, TOPICS = 10_000, 10
EXPONENT = 1.2
TASTES = 2  # number of topics that a user likes
ON_TOPIC = 0.85  # probability that an item's topic is one of the user's


def _draw_items(topics: Tensor, generator: Generator) -> Tensor:
    """Draws an item of each topic in `topics`. Item i belongs to topic i % TOPICS, so every topic has popular items."""
    ranks = power_law(topics.numel(), ITEMS // TOPICS, EXPONENT, generator)
    return ranks * TOPICS + topics


def _draw_topics(tastes: Tensor, on_topic: float, generator: Generator) -> Tensor:
    """Draws a topic for each row of `tastes`, int64 [n, TASTES]: one of its topics with probability `on_topic`, else
    any.
    """
    count = len(tastes)
    liked = tastes[torch.arange(count), torch.randint(0, TASTES, (count,), generator=generator)]
    other = torch.randint(0, TOPICS, (count,), generator=generator)
    return torch.where(torch.rand(count, generator=generator) < on_topic, liked, other)


def generated_histories(samples: int, longest: int, seed: int) -> ClickData:
    """Generates samples: a history of 0 to `longest` items, and a candidate. The same seed gives the same samples."""
    generator = Generator().manual_seed(seed)
    tastes = torch.randint(0, TOPICS, (samples, TASTES), generator=generator)
    lengths = torch.randint(0, longest + 1, (samples,), generator=generator)
    history_tastes = tastes.repeat_interleave(lengths, dim=0)
    history = _draw_items(_draw_topics(history_tastes, ON_TOPIC, generator), generator)
    candidate = _draw_items(_draw_topics(tastes, 0.5, generator), generator)

    appeal = torch.randn(ITEMS, generator=generator)
    liked = (tastes == (candidate % TOPICS).unsqueeze(1)).any(1)
    labels = clicks(3.0 * liked + appeal[candidate], 2.5, generator)
    features = {
        "history": JaggedIds(hash_numbers("item", history), lengths),
        "candidate": JaggedIds.single(hash_numbers("item", candidate)),
    }
    return ClickData(torch.empty(samples, 0), features, labels)
