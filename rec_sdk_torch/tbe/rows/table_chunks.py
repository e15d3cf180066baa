"""Whole tables in pieces, for saves: rows, what changed since a version, and open windows, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from ..cache.batch import Int64Array
from ..cache.cache_warming import CachedRows, Heats, cached_rows, warm_rows
from .layout import Layout
from .table_lifecycle import LifecycleView

CHUNK_BYTES = 2 << 20
"""Bytes of records that are in memory at a time beside their table; some copies of them are as well."""


READ_BYTES = 256 << 10
"""Bytes of records that are read at a time: they and their copies stay in a core's cache, and take no fresh memory."""


def versions(layout: Layout) -> list[int]:
    """Begins a version of each group, for `changed` and `forget_changes`: only batches in flight have later ones."""
    return [group.engine.saves.next_version() for group in layout.groups]


def forget_changes(layout: Layout, upto: Sequence[int]) -> None:
    """Forgets what changed or was removed before these versions, one of each group."""
    for group, version in zip(layout.groups, upto, strict=True):
        for table, member in enumerate(group.members):
            if member.config.track_changes:
                group.engine.saves.forget_changes(table, version)


class SaveView(LifecycleView):
    """The rows of one table for saves. Hold `exclusive()` during each call, and while an iterator is read."""

    def chunk_rows(self, most: int = 0) -> int:
        """Returns the rows of a piece of at most so many bytes, `CHUNK_BYTES` when 0; one at least."""
        return max(1, (most or CHUNK_BYTES) // self.locate()[0].layout.bytes)

    def id_chunks(self) -> Iterator[Int64Array]:
        """Yields ids of all rows, in no order, some at a time."""
        rows = self.chunk_rows(READ_BYTES)
        group, table = self.locate()
        if not self.config.hashed:
            for begin in range(0, self.config.num_embeddings, rows):
                yield np.arange(begin, min(begin + rows, self.config.num_embeddings), dtype=np.int64)
            return
        bucket = 0
        while bucket >= 0:
            ids, bucket = group.engine.saves.scan_ids(table, bucket, rows)
            for begin in range(0, len(ids), rows):
                yield ids[begin : begin + rows]

    def has_changes_since(self, since: int) -> bool:
        """Whether `changed` knows all that happened after a version: not where all rows were replaced at once."""
        group, table = self.locate()
        return group.engine.saves.removed_ids(table, since)[1]

    def removed(self, since: int) -> Int64Array:
        """Returns ids that were removed after a version, with those that came back.

        Raises:
            ValueError: a table without `track_changes`.
        """
        group, table = self.locate()
        return group.engine.saves.removed_ids(table, since)[0]

    def changed(self, since: int) -> tuple[Int64Array, Int64Array]:
        """Returns ids of rows that changed after a version; and ids that were removed, with those that came back.

        A removed row of an index table has changed: it is initial again.

        Raises:
            ValueError: a table without `track_changes`.
        """
        group, table = self.locate()
        ids, _ = group.engine.saves.changed_ids(table, since)
        removed, _ = group.engine.saves.removed_ids(table, since)
        if self.config.hashed:
            return ids, removed
        return np.union1d(ids, removed), removed[:0]

    def cached(self) -> CachedRows:
        """Returns the rows that are in the device cache."""
        return cached_rows(*self.locate())

    def warm_hottest(self, ids: Int64Array, heats: Heats) -> int:
        """Brings rows to the device cache as `TableView.warm` does, without its checks of ids and heats."""
        return warm_rows(*self.locate(), ids, heats)

    # ---- open windows

    def window_rows(self) -> Iterator[tuple[Int64Array, torch.Tensor]]:
        """Yields gradients of rows that wait for the end of an accumulation window: ids, float32 `[n, 2 * D]`."""
        group, table = self.locate()
        buffer = group.accumulation_buffer
        if buffer is None or not buffer.is_open():
            return
        ids = group.engine.saves.window_ids(table)
        slots, of_tables, _, nonresident = group.engine.window_rows()
        slots = slots[of_tables[table] : of_tables[table + 1]]
        rows = max(1, CHUNK_BYTES // (8 * group.layout.dim))
        for begin in range(0, len(slots), rows):
            some = torch.from_numpy(slots[begin : begin + rows].astype(np.int64)).to(buffer.sums.device)
            yield ids[begin : begin + rows][: len(some)], buffer.sums.index_select(0, some).cpu()
        first, end = nonresident[table : table + 2].tolist()
        for begin in range(first, end, rows):
            count = min(rows, end - begin)
            sums = np.empty((count, 2 * group.layout.dim), np.float32)
            group.engine.read_spilled(begin, begin + count, np.empty((count, group.layout.bytes), np.uint8), sums)
            offset = len(slots) + begin - first
            yield ids[offset : offset + count], torch.from_numpy(sums)

    def window_count(self) -> int:
        """Returns the number of rows that `window_rows` yields."""
        group, table = self.locate()
        buffer = group.accumulation_buffer
        return 0 if buffer is None or not buffer.is_open() else len(group.engine.saves.window_ids(table))
