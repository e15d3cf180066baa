"""Batches of the CUDA benchmark in the shape of NVIDIA dynamicemb's TestCaching, and the memory that they need."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rec_sdk_torch._engine import available_memory

from .ids import Distribution, Int64Array
from .planning import BYTES_PER_ROW
from .workload import TableSet, Workload

LOOKUPS, DIM = 1_048_570, 128
"""The shape of dynamicemb's benchmark: 2**20 // 10 lookups of each of 10 tables."""
ID_RANGES = {"power law": TableSet(10, 2**28 // 10), "uniform": TableSet(10, 2**24 // 10)}
"""Ids of a table: of its TestCaching, and of its TestGpu for uniform ids, nearly all of which would be new in the
first."""
HOST_MARGIN, DEVICE_MARGIN = 4 << 30, 2 << 30


@dataclass(frozen=True)
class Pool:
    """The batches of a run, drawn beforehand and looked up repeatedly.

    The footprint of a table is the number of its distinct ids in all batches. A cache of ratio r holds, for each table,
    r times the largest footprint. Tables without a host store have `rows` rows.
    """

    distribution: Distribution
    id_range: TableSet
    ids: list[torch.Tensor]
    """One int64 `[tables, lookups per table]` for each batch."""
    ranks: list[torch.Tensor]
    """The same, renumbered within the footprint of the table: the rows of an all-resident rival."""
    footprints: list[int]
    unique_rows: list[int]
    """Distinct rows of each batch, over all tables."""

    @property
    def rows(self) -> int:
        return max(self.footprints)

    def workload(self, dim: int, optimizer: str) -> Workload:
        """Builds the workload, a sequence with one lookup per sample."""
        count, per_table = self.ids[0].shape
        return Workload(TableSet(count, self.rows), dim, False, optimizer, count * per_table, 1)


def draw_pool(distribution: Distribution, id_range: TableSet, lookups: int, batches: int, seed: int) -> Pool:
    """Draws `batches` batches of `lookups` ids each."""
    rng = np.random.default_rng(seed)
    per_table = lookups // id_range.count
    drawn: list[Int64Array] = []
    ranked: list[Int64Array] = []
    footprints = []
    unique = np.zeros(batches, np.int64)
    for table in range(id_range.count):
        ids = distribution.draw(rng, id_range.rows, batches * per_table, table).reshape(batches, per_table)
        known, ranks = np.unique(ids, return_inverse=True)
        ranks = ranks.reshape(batches, per_table)
        drawn.append(ids)
        ranked.append(ranks)
        footprints.append(len(known))
        unique += [len(np.unique(batch)) for batch in ranks]

    def by_batch(tables: list[Int64Array]) -> list[torch.Tensor]:
        return [torch.from_numpy(np.stack([table[batch] for table in tables])) for batch in range(batches)]

    return Pool(distribution, id_range, by_batch(drawn), by_batch(ranked), footprints, unique.tolist())


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes of device and host memory."""

    device: int
    host: int

    def __add__(self, other: MemoryNeed) -> MemoryNeed:
        return MemoryNeed(self.device + other.device, self.host + other.host)


def activation_bytes(workload: Workload) -> int:
    """Returns the bytes of a lookup's output, or of its gradient."""
    return 4 * workload.lookups * workload.dim


def need_of_ours(workload: Workload, pool: Pool, ratio: float) -> MemoryNeed:
    """Returns the memory of our tables.

    On the device: the cache, three activations (output, its gradient, one more) and a swap. On the host: the host
    store, maps and staging buffers.
    """
    swap = 2 * max(pool.unique_rows) * workload.record_bytes
    rows = workload.tables.count * workload.tables.rows
    batches = sum(2 * ids.nbytes for ids in pool.ids)
    device = int(ratio * workload.table_bytes) + 3 * activation_bytes(workload) + batches + swap
    return MemoryNeed(device, workload.table_bytes + rows * BYTES_PER_ROW + batches + 2 * swap)


def free_memory(device: torch.device) -> MemoryNeed:
    """Returns the memory that may be used. If the device is the CPU, each of the two gets half of the host's memory."""
    host = max(0, available_memory() - HOST_MARGIN)
    if device.type == "cpu":
        return MemoryNeed(host // 2, host // 2)
    return MemoryNeed(max(0, torch.get_device_module(device).mem_get_info(device)[0] - DEVICE_MARGIN), host)


def shortage(need: MemoryNeed, free: MemoryNeed) -> str | None:
    """Returns a message about missing memory, or None if there is enough."""
    parts = [
        f"{name} memory: needs {wanted / 2**30:.1f} GiB, {there / 2**30:.1f} are free"
        for name, wanted, there in (("device", need.device, free.device), ("host", need.host, free.host))
        if wanted > there
    ]
    return "; ".join(parts) or None
