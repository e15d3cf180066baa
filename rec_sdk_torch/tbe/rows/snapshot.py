"""One moment of a table, read while training goes on: before a row changes, the old one is put aside."""

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
from .row_parts import as_stored
from .table_view import TableView

RawRows: TypeAlias = tuple[Int64Array, np.ndarray, np.ndarray, dict[str, np.ndarray]]
"""Rows as the engine gives them: ids, slots or -1, records where some have no slot, columns."""

CHUNK_BYTES = 256 << 10
"""Bytes of records that are read at a time: updates wait for one such piece."""

MAX_EMPTY_PASSES = 50
"""Passes over the rows that are left, a millisecond each, until plans are settled that no thread goes on with."""


@dataclass(frozen=True, eq=False)
class SnapshotRows:
    """Rows as they were at the moment.

    Attributes:
        ids: int64 `[n]`.
        records: uint8 `[n, bytes]`.
        columns: what the table counts of each, by name, `[n]`.
    """

    ids: Int64Array
    records: np.ndarray
    columns: dict[str, np.ndarray]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return int(sum(array.nbytes for array in (self.ids, self.records, *self.columns.values())))


class CopyOnWriteBuffer:
    """Where the rows of all tables of a save wait that were about to change.

    Attributes:
        rows: that were put aside.
        moved: bytes of them that memory had no room for.
    """

    def __init__(self, folder: Path, most: int) -> None:
        """
        Args:
            folder: on the disk that has room for the save.
            most: bytes in memory.
        """
        self._folder = folder
        self._most = most
        self._used = 0
        self._lock = threading.Lock()
        self.rows = 0
        self.moved = 0

    def put(self, copies: TableCopies, rows: SnapshotRows) -> None:
        """
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
            copies.moved.append(list(rows.columns))
            self.moved += rows.nbytes

    def take(self, copies: TableCopies) -> Iterator[SnapshotRows]:
        """All rows of a table, to which nothing is added any more."""
        if copies.file is not None:
            copies.file.seek(0)
            for names in copies.moved:
                ids, records = np.load(copies.file), np.load(copies.file)
                yield SnapshotRows(ids, records, {name: np.load(copies.file) for name in names})
        yield from self.take_memory(copies)

    def take_memory(self, copies: TableCopies) -> Iterator[SnapshotRows]:
        """Rows that wait in memory, so that it has room for others."""
        while copies.memory:
            with self._lock:
                rows = copies.memory.pop(0)
                self._used -= rows.nbytes
            yield rows

    def drop(self, copies: TableCopies) -> None:
        """Gives back the memory and the file of one table."""
        with self._lock:
            self._used -= sum(rows.nbytes for rows in copies.memory)
            copies.memory.clear()
            if copies.file is not None:
                copies.file.close()
                copies.file = None


class TableCopies:
    """Rows of one table that were put aside: some in memory, others in a file, with the names of their columns."""

    def __init__(self) -> None:
        self.memory: list[SnapshotRows] = []
        self.file: IO[bytes] | None = None
        self.moved: list[list[str]] = []


class Snapshot:
    """Rows of a table, all or some, as they are when this is made. One at a time for a table; `close` it.

    To be made while no other thread plans, reads or updates.

    Attributes:
        count: of the rows.
        size: rows that are read at a time.
    """

    def __init__(
        self, view: TableView, buffer: CopyOnWriteBuffer, ids: Int64Array | None = None, since: int | None = None
    ) -> None:
        """
        Args:
            view: the table.
            buffer: where rows wait.
            ids: of the rows, which the table has; None for all of them.
            since: only rows that changed after this version, in place of `ids`.

        Raises:
            RuntimeError: the table has a snapshot.
        """
        group, table = view.locate()
        self._locks, self._group, self._table, self._buffer, self._ids = view.layout.locks, group, table, buffer, ids
        self._names = list(view.parts())  # an optimizer that comes later brings others
        self._copies = TableCopies()
        self.size = max(1, CHUNK_BYTES // group.layout.bytes)
        self._place = 0
        self._error: BaseException | None = None
        self._replaced = False
        if since is None:
            self.count = group.engine.saves.open_snapshot(table, ids)
        else:
            self.count = group.engine.saves.open_snapshot_since(table, since)
        group.snapshots[table] = self

    def close(self) -> None:
        """Nothing is put aside any more."""
        with self._locks.launch:
            if self._group.snapshots.get(self._table) is self:
                del self._group.snapshots[self._table]
                self._group.engine.saves.close_snapshot(self._table)
        self._buffer.drop(self._copies)

    def initial(self, ids: Int64Array) -> SnapshotRows:
        """The first rows of ids that the table did not know."""
        records = np.empty((len(ids), self._group.layout.bytes), np.uint8)
        self._group.engine.tables.initial_records(self._table, ids, records)
        return SnapshotRows(ids, records, {})

    def parts(self, rows: SnapshotRows) -> dict[str, torch.Tensor]:
        """The parts of rows, by name, as `TableView` has them."""
        records = torch.from_numpy(rows.records)
        layout, names = self._group.layout, self._names
        parts = {n: layout.weight(records) if i == 0 else layout.state(records, i - 1) for i, n in enumerate(names)}
        return as_stored(self._group.members[self._table].config, parts)

    # ---- before rows change, under the launch lock

    def before_update(self, slots: np.ndarray) -> None:
        """Rows in these slots of the cache, int32 `[n]`, which a plan in flight has, will change."""
        self._put(lambda: self._group.engine.saves.take_slots(self._table, slots))

    def before_change(self, ids: Int64Array) -> None:
        """Rows of `ids` will change or leave. All must be settled."""
        self._put(lambda: self._group.engine.saves.take_ids(self._table, ids))

    def before_all_change(self) -> None:
        """Any row may change. All must be settled."""
        self._place = 0
        while self._place >= 0 and self._error is None:
            self._put(self._take_rest)

    def before_replacement(self) -> None:
        """All rows will go, with the engine that has them. All must be settled."""
        if not self._replaced:
            self.before_all_change()
            self._replaced = True

    def _take_rest(self) -> RawRows:
        taken, self._place = self._group.engine.saves.take_next(self._table, self._place, self.size)
        if self._place < 0 and self._group.engine.saves.snapshot_pending(self._table):
            raise RuntimeError("rows were evicted that the save had not copied")  # nothing moves: it will not find them
        return taken

    def _put(self, take: Callable[[], RawRows]) -> None:
        if self._error is not None or self._replaced:
            return
        try:
            rows = self._read(take())
            if len(rows.ids):
                self._buffer.put(self._copies, rows)
        except BaseException as error:
            # The save fails, and training goes on: what is pending may change from now on.
            self._error = error
            self._group.engine.saves.close_snapshot(self._table)
            if not isinstance(error, Exception):
                raise

    # ---- writing the save

    def chunks(self) -> Iterator[SnapshotRows]:
        """The rows, some at a time, each once, in no order. Updates wait while one of them is read.

        Raises:
            RuntimeError: rows could not be put aside.
        """
        place, passes_without = 0, 0
        while True:
            yield from self._buffer.take_memory(self._copies)
            with self._locks.launch:
                self._check()
                if self._replaced or not self._group.engine.saves.snapshot_pending(self._table):
                    break
                taken, place = self._take_from(place)
                rows = self._read(taken)
            if len(rows.ids):
                passes_without = 0
                yield rows
            elif place == 0:  # all that are left move with plans: let these go on
                passes_without += 1
                time.sleep(0.001)
            if passes_without > MAX_EMPTY_PASSES:  # no thread goes on with them
                with self._locks.exclusive():
                    self._group.swap.settle()
                    self.before_all_change()
        yield from self._buffer.take(self._copies)

    def _take_from(self, place: int) -> tuple[RawRows, int]:
        """Some rows, and where to go on: again at the beginning, in the end."""
        if self._ids is None:
            taken, place = self._group.engine.saves.take_next(self._table, place, self.size)
            return taken, max(place, 0)
        taken = self._group.engine.saves.take_ids(self._table, self._ids[place : place + self.size])
        place += self.size
        return taken, place if place < len(self._ids) else 0

    def _check(self) -> None:
        if self._error is not None:
            name = self._group.members[self._table].config.name
            message = f"a row of table {name!r} could not be copied for the save before it changed"
            raise RuntimeError(message) from self._error

    def _read(self, taken: RawRows) -> SnapshotRows:
        ids, slots, records, columns = taken
        resident = np.flatnonzero(slots >= 0)
        if len(resident) == len(ids):
            records = self._group.gather(slots).numpy()
        elif len(resident):
            records[resident] = self._group.gather(slots[resident]).numpy()
        return SnapshotRows(ids, records, columns)
