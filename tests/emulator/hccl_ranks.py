"""Ranks that call libhccl.so directly, each in its own process and without torch."""

from __future__ import annotations

import ctypes
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import forked_python
import numpy as np

ROOT_INFO_BYTES = 4108
TO_DEVICE, TO_HOST = 1, 2
SUM, PROD, MAX, MIN = range(4)
SEND, RECV = range(2)
# HcclDataType, and the NumPy type of the same size; bfloat16 is passed as its bits.
TYPES = {
    "int8": (0, np.int8),
    "int16": (1, np.int16),
    "int32": (2, np.int32),
    "float16": (3, np.float16),
    "float32": (4, np.float32),
    "int64": (5, np.int64),
    "uint8": (7, np.uint8),
    "float64": (10, np.float64),
    "bfloat16": (11, np.uint16),
}


class SendRecvItem(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("count", ctypes.c_uint64),
        ("type", ctypes.c_int),
        ("rank", ctypes.c_uint32),
    )


class Rank:
    """A rank on an emulated NPU."""

    def __init__(self, rank: int, ranks: int, root: bytes) -> None:
        self.rank, self.ranks = rank, ranks
        self._acl, self._hccl = ctypes.CDLL("libascendcl.so"), ctypes.CDLL("libhccl.so")
        self._acl.aclGetRecentErrMsg.restype = ctypes.c_char_p
        self._check(self._acl.aclInit(None))
        self._check(self._acl.aclrtSetDevice(0))
        self.stream, self.comm = ctypes.c_void_p(), ctypes.c_void_p()
        self._check(self._acl.aclrtCreateStream(ctypes.byref(self.stream)))
        info = ctypes.create_string_buffer(root, ROOT_INFO_BYTES)
        if self._hccl.HcclCommInitRootInfo(ranks, info, rank, ctypes.byref(self.comm)):
            raise RuntimeError("HcclCommInitRootInfo failed")

    def _check(self, code: int) -> None:
        if code:
            raise RuntimeError(f"{code}: {(self._acl.aclGetRecentErrMsg() or b'').decode()}")

    def upload(self, values: np.ndarray) -> ctypes.c_void_p:
        address = ctypes.c_void_p()
        self._check(self._acl.aclrtMalloc(ctypes.byref(address), ctypes.c_size_t(max(values.nbytes, 1)), 0))
        self._copy(address, values.ctypes.data, values.nbytes, TO_DEVICE)
        return address

    def download(self, address: ctypes.c_void_p, count: int, dtype: Any) -> np.ndarray:
        self.synchronize()
        values = np.empty(count, dtype)
        self._copy(values.ctypes.data, address, values.nbytes, TO_HOST)
        return values

    def _copy(self, to: Any, source: Any, count: int, kind: int) -> None:
        size = ctypes.c_size_t(count)
        to, source = (
            address if isinstance(address, ctypes.c_void_p) else ctypes.c_void_p(address) for address in (to, source)
        )
        self._check(self._acl.aclrtMemcpy(to, size, source, size, kind))

    def synchronize(self) -> None:
        self._check(self._acl.aclrtSynchronizeStream(self.stream))

    def call(self, function: str, *arguments: Any) -> None:
        """Calls a function of HCCL; appends the communicator and the stream to the arguments."""
        wide = [ctypes.c_uint64(a) if isinstance(a, int) else a for a in arguments]
        if getattr(self._hccl, function)(*wide, self.comm, self.stream):
            raise RuntimeError(f"{function} failed")

    def batch(self, *items: SendRecvItem) -> None:
        array = (SendRecvItem * len(items))(*items)
        if self._hccl.HcclBatchSendRecv(array, ctypes.c_uint32(len(items)), self.comm, self.stream):
            raise RuntimeError("HcclBatchSendRecv failed")

    def destroy(self) -> None:
        self.synchronize()
        self._hccl.HcclCommDestroy(self.comm)


def new_root() -> bytes:
    """Creates the address that rank 0 passes to the other ranks so that they can connect."""
    info = ctypes.create_string_buffer(ROOT_INFO_BYTES)
    if ctypes.CDLL("libhccl.so").HcclGetRootInfo(info):
        raise RuntimeError("HcclGetRootInfo failed")
    return info.raw


def _work(
    function: Callable[..., Any],
    rank: int,
    ranks: int,
    root: bytes,
    arguments: tuple[Any, ...],
    environment: dict[str, str],
    out: Connection,
) -> None:
    os.environ.update(environment)
    try:
        member = Rank(rank, ranks, root)
        result = function(member, *arguments)
        member.destroy()
        out.send(result)
    except BaseException:
        out.send(traceback.format_exc())


def run(
    function: Callable[..., Any], ranks: int, *arguments: Any, environment: dict[str, str] | None = None
) -> list[Any]:
    """Runs function(rank, *arguments) on each rank; returns each rank's result, traceback if it raised, or None
    if it died.
    """
    root = new_root()
    processes, ends = [], []
    for rank in range(ranks):
        receive, send = forked_python.CONTEXT.Pipe(duplex=False)
        work = (function, rank, ranks, root, arguments, environment or {}, send)
        process = forked_python.CONTEXT.Process(target=_work, args=work, daemon=True)
        process.start()
        send.close()
        processes.append(process)
        ends.append(receive)
    results = []
    for end in ends:
        try:
            results.append(end.recv() if end.poll(60) else "no answer within 60 s")
        except EOFError:
            results.append(None)
    for process in processes:
        process.join(20)
        if process.is_alive():
            process.kill()
    return results
