"""Exact counts of misses and swapped rows by cache policy, on generated id streams and on MovieLens-100K."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rec_sdk_torch.tools.cache_advice.simulation import Simulation

from .ids import STREAMS, Int64Array, stream
from .runner import Row

LOOK_AHEAD, DEPTHS = "look_ahead", (1, 4, 12)
"""The policy that looks ahead, and the numbers of announced batches."""
FRACTION, WARM, ALPHA = 0.1, 20, 1.05
"""The fraction of the rows in the cache, the number of batches before counting, and the exponent of the power laws."""
COUNTERS = ("lookups", "unique_rows", "unique_misses", "rows_in", "rows_out")
"""Names of the engine's counters that a simulated cache also has."""


class Simulated:
    """A simulated cache: it counts which rows of batches would be swapped, without storing any row.

    Attributes:
        counters: the counters of COUNTERS, with the meaning that they have in the engine.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Sets every counter to zero."""
        self.counters: dict[str, int] = dict.fromkeys(COUNTERS, 0)

    def count(self, lookups: int, unique: int, missing: int, leaving: int) -> None:
        """Adds a batch to the counters."""
        for name, number in zip(self.counters, (lookups, unique, missing, missing, leaving), strict=True):
            self.counters[name] += number


class RoundRobin(Simulated):
    """Round-robin eviction, as in Rec SDK: a pointer advances over the slots and skips those that the batch needs."""

    def __init__(self, rows: int, slots: int) -> None:
        super().__init__()
        self._slot_of = np.full(rows, -1, np.int64)
        self._row_in = np.full(slots, -1, np.int64)
        self._hand = 0

    def plan(self, ids: Int64Array) -> None:
        """Serves a batch.

        Raises:
            ValueError: the batch needs more rows than there are slots.
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


class OptimalCache(Simulated):
    """Belady's optimal policy: all batches are known, and the victim is the row whose next use is furthest away."""

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
        """Serves `ids`, the next batch.

        Raises:
            ValueError: the batch needs more rows than there are slots.
        """
        unique = np.unique(ids)
        if len(unique) > self._slots:
            raise ValueError(f"a batch of {len(unique)} distinct rows in a cache of {self._slots}")
        missing = len(unique) - int(self._resident[unique].sum())
        self._next_use[unique] = self._next_uses.pop()
        self._resident[unique] = False  # the batch's own rows cannot be victims
        others = np.flatnonzero(self._resident)
        leaving = max(0, len(others) + len(unique) - self._slots)
        if leaving:
            self._resident[others[np.argpartition(-self._next_use[others], leaving - 1)[:leaving]]] = False
        self._resident[unique] = True
        self.count(len(ids), len(unique), missing, leaving)


class Trace(NamedTuple):
    """A named sequence of batches, whose ids are below `rows`."""

    name: str
    rows: int
    batches: list[Int64Array]

    @property
    def slots(self) -> int:
        return max(1, round(self.rows * FRACTION))

    def row(self, policy: str, counters: dict[str, int]) -> Row:
        """Builds a row of the report."""
        return {
            **{"table": "cache policy, exact counts", "stream": self.name, "policy": policy},
            **{"slots": self.slots, "rows": self.rows},
            "miss_rate": counters["unique_misses"] / counters["unique_rows"],
            **counters,
        }

    def engine(self, policy: str, depth: int = 0) -> Row:
        """Counts the trace's misses with a policy of the engine, to which `depth` batches are announced in advance."""
        counts = Simulation.from_batches(self.batches).run(self.slots, policy, depth, WARM)
        numbers = counts.lookups, counts.rows, counts.misses, counts.rows_in, counts.rows_out
        name = f"{policy}, {depth} announced" if depth else policy
        return self.row(name, dict(zip(COUNTERS, numbers, strict=True)))

    def simulated(self, name: str, cache: RoundRobin | OptimalCache) -> Row:
        """Counts the trace's misses with a simulated cache."""
        for step, ids in enumerate(self.batches):
            if step == WARM:
                cache.reset()
            cache.plan(ids)
        return self.row(f"{name} (simulated)", cache.counters)


def movielens_items(folder: Path) -> Int64Array:
    """Returns the items of MovieLens-100K's ratings in order of time, from 0."""
    ratings = np.loadtxt(folder / "u.data", dtype=np.int64)
    items: Int64Array = ratings[np.argsort(ratings[:, 3], kind="stable"), 1] - 1
    return items


def traces(options: argparse.Namespace) -> Iterator[Trace]:
    """Yields the traces: the generated streams, and MovieLens in batches of a sixteenth of its number of rows."""
    rows = options.policy_rows
    batch = options.policy_batch or max(1, rows // 16)
    for kind in STREAMS:
        endless = stream(kind, rows, batch, ALPHA, options.seed)
        yield Trace(kind, rows, list(itertools.islice(endless, WARM + options.policy_steps)))
    if options.movielens is not None:
        items = movielens_items(options.movielens)
        rows = int(items.max()) + 1
        batch = max(1, rows // 16)
        starts = range(0, len(items) - batch + 1, batch)
        yield Trace("MovieLens items", rows, [items[first : first + batch] for first in starts])


def run_policies(options: argparse.Namespace) -> Iterator[Row]:
    """Runs every policy on every trace, then round robin, and the optimal policy as the bound."""
    for trace in traces(options):
        for policy in options.policies:
            yield trace.engine(policy)
        for depth in DEPTHS if LOOK_AHEAD in options.policies else ():
            yield trace.engine(LOOK_AHEAD, depth)
        yield trace.simulated("round robin", RoundRobin(trace.rows, trace.slots))
        yield trace.simulated("Belady", OptimalCache(trace.rows, trace.slots, trace.batches))
