"""The tables of the tests of serving, of each data type of weights."""

from __future__ import annotations

import torch

from rec_sdk_torch.tbe import InitializerType, Pooling, TableBatchedEmbedding, TableConfig, TableOptimizer

DTYPES = {"a": torch.float32, "b": torch.bfloat16, "c": torch.float16}


def make() -> TableBatchedEmbedding:
    tables = [
        TableConfig(
            name,
            1000,
            5,
            pooling=Pooling.SUM,
            hashed=name != "c",
            weight_dtype=dtype,
            initializer_type=InitializerType.UNIFORM,
            track_changes=True,
        )
        for name, dtype in DTYPES.items()
    ]
    optimizer = TableOptimizer.create(torch.optim.Adagrad, {"lr": 0.1})
    return TableBatchedEmbedding(tables, optimizer=optimizer, cache=200, seed=2)


def train(embedding: TableBatchedEmbedding, ids: range) -> None:
    embedding.train()
    for begin in range(ids.start, ids.stop, 50):
        some = torch.arange(begin, min(begin + 50, ids.stop)).repeat(len(DTYPES))
        embedding(some, torch.arange(len(some) + 1)).square().sum().backward()
