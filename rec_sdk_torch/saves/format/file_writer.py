"""Writes a new file in background threads, while the caller prepares the next bytes of the file."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from ...runtime.worker import Pool
from .files import NewFile

Bytes = npt.NDArray[np.uint8]
WRITE_BYTES = 2 << 20
"""Size of a buffer in bytes; one system call writes a whole buffer."""
_SYNC_BYTES = 64 << 20
"""Number of unsynced bytes after which fsync starts in the background, so that the last fsync has little to do."""
_MAX_QUEUED_BUFFERS = 3
"""Maximum number of full buffers in the queue; if there are more, `take_buffer` blocks."""


class FileWriter:
    """A new file that background threads write and fsync.

    Use it in a `with` block: at the end of the block, the file is complete on disk. If the block raises an exception,
    the file is closed incomplete. One thread writes buffers, and another calls fsync. If a thread raises an error, a
    later call of a method raises it.

    Attributes:
        path: path of the file.
        end: offset at which the next bytes are written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.end = 0
        self._file = NewFile(path)
        self._thread = Pool("rec_sdk_torch.checkpoint")
        self._sync_thread = Pool("rec_sdk_torch.checkpoint.sync")
        self._sync: Future[None] | None = None
        self._unsynced = 0
        self._free: list[Bytes] = []
        self._queued: deque[Future[Bytes]] = deque()
        self._small_writes: Bytes | None = None  # the buffer of which `allocate` returns parts
        self._filled = 0

    def allocate(self, count: int) -> Bytes:
        """Returns a buffer for the next `count` bytes of the file, which the caller fills before its next call.

        `count` is at most `WRITE_BYTES`. Several such buffers are parts of one larger buffer, which is written at once.
        """
        if self._small_writes is None or self._filled + count > len(self._small_writes):
            self._write_small_writes()
            self._small_writes = self.take_buffer()
        begin, self._filled = self._filled, self._filled + count
        self.end += count
        return self._small_writes[begin : self._filled]

    def reserve(self, count: int) -> int:
        """Reserves the next `count` bytes of the file; returns their offset, which the caller passes to `write`."""
        self._write_small_writes()
        begin, self.end = self.end, self.end + count
        return begin

    def take_buffer(self, min_size: int = 0) -> Bytes:
        """Returns a buffer of at least `min_size` bytes; a buffer that has been written is reused if one is free.

        Reuse avoids page faults: the system clears each page that is new to the process.
        """
        while len(self._queued) > _MAX_QUEUED_BUFFERS or (self._queued and self._queued[0].done()):
            self._free.append(self._queued.popleft().result())
        if self._free and len(self._free[-1]) >= min_size:
            return self._free.pop()
        return np.empty(max(WRITE_BYTES, min_size), np.uint8)

    def write(
        self, buffer: Bytes, count: int, offset: int, on_written: Callable[[memoryview], None] | None = None
    ) -> None:
        """Queues the first `count` bytes of `buffer` for writing at `offset`.

        The caller must not use `buffer` afterwards. The writing thread calls `on_written` with the bytes.
        """
        self._queued.append(self._thread.submit(self._write, buffer, count, offset, on_written))

    def _write_small_writes(self) -> None:
        if self._small_writes is not None:
            self.write(self._small_writes, self._filled, self.end - self._filled)
            self._small_writes, self._filled = None, 0

    def _write(self, buffer: Bytes, count: int, offset: int, on_written: Callable[[memoryview], None] | None) -> Bytes:
        self._file.write_at(buffer[:count].data, offset)
        if on_written is not None:
            on_written(buffer[:count].data)
        self._unsynced += count
        if self._unsynced >= _SYNC_BYTES:
            self._wait_for_sync()  # at most one fsync runs at a time; an error of the previous fsync is raised here
            self._sync, self._unsynced = self._sync_thread.submit(self._file.sync), 0
        return buffer

    def _wait_for_sync(self) -> None:
        if self._sync is not None:
            self._sync.result()

    def drain(self) -> None:
        """Blocks until every queued buffer is written."""
        self._write_small_writes()
        while self._queued:
            self._free.append(self._queued.popleft().result())

    def finish(self) -> None:
        """Blocks until the file is on disk, and closes it."""
        self.drain()
        self._wait_for_sync()
        self._file.sync()
        self.close()

    def close(self) -> None:
        """Cancels the writes that are still queued, and closes the file."""
        for queued in self._queued:
            queued.cancel()
        self._thread.end()
        self._sync_thread.end()
        self._file.close()

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.finish()
        finally:
            self.close()
