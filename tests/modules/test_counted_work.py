"""The work of a warm step that does not depend on its lookups: calls of Python, operators, objects of the collector."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from jagged import apply, bag_config, bags_collection, jagged, sequence_config, sequences_collection
from torch.utils._python_dispatch import TorchDispatchMode

ROWS = 4


@pytest.fixture(autouse=True)
def on_the_host(device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("on a device autograd has a thread of its own, and batches wait for copies")


class Warm:
    """A collection of so many tables, whose rows are all in its cache, and a step of it."""

    def __init__(self, pooled: bool, tables: int) -> None:
        config, collection = (bag_config, bags_collection) if pooled else (sequence_config, sequences_collection)
        self.keys = [f"f{i}" for i in range(tables)]
        configs = [config(f"t{i}", [key]) for i, key in enumerate(self.keys)]
        self.tables: Any = collection(torch.device("cpu"), *configs, cache=3 * ROWS)
        apply(self.tables, torch.optim.SGD, lr=0.1)
        self.pooled = pooled
        self.batches = [jagged({key: [[row] for row in range(ROWS)] for key in self.keys}) for _ in range(8)]
        for batch in self.batches[:4]:
            self.train(batch)

    def forward(self, batch: Any) -> list[torch.Tensor]:
        output = self.tables(batch)
        return [output.values()] if self.pooled else [output[key].values() for key in self.keys]

    def train(self, batch: Any) -> None:
        outputs = self.forward(batch)
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])


def calls_of(work: Callable[[], object], package: str = "") -> int:
    """Calls of Python, in whichever package, or in one."""
    count = 0

    def profile(frame: Any, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call" and package in frame.f_code.co_filename

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(("pooled", "of_a_table"), [(True, 0), (False, 1)])
def test_calls_of_a_forward_for_each_table_more(pooled: bool, of_a_table: int) -> None:
    """The test makes one for each output of a sequence, to read it."""
    few, many = Warm(pooled, 3), Warm(pooled, 13)
    counts = [calls_of(lambda warm=warm: warm.forward(warm.batches[5])) for warm in (few, many)]
    assert counts[1] - counts[0] == 10 * of_a_table


@pytest.mark.parametrize(("pooled", "most"), [(True, 43), (False, 49)])
def test_calls_of_a_step(pooled: bool, most: int) -> None:
    """Calls of the package count; constructors of data classes have no file, and do not."""
    warm = Warm(pooled, 1)
    assert calls_of(lambda: warm.train(warm.batches[5]), "/rec_sdk_torch/") <= most


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counted[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_operators_of_a_pooled_step() -> None:
    warm = Warm(True, 5)
    grad = torch.ones(ROWS, 5 * 4)
    with Operators() as operators:
        (output,) = warm.forward(warm.batches[5])
        output.backward(grad)
    ours = {name: count for name, count in operators.counted.items() if name.startswith("rec_sdk")}
    assert ours == {"rec_sdk.lookup_pooled.default": 1, "rec_sdk.update_rows.default": 1}
    # Beside them: TorchRec's offsets, memory for the output, two arrays of NumPy. Tensors of the plan cost no operator.
    assert operators.counted.total() <= 2 + 1 + 1 + 2, operators.counted


def test_operators_of_a_sequence_do_not_grow_with_tables() -> None:
    few, many = Warm(False, 3), Warm(False, 13)
    counts = []
    for warm in (few, many):
        with Operators() as operators:
            warm.forward(warm.batches[5])
        counts.append(operators.counted)
    assert counts[0] == counts[1]


def test_outputs_of_a_sequence_are_those_of_one_node() -> None:
    warm = Warm(False, 5)
    assert len({output.grad_fn for output in warm.forward(warm.batches[5])}) == 1


@pytest.mark.parametrize("pooled", [True, False])
def test_a_step_leaves_nothing_to_the_garbage_collector(pooled: bool) -> None:
    warm = Warm(pooled, 5)
    gc.collect()
    gc.disable()
    try:
        for batch in warm.batches[4:]:
            warm.train(batch)
        assert gc.collect() == 0, "cycles"
    finally:
        gc.enable()


@pytest.mark.parametrize(("pooled", "fixed", "of_a_table"), [(True, 30, 0), (False, 30, 4)])
def test_objects_that_live_until_the_backward_pass(pooled: bool, fixed: int, of_a_table: int) -> None:
    """Objects that the collector follows: they are what sets it off."""
    few, many = Warm(pooled, 3), Warm(pooled, 13)
    held = []
    for warm in (few, many):
        gc.collect()
        gc.disable()
        before = len(gc.get_objects())
        outputs = warm.tables(warm.batches[5])
        held.append(len(gc.get_objects()) - before)
        gc.enable()
        del outputs
    assert held[0] - 3 * of_a_table <= fixed
    assert held[1] - held[0] <= 10 * of_a_table
