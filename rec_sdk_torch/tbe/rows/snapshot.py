"""Snapshots: consistent reads of a table while training continues, by copy-on-write."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeAlias

import numpy as np
import torch

from ..cache.batch import Int64Array
from ..cache.cache_warming import CachedRows, cached_rows
from .row_parts import as_stored
from .table_view import TableView

RawRows: TypeAlias = tuple[Int64Array, np.ndarray, np.ndarray, dict[str, np.ndarray]]
"""(ids, slots, records, columns) of rows from the engine. The slot of a row outside the cache is -1. The
engine fills in only the records of such rows."""

CHUNK_BYTES = 256 << 10
"""Bytes of records that are read at once. The number is small because training waits during one such read."""

MAX_EMPTY_PASSES = 50
"""Passes without a readable row, one per millisecond, after which all plans are applied to make the rest readable."""


@dataclass(frozen=True, eq=False)
class SnapshotRows:
    """Rows with the values that they had when the snapshot was made.

    Attributes:
        ids: int64 `[n]`.
        records: uint8 `[n, bytes]`.
        columns: counts and clocks of each row, by name, `[n]`.
    """

    ids: Int64Array
    records: np.ndarray
    columns: dict[str, np.ndarray]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays together."""
        return int(sum(array.nbytes for array in (self.ids, self.records, *self.columns.values())))


class CopyOnWriteBuffer:
    """Copies of rows that changed while a save was running, for all tables of the save.

    Attributes:
        rows: number of rows that were copied.
        spilled_bytes: bytes of copies that were written to disk, beyond the limit in memory.
    """

    def __init__(self, folder: Path, most: int) -> None:
        """Creates an empty buffer.

        Args:
            folder: the folder of temporary files, on the disk of the save.
            most: maximum bytes in memory.
        """
        self._folder = folder
        self._most = most
        self._used = 0
        self._lock = threading.Lock()
        self.rows = 0
        self.spilled_bytes = 0

    def put(self, copies: TableCopies, rows: SnapshotRows) -> None:
        """Adds rows to the copies of a table.

        Raises:
            OSError: the disk is full.
        """
        with self._lock:
            self.rows += len(rows.ids)
            if self._used + rows.nbytes <= self._most:
                self._used += rows.nbytes
                copies.memory.append(rows)
                return
            if copies.file is None:
                copies.file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 (closed with its copies)
            for array in (rows.ids, rows.records, *rows.columns.values()):
                np.save(copies.file, array, allow_pickle=False)
            copies.spilled.append(list(rows.columns))
            self.spilled_bytes += rows.nbytes

    def take(self, copies: TableCopies) -> Iterator[SnapshotRows]:
        """Yields and removes all copies of a table. From this call on, nothing may be added to them."""
        if copies.file is not None:
            copies.file.seek(0)
            for names in copies.spilled:
                ids, records = np.load(copies.file), np.load(copies.file)
                yield SnapshotRows(ids, records, {name: np.load(copies.file) for name in names})
        yield from self.take_memory(copies)

    def take_memory(self, copies: TableCopies) -> Iterator[SnapshotRows]:
        """Yields and removes the copies of a table that are in memory, which frees memory for other copies."""
        while copies.memory:
            with self._lock:
                rows = copies.memory.pop(0)
                self._used -= rows.nbytes
            yield rows

    def drop(self, copies: TableCopies) -> None:
        """Deletes the copies of a table."""
        with self._lock:
            self._used -= sum(rows.nbytes for rows in copies.memory)
            copies.memory.clear()
            if copies.file is not None:
                copies.file.close()
                copies.file = None


class TableCopies:
    """Copied rows of one table: chunks in memory, and chunks in a file, with the names of their columns."""

    def __init__(self) -> None:
        self.memory: list[SnapshotRows] = []
        self.file: IO[bytes] | None = None
        self.spilled: list[list[str]] = []


class Snapshot:
    """All or some rows of a table as they were at the snapshot's construction, readable while training continues.

    Before a row changes, `before_update`, `before_change` and similar calls copy it. The constructor requires that no
    other thread plans, reads or updates. A table can have one snapshot at a time; call `close` at the end.

    Attributes:
        count: number of rows in the snapshot.
        size: number of rows that are read at once.
    """

    def __init__(
        self, view: TableView, buffer: CopyOnWriteBuffer, ids: Int64Array | None = None, since: int | None = None
    ) -> None:
        """Starts the snapshot.

        Args:
            view: the table.
            buffer: receives copies of rows before they change.
            ids: ids of the rows, all of which the table must contain; None for all rows.
            since: selects the rows that changed after this version, instead of `ids`.

        Raises:
            RuntimeError: the table already has a snapshot.
        """
        group, table = view.locate()
        self._locks, self._group, self._table, self._buffer, self._ids = view.layout.locks, group, table, buffer, ids
        self._names = list(view.parts())  # stored now, since an optimizer that is set later has other states
        self._copies = TableCopies()
        self.size = max(1, CHUNK_BYTES // group.layout.bytes)
        self._cursor = 0
        self._error: BaseException | None = None
        self._replaced = False
        self._cached: CachedRows | None = None
        if since is None:
            self.count = group.engine.saves.open_snapshot(table, ids)
        else:
            self.count = group.engine.saves.open_snapshot_since(table, since)
        self._untaken = self.count
        group.snapshots[table] = self

    def close(self) -> None:
        """Ends the snapshot: rows are no longer copied before they change, and copies are deleted."""
        with self._locks.launch:
            if self._group.snapshots.get(self._table) is self:
                del self._group.snapshots[self._table]
                self._group.engine.saves.close_snapshot(self._table)
        self._buffer.drop(self._copies)

    def initial(self, ids: Int64Array) -> SnapshotRows:
        """Returns initial rows for ids that the table does not contain."""
        records = np.empty((len(ids), self._group.layout.bytes), np.uint8)
        self._group.engine.tables.initial_records(self._table, ids, records)
        return SnapshotRows(ids, records, {})

    def parts(self, rows: SnapshotRows) -> dict[str, torch.Tensor]:
        """Returns the weights, in the table's data type, and the optimizer states of the rows, by name."""
        records = torch.from_numpy(rows.records)
        layout, names = self._group.layout, self._names
        parts = {n: layout.weight(records) if i == 0 else layout.state(records, i - 1) for i, n in enumerate(names)}
        return as_stored(self._group.members[self._table].config, parts)

    # ---- before rows change, under the launch lock

    def before_update(self, slots: np.ndarray) -> None:
        """Copies the rows in `slots`, int32 `[n]`, which belong to a plan in flight, before an update changes them."""
        self._copy(lambda: self._group.engine.saves.take_slots(self._table, slots))

    def before_change(self, ids: Int64Array) -> None:
        """Copies the rows of `ids` before they are changed or removed. Call `Swap.settle` first."""
        self._copy(lambda: self._group.engine.saves.take_ids(self._table, ids))

    def before_all_change(self) -> None:
        """Copies all remaining rows, since any of them may change. Call `Swap.settle` first."""
        self._cursor = 0
        while self._cursor >= 0 and self._error is None:
            self._copy(self._take_rest)

    def before_replacement(self) -> None:
        """Copies all remaining rows before the engine is replaced. Call `Swap.settle` first."""
        if not self._replaced:
            self.before_all_change()
            if self._error is None:
                self._cached = cached_rows(self._group, self._table)
            self._replaced = True

    def _take_rest(self) -> RawRows:
        taken, self._cursor = self._group.engine.saves.take_next(self._table, self._cursor, self.size)
        if self._cursor < 0 and self._group.engine.saves.snapshot_pending(self._table):
            # After `Swap.settle`, every row is readable: rows that this pass has missed are lost.
            raise RuntimeError("rows were evicted that the save had not copied")
        return taken

    def _copy(self, take: Callable[[], RawRows]) -> None:
        if self._error is not None or self._replaced:
            return
        try:
            rows = self._read(take())
            if len(rows.ids):
                self._buffer.put(self._copies, rows)
        except BaseException as error:
            # Only the save fails: training continues and may change the remaining rows.
            self._error = error
            self._group.engine.saves.close_snapshot(self._table)
            if not isinstance(error, Exception):
                raise

    # ---- writing the save

    def chunks(self) -> Iterator[SnapshotRows]:
        """Yields every row of the snapshot once, in chunks, in no order. Training waits during the read of a chunk.

        Raises:
            RuntimeError: a row could not be copied before it changed.
        """
        cursor, empty_passes = 0, 0
        while True:
            yield from self._buffer.take_memory(self._copies)
            with self._locks.launch:
                self._check()
                if self._replaced or self._untaken == 0:
                    break
                taken, cursor = self._take_from(cursor)
                rows = self._read(taken)
            if len(rows.ids):
                empty_passes = 0
                yield rows
            elif cursor == 0:  # the remaining rows become readable when training applies pending plans
                empty_passes += 1
                time.sleep(0.001)
            if empty_passes > MAX_EMPTY_PASSES:  # no thread seems to be applying these plans
                with self._locks.exclusive():
                    self._group.swap.settle()
                    self.before_all_change()
        yield from self._buffer.take(self._copies)

    def cached(self) -> CachedRows | None:
        """Returns the rows of the table that are cached now, or when the engine was replaced.

        All their ids were in the table at the snapshot's construction, so that a save has their rows.

        Raises:
            RuntimeError: a row could not be copied before it changed.
        """
        with self._locks.launch:
            self._check()
            return self._cached if self._replaced else cached_rows(self._group, self._table)

    def _take_from(self, cursor: int) -> tuple[RawRows, int]:
        """Returns the next rows after `cursor`, and the next cursor, which is 0 after the last rows."""
        if self._ids is None:
            taken, cursor = self._group.engine.saves.take_next(self._table, cursor, self.size)
            return taken, max(cursor, 0)
        taken = self._group.engine.saves.take_ids(self._table, self._ids[cursor : cursor + self.size])
        cursor += self.size
        return taken, cursor if cursor < len(self._ids) else 0

    def _check(self) -> None:
        if self._error is not None:
            name = self._group.members[self._table].config.name
            message = f"a row of table {name!r} could not be copied for the save before it changed"
            raise RuntimeError(message) from self._error

    def _read(self, taken: RawRows) -> SnapshotRows:
        ids, slots, records, columns = taken
        self._untaken -= len(ids)
        resident = np.flatnonzero(slots >= 0)
        if len(resident) == len(ids):
            records = self._group.gather(slots).numpy()
        elif len(resident):
            records[resident] = self._group.gather(slots[resident]).numpy()
        return SnapshotRows(ids, records, columns)
