"""Counts what a cache would miss: the engine's own policies over the rows of a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ... import _engine
from .traces import Int64Array

MAX_AHEAD = 15
"""Batches that may be announced beside the one that is planned."""


@dataclass(frozen=True)
class Counts:
    """Counts of all batches together.

    Attributes:
        batches: with at least one id.
        rows: distinct rows of each batch, summed.
        new: of these, those that no batch had before.
        misses: of these, those that were not in the cache, the new ones too.
        rows_in: rows that came to the cache.
        rows_out: rows that left it.
        lookups: ids of all batches.
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
        """Known rows that were not there, of the known rows that batches looked up."""
        known = self.rows - self.new
        return (self.misses - self.new) / known if known else 0.0


class Simulation:
    """The batches of a table, which are read once, in caches of any size under any policy.

    Attributes:
        distinct: different ids.
        largest: different ids of the largest batch.
    """

    def __init__(self, ids: Int64Array, starts: Int64Array) -> None:
        """
        Args:
            ids: int64 `[n]` of all batches.
            starts: int64 `[batches + 1]`, where each batch begins, from 0 to n.

        Raises:
            ValueError: other starts.
        """
        self._trace = _engine.CacheTrace(ids, starts)
        self._starts = starts
        self.distinct, self.largest = self._trace.distinct, self._trace.largest

    @classmethod
    def from_batches(cls, batches: Sequence[Int64Array]) -> Simulation:
        """Makes the simulation of batches, int64 ids of each."""
        return cls(np.concatenate(batches), np.cumsum([0, *map(len, batches)]))

    def run(self, slots: int, policy: str, ahead: int, warm: int = 0) -> Counts:
        """Plans all batches as the engine does, each trained before the next, without other batches in flight.

        Args:
            slots: rows of the cache.
            policy: its name in the engine.
            ahead: batches that are announced before they come, at most `MAX_AHEAD`; only policies that look ahead
                care.
            warm: batches at the beginning that are planned and not counted.

        Raises:
            CacheTooSmallError: a batch has more distinct ids than there are slots.
            ValueError: there is no such policy.
        """
        rows, new, misses, rows_out = self._trace.simulate(slots, policy, ahead, warm)
        lookups = int(self._starts[-1] - self._starts[warm])
        return Counts(len(self._starts) - 1 - warm, rows, new, misses, misses, rows_out, lookups)
