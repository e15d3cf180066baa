"""Cache warming: fills free slots of the device cache with hot rows before a batch needs them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from .batch import Int64Array
from .device_cache import Group

Heats = npt.NDArray[np.float32]
"""Decayed number of batches that used each row, float32 `[n]`; 0 if the cache policy does not count batches."""

LATEST = 1.0
"""The heat of a row that only the latest batch used."""


@dataclass(frozen=True, eq=False)
class CachedRows:
    """The cached rows of a table, in the order of their slots.

    Attributes:
        ids: int64 `[n]`.
        heats: float32 `[n]`, the decayed number of batches that used each row.
        last_batches: uint32 `[n]`, the number of the batch that used each row last; later batches have larger numbers.
    """

    ids: Int64Array
    heats: Heats
    last_batches: npt.NDArray[np.uint32]

    def by_heat(self) -> tuple[Int64Array, Heats]:
        """Returns ids and heats, hottest first: the cache policy would evict the last rows first."""
        # Rows of equal heat and last batch stay in descending order of slots: the lower slot is evicted first.
        order = np.lexsort((self.last_batches, self.heats))[::-1]
        return self.ids[order], self.heats[order]


def cached_rows(group: Group, table: int) -> CachedRows:
    """Returns the rows of a table that are in the cache, or that plans are fetching.

    While the table has a snapshot, rows of ids that were added since are left out.
    """
    return CachedRows(*group.engine.tables.cached_rows(table))


def warm_rows(group: Group, table: int, ids: Int64Array, heats: Heats) -> int:
    """Copies uncached rows of `ids` to free slots of the cache, in order, until no slot is free.

    Skips ids that a hash table does not contain, and rows that have accumulated gradients outside the cache. Call
    `Swap.settle` first. No other thread may plan, read or update meanwhile.

    Args:
        group: the group of the table.
        table: its index in the group.
        ids: hottest first; repeated ids are ignored.
        heats: the heat of each id.

    Returns:
        The number of rows that were copied.

    Raises:
        IndexError: an id is outside an index table.
        RuntimeError: batches are in flight.
    """
    indices, rows, slots = group.engine.tables.choose_warm(table, ids)
    chosen, heats = ids[indices], heats[indices]
    for begin in range(0, len(chosen), group.chunk):
        piece = slice(begin, begin + group.chunk)
        records = torch.empty((len(chosen[piece]), group.layout.bytes), dtype=torch.uint8, device="cpu")
        group.engine.tables.read_rows(table, chosen[piece], rows[piece], records.numpy())
        group.scatter(slots[piece], records)
    # The slots become occupied only now, after all copies: an interrupt before this call leaves the cache as it was.
    group.engine.tables.warm(table, chosen, slots, heats)
    return len(chosen)
