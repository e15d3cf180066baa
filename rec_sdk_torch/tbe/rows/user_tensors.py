"""Tensors that users give whole tables: what is wrong with one, and its numbers in host memory."""

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
    """Says why `values` cannot be read as real numbers, element by element; None when they can."""
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
    """The same numbers in host memory, without a copy where they are there; whatever can fail of reading them does."""
    found = values.detach().cpu()
    if type(found) is not torch.Tensor:  # a subclass may do anything when its elements are read
        found = torch.empty(found.shape, dtype=found.dtype, device="cpu").copy_(found)
    torch.empty(found[:1].shape, dtype=torch.float32, device="cpu").copy_(found[:1])
    return found


def step_problem(value: object) -> str | None:
    """Says why `value` cannot be the number of updates that were made; None when it can."""
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
    """Says why `ids` are not flat integers; None when they are."""
    problem = tensor_problem(ids)
    if problem is not None:
        return f"ids: {problem}"
    assert isinstance(ids, torch.Tensor)
    if ids.dim() != 1 or ids.dtype not in (torch.int64, torch.int32):
        return f"ids are {ids.dtype} of shape {tuple(ids.shape)}, expected flat torch.int64"
    return None


def distinct_ids_problem(ids: object) -> str | None:
    """Says why `ids` are not int64, each once; None when they are."""
    problem = ids_problem(ids)
    if problem is not None:
        return f"its {problem}"
    assert isinstance(ids, torch.Tensor)
    if ids.dtype != torch.int64:
        return f"its ids are {ids.dtype}, expected torch.int64"
    twice = ids.numel() - ids.unique().numel()
    return f"{twice} of its ids are duplicates" if twice else None


def hash_ids_problem(config: TableConfig, ids: Any) -> str | None:
    """Says why `ids` cannot be the rows of a hash table; None when they can."""
    problem = distinct_ids_problem(ids)
    if problem is not None:
        return problem
    if 0 < config.capacity < ids.numel():
        return f"{ids.numel()} ids, table {config.name!r} has a capacity of {config.capacity}"
    return None


def ids_to_host(table: str, ids: torch.Tensor) -> Int64Array:
    """Ids of some rows, int64 `[n]`, in host memory.

    Raises:
        TypeError: no flat integers.
    """
    problem = ids_problem(ids)
    if problem is not None:
        raise TypeError(f"table {table!r}: {problem}")
    found: Int64Array = ids.detach().cpu().contiguous().numpy().astype(np.int64, copy=False)
    return found


def heats_to_host(table: str, ids: torch.Tensor, heats: torch.Tensor | None) -> np.ndarray:
    """In how many batches the row of each id was used lately, float32 `[n]`; None: in the latest one.

    Raises:
        ValueError: other than one number from 0 on for each.
    """
    if heats is None:
        return np.full(ids.shape, LATEST, np.float32)
    problem = tensor_problem(heats)
    if problem is None and heats.shape != ids.shape:
        problem = f"have the shape {tuple(heats.shape)}, expected {tuple(ids.shape)}"
    if problem is None and heats.numel():
        least, most = heats.detach().aminmax()  # of numbers with a nan both are that
        if not (least >= 0 and most < torch.inf):
            problem = "are not all numbers from 0 on"
    if problem is not None:
        raise ValueError(f"table {table!r}: heats {problem}")
    found: np.ndarray = heats.detach().cpu().float().contiguous().numpy()
    return found


def check_evicted_rows(table: str, rows: object) -> None:
    """
    Raises:
        TypeError: no rows that have left a table.
        ValueError: ids that are none, or another number of something than of ids.
    """
    if not isinstance(rows, EvictedRows):
        raise TypeError(f"table {table!r}: rows are {type(rows).__name__}, expected EvictedRows")
    problem = ids_problem(rows.ids) or rows.length_problem()
    if problem is not None:
        raise ValueError(f"table {table!r}: {problem}")


def columns_problem(config: TableConfig, columns: Mapping[str, torch.Tensor], rows: int) -> str | None:
    """Says why `columns` cannot be those of so many rows; None when they can. `columns_to_host` says more.

    Raises:
        TypeError, ValueError: as `columns_to_host`.
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
    """Columns of rows or of candidates, in host memory.

    Raises:
        TypeError: integers that are not, a score that is none.
        ValueError: a score that is not finite.
    """
    found = {}
    for name, values in columns.items():
        problem, real = tensor_problem(values), name == "score"
        if problem is None and (values.dtype.is_floating_point != real or values.dtype is torch.bool):
            problem = f"is {values.dtype}, expected {'torch.float64' if real else 'torch.int64'}"
        if problem is not None:
            raise TypeError(f"table {table!r}: {name} {problem}")
        if real and not bool(values.isfinite().all()):
            raise ValueError(f"table {table!r}: {name} is not finite everywhere")
        found[name] = values.detach().cpu().numpy()
    return found
