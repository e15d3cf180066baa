"""Weights and optimizer states of FBGEMM's module: read-only copies, initial values and state dicts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..formulas import StateSpec
from ..tbe import (
    WEIGHT,
    TableBatchedEmbedding,
    TableOptimizer,
    TableView,
    TableWrite,
    load,
    step_problem,
    tensor_problem,
)
from .placement import EmbeddingSpec

ROWS_AT_ONCE = 1 << 16
"""Number of rows that are filled with random numbers at a time."""


class TableCopy(torch.Tensor):
    """A read-only copy of a table. Writing to it raises RuntimeError, because the table would not change."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        named = kwargs or {}
        changed = [named.get("out")]
        in_place = name.endswith("_") and not name.endswith("__") and name not in _HARMLESS
        if in_place or name in _CHANGES:
            changed += [*args[:1], *(named.get(key) for key in ("tensor", "self", "input"))]
        if any(isinstance(tensor, cls) for tensor in changed):
            raise RuntimeError(
                f"{name} on a copy of a table that the device caches: the table would not change. Write rows with "
                "module.tables.view(name).write(ids, {'weight': rows}), or take a clone() to change it"
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **named)
        shares = isinstance(result, torch.Tensor) and args and isinstance(args[0], torch.Tensor)
        if shares and result.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr():
            return result.as_subclass(cls)
        return result.as_subclass(torch.Tensor) if isinstance(result, cls) else result


_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
_CHANGES = {"__setitem__", "__set__", *(f"__i{name}__" for name in _OPERATORS)}
_HARMLESS = {"requires_grad_", "share_memory_"}


def read_only_copy(view: TableView) -> dict[str, torch.Tensor]:
    """Returns read-only copies of a table's weights and states in host memory, by name."""
    parts = view.read(torch.arange(view.config.num_embeddings, device="cpu")).parts
    return {part: values.as_subclass(TableCopy) for part, values in parts.items()}


def fill_uniform(tables: TableBatchedEmbedding, name: str, low: float, high: float) -> None:
    """Draws a table's weights uniformly from torch's CPU generator, in the same order as FBGEMM."""
    view = tables.view(name)
    rows, dim, dtype = view.config.num_embeddings, view.config.embedding_dim, view.config.weight_dtype
    for begin in range(0, rows, ROWS_AT_ONCE):
        ids = torch.arange(begin, min(begin + ROWS_AT_ONCE, rows), device="cpu")
        drawn = torch.empty((len(ids), dim), dtype=dtype, device="cpu").uniform_(low, high)
        view.write(ids, {WEIGHT: drawn})


def states_in_order(optimizer: TableOptimizer) -> list[StateSpec]:
    """Returns the specs of the optimizer's states in FBGEMM's order."""
    return sorted(optimizer.spec.states, key=lambda state: state.name == "sparse_ema")


def state_names(optimizer: TableOptimizer) -> dict[str, str]:
    """Returns FBGEMM's state names, keyed by this package's state names, in FBGEMM's order."""
    names: dict[str, str] = {}
    for state in states_in_order(optimizer):
        own = state.name in ("prev_iter", "row_counter")
        names[state.name] = state.name if own else f"momentum{1 + sum(n.startswith('m') for n in names.values())}"
    return names


def save_states(tables: TableBatchedEmbedding, optimizer: TableOptimizer) -> dict[str, torch.Tensor]:
    """Returns the optimizer states of all tables, `[rows, D]` or `[rows]`, and the number of updates.

    Keys are FBGEMM's state names, such as `<table>.momentum1`, and `iter` for the number of updates, int64 `[1]`.
    """
    saved = {}
    for table in tables.tables:
        view = tables.view(table.name)
        parts = view.read(view.ids(), list(state_names(optimizer))).parts
        for state, name in state_names(optimizer).items():
            values = parts[state]
            saved[f"{table.name}.{name}"] = values[:, 0] if _is_rowwise(optimizer, state) else values
    saved["iter"] = torch.tensor([optimizer.step], device="cpu")
    return saved


def _is_rowwise(optimizer: TableOptimizer, name: str) -> bool:
    return next(state.rowwise for state in optimizer.spec.states if state.name == name)


def load_states(
    tables: TableBatchedEmbedding, optimizer: TableOptimizer, saved: Mapping[str, torch.Tensor]
) -> list[str]:
    """Loads states that `save_states` returned, and returns the problems; loads nothing if there are any."""
    contents, problem = [], step_problem(saved["iter"])
    problems = [f"iter: {problem}"] if problem else []
    problems += [f"{name} {wrong}" for name, value in saved.items() if (wrong := tensor_problem(value))]
    for table in tables.tables if not problems else ():
        parts = {}
        for state, name in state_names(optimizer).items():
            values = saved[f"{table.name}.{name}"]
            parts[state] = values.reshape(-1, 1) if _is_rowwise(optimizer, state) else values
        if parts:
            contents.append(TableWrite(tables.view(table.name), None, parts))
            problem = contents[-1].problem()
            problems += [f"table {table.name!r}: {problem}"] if problem else []
    if not problems:
        load(tables.layout, contents, [(optimizer, int(saved["iter"]))])
    return problems


# ---- FBGEMM's own state dicts

_BUFFERS = ("dev", "uvm", "uvm", "host")
"""Name of the buffer that contains the rows, for each EmbeddingLocation."""


def from_fbgemm(
    state_dict: dict[str, Any],
    prefix: str,
    names: Sequence[str],
    specs: Sequence[EmbeddingSpec],
    first_features: Sequence[int],
    optimizer: TableOptimizer,
) -> None:
    """Replaces FBGEMM's keys in a state dict with the keys of this module.

    FBGEMM stores all tables of one kind of memory in one flat buffer. `<buffer>_placements` contains the kind of memory
    for each feature's table, and `<buffer>_offsets` the table's offset in the buffer.

    Args:
        state_dict: modified in place.
        prefix: prefix of the module's keys.
        names, specs, first_features: name, spec and first feature of each table.
        optimizer: optimizer of the tables.

    Raises:
        ValueError: the buffers do not have the sizes of the tables.
    """
    keys = {"weights": ("tables.{}.weight", False)}
    keys |= {
        name: (f"states.{{}}.{name}", _is_rowwise(optimizer, state)) for state, name in state_names(optimizer).items()
    }
    buffers = {key.removeprefix(prefix): state_dict.pop(key) for key in list(state_dict) if key.startswith(prefix)}
    for buffer, (key, rowwise) in keys.items():
        total = 0
        for name, spec, feature in zip(names, specs, first_features, strict=True):
            shape = (spec.rows,) if rowwise else (spec.rows, spec.dim)
            total += math.prod(shape)
            try:
                memory = _BUFFERS[int(buffers[f"{buffer}_placements"][feature])]
                begin = int(buffers[f"{buffer}_offsets"][feature])
                flat = buffers[f"{buffer}_{memory}"].detach().reshape(-1)
                state_dict[prefix + key.format(name)] = flat[begin : begin + math.prod(shape)].view(shape)
            except (KeyError, IndexError, RuntimeError) as error:
                raise ValueError(f"FBGEMM's {buffer} do not have table {name!r} of {shape}: {error}") from error
        flats = (buffers.get(f"{buffer}_{memory}") for memory in set(_BUFFERS))
        elements = sum(0 if values is None else values.numel() for values in flats)
        if elements != total:
            raise ValueError(f"FBGEMM's {buffer} have {elements} elements, these tables {total}")
    state_dict[f"{prefix}states.iter"] = buffers.get("iter", torch.tensor([optimizer.step], device="cpu"))
