"""Whole tables in pieces, for saves: rows, what changed since a version, and open windows, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from ..cache.batch import Int64Array
from ..cache.warming import CachedRows, Heats, cached_rows, warm_rows
from .layout import Layout
from .table_view import TableView

PIECE_BYTES = 2 << 20
"""Bytes of records that are in memory at a time beside their table; some copies of them are as well."""


READ_BYTES = 256 << 10
"""Bytes of records that are read at a time: they and their copies stay in a core's cache, and take no fresh memory."""


def piece_rows(view: TableView, most: int = 0) -> int:
    """Rows of a piece; `most`: of its bytes."""
    return max(1, (most or PIECE_BYTES) // view.locate()[0].layout.bytes)


def pieces_of_ids(view: TableView) -> Iterator[Int64Array]:
    """Ids of all rows, in no order, some at a time. The table must not change meanwhile: hold `exclusive()`."""
    rows = piece_rows(view, READ_BYTES)
    group, table = view.locate()
    if not view.config.hashed:
        for begin in range(0, view.config.num_embeddings, rows):
            yield np.arange(begin, min(begin + rows, view.config.num_embeddings), dtype=np.int64)
        return
    bucket = 0
    while bucket >= 0:
        ids, bucket = group.engine.scan_ids(table, bucket, rows)
        yield from split(ids, rows)


def split(ids: Int64Array, rows: int) -> Iterator[Int64Array]:
    """The ids, so many at a time."""
    for begin in range(0, len(ids), rows):
        yield ids[begin : begin + rows]


def versions(layout: Layout) -> list[int]:
    """Versions of the groups for `changed` and `forget_changes`: only batches in flight have later ones by now."""
    return [group.engine.next_version() for group in layout.groups]


def knows_changes(view: TableView, since: int) -> bool:
    """Whether `changed` knows all that happened after a version: not where all rows were replaced at once."""
    group, table = view.locate()
    return group.engine.removed_ids(table, since)[1]


def removed(view: TableView, since: int) -> Int64Array:
    """Ids that were removed after a version, with those that came back.

    Raises:
        ValueError: a table without `track_changes`.
    """
    group, table = view.locate()
    return group.engine.removed_ids(table, since)[0]


def changed(view: TableView, since: int) -> tuple[Int64Array, Int64Array]:
    """(ids of rows that changed after a version; ids that were removed, with those that came back).

    A removed row of an index table has changed: it is initial again.

    Raises:
        ValueError: a table without `track_changes`.
    """
    group, table = view.locate()
    ids, _ = group.engine.changed_ids(table, since)
    removed, _ = group.engine.removed_ids(table, since)
    if view.config.hashed:
        return ids, removed
    return np.union1d(ids, removed), removed[:0]


def forget_changes(layout: Layout, upto: Sequence[int]) -> None:
    """Forgets what changed or was removed before these versions, one of each group."""
    for group, version in zip(layout.groups, upto, strict=True):
        for table, member in enumerate(group.members):
            if member.config.track_changes:
                group.engine.forget_changes(table, version)


def cached(view: TableView) -> CachedRows:
    """The table's rows that are in the device cache. Hold `exclusive()` meanwhile."""
    return cached_rows(*view.locate())


def warm(view: TableView, ids: Int64Array, heats: Heats) -> int:
    """As `TableView.warm`, of ids and heats that are right. Hold `exclusive()` meanwhile."""
    return warm_rows(*view.locate(), ids, heats)


# ---- open windows


def window_rows(view: TableView) -> Iterator[tuple[Int64Array, torch.Tensor]]:
    """Gradients of the table's rows that wait for the end of an accumulation window: ids, float32 `[n, 2 * D]`.

    Hold `exclusive()` meanwhile.
    """
    group, table = view.locate()
    if group.window is None or not group.window.is_open():
        return
    ids = group.engine.window_ids(table)
    slots, of_tables = group.engine.window_slots()
    slots = slots[of_tables[table] : of_tables[table + 1]]
    rows = max(1, PIECE_BYTES // (8 * group.layout.dim))
    for begin in range(0, len(slots), rows):
        some = torch.from_numpy(slots[begin : begin + rows].astype(np.int64)).to(group.window.sums.device)
        yield ids[begin : begin + rows][: len(some)], group.window.sums.index_select(0, some).cpu()
    first, end = group.engine.window_away()[1][table : table + 2].tolist()
    for begin in range(first, end, rows):
        count = min(rows, end - begin)
        sums = np.empty((count, 2 * group.layout.dim), np.float32)
        group.engine.read_away(begin, begin + count, np.empty((count, group.layout.bytes), np.uint8), sums)
        place = len(slots) + begin - first
        yield ids[place : place + count], torch.from_numpy(sums)


def window_count(view: TableView) -> int:
    """Rows that `window_rows` gives."""
    group, table = view.locate()
    return 0 if group.window is None or not group.window.is_open() else len(group.engine.window_ids(table))
