"""Tables for the tests of serving, one for each weight dtype, and saves of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from embeddings import embedding_of

from rec_sdk_torch.saves.saver import Saver
from rec_sdk_torch.tbe import InitializerType, Pooling, TableBatchedEmbedding, TableConfig

DTYPES = {"a": torch.float32, "b": torch.bfloat16, "c": torch.float16}


def make() -> TableBatchedEmbedding:
    """Builds an embedding of two hash tables and an index table, with a thousand ids."""
    fields: dict[str, Any] = {"initializer_type": InitializerType.UNIFORM, "track_changes": True}
    tables = [
        TableConfig(name, 1000, 5, pooling=Pooling.SUM, hashed=name != "c", weight_dtype=dtype, **fields)
        for name, dtype in DTYPES.items()
    ]
    return embedding_of(*tables, cache=200, seed=2)


def train(embedding: TableBatchedEmbedding, ids: range) -> None:
    """Trains each table on the ids, fifty per step."""
    embedding.train()
    for begin in range(ids.start, ids.stop, 50):
        some = torch.arange(begin, min(begin + 50, ids.stop)).repeat(len(DTYPES))
        embedding(some, torch.arange(len(some) + 1)).square().sum().backward()


def save(embedding: TableBatchedEmbedding, path: Path, incremental: bool = False) -> Path:
    """Saves a model; returns the folder of the save."""
    return Path(Saver().save(embedding, path, incremental=incremental))


def saved(path: Path, ids: range = range(300)) -> TableBatchedEmbedding:
    """Trains an embedding on the ids and saves it; returns the embedding."""
    embedding = make()
    train(embedding, ids)
    save(embedding, path)
    return embedding


def only_save(path: Path) -> Path:
    """Saves to `path`; returns the folder of the only save there."""
    saved(path)
    (folder,) = path.iterdir()
    return folder
