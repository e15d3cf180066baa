"""Reads and writes files of named tensors in the safetensors format, in chunks of rows.

A file has the length of the header (8 bytes, little-endian), the header (JSON), and the raw tensors in sequence.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch

from ... import _engine
from ...runtime.worker import Pool
from .errors import CheckpointError
from .file_writer import WRITE_BYTES, Bytes, FileWriter
from .files import open_save_file
from .schema import InRange, OneOf, decode

_TYPES = {
    "F32": (torch.float32, np.float32),
    "F16": (torch.float16, np.float16),
    "BF16": (torch.bfloat16, np.int16),
    "F64": (torch.float64, np.float64),
    "I64": (torch.int64, np.int64),
    "I32": (torch.int32, np.int32),
    "U8": (torch.uint8, np.uint8),
}
DTYPES = {name: dtype for name, (dtype, _) in _TYPES.items()}
"""Torch data types by their names in the header."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_NUMPY = dict(_TYPES.values())
HEADER = "header"
"""Key of the header's checksum; the other checksums have the names of tensors as keys."""
_CHUNK_BYTES = 1 << 20
"""Bytes in memory at a time while a file is verified."""
_READERS = 4
"""Number of threads that verify a large file; each verifies one tensor at a time."""
_ONE_READER = 4 << 20
"""Files up to this size are verified by the calling thread: starting threads takes longer."""
_MAX_HEADER_BYTES = 1 << 20
_FIRST_BYTES = 1 << 10
"""Bytes of the first read from a file, which contain most headers."""
_ALIGNMENT = 64
"""The offset of the first tensor is a multiple of this number, so that mapped tensors are aligned to cache lines."""


@dataclass(frozen=True)
class TensorSpec:
    """Name, data type and shape of a tensor in a file.

    Attributes:
        name, dtype, shape: as in the header.
        row_bytes: size of one row in bytes.
        bytes: size of the tensor in bytes.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    row_bytes: int = field(init=False, compare=False, repr=False)
    bytes: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        row_bytes = prod(self.shape[1:]) * self.dtype.itemsize
        vars(self).update(row_bytes=row_bytes, bytes=self.shape[0] * row_bytes)


_Size = Annotated[int, InRange(0)]


@dataclass(frozen=True)
class _HeaderEntry:
    """The entry of one tensor in the header."""

    dtype: Annotated[str, OneOf(tuple(DTYPES))]
    shape: list[_Size]
    data_offsets: list[_Size]

    def __post_init__(self) -> None:
        if not self.shape or len(self.data_offsets) != 2:
            raise ValueError(f"a tensor has shape {self.shape} and data_offsets {self.data_offsets}")


crc32 = _engine.crc32 if _engine.has_carryless_multiplication() else zlib.crc32
"""Returns the CRC-32 of bytes; with a second argument it continues from that value."""

_encode = json.JSONEncoder(separators=(",", ":")).encode
_quoted = json.encoder.encode_basestring_ascii
_decode_from = json.JSONDecoder().raw_decode
_METADATA = '{"__metadata__":{'


class TensorLayout:
    """The layout of the tensors in a file, in order. Files with the same tensors and number of rows can share one.

    Attributes:
        specs: tensors by name, in file order. If tensors with wider elements come first, all are aligned.
        bytes: size of all tensors together, in bytes.
        max_row_bytes: size of the widest row, in bytes.
    """

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self.specs = {spec.name: spec for spec in specs}
        self.max_row_bytes = max((spec.row_bytes for spec in specs), default=0)
        fields: dict[str, Any] = {}
        self._offsets, self.bytes = {}, 0
        for spec in specs:
            self._offsets[spec.name], end = self.bytes, self.bytes + spec.bytes
            fields[spec.name] = {
                "dtype": DTYPE_NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [self.bytes, end],
            }
            self.bytes = end
        self._fields = _encode(fields)

    def header(self, metadata: Mapping[str, str], begin: int) -> tuple[bytes, dict[str, int]]:
        """Returns the header of a file that starts at offset `begin`, and the tensors' offsets relative to `begin`.

        The header is padded so that the first tensor is at a multiple of `_ALIGNMENT`.

        Args:
            metadata: strings to add to the header, by name.
            begin: offset of the file in its pack; 0 for a file that is not in a pack.
        """
        fields = self._fields
        if metadata:  # strings are encoded one by one: for a dict, json creates an encoder at each call
            pairs = ",".join([f"{_quoted(name)}:{_quoted(value)}" for name, value in metadata.items()])
            fields = f'{{"__metadata__":{{{pairs}}}{"," if self.specs else ""}{fields[1:]}'
        encoded = fields.encode()
        encoded += b" " * (-(begin + 8 + len(encoded)) % _ALIGNMENT)
        start = 8 + len(encoded)
        return len(encoded).to_bytes(8, "little") + encoded, {
            name: start + offset for name, offset in self._offsets.items()
        }


def _as_numpy(rows: torch.Tensor) -> np.ndarray:
    """Returns a numpy array that shares memory with `rows`; bfloat16 becomes int16, because numpy has no bfloat16.

    Numpy is used because it copies in the calling thread. Torch would use its thread pool for each strided chunk.
    """
    return (rows.view(torch.int16) if rows.dtype == torch.bfloat16 else rows).numpy()


class TensorWriter:
    """Writer that appends a set of tensors, with their header, to a file; each tensor is passed in chunks of rows.

    If header and tensors have at most `WRITE_BYTES`, they share a buffer with other small writes to the file.

    Attributes:
        begin: offset of the header in the file.
        bytes: size of the header and the tensors, in bytes.
    """

    def __init__(self, out: FileWriter, layout: TensorLayout, metadata: Mapping[str, str] | None = None) -> None:
        self._out = out
        self._specs, self._max_row_bytes = layout.specs, layout.max_row_bytes
        self.begin = out.end
        header, self._starts = layout.header(metadata or {}, self.begin)
        self.bytes = len(header) + layout.bytes
        self._written = dict.fromkeys(self._specs, 0)
        self._sums = {HEADER: crc32(header), **self._written}
        self._partial_buffers: dict[str, tuple[Bytes, int]] = {}  # by tensor: buffer, number of filled bytes
        self._small_file: Bytes | None = None
        if self.bytes <= WRITE_BYTES:
            self._small_file = out.allocate(self.bytes)
            _copy_into(self._small_file, 0, np.frombuffer(header, np.uint8))
        else:
            out.reserve(self.bytes)
            buffer = out.take_buffer(len(header))
            out.write(buffer, _copy_into(buffer, 0, np.frombuffer(header, np.uint8)), self.begin)

    def append(self, name: str, rows: torch.Tensor) -> None:
        """Writes the next rows of a tensor.

        Args:
            name: name of the tensor.
            rows: rows in the tensor's data type, on any device.

        Raises:
            ValueError: the rows have another data type, or the tensor would get more rows than its spec has.
        """
        spec, written = self._specs[name], self._written[name] + self._partial_buffers.get(name, (None, 0))[1]
        if rows.dtype != spec.dtype or written + rows.nbytes > spec.bytes:
            raise ValueError(f"{self._out.path}: {rows.numel()} elements of {rows.dtype} do not fit the rest of {spec}")
        rest = _as_numpy(rows if rows.device.type == "cpu" and not rows.requires_grad else rows.detach().cpu())
        if self._small_file is not None:
            begin = self._starts[name] + written
            end = _copy_into(self._small_file, begin, rest)
            # Computed right after the copy, while the rows are in the core's cache.
            self._sums[name] = crc32(self._small_file[begin:end].data, self._sums[name])
            self._written[name] = written + end - begin
            return
        while len(rest):
            buffer, filled = (
                self._partial_buffers.pop(name)
                if name in self._partial_buffers
                else (self._out.take_buffer(self._max_row_bytes), 0)
            )
            taken = rest[: (len(buffer) - filled) // spec.row_bytes]
            end = _copy_into(buffer, filled, taken)
            rest = rest[len(taken) :]
            self._partial_buffers[name] = buffer, end
            if len(buffer) - end < spec.row_bytes:
                self._submit(name)

    def _submit(self, name: str) -> None:
        buffer, filled = self._partial_buffers.pop(name)
        offset = self.begin + self._starts[name] + self._written[name]
        self._written[name] += filled
        self._out.write(buffer, filled, offset, lambda data: self._add(name, data))

    def _add(self, name: str, data: memoryview) -> None:
        self._sums[name] = crc32(data, self._sums[name])

    def finish(self) -> dict[str, int]:
        """Writes the last buffers and returns the checksums, by tensor name. It does not wait for the disk.

        Raises:
            ValueError: a tensor has fewer rows than its spec requires.
        """
        for name in list(self._partial_buffers):
            self._submit(name)
        for name, spec in self._specs.items():
            if self._written[name] != spec.bytes:
                raise ValueError(
                    f"{self._out.path}: {self._written[name]} of {spec.bytes} bytes of {name} were written"
                )
        if self._small_file is None:
            self._out.drain()
        return self._sums


def _copy_into(buffer: Bytes, begin: int, rows: np.ndarray) -> int:
    """Copies rows to offset `begin` of a buffer, and returns the offset of their end."""
    end = begin + rows.nbytes
    buffer[begin:end].view(rows.dtype).reshape(rows.shape)[...] = rows
    return end


@dataclass(frozen=True)
class _TensorEntries:
    """The parsed entries of the tensors in a header. Files with equal entries share one object.

    Attributes:
        specs: tensors by name.
        offsets: offset of each tensor, relative to the end of the header.
        last: name of the tensor with the greatest end offset.
        bytes: end offset of this tensor.
    """

    specs: dict[str, TensorSpec]
    offsets: dict[str, int]
    last: str
    bytes: int


def _split_header(text: str) -> tuple[Any, str]:
    """Splits a header into its metadata and the JSON text of its tensor entries.

    Raises:
        ValueError, RecursionError: the header is not JSON.
    """
    if text.startswith(_METADATA):
        metadata, end = _decode_from(text, len(_METADATA) - 1)
        if text.startswith(',"', end):
            return metadata, "{" + text[end + 1 :].rstrip()
    header = json.loads(text)
    metadata = header.pop("__metadata__", {}) if isinstance(header, dict) else {}
    return metadata, _encode(header)


@lru_cache(64)
def _parse_tensors(text: str) -> _TensorEntries:
    """Parses the tensor entries of a header.

    Raises:
        ValueError, RecursionError: the entries are invalid.
    """
    specs, offsets, last, last_end = {}, {}, "", 0
    for name, each in decode(dict[str, _HeaderEntry], json.loads(text), "tensors").items():
        spec = TensorSpec(name, DTYPES[each.dtype], tuple(each.shape))
        begin, end = each.data_offsets
        if end - begin != spec.bytes:
            raise ValueError(f"{name} has bytes {begin} to {end}")
        if end > last_end:
            last, last_end = name, end
        specs[name], offsets[name] = spec, begin
    return _TensorEntries(specs, offsets, last, last_end)


class Pack:
    """A pack file, open for reading until this object is deleted.

    Attributes:
        path: path of the file.
        fd: file descriptor of the pack.
        bytes: size of the pack.
        buffer: memory into which a file in the pack is read to verify it.
    """

    def __init__(self, path: Path, folder: Path) -> None:
        """Opens the pack `path` of the save `folder`.

        Raises:
            CheckpointError: the pack file does not exist or cannot be opened.
        """
        self.fd = -1
        self.path = path
        self.fd = open_save_file(path, folder)
        self.bytes = os.fstat(self.fd).st_size
        self.buffer = bytearray(_CHUNK_BYTES)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class TensorReader:
    """A file of tensors, or a range of a pack in the same format, open for reading.

    Attributes:
        path: path of the file.
        specs: tensors by name.
        starts: offset of each tensor in the file, or in the pack.
        bytes: size of the file, or of the range in the pack.
        metadata: strings in the header besides the tensor entries.
        validated_for: the manifest entry that the tensors were checked against, or None.
    """

    def __init__(
        self, path: Path, folder: Path | None = None, pack: Pack | None = None, within: tuple[int, int] = (0, 0)
    ) -> None:
        """Opens a file and parses its header.

        Args:
            path: path of the file.
            folder: folder of its save; links below it are not followed.
            pack: the open pack that contains the file; None for a file that is not in a pack.
            within: offset and size of the file in the pack.

        Raises:
            CheckpointError: the file is missing or damaged.
        """
        self.path = path
        self._pack = pack
        self._fd = open_save_file(path, folder) if pack is None else pack.fd
        try:
            self._begin, self.bytes = (0, os.fstat(self._fd).st_size) if pack is None else within
            if pack is not None and sum(within) > pack.bytes:
                raise CheckpointError(f"{path}: damaged, it ends at byte {pack.bytes}")
            self._header = self._read_header()
            self.specs, self.starts, self.metadata = self._parse(self._header)
        except BaseException:
            self.close()
            raise
        self.validated_for: object = None

    def _read_header(self) -> bytes:
        raw = os.pread(self._fd, min(_FIRST_BYTES, self.bytes), self._begin)
        length = int.from_bytes(raw[:8], "little")
        if self.bytes < 8 or length > min(_MAX_HEADER_BYTES, self.bytes - 8):
            raise CheckpointError(f"{self.path}: damaged, its header claims {length} of {self.bytes} bytes")
        return raw[: 8 + length] if 8 + length <= len(raw) else os.pread(self._fd, 8 + length, self._begin)

    def _parse(self, raw: bytes) -> tuple[dict[str, TensorSpec], dict[str, int], dict[str, str]]:
        begin = len(raw)
        try:
            metadata, text = _split_header(raw[8:].decode())
            tensors = _parse_tensors(text)
            metadata = decode(dict[str, str], metadata, "metadata")
            if begin + tensors.bytes > self.bytes:
                raise ValueError(f"{tensors.last} ends at byte {begin + tensors.bytes} of {self.bytes}")
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.path}: damaged, its header is wrong: {error}") from error
        starts = {name: self._begin + begin + offset for name, offset in tensors.offsets.items()}
        return tensors.specs, starts, metadata

    def read(self, name: str, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """Reads rows [begin, end) of a tensor to host memory.

        Raises:
            CheckpointError: the file has no such tensor, or is shorter than its header says.
        """
        rows = torch.from_numpy(self.array(name, begin, end))
        return rows.view(torch.bfloat16) if self.specs[name].dtype is torch.bfloat16 else rows

    def array(self, name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
        """Reads rows [begin, end) of a tensor as a numpy array; bfloat16 becomes int16.

        Raises:
            CheckpointError: the file has no such tensor, or is shorter than its header says.
        """
        spec = self.specs.get(name)
        if spec is None:
            raise CheckpointError(f"{self.path}: has no tensor {name!r}, only {sorted(self.specs)}")
        count = (spec.shape[0] if end is None else end) - begin
        rows = np.empty((count, *spec.shape[1:]), _NUMPY[spec.dtype])
        if rows.size:
            self._read_into(rows.reshape(-1).view(np.uint8).data, self.starts[name] + begin * spec.row_bytes)
        return rows

    def _read_into(self, out: memoryview, offset: int) -> None:
        while (count := os.preadv(self._fd, [out], offset)) < len(out):
            if count == 0:
                raise CheckpointError(f"{self.path}: damaged, it ends at byte {offset}")
            out, offset = out[count:], offset + count

    def verify(self, size: int, checksums: Mapping[str, int]) -> None:
        """Reads the whole file and compares it with the manifest.

        Args:
            size: expected size in bytes.
            checksums: expected CRC-32 of the header and of each tensor.

        Raises:
            CheckpointError: the size, the names of the tensors or a checksum differs.
        """
        if self.bytes != size:
            raise CheckpointError(f"{self.path}: damaged, it has {self.bytes} bytes, expected {size}")
        if checksums.keys() != {HEADER, *self.specs}:
            raise CheckpointError(f"{self.path}: has tensors {sorted(self.specs)}, expected {sorted(checksums)}")
        self._compare(HEADER, crc32(self._header), checksums)
        if self.bytes <= _CHUNK_BYTES:
            content = memoryview(bytearray(self.bytes) if self._pack is None else self._pack.buffer)[: self.bytes]
            self._read_into(content, self._begin)
            for name, spec in self.specs.items():
                begin = self.starts[name] - self._begin
                self._compare(name, crc32(content[begin : begin + spec.bytes]), checksums)
            return
        if self.bytes <= _ONE_READER:
            for name in self.specs:
                self._compare(name, self._checksum(name), checksums)
            return
        with Pool("rec_sdk_torch.checkpoint", _READERS) as threads:
            for name, total in zip(self.specs, threads.map(self._checksum, self.specs), strict=True):
                self._compare(name, total, checksums)

    def _checksum(self, name: str) -> int:
        total, offset, rest = 0, self.starts[name], self.specs[name].bytes
        buffer = memoryview(bytearray(min(_CHUNK_BYTES, rest)))
        while rest:
            chunk = buffer[: min(_CHUNK_BYTES, rest)]
            self._read_into(chunk, offset)
            total = crc32(chunk, total)
            offset, rest = offset + len(chunk), rest - len(chunk)
        return total

    def _compare(self, name: str, found: int, checksums: Mapping[str, int]) -> None:
        if found != checksums[name]:
            raise CheckpointError(
                f"{self.path}: damaged, the checksum of {name} is {found:#010x}, expected {checksums[name]:#010x}"
            )

    def close(self) -> None:
        """Closes the file; a reader of a range of a pack can still be used afterwards."""
        if self._pack is None and self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
