"""The way of one warm training batch through the package: its calls, classes and rooms are counted."""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from jagged import apply, bag_config, bags_collection, jagged
from torchrec import KeyedJaggedTensor

import rec_sdk_torch as rst
from rec_sdk_torch import _engine

PACKAGE = str(Path(rst.__file__).parent) + os.sep
CACHE, STEP = "tbe/cache/device_cache.py", "tbe/step/step.py"
ROWS = 16


class Walk:
    """Counts what runs in the package while it is open, in all threads that were started after it was made.

    Attributes:
        calls: Python calls.
        entries: calls from another file, by file.
        classes: whose methods ran.
        engine: calls of the engine, by name.
        left_out: files that do not count.
    """

    left_out: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.calls = 0
        self.entries: Counter[str] = Counter()
        self.classes: set[str] = set()
        self.engine: Counter[str] = Counter()
        self._open = False

    def profile(self, frame: Any, event: str, argument: object) -> None:
        path = frame.f_code.co_filename
        if not self._open or event != "call" or not path.startswith(PACKAGE) or path.endswith(self.left_out):
            return
        self.calls += 1
        if frame.f_back is None or frame.f_back.f_code.co_filename != path:
            self.entries[path.removeprefix(PACKAGE)] += 1
        outer = frame.f_code.co_qualname.split(".<locals>")[0]
        if "." in outer:
            self.classes.add(outer.rpartition(".")[0])

    def counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.engine[function.__name__] += self._open
            return function(*args, **kwargs)

        return call

    def count(self, work: Callable[[], object]) -> None:
        """Counts `work` alone."""
        self._open = True
        try:
            work()
        finally:
            self._open = False

    def check(self, *, calls: int, classes: int, cache: int, step: int) -> None:
        """Fails where there is more than this: calls, classes, entries into these two files."""
        assert self.calls <= calls, (self.calls, self.entries)
        assert len(self.classes) <= classes, sorted(self.classes)
        assert self.entries[CACHE] <= cache
        assert self.entries[STEP] <= step


@pytest.fixture
def walk(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> Iterator[Walk]:
    if device.type != "cpu":
        pytest.skip("on a device autograd has a thread of its own, and batches wait for copies")
    made = Walk()
    for owner, names in ((_engine.Engine, vars(_engine.Engine)), (_engine.Plan, ["release"]), (_engine, ["begin"])):
        for name in list(names):
            if not name.startswith("_") and callable(getattr(owner, name)):
                monkeypatch.setattr(owner, name, made.counted(getattr(owner, name)))
    threading.setprofile(made.profile)
    sys.setprofile(made.profile)
    yield made
    sys.setprofile(None)
    threading.setprofile(None)


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
    walk.check(calls=70, classes=12, cache=4, step=3)
    once = ("plan", "unapplied", "read_in", "begin", "applied", "release", "land")
    assert +walk.engine == Counter(once)


def test_a_batch_that_was_prefetched(walk: Walk, device: torch.device) -> None:
    """The thread that plans ahead plans another batch meanwhile; the calls of its own rooms are not counted."""
    walk.left_out = ("tbe/step/prefetch_queue.py", "distributed/prefetch.py", "worker.py")
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
    assert tables.cache_stats()["depth_reached"] == 2
    assert tables.cache_stats()["rows_out"] >= 2 * ROWS, "rows leave in every batch"
    walk.check(calls=100, classes=15, cache=6, step=3)
    once = ("plan", "read_ahead", "unapplied", "begin", "applied", "release", "land")
    assert {name: walk.engine[name] for name in once} == Counter(once)
