"""Serving of a DLRM without the model's code: tables are read from a save, the dense part is a torch.export program."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from support.clicks import ClickBatch, ClickData
from torch import Tensor, nn

from rec_sdk_torch.serving import TableReader

Request = tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]
"""Dense features [B, features], and ids [N] and offsets [B + 1] of each sparse feature."""


def request_of(batch: ClickBatch) -> Request:
    """Returns the batch in the form in which another program would send it."""
    sparse = batch.sparse.to_dict()
    return batch.dense, {name: (jagged.values(), jagged.offsets()) for name, jagged in sparse.items()}


def export_dense(dense: nn.Module, dim: int, data: ClickData, path: Path) -> None:
    """Writes the dense part as a program that takes batches of any size."""
    pooled, size = torch.zeros(2, len(data.features) * dim), torch.export.Dim("batch", min=1)
    program = torch.export.export(dense, (data.dense[:2], pooled), dynamic_shapes=({0: size}, {0: size}))
    torch.export.save(program, path)


def answer(program: nn.Module, readers: Mapping[str, TableReader], request: Request) -> Tensor:
    """Returns the probabilities of clicks, float32 [B]."""
    dense, sparse = request
    pooled = [reader.lookup_pooled(*sparse[name]) for name, reader in readers.items()]
    with torch.inference_mode():
        logits: Tensor = program(dense, torch.cat(pooled, dim=1))
        return logits.sigmoid()
