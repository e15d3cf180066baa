"""Counts what a cache would miss: the engine's own planner and policies over a trace, with rows of one element."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import _engine
from ..ops import parallel_runner
from .traces import Int64Array

__all__ = ["MOST_AHEAD", "Counts", "simulate"]

MOST_AHEAD = 15
"""Batches that may be announced beside the one that is planned."""
_FEATURES = np.zeros(1, np.int64)


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


def _engine_of(slots: int, distinct: int, policy: str) -> Any:
    _engine.set_parallel_runner(*parallel_runner())
    table = _engine.TableSpec(
        name="t",
        hashed=True,
        num_embeddings=distinct,
        slots=slots,
        capacity=0,
        initializer=_engine.Initializer("uniform", 0.0, 1.0, 0.0, 1.0),
        seed=0,
        state_init=[],
        bounds_check="fatal",
        columns=[],
        life=None,
    )
    return _engine.Engine([table], 1, 0, [], [0], [], [], policy)


def simulate(
    batches: Sequence[Int64Array], slots: int, distinct: int, policy: str, ahead: int, warm: int = 0
) -> Counts:
    """Plans all batches, one after the other, each trained before the next, as without other batches in flight.

    Args:
        batches: int64 ids of each.
        slots: rows of the cache.
        distinct: different ids of all batches.
        policy: its name in the engine.
        ahead: batches that are announced before they come, at most `MOST_AHEAD`; only policies that look ahead care.
        warm: batches at the beginning that are planned and not counted.

    Raises:
        CacheTooSmallError: a batch has more distinct ids than there are slots.
        ValueError: there is no such policy.
    """
    engine = _engine_of(slots, distinct, policy)
    looks = _engine.policy_looks_ahead(policy)
    announced: collections.deque[Any] = collections.deque()
    records = np.zeros((0, engine.record_bytes), np.uint8)
    offsets = [np.array([0, len(ids)], np.int64) for ids in batches]
    for place, ids in enumerate(batches):
        if place == warm:
            engine.reset_stats()
        while looks and len(announced) <= ahead and place + len(announced) < len(batches):
            at = place + len(announced)
            announced.append(engine.announce(batches[at], offsets[at], _FEATURES, 1))
        plan = engine.plan(ids, offsets[place], _FEATURES, 1, announced=announced.popleft() if announced else None)
        most = max(plan.rows_in, plan.rows_out)
        if most > len(records):
            records = np.zeros((most, engine.record_bytes), np.uint8)
        if plan.rows_in:
            engine.read_in(plan, records[: plan.rows_in])
        _engine.begin([plan])
        engine.applied(plan)
        if plan.rows_out:
            engine.land(plan, records[: plan.rows_out])
        plan.release()
    stats = engine.stats()
    return Counts(
        len(batches) - warm,
        *(stats[name] for name in ("unique_rows", "new_rows", "unique_misses", "rows_in", "rows_out", "lookups")),
    )
