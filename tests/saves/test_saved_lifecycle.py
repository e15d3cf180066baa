"""Saves of tables that admit and evict ids: counters and clocks continue after a load."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from embeddings import embedding_of
from tables import assert_same, loaded, refused, save

from rec_sdk_torch.rules import Age, Count, Idle, Probability, Rows, Score, Share, Sketch
from rec_sdk_torch.tbe import TableBatchedEmbedding, TableConfig
from rec_sdk_torch.tbe.config.lifecycle import TableLifecycle
from rec_sdk_torch.tbe.rows.table_view import TableView

LIVES = [
    TableLifecycle(admission=Count(3), default_value=0.5),
    TableLifecycle(admission=Count(2), eviction=Idle(4), every=2),
    TableLifecycle(eviction=Share(0.2), every=3, score=Score(beta=2, decay=0.9)),
    TableLifecycle(eviction=Age(25), every=2),
    TableLifecycle(admission=Count(2), bound=Rows(24)),
    TableLifecycle(eviction=Share(0.2), every=3, score=Score(beta=2, half_life=2)),
    TableLifecycle(admission=Count(2), bound=Rows(24), score=Score(half_life=3)),
    TableLifecycle(admission=Probability(0.3), bound=Rows(50)),
    TableLifecycle(admission=Sketch(5, bytes=200, halve_after=100)),
]


def make(lifecycle: TableLifecycle, cache: int = 40) -> TableBatchedEmbedding:
    tables = [TableConfig(name, 60, 4, track_changes=True, lifecycle=lifecycle) for name in "ab"]
    return embedding_of(*tables, cache=cache)


def train(embedding: TableBatchedEmbedding, seeds: range) -> list[torch.Tensor]:
    outputs, lifecycle = [], embedding.tables[0].lifecycle
    for seed in seeds:
        random = np.random.default_rng(seed)
        ids, clicks, times = (torch.from_numpy(random.integers(0, most, 24)) for most in (60, 2, 10))
        seen = {"clicks": clicks} if lifecycle.needs_clicks else {}
        seen |= {"timestamps": 10 * seed + times} if "timestamp" in lifecycle.columns() else {}
        output = embedding(ids, torch.arange(0, 25, 4), **seen)
        output.square().sum().backward()
        outputs.append(output.detach())
    return outputs


def lifecycles(embedding: TableBatchedEmbedding) -> dict[str, Any]:
    """Returns clocks, candidates and columns of rows, by table."""
    result: dict[str, Any] = {}
    for name in "ab":
        view = embedding.view(name)
        ids = view.ids().sort().values
        columns = {key: values.tolist() for key, values in view.row_columns(ids).items()}
        waiting, counted = view.candidates()
        candidates = waiting.tolist(), {key: values.tolist() for key, values in counted.items()}
        result[name] = {"ids": ids.tolist(), "columns": columns, "candidates": candidates, "clocks": view.clocks()}
        if len(view.sketch()):
            result[name]["sketch"] = view.sketch().tolist()
    return result


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("lifecycle", LIVES, ids=range(len(LIVES)))
def test_admission_and_eviction_continue_after_a_load(
    lifecycle: TableLifecycle, incremental: bool, tmp_path: Path
) -> None:
    source, target = make(lifecycle), make(lifecycle, cache=50)
    train(target, range(100, 103))
    for begin in (0, 5, 9):
        train(source, range(begin, begin + 4))
        save(source, tmp_path, incremental)
    loaded(tmp_path, target)
    assert lifecycles(target) == lifecycles(source)
    assert any(lifecycles(source)[name].get(kept) for name in "ab" for kept in ("columns", "candidates", "sketch"))
    for a, b in zip(train(source, range(13, 25)), train(target, range(13, 25)), strict=True):
        assert torch.equal(a, b)
    assert lifecycles(target) == lifecycles(source)
    assert_same(target, source)


COUNTERS = TableLifecycle(admission=Count(3))
SKETCH = TableLifecycle(admission=Sketch(3, bytes=4000))


@pytest.mark.parametrize(
    ("saved", "other", "knows"),
    [
        (COUNTERS, SKETCH, True),
        (SKETCH, COUNTERS, False),  # ids cannot be read from a sketch
        (COUNTERS, TableLifecycle(admission=Probability(1e-9)), False),
        (SKETCH, TableLifecycle(admission=Sketch(3, bytes=1500, depth=3)), True),
    ],
    ids=["into a sketch", "into counters", "into chance", "into another sketch"],
)
def test_counters_are_converted_to_other_rules(
    saved: TableLifecycle, other: TableLifecycle, knows: bool, tmp_path: Path
) -> None:
    source, target = make(saved), make(other)
    train(source, range(5))
    waiting = set(range(60)) - set(source.view("a").ids().tolist())
    save(source, tmp_path)
    loaded(tmp_path, target)
    assert target.view("a").ids().sort().values.tolist() == source.view("a").ids().sort().values.tolist()
    again = []
    for embedding in (source, target):
        embedding(torch.tensor(sorted(waiting)), torch.tensor([0, len(waiting), len(waiting)]))
        again.append(set(embedding.view("a").ids().tolist()))
    assert (again[1] >= again[0]) == knows
    assert waiting & again[0]


def test_a_damaged_sketch_state_is_refused(tmp_path: Path) -> None:
    """A valid checksum does not make the state valid."""
    source = make(SKETCH)
    train(source, range(5))
    with mock.patch.object(TableView, "sketch", return_value=torch.zeros(99, dtype=torch.uint8)):
        save(source, tmp_path)
    target = make(SKETCH)
    train(target, range(20, 23))
    before = lifecycles(target)
    refused(target, tmp_path, "the sketch of table 'a' has cell_bytes 0")
    assert lifecycles(target) == before


def test_a_table_that_admits_every_id_loads_the_rows(tmp_path: Path) -> None:
    source = make(LIVES[1])
    train(source, range(6))
    save(source, tmp_path)
    assert loaded(tmp_path, make(TableLifecycle())).view("a").count() == source.view("a").count() > 0
