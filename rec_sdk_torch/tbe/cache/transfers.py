"""Asynchronous copies between the host and a device, on separate streams.

Code waits for a copy only when it needs the data. For a cache on the CPU, the same calls copy nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from ...operators.devices.backends import Backend
from ...runtime.eager import check_stream
from ...runtime.settings import read_settings

_ALIGNMENT = 64
"""Alignment in bytes of the arrays in one copy; device allocators align new memory in the same way."""


@functools.cache
def _streams(device: torch.device) -> tuple[Any, Any]:
    """Returns the streams for uploads and for downloads. There are two, since the link copies both ways at once."""
    stream = torch.get_device_module(device).Stream
    return stream(device), stream(device)


def stream_context(stream: Any) -> Any:
    """Returns a context manager that makes `stream` the current stream inside a `with` block.

    `torch.cuda.stream` is not used: a KeyboardInterrupt inside its Python code can leave the stream current. Each block
    needs an object of its own, which stores the former stream.
    """
    return torch.Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


def device_context(device: torch.device) -> AbstractContextManager[Any]:
    """Returns the context in which a background thread must work on `device`."""
    if device.type in ("cpu", "meta"):
        return contextlib.nullcontext()
    context: AbstractContextManager[Any] = torch.get_device_module(device).device(device)
    return context


def download_context(tensor: torch.Tensor) -> Callable[[], AbstractContextManager[Any]]:
    """Returns a function that creates contexts in which any thread may copy `tensor` to the host.

    The copy has the values that the tensor has after the current stream's work so far; it does not wait for later work.
    """
    device = tensor.device
    if device.type in ("cpu", "meta"):  # a batch on the meta device raises later, when it is copied
        return contextlib.nullcontext
    event = torch.get_device_module(device).current_stream(device).record_event()

    @contextlib.contextmanager
    def copying() -> Iterator[None]:
        _, downloads = _streams(device)
        with stream_context(downloads):
            downloads.wait_event(event)
            yield

    return copying


def _staging(pinned: bool, rows: int, width: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Returns an uninitialized staging buffer `[rows, width]` in host memory."""
    return torch.empty((rows, width), dtype=dtype, device="cpu", pin_memory=pinned)


@dataclass(eq=False, slots=True)
class Upload:
    """An asynchronous copy to the device. Only work after `wait` may use its tensors.

    Attributes:
        tensors: views of `memory`.
        memory: the destination of the copy, on the device.
        event: the end of the copy; None if nothing is copied and the tensors can be used at once.
    """

    tensors: tuple[torch.Tensor, ...]
    memory: torch.Tensor
    event: Any = None

    def wait(self) -> tuple[torch.Tensor, ...]:
        """Returns the tensors; later work on the current stream runs after the copy. The host does not block."""
        if self.event is not None:
            stream = torch.get_device_module(self.memory.device).current_stream(self.memory.device)
            stream.wait_event(self.event)
            self.memory.record_stream(stream)  # otherwise the allocator could reuse the memory for the copy stream
        return self.tensors


@dataclass(eq=False, slots=True)
class Download:
    """A tensor in host memory that a stream writes or reads until `event`; if `event` is None, no stream uses it."""

    tensor: torch.Tensor
    event: Any

    def wait(self) -> torch.Tensor:
        """Returns the tensor; blocks until the stream has reached the event, but not for later work."""
        if self.event is not None:
            self.event.synchronize()
        return self.tensor

    def done(self) -> bool:
        """Returns whether `wait` would return at once."""
        return self.event is None or bool(self.event.query())


class Transfers:
    """Copies to and from one device.

    A staging buffer may be deleted right after a copy is started: torch's allocator reuses it only after the copy.

    Attributes:
        pinned: whether the device has memory of its own, so that staging buffers are page-locked and copied.
        direct: whether kernels access staging buffers directly, without copies.
    """

    def __init__(self, device: torch.device, backend: Backend) -> None:
        self.device = device
        self.staging = functools.partial(_staging, backend.pin_staging)
        self.direct = backend.reaches_host and read_settings().embcache_direct_swap
        self._module = torch.get_device_module(device)
        self.pinned = backend.pin_staging
        self._in_use: list[Download] = []
        self._last: Any = None

    def follow_previous_stream(self) -> None:
        """Orders later work on the current stream after the work on the stream that was current in the previous call.

        Must be called before every use of a group's cache on a device: the caller may change streams between an update
        of a row and the swap that evicts it.

        Raises:
            RuntimeError: the stream is being captured.
        """
        if not self.pinned:
            return
        check_stream()
        stream = self._module.current_stream(self.device)
        if self._last is not None and stream != self._last:
            stream.wait_stream(self._last)
        self._last = stream

    def upload(self, staging: torch.Tensor) -> Upload:
        """Starts to copy a staging buffer to the device."""
        if not self.pinned:
            return Upload((staging,), staging)
        uploads, _ = _streams(self.device)
        with stream_context(uploads):
            memory = staging.to(self.device, non_blocking=True)
            return Upload((memory,), memory, uploads.record_event())

    def upload_arrays(self, arrays: Sequence[np.ndarray]) -> Upload:
        """Starts to copy arrays, at least one, to the device in a single copy."""
        tensors = [torch.from_numpy(array) for array in arrays]
        if not self.pinned:
            return Upload(tuple(tensors), tensors[0])
        sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
        begins = [0, *accumulate(sizes)]
        staging = self.staging(1, begins.pop())[0]
        ranges = [slice(begin, begin + tensor.nbytes) for begin, tensor in zip(begins, tensors, strict=True)]
        for part, tensor in zip(ranges, tensors, strict=True):
            staging[part].view(tensor.dtype).view_as(tensor).copy_(tensor)
        upload = self.upload(staging)
        pairs = zip(ranges, tensors, strict=True)
        views = tuple(upload.memory[part].view(tensor.dtype).view_as(tensor) for part, tensor in pairs)
        return Upload(views, upload.memory, upload.event)

    def to_device(self, *arrays: np.ndarray) -> tuple[torch.Tensor, ...]:
        """Copies arrays to the device; returns tensors that the current stream may use."""
        if not self.pinned:
            return tuple(map(torch.from_numpy, arrays))
        return self.upload_arrays(arrays).wait()

    def download(self, tensor: torch.Tensor, staging: torch.Tensor | None = None) -> Download:
        """Starts to copy a matrix to the host, after the work of the current stream.

        Args:
            tensor: the matrix.
            staging: the destination; None allocates one.
        """
        if not self.pinned:
            return Download(tensor, None)
        _, downloads = _streams(self.device)
        downloads.wait_stream(self._module.current_stream(self.device))
        if staging is None:
            staging = self.staging(tensor.shape[0], tensor.shape[1], tensor.dtype)
        with stream_context(downloads):
            staging.copy_(tensor, non_blocking=True)
        tensor.record_stream(downloads)
        return Download(staging, downloads.record_event())

    def hold_until_used(self, staging: torch.Tensor) -> Download:
        """Keeps a staging buffer alive until kernels on the current stream have used it.

        Torch's allocator tracks only copies, not kernels that access host memory.
        """
        self._in_use = [download for download in self._in_use if not download.done()]
        event = self._module.current_stream(self.device).record_event() if self.pinned else None
        self._in_use.append(Download(staging, event))
        return self._in_use[-1]
