"""Reads checkpoints that Rec SDK's own savers wrote, so that training jobs can migrate from it.

There are two layouts of raw arrays: `<date and time>/<table>/rank<N>/<part>/slice.data` for each rank, and
`<table>/<part>/slice.data` for all ranks together. The parts are `key` int64 `[n]`, `embedding` float32 `[n, D]`, and
the optimizer states `momentum1`, `momentum2` float32 `[n, D]`. Beside each array, the file `slice.attribute` has the
size of an element in bytes and the shape, as int64. `rec_sdk_lifecycle.py` reads the counts of admission and eviction.
Steps and options of optimizers are not saved.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...runtime.warn import SaveWarning, warn
from ...tbe import WEIGHT, CapacityError, Replacement, SavedRows, TableSource, TableWrite, load
from ..format import files
from ..format.errors import CheckpointError
from ..format.folders import is_timestamp
from ..format.manifest import MANIFEST
from ..owners import TableOwner
from .capacity import fits_beside_tables
from .rec_sdk_lifecycle import SavedLifecycle, read_lifecycle

_KEY, _EMBEDDING = "key", "embedding"
_ATTRIBUTE, _DATA = "slice.attribute", "slice.data"
_RANK = re.compile("rank[0-9]{1,9}")


def find_save(path: Path) -> Path | None:
    """Returns `path` if it is a save of Rec SDK, else the latest save of Rec SDK in it; None if there is none.

    Raises:
        CheckpointError: a folder cannot be read.
    """
    try:
        return _find_save(path)
    except OSError as error:
        raise CheckpointError(f"{error.filename}: cannot be read: {error.strerror}") from error


def _find_save(path: Path) -> Path | None:
    if not path.is_dir():
        return None
    if any(_part_folders(each) for each in path.iterdir() if each.is_dir()):
        return path
    saves = [each for each in path.iterdir() if is_timestamp(each.name) and not (each / MANIFEST).exists()]
    return _find_save(max(saves)) if saves and not any((each / MANIFEST).exists() for each in path.iterdir()) else None


def _part_folders(table: Path) -> list[Path]:
    """Returns the folders that hold a table's parts: one for each rank, or only the table's folder."""
    if (table / _KEY / _ATTRIBUTE).exists():
        return [table]
    ranks = [each for each in table.glob("rank*") if _RANK.fullmatch(each.name) and (each / _KEY).is_dir()]
    return sorted(ranks, key=lambda each: int(each.name[4:]))


def _map_array(save: Path, folder: Path, dtype: Any, columns: int | None = None) -> np.ndarray:
    """Maps an array of a save into memory, `[n]` or `[n, columns]`, and checks its size."""
    attribute, data = folder / _ATTRIBUTE, folder / _DATA
    try:
        raw = files.read_regular_file(attribute, save)
        shape = np.frombuffer(raw, np.int64).tolist() if len(raw) % 8 == 0 else []
        if len(shape) < 2 or shape[0] != np.dtype(dtype).itemsize or min(shape) < 0:
            raise CheckpointError(f"{attribute}: damaged, it contains {shape} (bytes of an element, shape)")
        if columns is not None and shape[1] and prod(shape[2:]) != columns:
            raise CheckpointError(f"{attribute}: rows have {prod(shape[2:])} elements, the model has {columns}")
        expected = (shape[1],) if columns is None else (shape[1], columns)
        if not shape[1]:
            return np.empty(expected, dtype)
        with open(files.open_regular_file(data, save), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != prod(expected) * np.dtype(dtype).itemsize:
                raise CheckpointError(f"{data}: damaged, it has {size} bytes, {attribute.name} requires {shape}")
            return np.memmap(file, dtype, "r", shape=expected)
    except OSError as error:
        raise CheckpointError(f"{error.filename}: cannot be read: {error.strerror}") from error


@dataclass(eq=False)
class _RecSdkTable:
    """A table of a model, and its arrays in a save of Rec SDK.

    Attributes:
        owner, name: module that holds the table, and name of the table.
        arrays: for each rank that wrote the save, the array `key` and the parts by name.
        lifecycle: counts and timestamps for admission and eviction.
    """

    owner: TableOwner
    name: str
    arrays: list[tuple[np.ndarray, dict[str, np.ndarray]]]
    lifecycle: SavedLifecycle | None

    def chunks(self, rows: int) -> Iterator[SavedRows]:
        """Yields the rows that this rank owns; a chunk is selected from `rows` saved rows."""
        for ids, parts in self.arrays:
            for begin in range(0, len(ids), rows):
                chunk_ids = np.array(ids[begin : begin + rows])
                owned = self.owner.owned(self.name, chunk_ids)
                own_parts = {name: np.array(part[begin : begin + rows])[owned] for name, part in parts.items()}
                yield SavedRows(
                    torch.from_numpy(chunk_ids[owned]), {n: torch.from_numpy(p) for n, p in own_parts.items()}, {}
                )

    def ids(self) -> np.ndarray:
        """Returns the saved ids that this rank owns."""
        parts = [np.array(ids)[self.owner.owned(self.name, np.array(ids))] for ids, _ in self.arrays]
        return np.concatenate([np.empty(0, np.int64), *parts])


def _match_table(owner: TableOwner, name: str, folder: Path) -> _RecSdkTable:
    config, view = owner.configs[name], owner.embedding.view(name)
    ranks = _part_folders(folder / name)
    if not ranks:
        raise CheckpointError(f"{folder / name}: has no table {name!r}: there is no folder {_KEY} or rank<N>/{_KEY}")
    optimizer = owner.embedding.layout.optimizer_of(name)
    states = [state.name for state in optimizer.spec.states] if optimizer else []
    saved = len(list(ranks[0].glob("momentum[0-9]")))
    if saved != len(states):
        warn(
            f"{ranks[0]}: has {saved} optimizer states, table {name!r} {len(states)}: only its weights are loaded",
            SaveWarning,
        )
        states = []
    arrays = []
    for rank in ranks:
        ids = _map_array(folder, rank / _KEY, np.int64)
        parts = {WEIGHT: _map_array(folder, rank / _EMBEDDING, np.float32, config.embedding_dim)}
        for number, state in enumerate(states, 1):
            parts[state] = _map_array(folder, rank / f"momentum{number}", np.float32, view.parts()[state][0])
        wrong = [part for part, array in parts.items() if len(array) != len(ids)]
        if wrong:
            raise CheckpointError(f"{rank}: {wrong} do not have a row for each of the {len(ids)} ids")
        arrays.append((ids, parts))
    keys = [ids for ids, _ in arrays]
    return _RecSdkTable(owner, name, arrays, read_lifecycle(owner, name, folder, list(zip(ranks, keys, strict=True))))


def _check_table(table: _RecSdkTable, folder: Path) -> None:
    config, view = table.owner.configs[table.name], table.owner.embedding.view(table.name)
    ids = table.ids()
    if len(np.unique(ids)) < len(ids):
        raise CheckpointError(f"{folder / table.name}: some ids occur twice")
    if not config.hashed and len(ids) and not (ids.min() >= 0 and ids.max() < config.num_embeddings):
        raise CheckpointError(
            f"{folder / table.name}: has ids from {ids.min()} to {ids.max()}, the index table {table.name!r} has "
            f"num_embeddings {config.num_embeddings}"
        )
    if view.config.capacity and len(ids) > view.config.capacity:
        raise CapacityError(
            f"{folder}: table {table.name!r} has {len(ids)} ids, its capacity here is {view.config.capacity}"
        )
    table.owner.embedding.layout.check_not_in_flight("a load")


def read_tables(owners: Sequence[TableOwner], folder: Path) -> list[list[_RecSdkTable]]:
    """Finds the tables of a model in a save of Rec SDK and checks them.

    Returns:
        For each owner, its tables.

    Raises:
        CheckpointError: a table or file is missing, damaged, or does not fit the model.
        CapacityError: a table has more ids than its capacity.
        RuntimeError: batches are in flight.
    """
    tables_by_owner = [[_match_table(owner, name, folder) for name in owner.configs] for owner in owners]
    for tables in tables_by_owner:
        for table in tables:
            _check_table(table, folder)
    return tables_by_owner


def overwrite_rows(owners: Sequence[TableOwner], tables_by_owner: Sequence[Sequence[_RecSdkTable]]) -> None:
    """Writes the saved rows into the tables. Rows whose ids are not in the save stay unchanged."""
    for owner, tables in zip(owners, tables_by_owner, strict=True):
        contents = []
        for table in tables:
            view = owner.embedding.view(table.name)
            chunks = list(table.chunks(max(1, sum(len(ids) for ids, _ in table.arrays))))
            ids = torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *(each.ids for each in chunks)])
            names = list(table.arrays[0][1])
            parts = {name: torch.cat([each.parts[name] for each in chunks]) for name in names if chunks}
            contents.append(TableWrite(view, ids, parts))
        load(owner.embedding.layout, contents)


def restore_lifecycle(tables_by_owner: Sequence[Sequence[_RecSdkTable]]) -> None:
    """Restores counts and timestamps of ids; the rows must be in the tables already."""
    for tables in tables_by_owner:
        for table in tables:
            if table.lifecycle is not None:
                table.lifecycle.apply_to(table.owner.embedding.view(table.name))


def fits_beside(tables_by_owner: Sequence[Sequence[_RecSdkTable]], folder: Path) -> bool:
    """Returns whether the saved rows fit into memory while the tables keep their current rows.

    Raises:
        MemoryError, OSError: the saved rows do not fit even if the current rows are dropped.
    """
    tables = [table for owner_tables in tables_by_owner for table in owner_tables]
    return fits_beside_tables([(t.owner.embedding.view(t.name), len(t.ids())) for t in tables], folder)


def make_replacements(
    owners: Sequence[TableOwner], tables_by_owner: Sequence[Sequence[_RecSdkTable]], fits_beside: bool
) -> list[Replacement]:
    """Creates a replacement of the tables of each owner (module).

    The old rows are kept until the replacement runs if `fits_beside`, else they are dropped first.
    """
    replacements = []
    for owner, tables in zip(owners, tables_by_owner, strict=True):
        sources = []
        for table in tables:
            view = owner.embedding.view(table.name)
            layers = functools.partial(table.chunks, view.chunk_rows())
            sources.append(TableSource(view, layers, lambda: iter(()), rows=len(table.ids())))
        replacements.append(Replacement(owner.embedding.layout, sources, [], {}, keep_old=fits_beside))
    return replacements
