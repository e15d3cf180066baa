"""The operators alone, on a batch that is on the device already and rows that are all resident."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rec_sdk_torch.tools.operator_cases import Batch, lookups, updates

from .pool import Need, Pool
from .timing import Clock, Samples, no_collection
from .workload import Workload


def operator_bytes(workload: Workload, unique_rows: float) -> dict[str, float]:
    """Bytes an operator must move: every index, gradient, output and distinct row once, a record both ways."""
    activation, weight = 4.0 * workload.lookups * workload.dim, 4.0 * workload.dim * unique_rows
    record = weight * (1 + workload.states)
    indices = 4.0 * workload.lookups
    return {
        "lookup": indices + weight + activation,
        "update": indices + 8.0 * unique_rows + activation + 2 * record,
    }


def need_of_operators(workload: Workload) -> Need:
    """The records of the two calls, on the device and on the host that fills them, and a gradient."""
    both = 2 * workload.table_bytes + 4 * workload.lookups * workload.dim
    return Need(both, both)


def time_operators(workload: Workload, pool: Pool, device: torch.device) -> dict[str, dict[str, float]]:
    """Each operator alone and both together, as often as there are batches in a row, so that launches are hidden.

    The rows of all tables are in one. `npu_check` and the tests of operators compare the results of these calls.
    """
    rows = workload.tables.count * workload.tables.rows
    first_rows = torch.arange(0, rows, workload.tables.rows)
    batch = Batch.from_lookups((pool.ranks[0] + first_rows[:, None]).flatten().numpy(), rows)
    float32 = (torch.float32,)
    lookup = next(lookups(batch, workload.dim, float32, weighted=False)).to(device)
    update = next(updates(batch, workload.dim, float32, [workload.optimizer])).to(device)
    marks, clock = [], Clock(device)
    with no_collection():
        for _ in range(1 + len(pool.ids)):
            begin = clock.mark()
            lookup.call()
            middle = clock.mark()
            update.call()
            marks.append((begin, middle, clock.mark()))
        clock.synchronize()
    return {name: sample.summary() for name, sample in spans(clock, marks[1:]).items()}


def spans(clock: Clock, marks: Sequence[tuple[Any, Any, Any]]) -> dict[str, Samples]:
    """Seconds of the parts of steps, which are marked before the lookup, between it and the update, and after."""
    return {
        "lookup": Samples([clock.seconds(begin, middle) for begin, middle, _ in marks]),
        "update": Samples([clock.seconds(middle, end) for _, middle, end in marks]),
        "together": Samples([clock.seconds(begin, end) for begin, _, end in marks]),
    }
