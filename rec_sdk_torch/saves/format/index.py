"""Indexes of saves: id -> file and row of a table, so that a save can be looked up where it lies."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..._engine import IndexWriter, ServedTable, same_index
from . import files
from .errors import CheckpointError
from .manifest import REMOVED, ROWS, WEIGHT, Manifest, SavedTable
from .validation import Int64Array, isin_sorted, open_file

_CHUNK_IDS = 1 << 18
"""Ids that are in memory at once."""
_ROWS = 1 << 14
"""Rows that are in memory at once, while they are compared."""
_REMOVE = "remove it to have it made anew"
_WINDOW = 1 << 24
"""Entries of an index that are in memory at once, 16 bytes each; for each so many it reads all ids again. The reader of
saves for C++ servers has the same, `IndexWriter::kWindow`.
"""
SMALL_ROWS = 1 << 14
"""A table below this size gets its index when it is opened, in a moment: a save of many tables has none of it."""


def index_path(folder: Path, key: str) -> Path:
    """The path of the index of table `key` in the save `folder`. Names of derived files begin with `index`."""
    return folder / f"index-{key}"


def _index_exists(path: Path) -> bool:
    """Whether a save has this index.

    Raises:
        CheckpointError: something else has its name.
    """
    try:
        return files.is_regular_file(path)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; remove it to have the index made anew") from error


def write_indexes(folder: Path, manifest: Manifest) -> None:
    """Writes the indexes that the save in `folder` is to have; `manifest` need not be there yet.

    This takes 256 MiB of memory at most.

    Raises:
        OSError: the disk has no room.
        CheckpointError: a file of the save is damaged.
    """
    for table in manifest.tables:
        if has_stored_index(manifest, table.key):
            write_index(folder, manifest, table.key)


def has_stored_index(manifest: Manifest, key: str) -> bool:
    """Whether a save has an index of this table."""
    return not manifest.has_many_tables or sum(file.rows for file in manifest.files_of(key, REMOVED, ROWS)) > SMALL_ROWS


def check_indexes(folder: Path, manifest: Manifest) -> None:
    """Compares the indexes that the save in `folder` has with new ones, and the rows that they find with the files.

    Raises:
        OSError: the folder has no room for another index.
        CheckpointError: an index is not that of the save's rows.
    """
    for table in manifest.tables:
        path = index_path(folder, table.key)
        if not _index_exists(path):
            continue
        built = _build_index(folder, manifest, table.key, folder)
        try:
            if not same_index(str(built), str(path), manifest.id):
                raise CheckpointError(f"{path}: damaged; {_REMOVE}")
            _check_rows(folder, manifest, table, path)
        except ValueError as error:  # of the engine; a CheckpointError is one too
            raise CheckpointError(str(error)) from error
        finally:
            built.unlink()


def _check_rows(folder: Path, manifest: Manifest, table: SavedTable, path: Path) -> None:
    """Looks up all ids of a table in the index `path`, and compares their weights with the files.

    The last file in order that has an id decides. A new index would repeat the faults of the code that makes both.

    Raises:
        CheckpointError: an id has other weights or none, or a removed id has some.
    """
    served = open_served_table([(folder, manifest, table, path)])
    sources = reversed(manifest.files_of(table.key, REMOVED, ROWS))
    groups = [list(files) for _, files in itertools.groupby(sources, lambda file: (file.layer, file.role))]
    later_ids: Int64Array = np.empty(0, np.int64)  # ids in later groups, ascending
    for number, group in enumerate(groups, 1):
        in_group = [later_ids]
        for file in group:
            with open_file(folder, manifest, file) as reader:
                for begin in range(0, file.rows, _ROWS):
                    end = min(begin + _ROWS, file.rows)
                    ids = reader.array("ids", begin, end)
                    compared = ~isin_sorted(later_ids, ids)
                    weights = reader.array(WEIGHT, begin, end)[compared] if file.role == ROWS else None
                    wrong = _wrong_ids(served, ids[compared], weights)
                    if len(wrong):
                        raise CheckpointError(f"{path}: damaged, id {wrong[0]} is not at its row; {_REMOVE}")
                    if number < len(groups):
                        in_group.append(ids)
        if number < len(groups):
            later_ids = np.unique(np.concatenate(in_group))


def _wrong_ids(served: ServedTable, ids: Int64Array, weights: np.ndarray | None) -> Int64Array:
    """Ids that `served` has with other bytes than `weights` `[n, ...]`; with None, ids that it has at all."""
    rows = np.empty((len(ids), served.row_bytes), np.uint8)
    found = served.lookup(ids, np.zeros(served.row_bytes, np.uint8), rows)
    wrong: np.ndarray = found if weights is None else ~found | (rows != weights.view(np.uint8)).any(1)
    return np.ascontiguousarray(ids[wrong])


def open_served_table(saves: Sequence[tuple[Path, Manifest, SavedTable, Path]]) -> ServedTable:
    """Maps the rows of a table.

    Args:
        saves: of a chain, the newest first: folder, manifest, the table there, and the path of its index.

    Raises:
        CheckpointError: a file is missing, damaged or of another save.
    """
    served = []
    for folder, manifest, table, index in saves:
        files = []
        for file in manifest.files_of(table.key, ROWS):  # as the index numbers them
            with open_file(folder, manifest, file) as reader:
                files.append((str(reader.path), reader.starts[WEIGHT], file.rows))
        served.append((str(index), manifest.id, files))
    try:
        return ServedTable(served, table.weight_dtype, table.embedding_dim)
    except (OSError, ValueError) as error:
        raise CheckpointError(str(error)) from error


def write_index(folder: Path, manifest: Manifest, key: str) -> None:
    """Writes the index of one table: what is seen under its name is complete."""
    files.rename(_build_index(folder, manifest, key, folder), index_path(folder, key))


def _build_index(folder: Path, manifest: Manifest, key: str, target: Path) -> Path:
    """A new index in the folder `target`, under a name of its own."""
    built = target / f".index-{uuid.uuid4().hex}"
    numbers = {file.location: number for number, file in enumerate(manifest.files_of(key, ROWS))}
    sources = manifest.files_of(key, REMOVED, ROWS)
    for file in sources:  # each has as many rows as the manifest says, for which the index will have room
        open_file(folder, manifest, file).close()
    try:
        files.before_change("create", built)
        writer = IndexWriter(str(built), sum(file.rows for file in sources), manifest.id, _WINDOW)
        for _ in range(writer.rounds):
            for file in sources:
                with open_file(folder, manifest, file) as reader:
                    for begin in range(0, file.rows, _CHUNK_IDS):
                        ids = reader.read("ids", begin, min(begin + _CHUNK_IDS, file.rows)).numpy()
                        if file.role == ROWS:
                            writer.add(ids, numbers[file.location], begin)
                        else:
                            writer.remove(ids)
            files.before_change("write", built)
            writer.end_round()
        files.before_change("sync", built)
        writer.finish()
        return built
    except BaseException:
        built.unlink(missing_ok=True)
        raise


def ensure_index(folder: Path, manifest: Manifest, key: str, temporary_folder: Path) -> Path:
    """The index of a table, which is made now when the save has none.

    Args:
        aside: a folder for an index that is not kept with the save.

    Raises:
        CheckpointError: it cannot be written, or something else has its name.
    """
    path = index_path(folder, key)
    if not _index_exists(path):
        if not has_stored_index(manifest, key):
            return _build_index(folder, manifest, key, temporary_folder)
        try:
            write_index(folder, manifest, key)
        except OSError as error:
            raise CheckpointError(
                f"{path}: the save has no index of table {key!r}, and none can be written: {error}; make one with "
                "rec_sdk_torch.saves.format.index.write_indexes where the folder may be written to"
            ) from error
    return path
