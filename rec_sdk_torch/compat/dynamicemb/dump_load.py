"""`DynamicEmbDump` and `DynamicEmbLoad` for whole models, and the search for a model's dynamic tables."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import get_unwrapped_module

from ...distributed.sharded import ShardedCollection
from ...runtime.warn import InputWarning, SaveWarning, warn
from .scored import ScoredTables
from .shard import _ShardedTables


def find_sharded_modules(module: torch.nn.Module, path: str = "") -> list[tuple[str, str, torch.nn.Module]]:
    """Returns path, name and module of each sharded collection. The root module's path and name are `model`."""
    found: list[tuple[str, str, torch.nn.Module]] = []
    stack = [(module, f"{path}model", "model")]
    while stack:
        current, current_path, name = stack.pop()
        current = get_unwrapped_module(current)
        if isinstance(current, ShardedCollection):
            found.append((current_path, name, current))
        else:
            stack += [(child, f"{current_path}.{own}", own) for own, child in current.named_children()]
    return found


def get_dynamic_emb_module(model: torch.nn.Module) -> list[ScoredTables]:
    """Returns the dynamic tables of a model, one object for each sharded collection or lookup module."""
    found: list[ScoredTables] = []
    for module in model.modules():
        if isinstance(module, _ShardedTables):
            found += [module.dynamic] if module.dynamic.table_names else []
        elif isinstance(module, ScoredTables):
            found.append(module)
    return found


def dynamic_tables(model: torch.nn.Module, what: str) -> list[tuple[str, str, ScoredTables]]:
    """Returns path, name and tables of each sharded collection with dynamic tables; warns if the model has none."""
    found = [
        (path, name, tables)
        for path, name, module in find_sharded_modules(model)
        for tables in get_dynamic_emb_module(module)
    ]
    if not found:
        warn(f"the model has no sharded collection with dynamic tables: {what}", SaveWarning)
    return found


def warn_of_unknown(names: Mapping[str, object], known: set[str]) -> None:
    """Warns of names that are not known."""
    unknown = sorted(names.keys() - known)
    if unknown:
        warn(f"there are no {unknown}, only {sorted(known)}", InputWarning)


def DynamicEmbDump(  # noqa: N802  # the name is dynamicemb's
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    table_names: Mapping[str, Sequence[str]] | None = None,
    optim: bool | None = False,
    counter: bool | None = False,
    pg: dist.ProcessGroup | None = None,
    allow_overwrite: bool = False,
) -> None:
    """Writes all dynamic tables into a folder; each rank writes the rows that it owns (collective).

    Args:
        path: an empty folder, or a folder to create.
        model: model with sharded collections. The subfolder of a collection is named by its path, such as
            `model.tables`.
        table_names: names of the tables to dump, by path of the collection. A collection without an entry is dumped
            whole; None dumps all tables.
        optim: whether to write optimizer states.
        counter: whether to write the counts of ids that are not admitted.
        pg: process group of the ranks; None for all ranks.
        allow_overwrite: whether the folder may contain files.

    Raises:
        FileExistsError: the folder contains files.
        NotADirectoryError: the path is not a folder.
    """
    folder = Path(path)
    problem: OSError | None = None
    if folder.exists() and not folder.is_dir():
        problem = NotADirectoryError(f"{folder} is no folder")
    elif folder.exists() and any(folder.iterdir()) and not allow_overwrite:
        problem = FileExistsError(f"{folder} has files: give another folder, or allow_overwrite=True")
    _barrier(pg)  # all ranks must have checked the folder before any rank writes
    if problem is not None:
        raise problem
    found = dynamic_tables(model, "nothing is dumped")
    warn_of_unknown(table_names or {}, {collection for collection, _, _ in found})
    for collection, _, tables in found:
        own = folder / collection
        own.mkdir(parents=True, exist_ok=True)
        names = None if table_names is None else table_names.get(collection)
        tables.dump(own, bool(optim), bool(counter), names, pg)
    _barrier(pg)


def DynamicEmbLoad(  # noqa: N802  # the name is dynamicemb's
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    table_names: Mapping[str, Sequence[str]] | None = None,
    optim: bool = False,
    counter: bool = False,
    pg: dist.ProcessGroup | None = None,
) -> None:
    """Loads a dump that `DynamicEmbDump` wrote, on the same or another number of ranks.

    The arguments mean the same as for `DynamicEmbDump`.

    Raises:
        FileNotFoundError, ValueError: the folder does not exist, or the dump is incomplete or contains other tables.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    found = dynamic_tables(model, "nothing is loaded")
    warn_of_unknown(table_names or {}, {collection for collection, _, _ in found})
    for collection, _, tables in found:
        names = None if table_names is None else table_names.get(collection)
        tables.load(folder / collection, optim, counter, names, pg)
    _barrier(pg)


def _barrier(pg: dist.ProcessGroup | None) -> None:
    """Blocks until all ranks have reached this call."""
    if dist.is_initialized():
        dist.barrier(group=pg)
