"""Saves of index tables load into index tables with more rows, and with fewer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tables import ADAGRAD, WINDOWS, contents
from test_saver import refused

import rec_sdk_torch as rst
from rec_sdk_torch.saves.format.manifest import DELTA, FULL, read_manifest
from rec_sdk_torch.tbe import InitializerType, Pooling, TableBatchedEmbedding, TableConfig, TableOptimizer

SIZES = {"i": 60, "j": 8}


def make(sizes: dict[str, int], optimizer: Any = ADAGRAD, cache: int = 25, hashed: bool = False) -> Any:
    """Index tables of these sizes, the second one with as many rows in all models."""
    common: dict[str, Any] = {
        "pooling": Pooling.SUM,
        "track_changes": True,
        "initializer_type": InitializerType.UNIFORM,
    }
    tables = [TableConfig(name, size, 4, hashed=hashed and name == "i", **common) for name, size in sizes.items()]
    return TableBatchedEmbedding(tables, optimizer=TableOptimizer.create(*optimizer), cache=cache, seed=5)


def train(model: Any, steps: range) -> None:
    """Eight lookups of each table by their sizes."""
    for step in steps:
        random = np.random.default_rng(step)
        ids = np.concatenate([random.integers(0, table.num_embeddings, 8) for table in model.tables])
        model(
            torch.from_numpy(ids).to(model.device), torch.arange(0, 17, 2, device=model.device)
        ).square().sum().backward()


@pytest.mark.parametrize("delta", [False, True], ids=["full", "delta"])
@pytest.mark.parametrize("optimizer", [ADAGRAD, WINDOWS], ids=["rows", "windows"])
@pytest.mark.parametrize("rows", [1, 23, 59, 61, 200])
def test_rows_that_both_have(rows: int, optimizer: Any, delta: bool, tmp_path: Path) -> None:
    """Whole deltas follow in files of their own; pending gradients of rows that are left out are too."""
    source, target, fresh = make(SIZES, optimizer), *(make({**SIZES, "i": rows}, optimizer) for _ in range(2))
    train(source, range(3))
    if delta:
        rst.Saver().save(source, tmp_path)
    train(source, range(3, 5))
    rst.Saver().save(source, tmp_path, incremental=delta)
    train(target, range(70, 73))  # other rows, which go
    then = "the others begin anew" if rows > 60 else "the others are left out"
    with pytest.warns(
        UserWarning, match=f"'i' has num_embeddings {rows}, what is loaded 60: {min(rows, 60)} .*{then}"
    ) as said:
        rst.Saver().load(target, tmp_path)
    assert len(said) == 1
    before, after, new = contents(source), contents(target), contents(fresh)
    for name in ("i", "i.window"):
        expected = {i: row for i, row in before[name].items() if i < rows}
        expected |= {i: row for i, row in new[name].items() if i >= 60}
        assert after[name] == expected
    assert {**after, "i": {}, "i.window": {}} == {**before, "i": {}, "i.window": {}}
    train(target, range(80, 83))


@pytest.mark.filterwarnings("ignore:table 'i' has num_embeddings")
@pytest.mark.parametrize("rows", [23, 200])
def test_a_delta_does_not_follow_a_save_of_another_size(rows: int, tmp_path: Path) -> None:
    source, target = make(SIZES), make({**SIZES, "i": rows})
    train(source, range(3))
    rst.Saver().save(source, tmp_path)
    rst.Saver().load(target, tmp_path)
    kinds = []
    for step in range(2):
        train(target, range(step, step + 1))
        kinds.append(read_manifest(Path(rst.Saver().save(target, tmp_path, incremental=True))).kind)
    assert kinds == [FULL, DELTA]
    again = make({**SIZES, "i": rows})
    rst.Saver().load(again, tmp_path)
    assert contents(again) == contents(target)


def test_ids_of_a_hash_table_are_not_left_out(tmp_path: Path) -> None:
    """They are no row numbers: a hash table with larger ones does not become a smaller index table."""
    source, target = make(SIZES, hashed=True), make({**SIZES, "i": 23})
    train(source, range(9))
    rst.Saver().save(source, tmp_path)
    refused(target, tmp_path, "are no rows of the index table 'i', which has num_embeddings 23")
