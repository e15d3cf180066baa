"""Tables without TorchRec, and training steps on them, which tests of every room share.

`embedding_of(TableConfig("t", 100, 4), cache=8)` is a `TableBatchedEmbedding` that trains; `train(embedding, [1], [2])`
trains it on two batches. The same for collections is in jagged.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import torch

import rec_sdk_torch
from rec_sdk_torch.tbe import TableBatchedEmbedding, TableConfig, TableOptimizer

Optimizer = tuple[type, Mapping[str, Any]]
SGD: Optimizer = (torch.optim.SGD, {"lr": 0.1})
ADAGRAD: Optimizer = (torch.optim.Adagrad, {"lr": 0.1})
ADAM: Optimizer = (torch.optim.Adam, {"lr": 0.1})


def embedding_of(
    *tables: TableConfig, optimizer: Optimizer | TableOptimizer | None = ADAGRAD, seed: int = 1, **options: Any
) -> TableBatchedEmbedding:
    """An embedding of `tables`.

    Args:
        tables: their configs.
        optimizer: a class and its keywords, or what `TableOptimizer.create` makes of them; None: of none yet.
        seed: of the initial weights.
        options: of the embedding, such as `cache` and `device`.
    """
    made = TableOptimizer.create(*optimizer) if isinstance(optimizer, tuple) else optimizer
    return TableBatchedEmbedding(list(tables), optimizer=made, seed=seed, **options)


def one_table(
    device: torch.device | None, *, rows: int = 100, dim: int = 4, optimizer: Optimizer | None = SGD, **options: Any
) -> TableBatchedEmbedding:
    """An embedding of one hash table "t" of which 50 rows are cached.

    Args:
        device: of the cache.
        rows: `num_embeddings` of the table.
        dim: its `embedding_dim`.
        optimizer: a class and its keywords; None: of none yet.
        options: further fields of the table's config, and options of the embedding.
    """
    names = options.keys() & {field.name for field in fields(TableConfig)}
    table = TableConfig("t", rows, dim, **{name: options.pop(name) for name in names})
    return embedding_of(table, optimizer=optimizer, device=device, **{"cache": 50, **options})


def windowed(optimizer: str, window: int, **options: Any) -> Optimizer:
    """A class of `torch.optim`, or for a window of several backward passes its class `Accumulate*`, and keywords."""
    if window == 1:
        return getattr(torch.optim, optimizer), options
    options |= {"use_accumulate": True, "accumulate_step": window}
    return getattr(rec_sdk_torch, f"Accumulate{optimizer}"), options


def train(
    embedding: Any, *batches: Iterable[int] | torch.Tensor, bag: int = 0, square: bool = False, **signals: torch.Tensor
) -> list[torch.Tensor]:
    """A training step on each batch, on the sum of the outputs or of their squares; the outputs.

    Args:
        embedding: a `TableBatchedEmbedding`, or what is called as one.
        batches: ids, table by table.
        bag: ids of a bag; 0: each table has one bag.
        square: trains on the sum of squares.
        signals: clicks, timestamps or weights of each batch.
    """
    outputs = []
    for batch in batches:
        ids = batch if isinstance(batch, torch.Tensor) else torch.tensor(list(batch), dtype=torch.int64)
        offsets = torch.arange(0, len(ids) + 1, bag or max(1, len(ids) // len(embedding.tables)))
        output = embedding(ids, offsets, **signals)
        (output.square() if square else output).sum().backward()
        outputs.append(output.detach().cpu())
    return outputs


def ids_of(embedding: TableBatchedEmbedding, table: str = "t") -> list[int]:
    """The ids that a hash table knows, in order."""
    return sorted(embedding.view(table).ids().tolist())


def weights_of(embedding: TableBatchedEmbedding, ids: Iterable[int], table: str = "t") -> torch.Tensor:
    """The weights of `ids`, as a save has them: also of ids that have no row yet."""
    return embedding.view(table).read(torch.tensor(list(ids), dtype=torch.int64), ["weight"]).parts["weight"]
