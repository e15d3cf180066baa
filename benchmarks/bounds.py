"""Copy bandwidth of the machine, and the time that a step's bytes take at that bandwidth."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import torch

from .timing import best_of
from .workload import Workload


def step_bytes(workload: Workload, unique_rows: Sequence[float]) -> tuple[float, float, float]:
    """Computes the bytes that a step must move from the distinct rows of each table.

    Streams are 8N bytes of ids and 8RD bytes of the output and its gradient, where R is the number of output rows (N
    for a sequence). Of U distinct rows, the lookup reads the weights, 4DU bytes; the update reads and writes weights
    and states, 4DUS bytes each, where S = 1 + states per weight. The total is 8N + 8RD + 4DU(1 + 2S). The bytes of
    tables with different dims are added up.

    Returns:
        (streams, rows read, rows written back).
    """
    weight = record = 0.0
    for dim, unique in zip(workload.dims, unique_rows, strict=True):
        weight += 4.0 * dim * unique
        record += 4.0 * dim * unique * (1 + workload.states_of(dim))
    return 8.0 * workload.lookups + 8.0 * workload.output_elements, weight + record, record


def huge_buffer(size: int) -> torch.Tensor:
    """Allocates `size` bytes, in huge pages where the system has them, and touches them."""
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(area, dtype=torch.uint8)
    buffer.fill_(0)
    return buffer


class CopyBound:
    """Copy bandwidth, measured repeatedly during a run so that one busy moment does not lower the bound.

    Attributes:
        bandwidth: the highest bandwidth so far, in bytes per second; bytes read and bytes written both count.
    """

    def __init__(self, buffer_bytes: int, repeats: int) -> None:
        self._source, self._target = huge_buffer(buffer_bytes), huge_buffer(buffer_bytes)
        self._repeats = repeats
        self.bandwidth = 0.0

    def observe(self) -> float:
        """Repeats the measurement, and returns the highest bandwidth so far."""
        seconds = best_of(lambda: self._target.copy_(self._source), self._repeats)
        self.bandwidth = max(self.bandwidth, 2 * self._source.nbytes / seconds)
        return self.bandwidth

    def over(self, case: dict[str, Any], workload: Workload) -> dict[str, float]:
        """Computes a case's copy bound at the best bandwidth so far, and the collection's fastest step divided by
        it.
        """
        seconds = sum(step_bytes(workload, case["unique_rows_of_tables"])) / self.bandwidth
        return {"copy_bound_ms": seconds * 1e3, "over_copy_bound": case["collection"] / (seconds * 1e3)}
