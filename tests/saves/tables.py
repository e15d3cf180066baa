"""Builds, trains, saves and loads embeddings for the tests of saves, and reads their complete contents."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from embeddings import embedding_of

from rec_sdk_torch import AccumulateAdagrad, CheckpointError, Saver
from rec_sdk_torch.saves.format.manifest import Manifest, read_manifest
from rec_sdk_torch.tbe import InitializerType, Pooling, TableBatchedEmbedding, TableConfig

IDS = 60
ADAGRAD = (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.01})
WINDOWS = (AccumulateAdagrad, {"lr": 0.1, "use_accumulate": True, "accumulate_step": 3})


def configs(**options: Any) -> list[TableConfig]:
    """Builds configs of two hash tables and two index tables in four groups."""

    def table(name: str, hashed: bool, dim: int, dtype: torch.dtype = torch.float32) -> TableConfig:
        more = {"initializer_type": InitializerType.UNIFORM, "track_changes": True, **options}
        return TableConfig(name, IDS, dim, pooling=Pooling.SUM, hashed=hashed, weight_dtype=dtype, **more)

    d = replace(table("d", False, 4), cache_dtype=torch.bfloat16)  # float32 in host memory and in saves
    return [table("a", True, 4), table("b", False, 8), table("c", True, 4, torch.bfloat16), d]


def make(optimizer: Any = ADAGRAD, **options: Any) -> TableBatchedEmbedding:
    """Builds an embedding of the four tables; keywords that are not options of the embedding are fields of each table.

    If `cache` has fewer rows than the tables, the cache spills rows.
    """
    names = {"cache", "seed", "device", "cache_policy", "host_store"}
    own = {name: options.pop(name) for name in names & options.keys()}
    return embedding_of(*configs(**options), optimizer=optimizer, **{"cache": 20, **own})


def batch(seed: int, ids: int = IDS) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws eight lookups of each table, in bags of two."""
    return torch.from_numpy(np.random.default_rng(seed).integers(0, ids, 32)), torch.arange(0, 33, 2)


def train(embedding: TableBatchedEmbedding, seeds: Iterable[int]) -> list[torch.Tensor]:
    """Runs a step for each seed; returns the outputs."""
    outputs = []
    for seed in seeds:
        indices, offsets = (each.to(embedding.device) for each in batch(seed))
        output = embedding(indices, offsets)
        output.square().sum().backward()
        outputs.append(output.detach().cpu())
    return outputs


def contents(embedding: TableBatchedEmbedding) -> dict[str, dict[int, bytes]]:
    """Returns the bytes of every row, state and pending gradient by table and id, and also steps, options and
    window counts.
    """
    result: dict[str, dict[int, bytes]] = {}
    with embedding.exclusive():
        for config in embedding.tables:
            view = embedding.view(config.name)
            rows = result[config.name] = {}
            for ids in view.id_chunks():
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


def trained(steps: int | range = 3, optimizer: Any = ADAGRAD, **options: Any) -> TableBatchedEmbedding:
    """Builds a model and trains it."""
    embedding = make(optimizer, **options)
    train(embedding, range(steps) if isinstance(steps, int) else steps)
    return embedding


def assert_same(a: Any, b: Any) -> None:
    """Fails if two models or their contents differ, and names the differing part."""
    a, b = (contents(each) if isinstance(each, TableBatchedEmbedding) else each for each in (a, b))
    assert a.keys() == b.keys()
    for name in a:
        assert a[name] == b[name], name


def save(source: Any, path: Path, incremental: bool = False) -> Path:
    """Saves a model; returns the folder of the save."""
    return Path(Saver().save(source, path, incremental=incremental))


def delta(source: Any, path: Path) -> Path:
    """Saves a delta, or a full save if no delta is possible; returns the folder of the save."""
    return save(source, path, incremental=True)


def written(source: Any, path: Path, incremental: bool = True) -> Manifest:
    """Saves a model; returns the manifest of the save."""
    return read_manifest(save(source, path, incremental))


def chain(path: Path, saves: int = 4) -> tuple[TableBatchedEmbedding, list[Path]]:
    """Returns a model and its saves: a full save, and deltas that each follow one more training step."""
    source, folders = make(), []
    for step in range(saves):
        train(source, range(step, step + 1))
        folders.append(delta(source, path))
    return source, folders


def loaded(path: Any, target: Any = None, *, warm: bool = True, **options: Any) -> Any:
    """Loads a save into a model, by default a model built by `make`; returns the model."""
    target = make(**options) if target is None else target
    Saver().load(target, path, warm=warm)
    return target


def refused(target: Any, path: Any, message: str, error: type[Exception] = CheckpointError) -> None:
    """Checks that a load raises an error and leaves the model unchanged."""
    before = contents(target)
    with pytest.raises(error, match=message):
        Saver().load(target, path)
    assert_same(target, before)
