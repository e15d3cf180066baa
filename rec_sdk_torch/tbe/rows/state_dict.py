"""State dicts of tables: `weight` `[n, D]`, and of a hash table its `ids` int64 `[n]`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from ...runtime.eager import NotScripted
from ...runtime.warn import SaveWarning, warn
from .layout import Layout
from .row_parts import WEIGHT
from .table_view import Chunk, TableView, TableWrite, load
from .user_tensors import tensor_problem


class TablesModule(NotScripted, torch.nn.Module):
    """A module with tables: its state dict is one moment of all of them, a strict load is all or nothing."""

    _FORCE_STATE_DICT_LOAD = True
    """Lets DistributedModelParallel call `load_state_dict`, which raises: it drops what `error_msgs` has."""
    _strict = False
    """Whether the load that is going on is strict: torch does not tell the modules that load."""

    def exclusive(self) -> AbstractContextManager[None]:
        """Keeps other threads from planning, reading or updating."""
        raise NotImplementedError

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As any module's: one moment of all tables, copied to the host."""
        with self.exclusive():
            return super().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As any module's; with `strict`, a state dict that lacks keys or has others changes nothing."""
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
    """Raises RuntimeError: what `share_memory()` of a model calls on its tensors, of which a table has none."""
    raise RuntimeError(
        "embedding tables cannot be shared with other processes: their rows are in the memory of this one. Call "
        "share_memory() on the dense modules. Shard the tables with DistributedModelParallel to train them on several "
        "processes, or read a save of them with rec_sdk_torch.serving.TableReader"
    )


def save_table(layout: Layout, name: str, destination: dict[str, Any], prefix: str) -> None:
    """Puts a table into a state dict: `weight` `[n, D]`, of a hash table `ids` int64 `[n]` too, in ascending order."""
    view = TableView(layout, name)
    config = view.config
    if layout.device.type == "meta":
        rows = 0 if config.hashed else config.num_embeddings
        whole = Chunk(
            torch.empty(rows, dtype=torch.int64, device="meta"),
            {WEIGHT: torch.empty((rows, config.embedding_dim), dtype=config.weight_dtype, device="meta")},
        )
    else:
        whole = view.read(view.ids().sort().values, [WEIGHT])
    if config.hashed:
        destination[f"{prefix}ids"] = whole.ids
    destination[f"{prefix}weight"] = whole.parts[WEIGHT]


def _count(rows: object) -> int | None:
    """The rows of a tensor that a table can take; None of anything else."""
    has_rows = isinstance(rows, torch.Tensor) and tensor_problem(rows) is None and rows.dim() > 0
    return len(rows) if has_rows else None  # type: ignore[arg-type]


def row_numbers(rows: object) -> torch.Tensor:
    """Ids from 0 on of so many rows as a tensor has; none of anything else."""
    return torch.arange(_count(rows) or 0, dtype=torch.int64, device="cpu")


def cut_to_table(content: TableWrite) -> TableWrite:
    """The rows that an index table of another `num_embeddings` has too, with a warning; else the content as it is."""
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


def warn_of_rows(table: str, given: int, rows: int, rest: str = "stay as they are") -> None:
    """Warns that a table takes the rows of a table with another number of rows.

    Args:
        table: its name.
        given: rows of the table that is loaded.
        rows: rows of the table that takes them.
        rest: ends the sentence "the others ..." about rows for which nothing is given.
    """
    then = f"the others {rest}" if given < rows else "the others are left out"
    warn(
        f"table {table!r} has num_embeddings {rows}, what is loaded {given}: {min(given, rows)} rows are loaded, "
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
    """Replaces tables by what a state dict has of them: all, or none where something is wrong.

    Rows that stay keep their optimizer states. Gradients of open accumulation windows are dropped.

    Args:
        layout: has the tables.
        state_dict: `weight` behind the table's prefix, and of a hash table `ids`, which are those from 0 on if missing.
        prefix: what begins with it is of these tables.
        prefixes: by table name.
        strict: nothing is replaced unless every table is there, and nothing else; these lists are empty before then,
            but for what is wrong with the module that has the tables.
        missing_keys, unexpected_keys, error_msgs: what is wrong is added to these, each key once.
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
        content = TableWrite(view, ids, {WEIGHT: weight}, whole=view.config.hashed)
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
    load(layout, contents, drop_windows=True)
