"""The folder of host stores on disk (`host_store=`)."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import urllib.parse
import weakref

from ...runtime.forks import close_in_children

MARKER = b"rec_sdk_torch host store: rows of a running process, no save\n"
"""The first bytes of a host store's file, which torch_npu_ext/engine/store/store_file.cpp writes."""


class FolderInUseError(RuntimeError):
    """Error for a folder that another process, or another embedding of this process, uses."""


class StoreFolder:
    """A locked folder with the host stores of one embedding.

    The files are removed with their tables. No other process can reuse them, since the maps from ids to rows are in
    memory; only saves preserve rows. The constructor removes files that a killed process has left.

    Attributes:
        path: path of the folder.
    """

    def __init__(self, path: str) -> None:
        """Creates the folder if needed, and locks it until this object is deleted.

        Raises:
            FolderInUseError: another embedding uses the folder.
            OSError: the folder cannot be created or written.
        """
        self.path = path
        self._numbers = itertools.count()
        os.makedirs(path, exist_ok=True)
        lock = os.open(os.path.join(path, ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 20, 0).decode(errors="replace").strip()
            os.close(lock)
            raise FolderInUseError(
                f"host_store {path!r} is used by process {holder} (this one is {os.getpid()}): give each embedding a "
                "folder of its own"
            ) from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
        self._closed = weakref.finalize(self, close_in_children(lock))
        self._remove_stale_files()

    def _remove_stale_files(self) -> None:
        for entry in os.scandir(self.path):
            if not entry.name.endswith(".rows") or not entry.is_file(follow_symlinks=False):
                continue
            with open(entry.path, "rb") as file:
                ours = file.read(len(MARKER)) == MARKER
            if ours:
                os.unlink(entry.path)

    def new_path(self, table: str) -> str:
        """Returns the path of a new file for the host store of `table`."""
        name = urllib.parse.quote(table, safe="")[:100]
        return os.path.join(self.path, f"{name}.{next(self._numbers)}.rows")


def folder_for_copy(path: str) -> StoreFolder:
    """Locks and returns the first folder of `path`/copy1, `path`/copy2, ... that is not in use."""
    for number in itertools.count(1):
        with contextlib.suppress(FolderInUseError):
            return StoreFolder(os.path.join(path, f"copy{number}"))
    raise AssertionError("unreachable")
