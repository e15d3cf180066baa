"""Tables without TorchRec, and training steps on them, which tests of every room share.

`embedding_of(TableConfig("t", 100, 4), cache=8)` is a `TableBatchedEmbedding` that trains; `train(embedding, [1], [2])`
trains it on two batches. The same for collections is in jagged.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

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


def weights_of(embedding: TableBatchedEmbedding, ids: Iterable[int], table: str = "t") -> torch.Tensor:
    """The weights of `ids`, as a save has them: also of ids that have no row yet."""
    return embedding.view(table).read(torch.tensor(list(ids), dtype=torch.int64), ["weight"]).parts["weight"]
