"""Counts of a cache by the planner of an engine, with rows of one element: what simulations are compared with."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rec_sdk_torch import _engine

Ids = npt.NDArray[np.int64]
FEATURES = np.zeros(1, np.int64)
COUNTS = ("unique_rows", "new_rows", "unique_misses", "rows_in", "rows_out", "lookups")


def _engine_of(slots: int, policy: str) -> Any:
    initializer = _engine.Initializer("uniform", 0.0, 1.0, 0.0, 1.0)
    table = _engine.TableSpec(
        name="t",
        hashed=True,
        num_embeddings=1000,
        slots=slots,
        capacity=0,
        initializer=initializer,
        seed=0,
        state_init=[],
        bounds_check="fatal",
    )
    return _engine.Engine([table], 1, 0, [], [0], [], [], policy)


def planned(batches: Sequence[Ids], slots: int, policy: str, ahead: int, warm: int) -> list[int]:
    """Returns `COUNTS` after all batches, each of which is trained before the next; without the first `warm`."""
    engine, looks = _engine_of(slots, policy), _engine.policy_looks_ahead(policy)
    announced: collections.deque[Any] = collections.deque()
    offsets = [np.array([0, len(ids)], np.int64) for ids in batches]
    for place, ids in enumerate(batches):
        if place == warm:
            engine.tables.reset_stats()
        while looks and len(announced) <= ahead and place + len(announced) < len(batches):
            at = place + len(announced)
            announced.append(engine.announce(batches[at], offsets[at], FEATURES, 1))
        plan = engine.plan(ids, offsets[place], FEATURES, 1, announced=announced.popleft() if announced else None)
        records = np.zeros((max(plan.rows_in, plan.rows_out), engine.record_bytes), np.uint8)
        if plan.rows_in:
            engine.read_in(plan, records[: plan.rows_in])
        _engine.begin([plan])
        engine.applied(plan)
        if plan.rows_out:
            engine.land(plan, records[: plan.rows_out])
        plan.release()
    stats = engine.tables.stats()
    return [stats[name] for name in COUNTS]
