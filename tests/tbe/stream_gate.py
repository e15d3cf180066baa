"""A gate that blocks a stream, with which a test detects work that waits for the stream."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import torch


class Gate:
    """A gate that blocks later work of `stream` until it opens, by `open()` or after `patience` seconds."""

    _semaphores: ClassVar[list[Any]] = []
    """The semaphores are kept for ever: a stream may come to an open gate when the test is long over."""

    def __init__(self, stream: Any, patience: float) -> None:
        libc = ctypes.CDLL(None)
        self._semaphore = ctypes.create_string_buffer(64)
        self._semaphores.append(self._semaphore)
        self._post = libc.sem_post
        self.closed = True
        self._lock = threading.Lock()
        gc.collect()
        gc.disable()  # freeing some objects would wait for the stream
        libc.sem_init(self._semaphore, 0, 0)
        torch.get_device_module(stream.device).synchronize(stream.device)  # earlier work ends before the gate closes
        handle, launch = _launcher(stream)
        assert launch(ctypes.c_void_p(handle), libc.sem_wait, self._semaphore) == 0
        self._timer = threading.Timer(patience, self.open)
        self._timer.start()

    def open(self) -> None:
        with self._lock:
            if self.closed:
                self.closed = False
                self._post(self._semaphore)

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self.open()
        gc.enable()


def _launcher(stream: Any) -> tuple[int, Callable[..., int]]:
    """Returns the stream's handle, and the runtime's function that launches a host function on it."""
    if stream.device.type == "npu":
        return stream.npu_stream, ctypes.CDLL("libascendcl.so").aclrtLaunchHostFunc
    assert torch.version.cuda
    runtime = f"libcudart.so.{torch.version.cuda.partition('.')[0]}"  # the runtime library that torch has loaded
    return stream.cuda_stream, ctypes.CDLL(runtime).cudaLaunchHostFunc
