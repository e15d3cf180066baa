"""Reads the folders that Rec SDK's own savers write, so that a job can move over.

Two layouts, of raw arrays: `<date and time>/<table>/rank<N>/<part>/slice.data` of each rank, and
`<table>/<part>/slice.data` of all ranks. Parts: `key` int64 `[n]`, `embedding` float32 `[n, D]`, and `momentum1`,
`momentum2` float32 `[n, D]`, the optimizer's states in its order. `slice.attribute` beside each: int64, bytes of an
element and the shape. Counts of admission and eviction are beside them: `rec_sdk_life.py`. Steps and options of
optimizers are not in them.
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
    """The save of Rec SDK's at `path`, or the latest of those in it; None where there is none.

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
    if any(_ranks(each) for each in path.iterdir() if each.is_dir()):
        return path
    saves = [each for each in path.iterdir() if is_timestamp(each.name) and not (each / MANIFEST).exists()]
    return _find_save(max(saves)) if saves and not any((each / MANIFEST).exists() for each in path.iterdir()) else None


def _ranks(table: Path) -> list[Path]:
    """The folders of a table that have parts: those of the ranks, or its own."""
    if (table / _KEY / _ATTRIBUTE).exists():
        return [table]
    ranks = [each for each in table.glob("rank*") if _RANK.fullmatch(each.name) and (each / _KEY).is_dir()]
    return sorted(ranks, key=lambda each: int(each.name[4:]))


def _array(save: Path, folder: Path, dtype: Any, columns: int | None = None) -> np.ndarray:
    """An array in a folder of a save, mapped to memory: `[n]`, or `[n, columns]`."""
    attribute, data = folder / _ATTRIBUTE, folder / _DATA
    try:
        raw = files.read_regular_file(attribute, save)
        shape = np.frombuffer(raw, np.int64).tolist() if len(raw) % 8 == 0 else []
        if len(shape) < 2 or shape[0] != np.dtype(dtype).itemsize or min(shape) < 0:
            raise CheckpointError(f"{attribute}: damaged, it says {shape} (bytes of an element, shape)")
        if columns is not None and shape[1] and prod(shape[2:]) != columns:
            raise CheckpointError(f"{attribute}: rows have {prod(shape[2:])} elements, the model's {columns}")
        expected = (shape[1],) if columns is None else (shape[1], columns)
        if not shape[1]:
            return np.empty(expected, dtype)
        with open(files.open_regular_file(data, save), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != prod(expected) * np.dtype(dtype).itemsize:
                raise CheckpointError(f"{data}: damaged, it has {size} bytes, {attribute.name} says {shape}")
            return np.memmap(file, dtype, "r", shape=expected)
    except OSError as error:
        raise CheckpointError(f"{error.filename}: cannot be read: {error.strerror}") from error


@dataclass(eq=False)
class _RecSdkTable:
    """A table of a model and its arrays, those of each rank: `key`, then the parts by name; and what is counted."""

    owner: TableOwner
    name: str
    arrays: list[tuple[np.ndarray, dict[str, np.ndarray]]]
    lifecycle: SavedLifecycle | None

    def chunks(self, rows: int) -> Iterator[SavedRows]:
        """Rows that are at home in this process, so many at a time."""
        for ids, parts in self.arrays:
            for begin in range(0, len(ids), rows):
                some = np.array(ids[begin : begin + rows])
                owned = self.owner.owned(self.name, some)
                own = {name: np.array(part[begin : begin + rows])[owned] for name, part in parts.items()}
                yield SavedRows(torch.from_numpy(some[owned]), {n: torch.from_numpy(p) for n, p in own.items()}, {})

    def ids(self) -> np.ndarray:
        """The ids at home in this process."""
        parts = [np.array(ids)[self.owner.owned(self.name, np.array(ids))] for ids, _ in self.arrays]
        return np.concatenate([np.empty(0, np.int64), *parts])


def _match_table(owner: TableOwner, name: str, folder: Path) -> _RecSdkTable:
    config, view = owner.configs[name], owner.embedding.view(name)
    ranks = _ranks(folder / name)
    if not ranks:
        raise CheckpointError(f"{folder / name}: has no table {name!r}, that is no folder {_KEY} or rank<N>/{_KEY}")
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
        ids = _array(folder, rank / _KEY, np.int64)
        parts = {WEIGHT: _array(folder, rank / _EMBEDDING, np.float32, config.embedding_dim)}
        for number, state in enumerate(states, 1):
            parts[state] = _array(folder, rank / f"momentum{number}", np.float32, view.parts()[state][0])
        wrong = [part for part, array in parts.items() if len(array) != len(ids)]
        if wrong:
            raise CheckpointError(f"{rank}: {wrong} have another number of rows than its {len(ids)} ids")
        arrays.append((ids, parts))
    keys = [ids for ids, _ in arrays]
    return _RecSdkTable(owner, name, arrays, read_lifecycle(owner, name, folder, list(zip(ranks, keys, strict=True))))


def _check(table: _RecSdkTable, folder: Path) -> None:
    config, view = table.owner.configs[table.name], table.owner.embedding.view(table.name)
    ids = table.ids()
    if len(np.unique(ids)) < len(ids):
        raise CheckpointError(f"{folder / table.name}: some of its ids are there twice")
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
    """The tables of a model in a save of Rec SDK's, by owner.

    Raises:
        CheckpointError: a table or a file is missing, or is not as the model's.
        CapacityError: more ids than a table may have.
        RuntimeError: batches are in flight.
    """
    found = [[_match_table(owner, name, folder) for name in owner.configs] for owner in owners]
    for tables in found:
        for table in tables:
            _check(table, folder)
    return found


def overwrite_rows(owners: Sequence[TableOwner], found: Sequence[Sequence[_RecSdkTable]]) -> None:
    """Sets the rows that were read; the others of the tables stay."""
    for owner, tables in zip(owners, found, strict=True):
        contents = []
        for table in tables:
            view = owner.embedding.view(table.name)
            chunks = list(table.chunks(max(1, sum(len(ids) for ids, _ in table.arrays))))
            ids = torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *(each.ids for each in chunks)])
            names = list(table.arrays[0][1])
            parts = {name: torch.cat([each.parts[name] for each in chunks]) for name in names if chunks}
            contents.append(TableWrite(view, ids, parts))
        load(owner.embedding.layout, contents)


def restore_lifecycle(found: Sequence[Sequence[_RecSdkTable]]) -> None:
    """Sets what is counted of the rows, once they are in the tables."""
    for tables in found:
        for table in tables:
            if table.lifecycle is not None:
                table.lifecycle.apply_to(table.owner.embedding.view(table.name))


def fits_beside(found: Sequence[Sequence[_RecSdkTable]], folder: Path) -> bool:
    """Whether there is room for the rows that were read beside those of the tables.

    Raises:
        MemoryError, OSError: not even without those.
    """
    every = [table for tables in found for table in tables]
    return fits_beside_tables([(t.owner.embedding.view(t.name), len(t.ids())) for t in every], folder)


def make_replacements(
    owners: Sequence[TableOwner], found: Sequence[Sequence[_RecSdkTable]], fits_beside: bool
) -> list[Replacement]:
    """Makes a replacement for each owner, which will put the rows that were read in the place of its tables.

    `fits_beside`: there is room for both.
    """
    replacements = []
    for owner, tables in zip(owners, found, strict=True):
        sources = []
        for table in tables:
            view = owner.embedding.view(table.name)
            layers = functools.partial(table.chunks, view.chunk_rows())
            sources.append(TableSource(view, layers, lambda: iter(()), rows=len(table.ids())))
        replacements.append(Replacement(owner.embedding.layout, sources, [], {}, beside=fits_beside))
    return replacements
