"""The data and the model of the tutorial, which all steps share: clicks of users on items."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor

ROWS = {"user": 2000, "item": 1000}
BATCH, DIM = 64, 16


@dataclass
class Batch:
    """Ids of a user and an item for each sample, on the host, and whether the user clicked, float32 [BATCH]."""

    ids: KeyedJaggedTensor
    clicked: Tensor


def batches(steps: int, rank: int = 0) -> Iterator[Batch]:
    """Some users click more than others, some items are clicked more, and few ids are in most batches."""
    taste = torch.Generator().manual_seed(0)
    scores = {name: torch.randn(rows, generator=taste) for name, rows in ROWS.items()}
    draw = torch.Generator().manual_seed(1 + rank)
    for _ in range(steps):
        uniform = {name: torch.rand(BATCH, generator=draw) for name in ROWS}
        ids = {name: (rows * uniform[name] ** 4).long() for name, rows in ROWS.items()}
        clicked = (scores["user"][ids["user"]] + scores["item"][ids["item"]] > 0).float()
        lengths = torch.ones(2 * BATCH, dtype=torch.int64)
        yield Batch(KeyedJaggedTensor(list(ids), torch.cat(list(ids.values())), lengths=lengths), clicked)


class Model(nn.Module):
    """The logit of a click from the embeddings of both ids."""

    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables = tables
        self.dense = nn.Sequential(nn.Linear(2 * DIM, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        """Logits, float32 [BATCH]."""
        return self.dense(self.tables(ids).values()).squeeze(1)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """The mean loss of a batch."""
    return nn.functional.binary_cross_entropy_with_logits(model(batch.ids), batch.clicked)


def report(losses: list[Tensor]) -> None:
    """Prints the loss of the first and the last ten steps."""
    first, last = (float(torch.stack(part).mean()) for part in (losses[:10], losses[-10:]))
    print(f"loss {first:.3f} at first, {last:.3f} at last")
