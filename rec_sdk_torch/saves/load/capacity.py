"""Capacity check: whether the rows of a save fit into host memory or on disk beside the tables' current rows."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from ..._engine import available_memory
from ...runtime.warn import SaveWarning, warn
from ...tbe import TableView

RowCounts = Sequence[tuple[TableView, int]]
"""Tables, and the approximate number of rows that each will have."""


def fits_beside_tables(row_counts: RowCounts, folder: Path) -> bool:
    """Returns whether the rows of the save in `folder` fit while the tables keep their current rows.

    If they do not, a warning tells the user that the tables are emptied first.

    Raises:
        MemoryError, OSError: the saved rows do not fit even if the current rows are dropped.
    """
    beside = True
    for store in {view.layout.options.host_store for view, _ in row_counts}:
        own = [(view, rows) for view, rows in row_counts if view.layout.options.host_store == store]
        need = sum(rows * view.stored_bytes() for view, rows in own)
        stored = sum(view.memory()["store_bytes" if store is None else "disk_bytes"] for view, _ in own)
        free = _free_bytes(store)
        if need - stored > free:
            text = f"{folder}: its rows need {need - stored} bytes of {_store_name(store)}, {free} are free"
            raise MemoryError(text) if store is None else OSError(errno.ENOSPC, text)
        if need > free:
            beside = False
            warn(
                f"{folder}: {_store_name(store)} cannot hold its rows ({need} bytes, {free} are free) beside the rows "
                "of the tables, which are emptied first: if the load fails, they stay empty",
                SaveWarning,
            )
    return beside


def _free_bytes(store: str | None) -> int:
    if store is None:
        return available_memory()
    disk = os.statvfs(store)
    return disk.f_bavail * disk.f_frsize


def _store_name(store: str | None) -> str:
    return "host memory" if store is None else f"the disk of host_store {store!r}"
