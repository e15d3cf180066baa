"""A new file that a thread writes while its caller makes what comes next."""

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
"""Bytes of a buffer, which is written at once."""
_SYNC_BYTES = 64 << 20
"""Written, they are brought to the disk while the caller reads what comes next."""
_MAX_QUEUED_BUFFERS = 3
"""Buffers that are full and not written yet."""


class FileWriter:
    """A new file, open for writing: with `with` it is on the disk at the end, and given up after an exception.

    One thread writes what it is given, and another brings it to the disk; what goes wrong there is raised by one of the
    next calls.

    Attributes:
        path: of the file.
        end: where the next bytes go.
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
        self._small_writes: Bytes | None = None  # the last bytes of the file, some of which are not filled yet
        self._filled = 0

    def allocate(self, count: int) -> Bytes:
        """Where the caller puts the next `count` bytes, up to `WRITE_BYTES`, before its next call."""
        if self._small_writes is None or self._filled + count > len(self._small_writes):
            self._write_small_writes()
            self._small_writes = self.take_buffer()
        begin, self._filled = self._filled, self._filled + count
        self.end += count
        return self._small_writes[begin : self._filled]

    def reserve(self, count: int) -> int:
        """Where the next `count` bytes go, which the caller will `write`."""
        self._write_small_writes()
        begin, self.end = self.end, self.end + count
        return begin

    def take_buffer(self, min_size: int = 0) -> Bytes:
        """A buffer to be filled. Used ones first: memory that is new to the process has to be cleared by the system."""
        while len(self._queued) > _MAX_QUEUED_BUFFERS or (self._queued and self._queued[0].done()):
            self._free.append(self._queued.popleft().result())
        if self._free and len(self._free[-1]) >= min_size:
            return self._free.pop()
        return np.empty(max(WRITE_BYTES, min_size), np.uint8)

    def write(
        self, buffer: Bytes, count: int, offset: int, on_written: Callable[[memoryview], None] | None = None
    ) -> None:
        """Writes the first `count` bytes of a `buffer`, which the caller gives up. `on_written` receives them."""
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
            self._wait_for_sync()
            self._sync, self._unsynced = self._sync_thread.submit(self._file.sync), 0
        return buffer

    def _wait_for_sync(self) -> None:
        if self._sync is not None:
            self._sync.result()

    def drain(self) -> None:
        """Waits until everything is written."""
        self._write_small_writes()
        while self._queued:
            self._free.append(self._queued.popleft().result())

    def finish(self) -> None:
        """Waits until everything is on the disk, and closes the file."""
        self.drain()
        self._wait_for_sync()
        self._file.sync()
        self.close()

    def close(self) -> None:
        """Gives the file up, when it is not finished."""
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
