"""The data, model and training loop that all steps of the tutorial share: clicks of users on items."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
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
    """Generates batches: some users click more, some items are clicked more, and few ids are in most batches."""
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
    """A model that computes the logit of a click from the embeddings of both ids."""

    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables = tables
        self.dense = nn.Sequential(nn.Linear(2 * DIM, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        """Returns the logits, float32 [BATCH]."""
        return self.dense(self.tables(ids).values()).squeeze(1)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Returns the mean loss of a batch."""
    return nn.functional.binary_cross_entropy_with_logits(model(batch.ids), batch.clicked)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Batch]) -> None:
    """Trains on all batches, and prints the loss of the first and the last ten steps."""
    losses = []
    model.train()
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()  # also updates the rows of the tables
        optimizer.step()
        losses.append(loss.detach())
    first, last = (float(torch.stack(part).mean()) for part in (losses[:10], losses[-10:]))
    say(f"loss {first:.3f} at first, {last:.3f} at last")


@torch.no_grad()
def evaluate(model: nn.Module) -> Tensor:
    """Returns the mean loss of five batches."""
    return torch.stack([loss_of(model.eval(), batch) for batch in batches(steps=5)]).mean()


def say(text: str) -> None:
    """Prints the text on rank 0 only, or if there are no ranks."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text)
