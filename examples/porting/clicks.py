"""Parts of the porting scripts: clicks of users on items, a model that predicts them, and the end of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor

ROWS = {"user": 1000, "item": 500}
BATCH, STEPS, DIM = 64, 150, 16


@dataclass
class Clicks:
    """Ids of a user and an item per sample, on the host, and whether the user clicked, float32 [B]."""

    sparse: KeyedJaggedTensor
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Clicks:
        """Copies the labels to the device, for a pipeline; the ids stay on the host."""
        return Clicks(self.sparse, self.labels.to(device, non_blocking=non_blocking))

    def record_stream(self, stream: torch.Stream) -> None:
        """Keeps the memory of the labels until the stream has copied them."""
        self.labels.record_stream(stream)


def clicks(rank: int) -> Iterator[Clicks]:
    """Generates batches: some users click more than others, and some items are clicked more."""
    taste = torch.Generator().manual_seed(0)
    scores = {name: torch.randn(rows, generator=taste) for name, rows in ROWS.items()}
    generator = torch.Generator().manual_seed(1 + rank)
    for _ in range(STEPS):
        ids = {name: torch.randint(0, rows, (BATCH,), generator=generator) for name, rows in ROWS.items()}
        labels = (scores["user"][ids["user"]] + scores["item"][ids["item"]] > 0).float()
        lengths = torch.ones(2 * BATCH, dtype=torch.int64)
        yield Clicks(KeyedJaggedTensor(list(ids), torch.cat(list(ids.values())), lengths=lengths), labels)


def pooled(output: Any) -> Tensor:
    """Returns the embeddings of both ids, concatenated, from a collection of bags."""
    return output.values()


def sequences(output: Any) -> Tensor:
    """Returns the embeddings of both ids, concatenated, from a collection of sequences of one id each."""
    return torch.cat([output[name].values() for name in ROWS], dim=1)


class Model(nn.Module):
    """A model that computes the logit of a click from the embeddings of both ids, with the layers `dense`."""

    def __init__(self, tables: nn.Module, rows: Callable[[Any], Tensor], dense: nn.Module) -> None:
        super().__init__()
        self.tables = tables
        self.rows = rows
        self.dense = dense

    def forward(self, batch: Clicks) -> tuple[Tensor, Tensor]:
        """Returns the mean loss and the logits."""
        logits = self.dense(self.rows(self.tables(batch.sparse))).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels), logits


def end(device: torch.device, losses: Sequence[Tensor]) -> None:
    """Prints the loss of the first and the last steps, and ends the process group."""
    first, last = (float(torch.stack(part).mean()) for part in (losses[:10], losses[-10:]))
    if dist.get_rank() == 0:
        print(f"{device.type}: loss {first:.4f} at first, {last:.4f} at last")
    dist.barrier()  # no rank closes its sockets while another still uses them
    dist.destroy_process_group()
