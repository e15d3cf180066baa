"""Copies between the host and a device, on streams of their own: nothing waits for one before its data is needed.

On the CPU host and device are one, and the same calls copy nothing.
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
"""Bytes that arrays of one copy start at multiples of, as in fresh device memory."""


@functools.cache
def _streams(device: torch.device) -> tuple[Any, Any]:
    """The device's streams for copies to it and from it: one each, since the link carries both at once."""
    stream = torch.get_device_module(device).Stream
    return stream(device), stream(device)


def current(stream: Any) -> Any:
    """Makes `stream` the current one of a `with` block.

    Not `torch.cuda.stream`, which a KeyboardInterrupt may leave in its Python part, with the stream still current.
    Each block has an object of its own, which remembers the stream before.
    """
    return torch.Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


def device_context(device: torch.device) -> AbstractContextManager[Any]:
    """The context in which a thread of its own works on `device`."""
    if device.type in ("cpu", "meta"):
        return contextlib.nullcontext()
    context: AbstractContextManager[Any] = torch.get_device_module(device).device(device)
    return context


def download_context(tensor: torch.Tensor) -> Callable[[], AbstractContextManager[Any]]:
    """Gives contexts in which `tensor` may be copied to the host, as the current stream leaves it now, by any thread.

    The copy waits for nothing that the current stream is given later.
    """
    device = tensor.device
    if device.type in ("cpu", "meta"):  # a batch on the meta device is refused when it is copied
        return contextlib.nullcontext
    event = torch.get_device_module(device).current_stream(device).record_event()

    @contextlib.contextmanager
    def copying() -> Iterator[None]:
        _, outward = _streams(device)
        with current(outward):
            outward.wait_event(event)
            yield

    return copying


def _staging(pinned: bool, rows: int, width: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """An uninitialised buffer `[rows, width]` in host memory, which copies go through."""
    return torch.empty((rows, width), dtype=dtype, device="cpu", pin_memory=pinned)


@dataclass(eq=False, slots=True)
class Upload:
    """Tensors on their way to the device; only what `wait` is called before may use them.

    Where `event` is None they are there already.

    Attributes:
        tensors: views of `memory`.
        memory: of the copy, on the device.
        event: the end of the copy; None where nothing is copied.
    """

    tensors: tuple[torch.Tensor, ...]
    memory: torch.Tensor
    event: Any = None

    def wait(self) -> tuple[torch.Tensor, ...]:
        """The tensors, for what the current stream is given from now on. The host does not wait."""
        if self.event is not None:
            stream = torch.get_device_module(self.memory.device).current_stream(self.memory.device)
            stream.wait_event(self.event)
            self.memory.record_stream(stream)  # it belongs to the copy's stream, which would use it again too soon
        return self.tensors


@dataclass(eq=False, slots=True)
class Download:
    """A tensor in host memory that a stream is still writing, or reading; none is where `event` is None."""

    tensor: torch.Tensor
    event: Any

    def wait(self) -> torch.Tensor:
        """The tensor, on the host; waits until the stream has copied it, and for nothing behind that."""
        if self.event is not None:
            self.event.synchronize()
        return self.tensor

    def done(self) -> bool:
        return self.event is None or bool(self.event.query())


class Transfers:
    """Copies to and from one device.

    Attributes:
        pinned: whether host and device are two, and staging is page-locked.
        direct: whether kernels use staging in place of copies.

    Staging may be dropped at once: torch's allocator hands it out again only behind the copies.
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
        """Puts what the current stream is given from now on behind what the stream of the last call was given.

        To be called before every use of a group's cache, where host and device are two: a row may leave it right after
        its update was launched.

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
        inward, _ = _streams(self.device)
        with current(inward):
            memory = staging.to(self.device, non_blocking=True)
            return Upload((memory,), memory, inward.record_event())

    def upload_arrays(self, arrays: Sequence[np.ndarray]) -> Upload:
        """Starts to copy arrays, at least one, to the device: all in one copy through staging."""
        tensors = [torch.from_numpy(array) for array in arrays]
        if not self.pinned:
            return Upload(tuple(tensors), tensors[0])
        sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
        begins = [0, *accumulate(sizes)]
        staging = self.staging(1, begins.pop())[0]
        places = [slice(begin, begin + tensor.nbytes) for begin, tensor in zip(begins, tensors, strict=True)]
        for place, tensor in zip(places, tensors, strict=True):
            staging[place].view(tensor.dtype).view_as(tensor).copy_(tensor)
        there = self.upload(staging)
        pairs = zip(places, tensors, strict=True)
        views = tuple(there.memory[place].view(tensor.dtype).view_as(tensor) for place, tensor in pairs)
        return Upload(views, there.memory, there.event)

    def to_device(self, *arrays: np.ndarray) -> tuple[torch.Tensor, ...]:
        """Arrays on the device, for the current stream."""
        if not self.pinned:
            return tuple(map(torch.from_numpy, arrays))
        return self.upload_arrays(arrays).wait()

    def download(self, tensor: torch.Tensor, staging: torch.Tensor | None = None) -> Download:
        """Starts to copy a matrix to the host, into `staging` if it is given, as the current stream leaves it."""
        if not self.pinned:
            return Download(tensor, None)
        _, outward = _streams(self.device)
        outward.wait_stream(self._module.current_stream(self.device))
        if staging is None:
            staging = self.staging(tensor.shape[0], tensor.shape[1], tensor.dtype)
        with current(outward):
            staging.copy_(tensor, non_blocking=True)
        tensor.record_stream(outward)
        return Download(staging, outward.record_event())

    def hold_until_used(self, staging: torch.Tensor) -> Download:
        """Keeps staging that a kernel on the current stream uses until it has: torch only knows of copies."""
        self._in_use = [other for other in self._in_use if not other.done()]
        event = self._module.current_stream(self.device).record_event() if self.pinned else None
        self._in_use.append(Download(staging, event))
        return self._in_use[-1]
