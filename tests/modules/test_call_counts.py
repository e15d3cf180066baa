"""Work of a training batch: numbers of calls, operators, and objects that the garbage collector tracks."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from batches import jagged
from call_counts import CallCounter, call_counter
from collection_factory import EACH_KIND, POOLED, SEQUENCE, Kind, apply, bag_config, bags_collection
from torch.utils._python_dispatch import TorchDispatchMode
from torchrec import KeyedJaggedTensor
from training import train_step

import rec_sdk_torch as rst

ROWS = 16
SAMPLES = 4


@pytest.fixture(autouse=True)
def on_the_host(device: torch.device) -> Iterator[None]:
    """Skips tests on other devices. Freezes the objects that exist, so that the garbage collector traverses none of
    torch's objects.
    """
    if device.type != "cpu":
        pytest.skip("on a device autograd has a thread of its own, and batches wait for copies")
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def calls() -> Iterator[CallCounter]:
    with call_counter() as made:
        yield made


def collection(device: torch.device, batches: float) -> Any:
    """Builds two tables in one group with a cache for `batches` batches."""
    configs = [bag_config(f"t{table}", [f"f{table}"], num_embeddings=500) for table in range(2)]
    return apply(bags_collection(device, *configs, cache=int(ROWS * batches)), torch.optim.Adagrad, lr=0.1)


def batch(number: int) -> KeyedJaggedTensor:
    """Builds a batch of new rows, for which the cache must spill other rows."""
    ids = [[ROWS * number + row] for row in range(ROWS)]
    return jagged({"f0": ids, "f1": ids})


def test_calls_of_a_batch_that_swaps(calls: CallCounter, device: torch.device) -> None:
    tables = collection(device, 2.5)
    for number in range(4):
        train_step(tables, batch(number))
    next_one = batch(4)
    calls.count(lambda: train_step(tables, next_one))
    assert tables.cache_stats()["rows_out"] >= 2 * ROWS, "rows leave in every batch"
    calls.check(calls=62, classes=14, cache=5, step=3)
    once = ("plan", "read_in", "apply_without_swap", "start_plans", "applied", "release", "complete_write_back")
    assert +calls.engine == Counter(once)


def test_calls_of_a_batch_whose_rows_are_cached(calls: CallCounter, device: torch.device) -> None:
    tables = collection(device, 2.5)
    for _ in range(4):
        train_step(tables, batch(0))
    next_one = batch(0)
    calls.count(lambda: train_step(tables, next_one))
    calls.check(calls=45, classes=14, cache=3, step=3)
    assert +calls.engine == Counter(("plan", "apply_without_swap", "release"))


def test_calls_of_a_prefetched_batch(calls: CallCounter, device: torch.device) -> None:
    """The concurrent planning of later batches is not counted."""
    calls.left_out = ("tbe/step/prefetch_queue.py", "distributed/prefetch.py", "runtime/worker.py")
    tables = collection(device, 3.5)
    train_step(tables, batch(0))
    coming = rst.prefetch(map(batch, range(1, 9)), tables, depth=2)
    for _ in range(3):
        train_step(tables, next(coming))
        tables.wait_for_plans()

    def step() -> None:
        train_step(tables, next(coming))
        tables.wait_for_plans()

    calls.count(step)
    assert tables.cache_stats()["depth_reached"] >= 2
    assert tables.cache_stats()["rows_out"] >= 2 * ROWS, "rows leave in every batch"
    calls.check(calls=88, classes=17, cache=7, step=3)
    once = ("plan", "read_ahead", "start_plans", "applied", "release", "complete_write_back")
    assert {name: calls.engine[name] for name in once} == Counter(once)


# ---- a batch whose rows are all in the cache


class CachedTables:
    """A collection whose tables are completely cached, with methods to train it."""

    def __init__(self, kind: Kind, tables: int) -> None:
        self.keys = [f"f{i}" for i in range(tables)]
        configs = [kind.config(f"t{i}", [key]) for i, key in enumerate(self.keys)]
        self.tables = apply(kind.collection(torch.device("cpu"), *configs, cache=3 * SAMPLES), lr=0.1)
        self.pooled = kind is POOLED
        self.batches = [jagged({key: [[row] for row in range(SAMPLES)] for key in self.keys}) for _ in range(8)]
        for batch in self.batches[:4]:
            self.train(batch)

    def forward(self, batch: Any) -> list[torch.Tensor]:
        output = self.tables(batch)
        return [output.values()] if self.pooled else [output[key].values() for key in self.keys]

    def train(self, batch: Any) -> None:
        outputs = self.forward(batch)
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])


def calls_of(work: Callable[[], object], package: str = "") -> int:
    """Counts Python calls, in all files or only in `package`."""
    files: list[str] = []
    sys.setprofile(lambda frame, event, argument: files.append(frame.f_code.co_filename) if event == "call" else None)
    try:
        work()
    finally:
        sys.setprofile(None)
    return sum(package in file for file in files)


@pytest.mark.parametrize(("kind", "of_a_table"), [(POOLED, 0), (SEQUENCE, 1)], ids=str)
def test_calls_of_a_forward_per_additional_table(kind: Kind, of_a_table: int) -> None:
    """The count includes one call per output of a sequence, with which the test reads the output."""
    few, many = CachedTables(kind, 3), CachedTables(kind, 13)
    counts = [calls_of(lambda cached=cached: cached.forward(cached.batches[5])) for cached in (few, many)]
    assert counts[1] - counts[0] == 10 * of_a_table


@pytest.mark.parametrize(("kind", "most"), [(POOLED, 43), (SEQUENCE, 49)], ids=str)
def test_calls_of_a_step(kind: Kind, most: int) -> None:
    """Only calls of functions in the package's files count. Generated constructors of data classes have no file."""
    cached = CachedTables(kind, 1)
    assert calls_of(lambda: cached.train(cached.batches[5]), "/rec_sdk_torch/") <= most


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counted[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_operators_of_a_pooled_step() -> None:
    cached = CachedTables(POOLED, 5)
    grad = torch.ones(SAMPLES, 5 * 4)
    with Operators() as operators:
        (output,) = cached.forward(cached.batches[5])
        output.backward(grad)
    ours = {name: count for name, count in operators.counted.items() if name.startswith("rec_sdk")}
    assert ours == {"rec_sdk.lookup_pooled.default": 1, "rec_sdk.update_rows.default": 1}
    # The other operators compute TorchRec's offsets, allocate the output, and wrap two NumPy arrays.
    assert operators.counted.total() <= 2 + 1 + 1 + 2, operators.counted


def test_operators_of_a_sequence_do_not_grow_with_tables() -> None:
    few, many = CachedTables(SEQUENCE, 3), CachedTables(SEQUENCE, 13)
    counts = []
    for cached in (few, many):
        with Operators() as operators:
            cached.forward(cached.batches[5])
        counts.append(operators.counted)
    assert counts[0] == counts[1]


def test_outputs_of_a_sequence_share_one_autograd_node() -> None:
    cached = CachedTables(SEQUENCE, 5)
    assert len({output.grad_fn for output in cached.forward(cached.batches[5])}) == 1


@EACH_KIND
def test_nodes_of_a_backward_pass_do_not_grow_with_tables(kind: Kind) -> None:
    """Torch executes every node behind the outputs, which takes 2 us for the node of a parameter."""
    counts = []
    for tables in (3, 13):
        cached = CachedTables(kind, tables)
        nodes = {output.grad_fn for output in cached.forward(cached.batches[5])}
        for _ in range(3):
            nodes |= {following for node in nodes if node for following, _ in node.next_functions}
        counts.append(len(nodes))
    assert counts == [2, 2], "the lookup and one leaf"


@EACH_KIND
def test_a_step_leaves_nothing_to_the_garbage_collector(kind: Kind) -> None:
    cached = CachedTables(kind, 5)
    gc.collect()
    gc.disable()
    try:
        for batch in cached.batches[4:]:
            cached.train(batch)
        assert gc.collect() == 0, "cycles"
    finally:
        gc.enable()


@pytest.mark.parametrize(("kind", "fixed", "of_a_table"), [(POOLED, 30, 0), (SEQUENCE, 30, 4)], ids=str)
def test_objects_that_live_until_the_backward_pass(kind: Kind, fixed: int, of_a_table: int) -> None:
    """The number of tracked objects determines how often the garbage collector runs."""
    few, many = CachedTables(kind, 3), CachedTables(kind, 13)
    held = []
    for cached in (few, many):
        gc.collect()
        gc.disable()
        before = len(gc.get_objects())
        outputs = cached.tables(cached.batches[5])
        held.append(len(gc.get_objects()) - before)
        gc.enable()
        del outputs
    assert held[0] - 3 * of_a_table <= fixed
    assert held[1] - held[0] <= 10 * of_a_table
