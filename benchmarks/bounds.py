"""The machine's bounds: bandwidth of a copy, cost of a random row, and the time a step must take at least."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from rec_sdk_torch.operators.calls import ops

from .timing import best_of
from .workload import Workload

_READS = 65536
_ROWS_PER_BAG = 64


def step_bytes(workload: Workload, unique_rows: Sequence[float]) -> tuple[float, float, float]:
    """Bytes a step must move, as (streams, rows read, rows written back), from the distinct rows of each table.

    Streams: ids, 8N; output and its gradient, 8RD. Rows, of U distinct ones: the lookup reads the weight, 4DU; the
    update reads and writes weight and states, 4DUS each, S = 1 + states. Together 8N + 8RD + 4DU(1 + 2S), where R,
    the rows of the output, is N for a sequence; tables of several dims are added up.
    """
    weight = record = 0.0
    for dim, unique in zip(workload.dims, unique_rows, strict=True):
        weight += 4.0 * dim * unique
        record += 4.0 * dim * unique * (1 + workload.states_of(dim))
    return 8.0 * workload.lookups + 8.0 * workload.output_elements, weight + record, record


def huge_buffer(size: int) -> torch.Tensor:
    """`size` bytes in huge pages where the system has them, touched."""
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(area, dtype=torch.uint8)
    buffer.fill_(0)
    return buffer


@dataclass
class Machine:
    """Measures all through a run and keeps the best: a busy moment must not lower the bounds.

    Attributes:
        threads: torch's, while it measures.
        buffer_bytes: of memory that random rows are read from; a larger table is taken to cost the same.
        repeats: measurements per call of `observe`.
    """

    threads: int
    buffer_bytes: int
    repeats: int

    def __post_init__(self) -> None:
        self._buffer = huge_buffer(self.buffer_bytes)
        self._costs: dict[tuple[int, int], float] = {}
        self.copy_bandwidth = 0.0
        """Bytes per second, read and written bytes both counted."""

    def observe(self, workload: Workload) -> None:
        """Measures what the bounds of `workload` need, once more."""
        half = self.buffer_bytes // 2
        source, target = self._buffer[:half], self._buffer[half : 2 * half]
        self.copy_bandwidth = max(self.copy_bandwidth, 2 * half / best_of(lambda: target.copy_(source), self.repeats))
        for size in sorted({size for dim in workload.dims for size in (4 * dim, workload.record_bytes_of(dim))}):
            rows = self._rows(workload, size)
            known = self._costs.get((rows, size), float("inf"))
            self._costs[rows, size] = min(known, self._measure(rows, size))

    def _rows(self, workload: Workload, row_bytes: int) -> int:
        return max(1, min(workload.table_bytes, self.buffer_bytes) // row_bytes)

    def row_cost(self, workload: Workload, row_bytes: int) -> float:
        """Seconds of reading `row_bytes` at random in as much memory as the workload's tables have."""
        return self._costs[self._rows(workload, row_bytes), row_bytes]

    def _measure(self, rows: int, row_bytes: int) -> float:
        """The fastest of three operators in one large batch: bags summed (reads only), torch's and our gather."""
        records = self._buffer[: rows * row_bytes].view(rows, row_bytes)
        values = records.view(torch.float32)
        borders = torch.arange(0, _READS, _ROWS_PER_BAG)
        out = torch.empty((_READS, row_bytes // 4))
        generator = torch.Generator().manual_seed(rows)
        best = float("inf")
        for _ in range(self.repeats):
            index = torch.randint(0, rows, (_READS,), generator=generator)
            narrow = index.int()
            for call in (
                lambda i=index: F.embedding_bag(i, values, borders, mode="sum"),
                lambda i=index: torch.index_select(values, 0, i, out=out),
                lambda i=narrow: ops.gather_rows(records, i),
            ):
                best = min(best, best_of(call, 1))
        return best / _READS

    def copy_bound(self, workload: Workload, unique_rows: Sequence[float]) -> float:
        """Seconds to move a step's bytes at copy bandwidth."""
        return sum(step_bytes(workload, unique_rows)) / self.copy_bandwidth

    def random_bound(self, workload: Workload, unique_rows: Sequence[float]) -> float:
        """The same bytes, but rows are read at the measured cost of a random row: once by the lookup, once by
        the update. Streams and write-back stay at copy bandwidth.
        """
        streams, _, written = step_bytes(workload, unique_rows)
        seconds = (streams + written) / self.copy_bandwidth
        for dim, unique in zip(workload.dims, unique_rows, strict=True):
            lookup, update = (self.row_cost(workload, size) for size in (4 * dim, workload.record_bytes_of(dim)))
            seconds += unique * (lookup + update)
        return seconds

    def bounds(self, case: dict[str, Any], workload: Workload) -> dict[str, float]:
        """The bounds of a case, from all that was observed until now, and the collection's fastest step over them."""
        unique = case["unique_rows_of_tables"]
        found = {"copy": self.copy_bound(workload, unique), "random": self.random_bound(workload, unique)}
        over = {f"over_{name}_bound": case["collection"] / (seconds * 1e3) for name, seconds in found.items()}
        return {**{f"{name}_bound_ms": seconds * 1e3 for name, seconds in found.items()}, **over}

    def rows(self) -> Iterator[dict[str, Any]]:
        """The machine's own figures."""
        yield {"table": "copy", "threads": self.threads, "copy_bytes_per_second": self.copy_bandwidth}
        for (rows, size), cost in self._costs.items():
            shown = {"table": "random rows", "threads": self.threads, "rows": rows, "row_bytes": size}
            yield {**shown, "nanoseconds": cost * 1e9}
