"""Times of the operators alone, on a batch that is already on the device and with all rows resident."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rec_sdk_torch.tools.operator_cases import Batch, lookup_cases, update_cases

from .pool import MemoryNeed, Pool
from .timing import Clock, Samples, no_collection
from .workload import Workload


def operator_bytes(workload: Workload, unique_rows: float) -> dict[str, float]:
    """Computes the bytes that an operator must move.

    These are every index, gradient, output and distinct row once; the update reads and writes each record.
    """
    activation, weight = 4.0 * workload.lookups * workload.dim, 4.0 * workload.dim * unique_rows
    record = weight * (1 + workload.states)
    indices = 4.0 * workload.lookups
    return {
        "lookup": indices + weight + activation,
        "update": indices + 8.0 * unique_rows + activation + 2 * record,
    }


def need_of_operators(workload: Workload) -> MemoryNeed:
    """Returns the memory that the calls need for records and gradients, the same on the device and on the host."""
    both = 2 * workload.table_bytes + 4 * workload.lookups * workload.dim
    return MemoryNeed(both, both)


def time_operators(workload: Workload, pool: Pool, device: torch.device) -> dict[str, dict[str, float]]:
    """Times each operator alone and both together, repeated without synchronization so that launches are hidden.

    The rows of all tables are in one table. The results are not compared here; `npu_check` and the operators' tests do
    that.
    """
    rows = workload.tables.count * workload.tables.rows
    first_rows = torch.arange(0, rows, workload.tables.rows)
    batch = Batch.from_lookups((pool.ranks[0] + first_rows[:, None]).flatten().numpy(), rows)
    float32 = (torch.float32,)
    lookup = next(lookup_cases(batch, workload.dim, float32, weighted=False)).to(device)
    update = next(update_cases(batch, workload.dim, float32, [workload.optimizer])).to(device)
    marks, clock = [], Clock(device)
    with no_collection():
        for _ in range(1 + len(pool.ids)):
            begin = clock.mark()
            lookup.call()
            middle = clock.mark()
            update.call()
            marks.append((begin, middle, clock.mark()))
        clock.synchronize()
    return {name: sample.summary() for name, sample in part_seconds(clock, marks[1:]).items()}


def part_seconds(clock: Clock, marks: Sequence[tuple[Any, Any, Any]]) -> dict[str, Samples]:
    """Computes the seconds of lookups and updates from marks before, between and after the two."""
    return {
        "lookup": Samples([clock.seconds(begin, middle) for begin, middle, _ in marks]),
        "update": Samples([clock.seconds(middle, end) for _, middle, end in marks]),
        "together": Samples([clock.seconds(begin, end) for begin, _, end in marks]),
    }
