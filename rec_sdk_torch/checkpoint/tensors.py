"""Files of named tensors in the safetensors format, written and read piece by piece.

The format: 8 bytes, the length of the header, little-endian; the header, JSON; the tensors, raw, one behind the other.
"""

from __future__ import annotations

import json
import os
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch

from ..tbe.worker import Pool
from .errors import CheckpointError
from .files import NewFile, open_plain
from .schema import OneOf, Within, record

DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
}
"""Names of data types in the header."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_Bytes = npt.NDArray[np.uint8]
HEADER = "header"
"""What the checksum of the length and the header is called among those of the tensors."""
_PIECE = 1 << 20
_READERS = 4
"""Threads that read a file for its checksums, a tensor each."""
_MOST_HEADER = 1 << 20
_WRITE_BYTES = 2 << 20
_SYNC_BYTES = 64 << 20
"""Written, they are brought to the disk while the caller reads what comes next."""
_MOST_WAITING = 3
"""Buffers of `_WRITE_BYTES` that are full and not written yet."""
_ALIGNMENT = 64


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of a file: its name, data type and shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def bytes(self) -> int:
        return self.shape[0] * self.row_bytes


_Size = Annotated[int, Within(0)]


@dataclass(frozen=True)
class _Field:
    """The header's entry of a tensor."""

    dtype: Annotated[str, OneOf(tuple(DTYPES))]
    shape: list[_Size]
    data_offsets: list[_Size]

    def __post_init__(self) -> None:
        if not self.shape or len(self.data_offsets) != 2:
            raise ValueError(f"a tensor has shape {self.shape} and data_offsets {self.data_offsets}")


@dataclass(frozen=True)
class _Header:
    """The header of a file."""

    about: dict[str, str]
    tensors: dict[str, _Field]


def _header(specs: Sequence[TensorSpec], about: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """What is before the tensors, and the place of each in the file. Tensors of larger elements come first."""
    fields: dict[str, Any] = {"__metadata__": dict(about)} if about else {}
    offset = 0
    places = {}
    for spec in specs:
        end = offset + spec.bytes
        fields[spec.name] = {
            "dtype": DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, end],
        }
        places[spec.name] = offset
        offset = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    start = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: start + place for name, place in places.items()}


def _bits(rows: torch.Tensor) -> np.ndarray:
    """The same memory for numpy, which knows no bfloat16 and copies with one thread: torch's many would wait here."""
    return (rows.view(torch.int16) if rows.dtype == torch.bfloat16 else rows).numpy()


class TensorWriter:
    """A new file of tensors, each written from its beginning to its end, in pieces of rows.

    A thread writes what the caller has appended, and another brings it to the disk; what goes wrong there is raised by
    one of the next calls.

    Attributes:
        path: of the file.
    """

    def __init__(self, path: Path, specs: Sequence[TensorSpec], about: Mapping[str, str] | None = None) -> None:
        """`specs`: in the order of the file. Those with the widest elements first keep all of them aligned."""
        self.path = path
        self._specs = {spec.name: spec for spec in specs}
        header, self._starts = _header(specs, about or {})
        self._written = dict.fromkeys(self._specs, 0)
        self._sums = {HEADER: zlib.crc32(header), **dict.fromkeys(self._specs, 0)}
        self._bytes = len(header) + sum(spec.bytes for spec in specs)
        self._file = NewFile(path)
        self._file.write_at(header, 0)
        self._thread = Pool("rec_sdk_torch.checkpoint")
        self._filling: dict[str, tuple[_Bytes, int]] = {}  # a buffer, and how much of it is full
        self._free: list[_Bytes] = []
        self._waiting: deque[Future[_Bytes]] = deque()
        self._most_row = max((spec.row_bytes for spec in specs), default=0)
        self._unsynced = 0
        self._syncs = Pool("rec_sdk_torch.checkpoint.sync")
        self._sync: Future[None] | None = None

    def append(self, name: str, rows: torch.Tensor) -> None:
        """Writes the next rows of a tensor, in its data type; on any device."""
        spec, written = self._specs[name], self._written[name] + self._filling.get(name, (None, 0))[1]
        if rows.dtype != spec.dtype or written + rows.nbytes > spec.bytes:
            raise ValueError(f"{self.path}: {rows.numel()} elements of {rows.dtype} do not fit what is left of {spec}")
        rest = _bits(rows.detach().cpu())
        while len(rest):
            buffer, filled = self._filling.pop(name) if name in self._filling else (self._take_buffer(), 0)
            taken = rest[: (len(buffer) - filled) // spec.row_bytes]
            end = filled + taken.nbytes
            buffer[filled:end].view(taken.dtype).reshape(taken.shape)[...] = taken
            rest = rest[len(taken) :]
            self._filling[name] = buffer, end
            if len(buffer) - end < spec.row_bytes:
                self._submit(name)

    def _take_buffer(self) -> _Bytes:
        """Used ones first: memory that is new to the process has to be cleared by the system, page by page."""
        while len(self._waiting) > _MOST_WAITING or (self._waiting and self._waiting[0].done()):
            self._free.append(self._waiting.popleft().result())
        return self._free.pop() if self._free else np.empty(max(_WRITE_BYTES, self._most_row), np.uint8)

    def _submit(self, name: str) -> None:
        buffer, filled = self._filling.pop(name)
        offset = self._starts[name] + self._written[name]
        self._written[name] += filled
        self._waiting.append(self._thread.submit(self._write, name, buffer, filled, offset))

    def _write(self, name: str, buffer: _Bytes, count: int, offset: int) -> _Bytes:
        self._file.write_at(buffer[:count].data, offset)
        self._sums[name] = zlib.crc32(buffer[:count].data, self._sums[name])
        self._unsynced += count
        if self._unsynced >= _SYNC_BYTES:
            self._wait_for_sync()
            self._sync, self._unsynced = self._syncs.submit(self._file.sync), 0
        return buffer

    def _wait_for_sync(self) -> None:
        if self._sync is not None:
            self._sync.result()

    def finish(self) -> tuple[int, dict[str, int]]:
        """Bytes of the file and its checksums; it is on the disk then.

        Raises:
            ValueError: a tensor has fewer rows than its spec says.
        """
        for name in list(self._filling):
            self._submit(name)
        for name, spec in self._specs.items():
            if self._written[name] != spec.bytes:
                raise ValueError(f"{self.path}: {self._written[name]} of {spec.bytes} bytes of {name} were written")
        for waiting in self._waiting:
            waiting.result()
        self._wait_for_sync()
        self._file.sync()
        self.close()
        return self._bytes, dict(self._sums)

    def close(self) -> None:
        """Gives the file up, when it is not finished."""
        for waiting in self._waiting:
            waiting.cancel()
        self._thread.end()
        self._syncs.end()
        self._file.close()


class TensorReader:
    """A file of tensors, open for reading.

    Attributes:
        path: of the file.
        specs: its tensors by name.
        starts: of each tensor, its first byte in the file.
        bytes: of the file.
        about: what else its header says, in strings.
    """

    def __init__(self, path: Path, folder: Path | None = None) -> None:
        """
        Args:
            path: of the file.
            folder: of the save in which it lies: no link in it is followed.

        Raises:
            CheckpointError: there is no such file, or it is not one of tensors.
        """
        self.path = path
        try:
            self._fd = open_plain(path, folder)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from error
        try:
            self.bytes = os.fstat(self._fd).st_size
            self._header = self._read_header()
            self.specs, self.starts, self.about = self._parse(self._header[8:])
        except BaseException:
            self.close()
            raise

    def _read_header(self) -> bytes:
        length = int.from_bytes(os.pread(self._fd, 8, 0), "little")
        if self.bytes < 8 or length > min(_MOST_HEADER, self.bytes - 8):
            raise CheckpointError(f"{self.path}: damaged, its header would be {length} of {self.bytes} bytes")
        return os.pread(self._fd, 8 + length, 0)

    def _parse(self, text: bytes) -> tuple[dict[str, TensorSpec], dict[str, int], dict[str, str]]:
        specs, starts = {}, {}
        try:
            header = json.loads(text)
            about = header.pop("__metadata__", {}) if isinstance(header, dict) else {}
            fields = record(_Header, {"about": about, "tensors": header}, "")
            for name, field in fields.tensors.items():
                spec = TensorSpec(name, DTYPES[field.dtype], tuple(field.shape))
                begin, end = field.data_offsets
                if end - begin != spec.bytes or 8 + len(text) + end > self.bytes:
                    raise ValueError(f"{name} has bytes {begin} to {end}")
                specs[name], starts[name] = spec, 8 + len(text) + begin
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.path}: damaged, its header is wrong: {error}") from error
        return specs, starts, fields.about

    def read(self, name: str, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """Rows [begin, end) of a tensor, on the host.

        Raises:
            CheckpointError: there is no such tensor, or the file ends before.
        """
        spec = self.specs.get(name)
        if spec is None:
            raise CheckpointError(f"{self.path}: has no tensor {name!r}, only {sorted(self.specs)}")
        count = (spec.shape[0] if end is None else end) - begin
        rows = torch.empty((count, *spec.shape[1:]), dtype=spec.dtype, device="cpu")
        self._read_into(rows.reshape(-1).view(torch.uint8).numpy().data, self.starts[name] + begin * spec.row_bytes)
        return rows

    def _read_into(self, out: memoryview, offset: int) -> None:
        while out:
            count = os.preadv(self._fd, [out], offset)
            if count == 0:
                raise CheckpointError(f"{self.path}: damaged, it ends at byte {offset}")
            out, offset = out[count:], offset + count

    def verify(self, size: int, checksums: Mapping[str, int]) -> None:
        """Reads the whole file.

        Raises:
            CheckpointError: its size, its tensors or a checksum is another.
        """
        if self.bytes != size:
            raise CheckpointError(f"{self.path}: damaged, it has {self.bytes} bytes, expected {size}")
        if checksums.keys() != {HEADER, *self.specs}:
            raise CheckpointError(f"{self.path}: has tensors {sorted(self.specs)}, expected {sorted(checksums)}")
        self._compare(HEADER, zlib.crc32(self._header), checksums)
        with Pool("rec_sdk_torch.checkpoint", _READERS) as threads:
            for name, total in zip(self.specs, threads.map(self._checksum, self.specs), strict=True):
                self._compare(name, total, checksums)

    def _checksum(self, name: str) -> int:
        buffer = memoryview(bytearray(_PIECE))
        total, offset, rest = 0, self.starts[name], self.specs[name].bytes
        while rest:
            piece = buffer[: min(_PIECE, rest)]
            self._read_into(piece, offset)
            total = zlib.crc32(piece, total)
            offset, rest = offset + len(piece), rest - len(piece)
        return total

    def _compare(self, name: str, found: int, checksums: Mapping[str, int]) -> None:
        if found != checksums[name]:
            raise CheckpointError(
                f"{self.path}: damaged, the checksum of {name} is {found:#010x}, expected {checksums[name]:#010x}"
            )

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
