"""Embeddings that the tests of saves train, and all that one has of its rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rec_sdk_torch import AccumulateAdagrad
from rec_sdk_torch.tbe import InitializerType, Pooling, TableBatchedEmbedding, TableConfig, TableOptimizer

IDS = 60
ADAGRAD = (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.01})
WINDOWS = (AccumulateAdagrad, {"lr": 0.1, "use_accumulate": True, "accumulate_step": 3})


def configs(**options: Any) -> list[TableConfig]:
    """Two hash tables and two index tables in four groups."""

    def table(name: str, hashed: bool, dim: int, dtype: torch.dtype = torch.float32) -> TableConfig:
        more = {"initializer_type": InitializerType.UNIFORM, "track_changes": True, **options}
        return TableConfig(name, IDS, dim, pooling=Pooling.SUM, hashed=hashed, weight_dtype=dtype, **more)

    d = replace(table("d", False, 4), cache_dtype=torch.bfloat16)  # float32 in host memory and in saves
    return [table("a", True, 4), table("b", False, 8), table("c", True, 4, torch.bfloat16), d]


def make(optimizer: Any = ADAGRAD, *, cache: Any = 20, seed: int = 1, **options: Any) -> TableBatchedEmbedding:
    """An embedding; `cache` of fewer rows than tables have makes rows leave it."""
    names = {"device", "cache_policy", "batch_hint"}
    own = {name: options.pop(name) for name in names & options.keys()}
    given = None if optimizer is None else TableOptimizer.create(*optimizer)
    return TableBatchedEmbedding(configs(**options), optimizer=given, cache=cache, seed=seed, **own)


def batch(seed: int, ids: int = IDS) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight lookups of each table, in bags of two."""
    return torch.from_numpy(np.random.default_rng(seed).integers(0, ids, 32)), torch.arange(0, 33, 2)


def train(embedding: TableBatchedEmbedding, seeds: range) -> list[torch.Tensor]:
    """The outputs of the steps."""
    outputs = []
    for seed in seeds:
        indices, offsets = (each.to(embedding.device) for each in batch(seed))
        output = embedding(indices, offsets)
        output.square().sum().backward()
        outputs.append(output.detach().cpu())
    return outputs


def contents(embedding: TableBatchedEmbedding) -> dict[str, dict[int, bytes]]:
    """The bytes of every row, state and pending gradient, by table and id; with steps, options and window counts."""
    result: dict[str, dict[int, bytes]] = {}
    with embedding.exclusive():
        for config in embedding.tables:
            view = embedding.view(config.name)
            rows = result[config.name] = {}
            for ids in view.id_pieces():
                chunk = view.read(torch.from_numpy(ids))
                flat = [part.contiguous().view(torch.uint8).reshape(len(ids), -1) for part in chunk.parts.values()]
                values = torch.cat(flat, 1).numpy() if len(ids) else np.empty((0, 0), np.uint8)
                rows.update({int(i): row.tobytes() for i, row in zip(ids, values, strict=True)})
            waiting = result[f"{config.name}.window"] = {}
            for ids, sums in view.window_rows():
                waiting.update({int(i): row.numpy().tobytes() for i, row in zip(ids, sums, strict=True)})
        for place, optimizer in enumerate(embedding.optimizers):
            if optimizer is not None:
                options = {name: value for name, value in optimizer.options.items() if name != "params"}
                result[f"optimizer {place}"] = {optimizer.step: repr(sorted(options.items())).encode()}
        result["counts"] = {length: bytes([count]) for length, count in embedding.layout.windows.items() if count}
    return result
