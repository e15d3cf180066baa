"""Checks the files of a save: the tensors in each file, their values, and whether ids agree across files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from ...operators.record import WEIGHT_DTYPES
from ...tbe import EvictReason
from .errors import CheckpointError
from .manifest import (
    CACHED,
    CANDIDATES,
    EVICTED,
    REMOVED,
    ROLES,
    ROWS,
    SKETCH,
    WEIGHT,
    WINDOW,
    Chain,
    Manifest,
    SavedFile,
    SavedTable,
)
from .quantized import BITS, row_bytes
from .sketches import sketch_problem
from .tensors import DTYPES, Pack, TensorReader

Int64Array: TypeAlias = npt.NDArray[np.int64]
OwnedFilter: TypeAlias = Callable[[Int64Array], "np.ndarray | slice"]
"""Function that selects, from an array of ids, the ids that this rank owns: a mask, or a slice for all."""

_COUNTS = ("count", "last_use", "clicks")
"""Columns of integers from 0 to 2^32 - 1."""
_VALUE_BOUNDS = {(CACHED, "heats"): (0, np.inf), (EVICTED, "reason"): (min(EvictReason), max(EvictReason) + 1)}
"""Bounds of other tensors, by role and name: the smallest allowed value, and the exclusive upper bound."""
_CHUNK_ROWS = 1 << 20
"""Number of values in memory at a time while they are checked."""
_CONTRADICTIONS = {
    CANDIDATES: "is a row and also a candidate for admission",
    WINDOW: "has gradients but no row",
    CACHED: "was in the cache but has no row",
}
"""For each role of a file, the error text for an id that contradicts the ids of the rows."""


@dataclass(frozen=True)
class _ExpectedTensor:
    """A tensor that is expected in every file of one role.

    Attributes:
        dtypes: allowed data types.
        shape: shape of a row.
        optional: whether the tensor may be missing.
    """

    dtypes: tuple[torch.dtype, ...]
    shape: tuple[int, ...] = ()
    optional: bool = False


def _expected_tensors(role: str, table: SavedTable) -> dict[str, _ExpectedTensor]:
    """Returns the tensors, by name, that a file of role `role` must have for `table`."""
    parts, columns = tuple(table.parts.items()), tuple(table.columns.items())
    return _expected_of(role, table.embedding_dim, table.weight_dtype, parts, columns)


@lru_cache(64)
def _expected_of(
    role: str, dim: int, weight_dtype: str, parts: Sequence[tuple[str, int]], columns: Sequence[tuple[str, str]]
) -> dict[str, _ExpectedTensor]:
    count = _ExpectedTensor((torch.int64,))
    found = {"ids": count}
    if role == SKETCH:
        found = {SKETCH: _ExpectedTensor((torch.uint8,))}
    elif role == WINDOW:
        found["sums"] = _ExpectedTensor((torch.float32,), (2 * dim,))
    elif role == CANDIDATES:
        more = _ExpectedTensor((torch.int64,), optional=True)
        found |= {"column.count": count, "column.last_use": count, "column.clicks": more, "column.timestamp": more}
    elif role == CACHED:
        found["heats"] = _ExpectedTensor((torch.float16,))
    elif role in (ROWS, EVICTED):
        if role == EVICTED:
            found["reason"] = _ExpectedTensor((torch.uint8,))
        if weight_dtype in BITS:
            found[WEIGHT] = _ExpectedTensor((torch.uint8,), (row_bytes(weight_dtype, dim),))
        else:
            found[WEIGHT] = _ExpectedTensor((DTYPES[weight_dtype],), (dim,))
        states = {f"state.{name}": elements for name, elements in parts if name != WEIGHT}
        found |= {name: _ExpectedTensor(WEIGHT_DTYPES, (elements,)) for name, elements in states.items()}
        found |= {f"column.{name}": _ExpectedTensor((DTYPES[kind],)) for name, kind in columns}
    return found


def check_tensors(reader: TensorReader, manifest: Manifest, file: SavedFile) -> None:
    """Checks that a file has the tensors that its role requires, and was written for this save and table.

    Raises:
        CheckpointError: a tensor is missing, unknown or of another type or shape, or the file belongs to another save.
    """
    if file.role not in ROLES:
        return
    metadata = {"save": manifest.id, "table": file.table}
    if reader.metadata != metadata:
        raise CheckpointError(f"{reader.path}: belongs to {reader.metadata}, expected {metadata}")
    expected_tensors = _expected_tensors(file.role, manifest.table(file.table))
    unknown = [name for name in reader.specs if name not in expected_tensors and name.startswith(("state.", "column."))]
    if unknown:
        raise CheckpointError(f"{reader.path}: has tensors {unknown}, which the manifest does not list")
    for name, expected in expected_tensors.items():
        spec = reader.specs.get(name)
        if spec is None:
            if expected.optional:
                continue
            raise CheckpointError(f"{reader.path}: has no tensor {name!r}, only {sorted(reader.specs)}")
        shape = (file.rows, *expected.shape)
        if spec.dtype not in expected.dtypes or spec.shape != shape:
            kinds = " or ".join(map(str, expected.dtypes))
            raise CheckpointError(f"{reader.path}: {name} is {spec.dtype} {spec.shape}, expected {kinds} {shape}")


def open_unchecked(folder: Path, manifest: Manifest, file: SavedFile) -> TensorReader:
    """Opens a file of the save in `folder` without checking its tensors; a file in a pack is opened once.

    Raises:
        CheckpointError: the file is missing, or is not a file of tensors.
    """
    if file.offset is None:
        return TensorReader(folder / file.path, folder)
    reader = manifest.pack_readers.get(file.location)
    if reader is None:
        pack = manifest.packs.get(file.path)
        if pack is None:
            pack = manifest.packs[file.path] = Pack(folder / file.path, folder)
        reader = TensorReader(pack.path, folder, pack, (file.offset, file.bytes))
        manifest.pack_readers[file.location] = reader
    return reader


def open_file(folder: Path, manifest: Manifest, file: SavedFile) -> TensorReader:
    """Opens a file of the save in `folder` and checks its tensors.

    Raises:
        CheckpointError: the file is missing, or lacks tensors that its role requires.
    """
    reader = open_unchecked(folder, manifest, file)
    try:
        if reader.validated_for is not file:
            check_tensors(reader, manifest, file)
            reader.validated_for = file
    except BaseException:
        reader.close()
        raise
    return reader


def check_values(reader: TensorReader, manifest: Manifest, file: SavedFile) -> None:
    """Checks that values in a file's columns are in range, and that a sketch was saved by the rank of its file.

    Raises:
        CheckpointError: a value is out of range, or the sketch is invalid.
    """
    if file.role == SKETCH:
        problem = sketch_problem(reader.array(SKETCH), file.rank, manifest.world_size)
        if problem is not None:
            raise CheckpointError(f"{reader.path}: the sketch of table {file.table!r} has {problem}")
    for name, spec in reader.specs.items():
        column = name.removeprefix("column.")
        other = _VALUE_BOUNDS.get((file.role, name))
        counted = file.role in (ROWS, CANDIDATES, EVICTED) and name != column and column in (*_COUNTS, "score")
        if other is None and not counted:
            continue
        lower, upper = other or (int(file.role == CANDIDATES and column == "count"), 2**32)
        for begin in range(0, spec.shape[0], _CHUNK_ROWS):
            values = reader.array(name, begin, min(begin + _CHUNK_ROWS, spec.shape[0]))
            valid = np.isfinite(values) if column == "score" else (values >= lower) & (values < upper)
            if not valid.all():
                raise CheckpointError(f"{reader.path}: {name} has the value {values[~valid][0]}, which is out of range")


@dataclass(frozen=True, eq=False)
class TableChain:
    """One table, with its entry in every save of a chain.

    Attributes:
        saves: folder, manifest and table of each save, in order.
        owned: function that selects the ids that this rank owns.
        num_embeddings: size of the index table to load into; None for a hash table.
        id_limit: ids greater than or equal to this limit are ignored; None for no limit.
    """

    saves: Sequence[tuple[Path, Manifest, SavedTable]]
    owned: OwnedFilter = field(default=lambda ids: slice(None))
    num_embeddings: int | None = None
    id_limit: int | None = None

    def check_ids(self) -> int:
        """Checks the table's ids in all files, and returns how many rows the table has in the last save.

        Raises:
            CheckpointError: an id occurs twice in a layer, is out of range of an index table, is both a row and a
                candidate for admission, or has gradients or a cache entry but no row.
        """
        final = self._final_ids()
        folder, manifest, table = self.saves[-1]
        for role, are_rows in ((CANDIDATES, False), (WINDOW, True), (CACHED, True)):
            files = manifest.files_of(table.key, role)
            if not files:
                continue
            ids = self._joined_ids(folder, manifest, table, files)
            wrong = ids[isin_sorted(final, ids) != are_rows]
            if len(wrong):
                raise CheckpointError(f"{folder}: id {wrong[0]} of table {table.key!r} {_CONTRADICTIONS[role]}")
        return len(final)

    def _final_ids(self) -> Int64Array:
        """Returns the ids that have rows in the last save, ascending."""
        base: Int64Array = np.empty(0, np.int64)
        changes: list[tuple[Int64Array, bool]] = []  # in order: ids, and whether they were added or removed
        for folder, manifest, table, files in self._layers():
            rows = self._joined_ids(folder, manifest, table, [file for file in files if file.role == ROWS])
            if not len(base) and not changes:
                base = rows
                continue
            for file in files:
                if file.role == REMOVED:
                    changes.append((self._ids(folder, manifest, table, file), False))
            changes.append((rows, True))
        if not changes:
            return base
        every = np.concatenate([ids for ids, _ in changes])
        present = np.concatenate([np.full(len(ids), is_row) for ids, is_row in changes])
        # np.unique keeps the first change of an id; reversed, this is the last change.
        changed, last = np.unique(every[::-1], return_index=True)
        added = changed[present[::-1][last]]
        return np.sort(np.concatenate([base[~isin_sorted(changed, base)], added]))

    def _layers(self) -> Iterator[tuple[Path, Manifest, SavedTable, list[SavedFile]]]:
        for folder, manifest, table in self.saves:
            files = manifest.files_of(table.key, REMOVED, ROWS)
            for layer in sorted({file.layer for file in files}):
                yield folder, manifest, table, [file for file in files if file.layer == layer]

    def _joined_ids(
        self, folder: Path, manifest: Manifest, table: SavedTable, files: Sequence[SavedFile]
    ) -> Int64Array:
        """Returns the ids in the files of one layer, ascending; raises an error if an id occurs twice."""
        of_files = [self._ids(folder, manifest, table, file) for file in files]
        ids: Int64Array = of_files[0] if len(of_files) == 1 else np.concatenate([np.empty(0, np.int64), *of_files])
        ids.sort()
        repeated = ids[1:][ids[1:] == ids[:-1]]
        if len(repeated):
            raise CheckpointError(
                f"{folder / files[-1].path}: {len(repeated)} ids (such as {repeated[0]}) of table {table.key!r} "
                "occur twice in the layer"
            )
        return ids

    def _ids(self, folder: Path, manifest: Manifest, table: SavedTable, file: SavedFile) -> Int64Array:
        with open_file(folder, manifest, file) as reader:
            ids: Int64Array = reader.array("ids")
        ids = ids[self.owned(ids)]
        for num_embeddings in (None if table.hashed else table.num_embeddings, self.num_embeddings):
            if num_embeddings is None:
                continue
            bad = ids[(ids < 0) | (ids >= num_embeddings)]
            if len(bad):
                raise CheckpointError(
                    f"{folder / file.path}: {len(bad)} ids (such as {bad[0]}) are out of range for the index table "
                    f"{table.name!r}, which has num_embeddings {num_embeddings}"
                )
        return ids if self.id_limit is None else ids[ids < self.id_limit]


def find_saved_table(manifest: Manifest, where: Path, module: str, name: str, unique_name: bool) -> SavedTable:
    """Finds a model's table in a save by module path and name, or by name alone if only one saved table has it.

    Args:
        manifest: manifest of the save.
        where: folder of the save, for error messages.
        module: path of the module.
        name: name of the table.
        unique_name: whether the model has only one table of this name.

    Raises:
        CheckpointError: the save does not have the table.
    """
    exact = manifest.by_module.get((module, name))
    named = manifest.by_name.get(name, [])
    if exact is not None:
        return exact
    if len(named) == 1 and unique_name:
        return named[0]
    known = [f"{table.module}.{table.name}".lstrip(".") for table in manifest.tables]
    raise CheckpointError(f"{where}: has no table {name!r} of the module {module!r}, only {known}")


def table_chain(chain: Chain, saved: SavedTable) -> TableChain:
    """Finds the table `saved` of the last save in every save of the chain.

    Raises:
        CheckpointError: a save does not have the table, or has it in another format.
    """
    found = []
    for folder, manifest in chain:
        table = find_saved_table(manifest, folder, saved.module, saved.name, True)
        difference = None if table is saved else table.row_format.difference(saved.row_format)
        if difference is not None:
            name, before, now = difference
            raise CheckpointError(
                f"{folder}: table {table.key!r} has {name} {before}, but {now} in {chain[-1][0]}, which follows"
            )
        found.append((folder, manifest, table))
    return TableChain(found)


def evicted_files(tables: TableChain) -> list[tuple[Path, Manifest, SavedFile, int]]:
    """Finds the files with pending evicted rows (not yet returned by `take_evicted()`), in eviction order.

    Returns:
        For each file: folder, manifest, file, and the index of its first pending row.

    Raises:
        CheckpointError: a save has fewer evicted rows than the next save refers to.
    """
    found = []
    expected_rows: dict[int, int] | None = None  # for each rank, how many of the last rows are pending; None: all
    successor = tables.saves[-1][0]
    for folder, manifest, table in reversed(tables.saves):
        before = dict(enumerate(table.evicted_before))
        for file in reversed(manifest.files_of(table.key, EVICTED)):
            rows = file.rows if expected_rows is None else min(file.rows, expected_rows.get(file.rank, 0))
            if expected_rows is not None and rows:
                expected_rows[file.rank] -= rows
            if rows:
                found.append((folder, manifest, file, file.rows - rows))
        for rank, rows in (expected_rows or {}).items():
            missing = rows - before.get(rank, 0)
            if missing > 0:
                raise CheckpointError(
                    f"{successor}: {missing} evicted rows of table {table.key!r} of rank {rank} are not in {folder}, "
                    "which it follows"
                )
        expected_rows, successor = before if expected_rows is None else expected_rows, folder
        if not any(expected_rows.values()):
            break
    return found[::-1]


def isin_sorted(known: Int64Array, ids: Int64Array) -> np.ndarray:
    """Returns which of `ids` `[n]` are in the ascending array `known`, bool `[n]`."""
    if not len(known):
        return np.zeros(len(ids), bool)
    if np.array_equal(known, ids):  # frequent case: the cache held every row
        return np.ones(len(ids), bool)
    positions = np.searchsorted(known, ids)
    found: np.ndarray = known[np.minimum(positions, len(known) - 1)] == ids
    return found


def row_count_problem(table: SavedTable, rows: int, expected: int) -> str | None:
    """Returns None if the table has as many rows on all ranks together as expected, else an error text."""
    if rows == expected:
        return None
    return f"table {table.key!r} had {expected} rows when it was saved, its files have {rows}"
