"""Ctrl-C at every point of a step: afterwards the step was either applied to all tables or to none.

The reference is the NumPy training in tests/interrupting.py.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from counts import exact_counts
from embeddings import embedding_of, windowed
from interrupting import Change, PossibleStates, TrainingState, strike

from rec_sdk_torch.tbe import InitializerType, Pooling, TableConfig

ROWS = 48
CACHE = 4  # rows of each table, more than its cache: every batch swaps
LR = 0.5


class Training:
    """Three tables in two groups, and the states in which the reference may be."""

    def __init__(
        self,
        device: torch.device,
        *,
        pooled: bool,
        hashed: bool,
        window: int,
        cache: int = CACHE,
        update: str = "backward",
    ) -> None:
        self.device, self.window, self.hashed, self.cache, self.update = device, window, hashed, cache, update
        # Sequence tables must have one dim, so different data types split them into two groups.
        kinds = [(4, torch.float32), (8, torch.float32) if pooled else (4, torch.float16)]
        shared = {"pooling": Pooling.SUM if pooled else Pooling.NONE, "hashed": hashed}
        shared["initializer_type"] = InitializerType.UNIFORM
        self.tables = [
            TableConfig(name, ROWS, dim, weight_dtype=dtype, **shared)
            for name, (dim, dtype) in zip("abc", (kinds[0], kinds[1], kinds[0]), strict=True)
        ]
        self.ids = np.arange(ROWS) * (104729 if hashed else 1)
        self.start()

    def start(self) -> None:
        """Creates a new embedding."""
        optimizer = windowed("Adagrad", self.window, lr=LR, **TrainingState.OPTIONS)
        options = {"cache": self.cache, "device": self.device, "update": self.update}
        self.embedding = embedding_of(*self.tables, optimizer=optimizer, **options)
        self.possible = PossibleStates([TrainingState.start(self.weights(), [self.hashed] * len(self.tables))])
        self._batches = itertools.cycle(range(0, ROWS, CACHE))
        self.new = ROWS // CACHE
        """Batches that are left of rows that hash tables do not know."""

    def batch(self) -> list[np.ndarray]:
        """Returns for each table as many rows as its cache holds, none of them cached, and the first of them twice."""
        first = next(self._batches)
        self.new -= 1
        return [np.append(np.arange(first, first + CACHE), first) for _ in self.tables]

    def weights(self) -> list[np.ndarray]:
        """Returns every row of every table."""
        self.embedding.eval()
        rows = [torch.from_numpy(self.ids)] * len(self.tables)
        pooled = self.tables[0].pooling is not Pooling.NONE
        offsets = torch.arange(len(rows) * ROWS + 1)
        out = self.embedding(torch.cat(rows), offsets).cpu()
        self.embedding.train()
        parts = out.split([table.embedding_dim for table in self.tables], 1) if pooled else out.split(ROWS)
        return [part.to(table.weight_dtype).numpy() for part, table in zip(parts, self.tables, strict=True)]

    def observe(self) -> None:
        """Compares every row with the reference."""
        known = tuple(np.isin(self.ids, self.embedding.table_ids(table.name)) for table in self.tables)
        self.possible.observe(TrainingState(tuple(self.weights()), known, t=None))

    def arguments(self, lookups: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.from_numpy(np.concatenate([self.ids[rows] for rows in lookups]))
        return ids, torch.arange(len(ids) + 1)

    def forward(self, lookups: list[np.ndarray]) -> torch.Tensor:
        return self.embedding(*self.arguments(lookups))

    def changes(self, lookups: list[np.ndarray]) -> tuple[Change, Change]:
        """Returns two functions that apply a forward and its backward to the reference."""
        return lambda m: m.forward(lookups), lambda m: m.backward(lookups, LR, self.window)

    def train(self) -> None:
        lookups = self.batch()
        self.forward(lookups).sum().backward()
        self.embedding.apply_gradients()
        self.possible.applied("a step", *self.changes(lookups))


def counted(training: Training, lookups: list[np.ndarray], at: int) -> tuple[str | None, dict[str, int]]:
    """Runs a forward with Ctrl-C at a point; returns where it struck, and what the forward added to the counters."""
    before = exact_counts(training.embedding)
    struck = strike(lambda: training.forward(lookups), at)
    after = exact_counts(training.embedding)
    return struck, {name: after[name] - before[name] for name in after}


KINDS = pytest.mark.parametrize(
    ("pooled", "hashed", "window"),
    [(True, True, 1), (True, False, 3), (False, False, 1), (False, True, 3)],
    ids=["pooled hash", "pooled index, window", "sequence index", "sequence hash, window"],
)


@pytest.fixture(params=["some", pytest.param("all", marks=pytest.mark.full)])
def one_in(request: pytest.FixtureRequest, pooled: bool, hashed: bool) -> Callable[[int], range]:
    """Returns a function that selects every n-th point, beginning with a point that depends on the day.

    Over weeks, every point is tried.
    """
    day: int = request.config.getoption("--day")

    def points(every: int) -> range:
        return range(1 + (day + 7 * (2 * hashed + pooled)) % every, sys.maxsize, every)

    return points if request.param == "some" else lambda every: range(1, sys.maxsize)


def stride_in_a_forward(device: torch.device) -> int:
    """Returns the stride between the points of a forward that are tried.

    With an accelerator, a forward has four times as many points as on the CPU, and the emulated NPU takes ten times as
    long for each.
    """
    return 9 if device.type == "cpu" else 54


@KINDS
def test_interrupts_in_a_forward(
    device: torch.device, pooled: bool, hashed: bool, window: int, one_in: Callable[[int], range]
) -> None:
    """Every batch swaps rows.

    The interrupted batch's ids may or may not be inserted and counted; no row's value changes.
    """
    training = Training(device, pooled=pooled, hashed=hashed, window=window)
    for _ in range(1 if hashed else ROWS // CACHE):  # look up all rows of an index table once: none is new later
        training.train()
    lookups = training.batch()
    _, whole = counted(training, lookups, at=-1)  # a forward without an interrupt
    training.possible.applied("forward", training.changes(lookups)[0])
    for at in one_in(stride_in_a_forward(device)):
        if hashed and training.new < 2:
            training.start()
        training.train()
        lookups = training.batch()
        struck, added = counted(training, lookups, at)
        training.possible.may_have_applied(f"forward at {struck}", training.changes(lookups)[0])
        training.observe()
        assert added in (whole, dict.fromkeys(added, 0)), f"half a batch is counted: {struck}"
        if struck is None:
            break
    assert at > 50, "points of a forward"


@KINDS
def test_interrupts_with_prefetched_batches(
    device: torch.device, pooled: bool, hashed: bool, window: int, one_in: Callable[[int], range]
) -> None:
    """A batch that was prefetched but never looked up leaves no trace."""
    training = Training(device, pooled=pooled, hashed=hashed, window=window, cache=3 * CACHE)
    for at in one_in(stride_in_a_forward(device)):
        if hashed and training.new < 4:
            training.start()
        training.train()
        lookups, later = training.batch(), training.batch()

        def action(lookups: list[np.ndarray] = lookups, later: list[np.ndarray] = later) -> None:
            for batch in lookups, later:
                training.embedding.prefetch(*training.arguments(batch))
            training.embedding.queue.wait()
            training.forward(lookups)

        struck = strike(action, at)
        training.possible.may_have_applied(f"forward at {struck}", training.changes(lookups)[0])
        training.observe()
        training.train()
        training.observe()
        training.embedding.forget()
        assert not any(group.engine.in_flight() for group in training.embedding.groups), struck
        if struck is None:
            break
    assert at > 80, "points of two prefetches and a forward"


@KINDS
def test_interrupts_in_a_backward(
    device: torch.device, pooled: bool, hashed: bool, window: int, one_in: Callable[[int], range]
) -> None:
    """Either all tables are updated or none. If the next call raises, its error explains why, and the test continues
    with a new embedding.
    """
    training = Training(device, pooled=pooled, hashed=hashed, window=window)
    for place in {0, window - 1}:  # backward passes within a window; the last one runs the update
        for at in one_in(9):
            while training.possible.moments[0].backwards != place:
                training.train()
            lookups = training.batch()
            output = training.forward(lookups).sum()
            forward, backward = training.changes(lookups)
            training.possible.applied("forward", forward)
            struck = strike(output.backward, at)
            del output
            training.possible.may_have_applied(f"backward at {struck}", backward)
            try:
                training.observe()
                for _ in range(window):  # a wrong accumulation buffer or step count t would show in the next update
                    training.train()
                training.observe()
            except RuntimeError as refused:
                assert re.search("interrupt", str(refused)), str(refused)  # noqa: PT017
                training.start()
            if struck is None:
                break
        assert at > 20, "points of a backward"


@pytest.mark.parametrize(("pooled", "hashed"), [(True, True), (False, False)], ids=["pooled hash", "sequence index"])
@pytest.mark.parametrize("struck_in", ["backward", "step"])
def test_interrupts_with_updates_at_step(
    device: torch.device, pooled: bool, hashed: bool, struck_in: str, one_in: Callable[[int], range]
) -> None:
    """A backward pass adds its gradients to all tables or to none. Calling step() after an interrupt applies the update
    once.
    """
    training = Training(device, pooled=pooled, hashed=hashed, window=1, update="step")
    training.train()
    for at in one_in(9):
        lookups = training.batch()
        output = training.forward(lookups).sum()
        forward, backward = training.changes(lookups)
        training.possible.applied("forward", forward)
        if struck_in == "backward":
            struck = strike(output.backward, at)
            training.embedding.apply_gradients()
            training.possible.may_have_applied(f"backward at {struck}", backward)
        else:
            output.backward()
            struck = strike(training.embedding.apply_gradients, at)
            training.embedding.apply_gradients()
            training.possible.applied(f"step at {struck}", backward)
        del output
        training.observe()
        assert not any(group.engine.in_flight() for group in training.embedding.groups), struck
        training.train()  # a wrong step count t would show in the next update
        training.observe()
        if struck is None:
            break
    assert at > 20, "points of a backward pass or a step"
