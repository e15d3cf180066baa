"""Reads traces: the ids that a run looked up in each table."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
OFFSETS = "_offsets"
"""Suffix of an array's name: `<table>_offsets` has the start of each sample in `<table>`."""


class TraceError(ValueError):
    """Exception raised if a file is not a trace or is damaged; the message names the file."""


@dataclass(frozen=True)
class TableTrace:
    """The lookups of one table.

    Attributes:
        ids: int64 `[n]`, in the order of the samples.
        offsets: int64 `[samples + 1]`, position in `ids` where the ids of each sample begin; the last element is n.
    """

    ids: Int64Array
    offsets: Int64Array

    def starts(self, samples: int) -> Int64Array:
        """Returns where each batch of `samples` samples begins in `ids`, then n; empty batches are left out."""
        found: Int64Array = np.unique(np.append(self.offsets[:-1:samples], self.offsets[-1]))
        return found


def read_traces(path: Path) -> dict[str, TableTrace]:
    """Returns the traces in a file, by table name.

    A `.npz` or `.safetensors` file has an array of integers for each table. `[samples]` has one id per sample,
    `[samples, k]` has k ids per sample. With a second array `<table>_offsets` `[samples + 1]`, the table's array is
    `[n]`, the ids of all samples one after another. A `.parquet` file has a column of integers, or of lists of
    integers, for each table. Arrays and columns of other types are ignored.

    Raises:
        TraceError: the file does not exist, cannot be read, or has no ids.
        ImportError: the package that reads this format is not installed.
    """
    readers: dict[str, Callable[[Path], dict[str, TableTrace]]] = {
        ".npz": lambda file: _traces_of_arrays(_read_npz(file), file),
        ".safetensors": lambda file: _traces_of_arrays(_read_safetensors(file), file),
        ".parquet": _read_parquet,
    }
    if path.suffix not in readers:
        raise TraceError(f"{path}: the name of a trace ends in {', '.join(readers)}")
    if not path.is_file():
        raise TraceError(f"{path}: there is no such file")
    found = {name: trace for name, trace in readers[path.suffix](path).items() if len(trace.ids)}
    if not found:
        raise TraceError(f"{path}: has no array or column of integers")
    return found


def _read_npz(path: Path) -> Mapping[str, npt.NDArray[Any]]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, KeyError) as error:
        raise TraceError(f"{path}: is not an .npz file of plain arrays: {error}") from error


def _read_safetensors(path: Path) -> Mapping[str, npt.NDArray[Any]]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError(f"{path}: reading it requires the package safetensors, which is not installed") from error
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # safe_open is not iterable
    except (OSError, SafetensorError) as error:
        raise TraceError(f"{path}: is not a .safetensors file: {error}") from error
    kept = {name: tensor for name, tensor in tensors.items() if not tensor.is_floating_point()}
    return {name: tensor.numpy() for name, tensor in kept.items()}


def _traces_of_arrays(arrays: Mapping[str, npt.NDArray[Any]], path: Path) -> dict[str, TableTrace]:
    ids = {name: array for name, array in arrays.items() if array.dtype.kind in "iu"}
    return {
        name: _trace_of_array(array, ids.get(f"{name}{OFFSETS}"), f"{path}: {name!r}")
        for name, array in ids.items()
        if not (name.endswith(OFFSETS) and name.removesuffix(OFFSETS) in ids)
    }


def _trace_of_array(array: npt.NDArray[Any], offsets: npt.NDArray[Any] | None, where: str) -> TableTrace:
    """Builds the trace of an array of ids and its optional offsets.

    Raises:
        TraceError: the shapes or the offsets are invalid.
    """
    flat = array.reshape(-1).astype(np.int64)
    if offsets is None:
        if array.ndim not in (1, 2):
            raise TraceError(f"{where} has the shape {list(array.shape)}, expected [samples] or [samples, ids]")
        per_sample = 1 if array.ndim == 1 else array.shape[1]
        return TableTrace(flat, np.arange(array.shape[0] + 1, dtype=np.int64) * per_sample)
    starts = offsets.astype(np.int64)
    if array.ndim != 1 or starts.ndim != 1 or len(starts) < 2:
        raise TraceError(f"{where} and its offsets must have one dimension, and the offsets at least 2 elements")
    if starts[0] != 0 or starts[-1] != len(flat) or (np.diff(starts) < 0).any():
        raise TraceError(f"{where}: its offsets must ascend from 0 to the number of ids, {len(flat)}")
    return TableTrace(flat, starts)


def _read_parquet(path: Path) -> dict[str, TableTrace]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ImportError(f"{path}: reading it requires the package pyarrow, which is not installed") from error
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise TraceError(f"{path}: is not a .parquet file: {error}") from error
    found = {}
    for name in table.column_names:
        chunks = table[name].combine_chunks()
        column = pa.concat_arrays(chunks.chunks) if isinstance(chunks, pa.ChunkedArray) else chunks
        if pa.types.is_integer(column.type):
            found[name] = _trace_of_array(column.drop_null().to_numpy(), None, f"{path}: {name!r}")
            continue
        is_list = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
        if is_list and pa.types.is_integer(column.type.value_type):
            ids, lengths = column.flatten(), column.value_lengths().fill_null(0).to_numpy()
            if ids.null_count:
                raise TraceError(f"{path}: {name!r} has lists with null in them")
            offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
            found[name] = _trace_of_array(ids.to_numpy(), offsets, f"{path}: {name!r}")
    return found
