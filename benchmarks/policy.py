"""Exact counts of what a cache policy misses, on a stationary power law, a drifting one and a scan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .ids import STREAMS, Int64Array, stream
from .planning import Planner, make_engine


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
    """

    rows: int
    fraction: float
    batch: int
    warm: int
    steps: int
    alpha: float
    policies: tuple[str, ...]
    seed: int

    @property
    def slots(self) -> int:
        return max(1, round(self.rows * self.fraction))


class RoundRobin:
    """A hand that walks over the slots and takes each that the batch does not need: the policy to beat."""

    def __init__(self, rows: int, slots: int) -> None:
        self._slot_of = np.full(rows, -1, np.int64)
        self._row_in = np.full(slots, -1, np.int64)
        self._hand = 0
        self.counters = dict.fromkeys(("lookups", "unique_rows", "unique_misses", "rows_in", "rows_out"), 0)

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
        self._count(len(ids), len(unique), len(missing), len(leaving))

    def _count(self, lookups: int, unique: int, missing: int, leaving: int) -> None:
        counted = (lookups, unique, missing, missing, leaving)
        for name, count in zip(self.counters, counted, strict=True):
            self.counters[name] += count


def _result(kind: str, policy: str, options: PolicyOptions, counters: dict[str, int]) -> dict[str, Any]:
    return {
        "stream": kind,
        "policy": policy,
        "rows": options.rows,
        "slots": options.slots,
        "batch": options.batch,
        "steps": options.steps,
        "unique_miss_rate": counters["unique_misses"] / counters["unique_rows"],
        "counters": counters,
    }


def _batches(kind: str, options: PolicyOptions) -> Iterator[Int64Array]:
    return stream(kind, options.rows, options.batch, options.alpha, options.seed)


def _engine_run(kind: str, policy: str, options: PolicyOptions) -> dict[str, Any]:
    planner = Planner(make_engine(options.rows, options.slots, policy=policy))
    batches = _batches(kind, options)
    for step in range(options.warm + options.steps):
        if step == options.warm:
            planner.engine.reset_stats()
        planner.plan(next(batches))
    return _result(kind, policy, options, planner.engine.stats())


def _hand_run(kind: str, options: PolicyOptions) -> dict[str, Any]:
    hand = RoundRobin(options.rows, options.slots)
    batches = _batches(kind, options)
    for step in range(options.warm + options.steps):
        if step == options.warm:
            hand.counters = dict.fromkeys(hand.counters, 0)
        hand.plan(next(batches))
    return _result(kind, "round robin (simulated)", options, hand.counters)


def run_policies(options: PolicyOptions) -> list[dict[str, Any]]:
    """Every policy on every stream."""
    results = []
    for kind in STREAMS:
        results += [_engine_run(kind, policy, options) for policy in options.policies]
        results.append(_hand_run(kind, options))
    return results
