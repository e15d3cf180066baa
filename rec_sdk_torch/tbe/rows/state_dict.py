"""State dicts of tables: `weight` `[n, D]`, and for a hash table also `ids`, int64 `[n]`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from ...runtime.eager import NotScripted
from ...runtime.warn import SaveWarning, warn
from .layout import Layout
from .row_parts import WEIGHT, Chunk
from .table_view import TableView, TableWrite, load
from .user_tensors import tensor_problem


class TablesModule(NotScripted, torch.nn.Module):
    """Base of modules with tables. Their state dict is a consistent copy; a strict load changes all tables or none."""

    _FORCE_STATE_DICT_LOAD = True
    """Makes DistributedModelParallel call `load_state_dict`, which raises errors; it ignores `error_msgs` otherwise."""
    _strict = False
    """Whether the current load is strict, which torch does not pass to submodules."""

    def exclusive(self) -> AbstractContextManager[None]:
        """Returns a context in which other threads cannot plan, read or update."""
        raise NotImplementedError

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns a consistent copy of all tables on the host; see `torch.nn.Module.state_dict`."""
        with self.exclusive():
            return super().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads all tables; see `torch.nn.Module.load_state_dict`.

        With `strict`, a state dict with missing or unexpected keys changes nothing.
        """
        self._strict = strict
        try:
            return super().load_state_dict(state_dict, strict, assign)
        finally:
            self._strict = False

    def __reduce__(self) -> Any:
        raise TypeError(
            "embedding tables are not pickled: save them with rec_sdk_torch.Saver().save(model, path), or state_dict() "
            "with torch.save or torch.distributed.checkpoint"
        )


def refuse_sharing() -> None:
    """Raises RuntimeError, since `share_memory()` of a model cannot share the rows of tables."""
    raise RuntimeError(
        "embedding tables cannot be shared with other processes: their rows are in the memory of this one. Call "
        "share_memory() on the dense modules. Shard the tables with DistributedModelParallel to train them on several "
        "processes, or read a save of them with rec_sdk_torch.serving.TableReader"
    )


def save_table(layout: Layout, name: str, destination: dict[str, Any], prefix: str) -> None:
    """Adds a table to a state dict: `weight` `[n, D]`, and for a hash table `ids`, int64 `[n]` in ascending order."""
    view = TableView(layout, name)
    config = view.config
    if layout.device.type == "meta":
        rows = 0 if config.hashed else config.num_embeddings
        table = Chunk(
            torch.empty(rows, dtype=torch.int64, device="meta"),
            {WEIGHT: torch.empty((rows, config.embedding_dim), dtype=config.weight_dtype, device="meta")},
        )
    else:
        table = view.read(view.ids().sort().values, [WEIGHT])
    if config.hashed:
        destination[f"{prefix}ids"] = table.ids
    destination[f"{prefix}weight"] = table.parts[WEIGHT]


def _count(rows: object) -> int | None:
    """Returns the number of rows if `rows` is a valid tensor with rows; None for anything else."""
    has_rows = isinstance(rows, torch.Tensor) and tensor_problem(rows) is None and rows.dim() > 0
    return len(rows) if has_rows else None  # type: ignore[arg-type]


def row_numbers(rows: object) -> torch.Tensor:
    """Returns the row numbers 0, 1, 2, ... of a tensor, int64; an empty tensor if `rows` is not a valid tensor."""
    return torch.arange(_count(rows) or 0, dtype=torch.int64, device="cpu")


def cut_to_table(content: TableWrite) -> TableWrite:
    """Cuts contents for another `num_embeddings` to the rows that the index table has, with a warning."""
    config, parts = content.view.config, content.parts
    counts = {_count(part) for part in parts.values()}
    count = counts.pop()
    if counts or count in (None, config.num_embeddings):
        return content
    assert count is not None
    rows = min(count, config.num_embeddings)
    cut = replace(
        content,
        ids=row_numbers(torch.empty(rows, device="cpu")),
        parts={name: part[:rows] for name, part in parts.items()},
    )
    if cut.problem():
        return content
    warn_of_rows(config.name, count, config.num_embeddings)
    return cut


def warn_of_rows(table: str, loaded: int, rows: int, rest: str = "stay as they are") -> None:
    """Warns that a table is loaded from a table with another number of rows.

    Args:
        table: the name of the table.
        loaded: rows in the state dict or save.
        rows: rows of the table in the model.
        rest: ends the sentence "the others ..." about rows of the model's table that are not loaded.
    """
    then = f"the others {rest}" if loaded < rows else "the others are left out"
    warn(
        f"table {table!r} has num_embeddings {rows}, what is loaded {loaded}: {min(loaded, rows)} rows are loaded, "
        f"{then}",
        SaveWarning,
    )


def load_tables(
    layout: Layout,
    state_dict: Mapping[str, Any],
    prefix: str,
    prefixes: Mapping[str, str],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Replaces the rows of all tables by the rows of a state dict; changes no table if there is an error.

    Ids that a table already contains keep their optimizer states. Accumulated and pending gradients are discarded.

    Args:
        layout: the layout of the tables.
        state_dict: for each table prefix, the key `weight`, and for a hash table `ids`; missing ids are 0, 1, 2, ...
        prefix: the prefix of all keys of these tables.
        prefixes: the prefix of each table, by name.
        strict: whether missing or unexpected keys prevent the load. In this case the caller passes empty lists, except
            for errors of the module that has the tables.
        missing_keys, unexpected_keys, error_msgs: lists to which errors are appended, each key once.
    """
    contents = []
    wanted: set[str] = set()
    problems = []
    for name, own in prefixes.items():
        view = TableView(layout, name)
        keys = [f"{own}ids", f"{own}weight"] if view.config.hashed else [f"{own}weight"]
        wanted.update(keys)
        if keys[-1] not in state_dict:
            missing_keys.extend(key for key in keys if key not in state_dict)
            continue
        weight = state_dict[keys[-1]]
        ids = state_dict.get(keys[0], row_numbers(weight)) if view.config.hashed else None
        content = TableWrite(view, ids, {WEIGHT: weight}, replace_all=view.config.hashed)
        if ids is None:
            content = cut_to_table(content)
        problem = content.problem()
        if problem:
            problems.append(f"{keys[-1]}: {problem}")
        contents.append(content)
    error_msgs.extend(problems)
    unexpected_keys.extend(key for key in state_dict if key.startswith(prefix) and key not in wanted)
    if not contents or problems or (strict and (unexpected_keys or missing_keys)):
        return
    load(layout, contents, discard_gradients=True)
