"""Exact counts of what cache policies miss: on a stationary power law, a drifting one, a scan, and MovieLens-100K."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rec_sdk_torch.cache_advice.simulation import simulate

from .ids import STREAMS, Int64Array, stream

LOOK_AHEAD = "look_ahead"
COUNTERS = ("lookups", "unique_rows", "unique_misses", "rows_in", "rows_out")
"""Names of the counters of the engine that a simulated cache has too."""


@dataclass(frozen=True)
class PolicyOptions:
    """Sizes of a policy run.

    Attributes:
        rows: of the table.
        fraction: of them the cache holds.
        batch: ids of a batch.
        warm: batches before the count begins.
        steps: batches counted.
        alpha: of the power laws.
        policies: of the engine.
        seed: of the ids.
        depths: batches announced ahead, for the policy that looks ahead.
        movielens: folder of MovieLens-100K; its batches have 1/16 of the rows, and all are served.
    """

    rows: int
    fraction: float
    batch: int
    warm: int
    steps: int
    alpha: float
    policies: tuple[str, ...]
    seed: int
    depths: tuple[int, ...] = (1, 4, 12)
    movielens: Path | None = None

    @property
    def slots(self) -> int:
        return max(1, round(self.rows * self.fraction))


class Simulated:
    """Swaps the rows of a batch into a cache that is simulated.

    Attributes:
        counters: as the engine's, as far as they are the same.
    """

    def __init__(self) -> None:
        self.counters: dict[str, int] = {}
        self.reset()

    def reset(self) -> None:
        """Sets every counter to zero."""
        self.counters = dict.fromkeys(COUNTERS, 0)

    def count(self, lookups: int, unique: int, missing: int, leaving: int) -> None:
        """Adds a batch."""
        for name, number in zip(self.counters, (lookups, unique, missing, missing, leaving), strict=True):
            self.counters[name] += number


class RoundRobin(Simulated):
    """A hand that walks over the slots and takes each that the batch does not need: Rec SDK's, and to be beaten."""

    def __init__(self, rows: int, slots: int) -> None:
        super().__init__()
        self._slot_of = np.full(rows, -1, np.int64)
        self._row_in = np.full(slots, -1, np.int64)
        self._hand = 0

    def plan(self, ids: Int64Array) -> None:
        """Serves a batch.

        Raises:
            ValueError: it needs more rows than there are slots.
        """
        unique = np.unique(ids)
        held = self._slot_of[unique]
        missing = unique[held < 0]
        needed = np.zeros(len(self._row_in), bool)
        needed[held[held >= 0]] = True
        order = np.roll(np.arange(len(needed)), -self._hand)
        taken = order[~needed[order]][: len(missing)]
        if len(taken) < len(missing):
            raise ValueError(f"a batch of {len(unique)} distinct rows in a cache of {len(needed)}")
        leaving = self._row_in[taken]
        leaving = leaving[leaving >= 0]
        self._slot_of[leaving] = -1
        self._row_in[taken] = missing
        self._slot_of[missing] = taken
        if len(taken):
            self._hand = int(taken[-1] + 1) % len(needed)
        self.count(len(ids), len(unique), len(missing), len(leaving))


class Optimum(Simulated):
    """Belady's: what leaves is needed last. It knows all batches."""

    def __init__(self, rows: int, slots: int, batches: Sequence[Int64Array]) -> None:
        super().__init__()
        never = len(batches)
        after = np.full(rows, never, np.int64)
        self._next_uses: list[Int64Array] = []
        for step in reversed(range(len(batches))):
            unique = np.unique(batches[step])
            self._next_uses.append(after[unique])
            after[unique] = step
        self._slots = slots
        self._resident = np.zeros(rows, bool)
        self._next_use = np.full(rows, never, np.int64)

    def plan(self, ids: Int64Array) -> None:
        """Serves the next batch, which is `ids`.

        Raises:
            ValueError: it needs more rows than there are slots.
        """
        unique = np.unique(ids)
        if len(unique) > self._slots:
            raise ValueError(f"a batch of {len(unique)} distinct rows in a cache of {self._slots}")
        missing = len(unique) - int(self._resident[unique].sum())
        self._next_use[unique] = self._next_uses.pop()
        self._resident[unique] = False  # so that what is left may leave
        others = np.flatnonzero(self._resident)
        leaving = max(0, len(others) + len(unique) - self._slots)
        if leaving:
            self._resident[others[np.argpartition(-self._next_use[others], leaving - 1)[:leaving]]] = False
        self._resident[unique] = True
        self.count(len(ids), len(unique), missing, leaving)


def _result(trace: str, policy: str, options: PolicyOptions, counters: dict[str, int]) -> dict[str, Any]:
    return {
        "stream": trace,
        "policy": policy,
        "rows": options.rows,
        "slots": options.slots,
        "batch": options.batch,
        "steps": options.steps,
        "unique_miss_rate": counters["unique_misses"] / counters["unique_rows"],
        "counters": counters,
    }


def movielens_items(folder: Path) -> Int64Array:
    """Items of the ratings of MovieLens-100K in the order of time, from 0."""
    ratings = np.loadtxt(folder / "u.data", dtype=np.int64)
    items: Int64Array = ratings[np.argsort(ratings[:, 3], kind="stable"), 1] - 1
    return items


def _traces(options: PolicyOptions) -> list[tuple[str, PolicyOptions, list[Int64Array]]]:
    """Names, sizes and batches."""
    steps = options.warm + options.steps
    traces = []
    for kind in STREAMS:
        endless = stream(kind, options.rows, options.batch, options.alpha, options.seed)
        traces.append((kind, options, list(itertools.islice(endless, steps))))
    if options.movielens is not None:
        items = movielens_items(options.movielens)
        rows = int(items.max()) + 1
        batch = max(1, rows // 16)
        batches = [items[first : first + batch] for first in range(0, len(items) - batch + 1, batch)]
        sizes = replace(options, rows=rows, batch=batch, steps=len(batches) - options.warm)
        traces.append(("MovieLens items", sizes, batches))
    return traces


def _engine_run(
    trace: str, policy: str, options: PolicyOptions, batches: Sequence[Int64Array], depth: int = 0
) -> dict[str, Any]:
    counts = simulate(batches, options.slots, options.rows, policy, depth, options.warm)
    numbers = counts.lookups, counts.rows, counts.misses, counts.rows_in, counts.rows_out
    name = f"{policy}, {depth} announced" if depth else policy
    return _result(trace, name, options, dict(zip(COUNTERS, numbers, strict=True)))


def _simulated_run(
    trace: str, name: str, simulated: RoundRobin | Optimum, options: PolicyOptions, batches: Sequence[Int64Array]
) -> dict[str, Any]:
    for step, ids in enumerate(batches):
        if step == options.warm:
            simulated.reset()
        simulated.plan(ids)
    return _result(trace, name, options, simulated.counters)


def run_policies(options: PolicyOptions) -> list[dict[str, Any]]:
    """Every policy on every trace; then the hand, and what no policy can do better than."""
    results = []
    for trace, sizes, batches in _traces(options):
        results += [_engine_run(trace, policy, sizes, batches) for policy in options.policies]
        if LOOK_AHEAD in options.policies:
            results += [_engine_run(trace, LOOK_AHEAD, sizes, batches, depth) for depth in options.depths]
        hand, optimum = RoundRobin(sizes.rows, sizes.slots), Optimum(sizes.rows, sizes.slots, batches)
        results.append(_simulated_run(trace, "round robin (simulated)", hand, sizes, batches))
        results.append(_simulated_run(trace, "Belady (simulated)", optimum, sizes, batches))
    return results
