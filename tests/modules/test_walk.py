"""The way of one warm training batch through the package: its calls, classes and entries are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from jagged import apply, bag_config, bags_collection, jagged
from torchrec import KeyedJaggedTensor
from walks import Walk, walking

import rec_sdk_torch as rst

ROWS = 16


@pytest.fixture
def walk(device: torch.device) -> Iterator[Walk]:
    if device.type != "cpu":
        pytest.skip("on a device autograd has a thread of its own, and batches wait for copies")
    with walking() as made:
        yield made


def collection(device: torch.device, batches: float) -> Any:
    """Two tables in one group, whose cache holds so many batches."""
    configs = [bag_config(f"t{table}", [f"f{table}"], num_embeddings=500) for table in range(2)]
    tables = bags_collection(device, *configs, cache=int(ROWS * batches))
    apply(tables, torch.optim.Adagrad, lr=0.1)
    return tables


def batch(number: int) -> KeyedJaggedTensor:
    """Rows that no batch before has had: others leave the cache for them."""
    ids = [[ROWS * number + row] for row in range(ROWS)]
    return jagged({"f0": ids, "f1": ids})


def train(tables: Any, features: KeyedJaggedTensor) -> None:
    tables(features).values().sum().backward()


def test_a_batch(walk: Walk, device: torch.device) -> None:
    tables = collection(device, 2.5)
    for number in range(4):
        train(tables, batch(number))
    next_one = batch(4)
    walk.count(lambda: train(tables, next_one))
    assert tables.cache_stats()["rows_out"] >= 2 * ROWS, "rows leave in every batch"
    walk.check(calls=62, classes=13, cache=5, step=3)
    once = ("plan", "read_in", "pass_plans", "begin", "applied", "release", "land")
    assert +walk.engine == Counter(once)


def test_a_batch_whose_rows_are_all_in_the_cache(walk: Walk, device: torch.device) -> None:
    tables = collection(device, 2.5)
    for _ in range(4):
        train(tables, batch(0))
    next_one = batch(0)
    walk.count(lambda: train(tables, next_one))
    walk.check(calls=45, classes=13, cache=3, step=3)
    assert +walk.engine == Counter(("plan", "pass_plans", "release"))


def test_a_batch_that_was_prefetched(walk: Walk, device: torch.device) -> None:
    """The thread that plans ahead plans another batch meanwhile; the calls of its own rooms are not counted."""
    walk.left_out = ("tbe/step/prefetch_queue.py", "distributed/prefetch.py", "runtime/worker.py")
    tables = collection(device, 3.5)
    train(tables, batch(0))
    coming = rst.prefetch(map(batch, range(1, 9)), tables, depth=2)
    for _ in range(3):
        train(tables, next(coming))
        tables.wait_for_plans()

    def step() -> None:
        train(tables, next(coming))
        tables.wait_for_plans()

    walk.count(step)
    assert tables.cache_stats()["depth_reached"] >= 2
    assert tables.cache_stats()["rows_out"] >= 2 * ROWS, "rows leave in every batch"
    walk.check(calls=88, classes=16, cache=7, step=3)
    once = ("plan", "read_ahead", "begin", "applied", "release", "land")
    assert {name: walk.engine[name] for name in once} == Counter(once)
