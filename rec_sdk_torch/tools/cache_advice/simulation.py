"""Counts the misses of a cache by running the engine's own policies on a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ... import _engine
from .traces import Int64Array

MAX_AHEAD = 15
"""Largest number of future batches that a policy may be shown while one batch is planned."""


@dataclass(frozen=True)
class Counts:
    """Counts over all simulated batches.

    Attributes:
        batches: batches with at least one id.
        rows: sum over all batches of each batch's distinct rows.
        new: rows that appeared in a batch for the first time.
        misses: rows that were not in the cache, including new rows.
        rows_in: rows copied to the cache.
        rows_out: victims written back to the host.
        lookups: number of ids in all batches, with repetitions.
    """

    batches: int
    rows: int
    new: int
    misses: int
    rows_in: int
    rows_out: int
    lookups: int = 0

    @property
    def miss_rate(self) -> float:
        """The fraction of known (not new) rows that were not in the cache."""
        known = self.rows - self.new
        return (self.misses - self.new) / known if known else 0.0


class Simulation:
    """Simulator of caches of any size and policy on the batches of one table.

    Attributes:
        distinct: number of distinct ids.
        largest: largest number of distinct ids in one batch.
    """

    def __init__(self, ids: Int64Array, starts: Int64Array) -> None:
        """Reads the batches into the engine.

        Args:
            ids: int64 `[n]`, the ids of all batches.
            starts: int64 `[batches + 1]`, ascending from 0 to n: where each batch begins.

        Raises:
            ValueError: `starts` do not ascend from 0 to n.
        """
        self._trace = _engine.CacheTrace(ids, starts)
        self._starts = starts
        self.distinct, self.largest = self._trace.distinct, self._trace.largest

    @classmethod
    def from_batches(cls, batches: Sequence[Int64Array]) -> Simulation:
        """Creates a simulation from a list of batches; each is an array of ids, int64 `[n]`."""
        return cls(np.concatenate(batches), np.cumsum([0, *map(len, batches)]))

    def run(self, slots: int, policy: str, ahead: int, warm: int = 0) -> Counts:
        """Plans all batches as the engine does, as if each batch was trained before the next was planned.

        Args:
            slots: number of rows that the cache holds.
            policy: name of the policy.
            ahead: number of future batches that the policy sees, at most `MAX_AHEAD`; ignored by policies that do not
                look ahead.
            warm: number of batches at the beginning that are planned but not counted.

        Raises:
            CacheTooSmallError: a batch has more distinct ids than slots.
            ValueError: the policy is unknown.
        """
        rows, new, misses, rows_out = self._trace.simulate(slots, policy, ahead, warm)
        lookups = int(self._starts[-1] - self._starts[warm])
        return Counts(len(self._starts) - 1 - warm, rows, new, misses, misses, rows_out, lookups)
