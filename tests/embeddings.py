"""Builds `TableBatchedEmbedding`s and trains them, without TorchRec, for tests of all folders.

`embedding_of(TableConfig("t", 100, 4), cache=8)` returns a `TableBatchedEmbedding` that can be trained;
`train(embedding, [1], [2])` trains it on two batches. collection_factory.py does the same for collections.
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
    """Builds an embedding with `tables`.

    Args:
        tables: table configs.
        optimizer: a class and its keywords, or a `TableOptimizer`; with None, tables have no optimizer yet.
        seed: seed of the initial weights.
        options: options of the embedding, such as `cache` and `device`.
    """
    made = TableOptimizer.create(*optimizer) if isinstance(optimizer, tuple) else optimizer
    return TableBatchedEmbedding(list(tables), optimizer=made, seed=seed, **options)


def one_table(
    device: torch.device | None, *, rows: int = 100, dim: int = 4, optimizer: Optimizer | None = SGD, **options: Any
) -> TableBatchedEmbedding:
    """Builds an embedding with one hash table "t" and a cache of 50 rows.

    Args:
        device: device of the cache.
        rows: `num_embeddings` of the table.
        dim: `embedding_dim` of the table.
        optimizer: a class and its keywords; with None, the table has no optimizer yet.
        options: further fields of the table's config, and options of the embedding.
    """
    names = options.keys() & {field.name for field in fields(TableConfig)}
    table = TableConfig("t", rows, dim, **{name: options.pop(name) for name in names})
    return embedding_of(table, optimizer=optimizer, device=device, **{"cache": 50, **options})


def windowed(optimizer: str, window: int, **options: Any) -> Optimizer:
    """Returns a class of `torch.optim` and its keywords. For a window of several backward passes, the class is the
    corresponding `Accumulate*`.
    """
    if window == 1:
        return getattr(torch.optim, optimizer), options
    options |= {"use_accumulate": True, "accumulate_step": window}
    return getattr(rec_sdk_torch, f"Accumulate{optimizer}"), options


def train(
    embedding: Any, *batches: Iterable[int] | torch.Tensor, bag: int = 0, square: bool = False, **signals: torch.Tensor
) -> list[torch.Tensor]:
    """Runs a training step on each batch, with the sum of the outputs (or of their squares) as the loss.

    Args:
        embedding: a `TableBatchedEmbedding`, or a callable with the same arguments.
        batches: ids of each batch, table by table.
        bag: ids per bag; with 0, each table has one bag.
        square: whether the loss is the sum of squares.
        signals: clicks, timestamps or weights of each batch.

    Returns:
        The output of each batch, on the host.
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
    """Returns the ids that a hash table holds, sorted."""
    return sorted(embedding.view(table).ids().tolist())


def weights_of(embedding: TableBatchedEmbedding, ids: Iterable[int], table: str = "t") -> torch.Tensor:
    """Returns the weights of `ids` as a save would store them; ids without a row have their initial weights."""
    return embedding.view(table).read(torch.tensor(list(ids), dtype=torch.int64), ["weight"]).parts["weight"]
