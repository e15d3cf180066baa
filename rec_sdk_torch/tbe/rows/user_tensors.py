"""Validates user-supplied table tensors and copies them to host memory.

Functions named `..._problem` return a message that completes an error, or None for valid values.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ..cache.batch import Int64Array
from ..cache.cache_warming import LATEST
from ..cache.evicted import EvictedRows
from ..config.table import TableConfig


def tensor_problem(values: object) -> str | None:
    """Returns why `values` is not a dense tensor of real numbers with values; None if it is."""
    if not isinstance(values, torch.Tensor):
        return f"is a {type(values).__name__}, expected a tensor"
    if values.is_nested or values.layout is not torch.strided:
        return f"is {'nested' if values.is_nested else values.layout}, expected a dense tensor: to_dense() makes one"
    if values.is_quantized:
        return f"is quantized ({values.dtype}), expected plain numbers: dequantize() makes some"
    if values.is_complex():
        return f"is {values.dtype}, and tables are real"
    if values.device.type == "meta":
        return "is on the meta device: it has no values"
    return None


def to_host(values: torch.Tensor) -> torch.Tensor:
    """Returns a plain tensor in host memory, without a copy if possible; raises at once if values cannot be read."""
    result = values.detach().cpu()
    if type(result) is not torch.Tensor:  # copied to a plain tensor, since reading a subclass may run any code
        result = torch.empty(result.shape, dtype=result.dtype, device="cpu").copy_(result)
    # Converts one row as a test, so that errors occur before the table is changed.
    torch.empty(result[:1].shape, dtype=torch.float32, device="cpu").copy_(result[:1])
    return result


def step_problem(value: object) -> str | None:
    """Returns why `value` is not a number of updates, a whole number of at least 0; None if it is."""
    if isinstance(value, torch.Tensor):
        problem = tensor_problem(value)
        if problem is not None or value.numel() != 1:
            return problem or f"has shape {tuple(value.shape)}, expected one number"
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return f"is {value!r}, expected a number"
    number = float(value)
    return None if number >= 0 and number.is_integer() else f"{number} is not a whole number of updates"


def ids_problem(ids: object) -> str | None:
    """Returns why `ids` are not a 1-D tensor of int32 or int64; None if they are."""
    problem = tensor_problem(ids)
    if problem is not None:
        return f"ids: {problem}"
    assert isinstance(ids, torch.Tensor)
    if ids.dim() != 1 or ids.dtype not in (torch.int64, torch.int32):
        return f"ids are {ids.dtype} of shape {tuple(ids.shape)}, expected flat torch.int64"
    return None


def distinct_ids_problem(ids: object) -> str | None:
    """Returns why `ids` are not distinct int64; None if they are."""
    problem = ids_problem(ids)
    if problem is not None:
        return f"its {problem}"
    assert isinstance(ids, torch.Tensor)
    if ids.dtype != torch.int64:
        return f"its ids are {ids.dtype}, expected torch.int64"
    twice = ids.numel() - ids.unique().numel()
    return f"{twice} of its ids are duplicates" if twice else None


def hash_ids_problem(config: TableConfig, ids: Any) -> str | None:
    """Returns why `ids` cannot be all ids of a hash table; None if they can."""
    problem = distinct_ids_problem(ids)
    if problem is not None:
        return problem
    if 0 < config.capacity < ids.numel():
        return f"{ids.numel()} ids, table {config.name!r} has a capacity of {config.capacity}"
    return None


def ids_to_host(table: str, ids: torch.Tensor) -> Int64Array:
    """Returns ids as a NumPy array, int64 `[n]`.

    Raises:
        TypeError: `ids` are not a 1-D tensor of int32 or int64.
    """
    problem = ids_problem(ids)
    if problem is not None:
        raise TypeError(f"table {table!r}: {problem}")
    array: Int64Array = ids.detach().cpu().contiguous().numpy().astype(np.int64, copy=False)
    return array


def heats_to_host(table: str, ids: torch.Tensor, heats: torch.Tensor | None) -> np.ndarray:
    """Returns the heat of each id as a NumPy array, float32 `[n]`; None: `LATEST` for each.

    Raises:
        ValueError: the shapes of heats and ids differ, or a heat is negative or not finite.
    """
    if heats is None:
        return np.full(ids.shape, LATEST, np.float32)
    problem = tensor_problem(heats)
    if problem is None and heats.shape != ids.shape:
        problem = f"have the shape {tuple(heats.shape)}, expected {tuple(ids.shape)}"
    if problem is None and heats.numel():
        least, most = heats.detach().aminmax()  # if a heat is NaN, `least` and `most` are NaN and the comparison fails
        if not (least >= 0 and most < torch.inf):
            problem = "are not all finite numbers of at least 0"
    if problem is not None:
        raise ValueError(f"table {table!r}: heats {problem}")
    array: np.ndarray = heats.detach().cpu().float().contiguous().numpy()
    return array


def check_evicted_rows(table: str, rows: object) -> None:
    """Checks that `rows` are `EvictedRows` with valid ids and tensors of one length.

    Raises:
        TypeError: `rows` are not `EvictedRows`.
        ValueError: invalid ids, or a tensor with another length than the ids.
    """
    if not isinstance(rows, EvictedRows):
        raise TypeError(f"table {table!r}: rows are {type(rows).__name__}, expected EvictedRows")
    problem = ids_problem(rows.ids) or rows.length_problem()
    if problem is not None:
        raise ValueError(f"table {table!r}: {problem}")


def columns_problem(config: TableConfig, columns: Mapping[str, torch.Tensor], rows: int) -> str | None:
    """Returns why the table cannot store `columns` for `rows` rows; None if it can.

    Raises:
        TypeError, ValueError: see `columns_to_host`.
    """
    kept = config.lifecycle.columns() if config.lifecycle is not None else []
    for name, values in columns_to_host(config.name, columns).items():
        if name not in kept:
            return f"it keeps no column {name!r}, only {kept}"
        if values.shape != (rows,):
            return f"shape {values.shape} of column {name}, expected {(rows,)}"
        if name not in ("score", "timestamp") and len(values) and not 0 <= values.min() <= values.max() < 2**32:
            return f"column {name} has numbers from {values.min()} to {values.max()}, allowed are 0 to 2**32 - 1"
    return None


def columns_to_host(table: str, columns: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Returns columns of rows or of candidates as NumPy arrays.

    Raises:
        TypeError: the column `score` is not floating point, or another column does not have integers.
        ValueError: a score that is not finite.
    """
    arrays = {}
    for name, values in columns.items():
        problem, real = tensor_problem(values), name == "score"
        if problem is None and (values.dtype.is_floating_point != real or values.dtype is torch.bool):
            problem = f"is {values.dtype}, expected {'torch.float64' if real else 'torch.int64'}"
        if problem is not None:
            raise TypeError(f"table {table!r}: {name} {problem}")
        if real and not bool(values.isfinite().all()):
            raise ValueError(f"table {table!r}: {name} is not finite everywhere")
        arrays[name] = values.detach().cpu().numpy()
    return arrays
