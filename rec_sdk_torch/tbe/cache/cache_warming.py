"""Rows that come to the device cache for no batch: those that were hot, so that the next steps find them there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from .batch import Int64Array
from .device_cache import Group

Heats = npt.NDArray[np.float32]
"""In how many batches each row was used, of which those of long ago count less; 0 where none is counted."""

LATEST = 1.0
"""The heat of a row that the latest batch used, and none before it."""


@dataclass(frozen=True, eq=False)
class CachedRows:
    """Rows of a table that are in the cache, by slot.

    Attributes:
        ids: int64 `[n]`.
        heats: float32 `[n]`.
        last_batches: uint32 `[n]`, numbers of the batches that used them last; later ones have larger numbers.
    """

    ids: Int64Array
    heats: Heats
    last_batches: npt.NDArray[np.uint32]

    def by_heat(self) -> tuple[Int64Array, Heats]:
        """Ids and heats in the order in which rows should stay: the last that would leave is the first."""
        order = np.lexsort((self.last_batches, self.heats))[::-1]  # of equal ones the lower slot leaves first
        return self.ids[order], self.heats[order]


def cached_rows(group: Group, table: int) -> CachedRows:
    """The rows of a table that are in the cache now. All must be settled."""
    return CachedRows(*group.engine.tables.cached_rows(table))


def warm_rows(group: Group, table: int, ids: Int64Array, heats: Heats) -> int:
    """Brings the first of `ids` whose rows are not in the cache to its free slots; how many these were.

    No other thread may plan, read or update meanwhile, and all must be settled. Rows of a hash table without a record
    are passed over, and rows whose sums of an accumulation window are not in the cache.

    Args:
        group, table: the table.
        ids: hottest first; of several places of an id the first counts.
        heats: of the ids.

    Raises:
        IndexError: an index table lacks an id.
        RuntimeError: batches are in flight.
    """
    places, rows, slots = group.engine.tables.choose_warm(table, ids)
    chosen, heats = ids[places], heats[places]
    for begin in range(0, len(chosen), group.chunk):
        piece = slice(begin, begin + group.chunk)
        records = torch.empty((len(chosen[piece]), group.layout.bytes), dtype=torch.uint8, device="cpu")
        group.engine.tables.read_rows(table, chosen[piece], rows[piece], records.numpy())
        group.scatter(slots[piece], records)
    # Until now the slots are free: an interrupt leaves the cache as it was.
    group.engine.tables.warm(table, chosen, slots, heats)
    return len(chosen)
