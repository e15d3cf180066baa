"""Reads whole tables for saves, in chunks of bounded size: ids, changes since a version, and accumulated gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from ..cache.batch import Int64Array
from ..cache.cache_warming import CachedRows, Heats, cached_rows, warm_rows
from .layout import Layout
from .table_lifecycle import LifecycleView

CHUNK_BYTES = 2 << 20
"""Bytes of records per chunk of rows. A few copies of a chunk are in memory at the same time."""


READ_BYTES = 256 << 10
"""Bytes of records per chunk of ids: so few that a chunk stays in a core's cache and reuses freed memory."""


def start_versions(layout: Layout) -> list[int]:
    """Begins a new version in each group and returns the numbers of the former versions.

    `changed` and `forget_changes` take these numbers. Updates of batches in flight belong to the new versions.
    """
    return [group.engine.saves.next_version() for group in layout.groups]


def forget_changes(layout: Layout, upto: Sequence[int]) -> None:
    """Discards the records of changes and removals up to the versions in `upto`, which has one for each group."""
    for group, version in zip(layout.groups, upto, strict=True):
        for table, member in enumerate(group.members):
            if member.config.track_changes:
                group.engine.saves.forget_changes(table, version)


class SaveView(LifecycleView):
    """The part of a table view that saves read.

    The caller must hold `exclusive()` during each call, and while it iterates over a result.
    """

    def chunk_rows(self, most: int = 0) -> int:
        """Returns the number of rows (at least 1) in a chunk of at most `most` bytes; 0 bytes mean `CHUNK_BYTES`."""
        return max(1, (most or CHUNK_BYTES) // self.locate()[0].layout.bytes)

    def row_count(self) -> int:
        """Returns the number of rows, like `TableView.count`."""
        group, table = self.locate()
        return group.engine.tables.row_count(table)

    def id_chunks(self) -> Iterator[Int64Array]:
        """Yields the ids of all rows in chunks, in no order."""
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
        """Returns whether all changes since a version are recorded; a load that replaces all rows is not recorded."""
        group, table = self.locate()
        return group.engine.saves.removed_ids(table, since)[1]

    def removed(self, since: int) -> Int64Array:
        """Returns ids that were removed after a version, including ids that were added again.

        Raises:
            ValueError: a table without `track_changes`.
        """
        group, table = self.locate()
        return group.engine.saves.removed_ids(table, since)[0]

    def changed(self, since: int) -> tuple[Int64Array, Int64Array]:
        """Returns ids of rows that changed after a version, and ids that were removed, even if added again later.

        A removed row of an index table counts as changed, since it has its initial value again.

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
        """Copies rows to free slots of the device cache, like `TableView.warm`, but without checks."""
        return warm_rows(*self.locate(), ids, heats)

    # ---- accumulated gradients

    def window_rows(self) -> Iterator[tuple[Int64Array, torch.Tensor]]:
        """Yields accumulated gradients in chunks: ids, and float32 `[n, 2 * D]` of sum and rounding compensation."""
        group, table = self.locate()
        buffer = group.accumulation_buffer
        if buffer is None or not buffer.is_open():
            return
        ids = group.engine.saves.window_ids(table)
        slots, table_offsets, _, nonresident = group.engine.window_rows()
        slots = slots[table_offsets[table] : table_offsets[table + 1]]
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
