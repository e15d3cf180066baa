"""Indexes of saves, which map each id of a table to the file that holds its row and to the row's position there.

With an index, rows of a table can be looked up in the files of a save without loading the table.
"""

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
"""Number of ids in memory at a time."""
_ROWS = 1 << 14
"""Number of rows in memory at a time while they are compared."""
_REMOVE = "remove it to have it rebuilt"
_WINDOW = 1 << 24
"""Index entries in memory at a time, 16 bytes each. A larger index reads all ids once per window. C++ readers use the
same number, `IndexWriter::kWindow`.
"""
SMALL_ROWS = 1 << 14
"""Among many tables, a table with at most this many rows has no stored index: it is built when the table is opened,
which takes a moment.
"""


def index_path(folder: Path, key: str) -> Path:
    """Returns the path of the index of table `key` in the save `folder`."""
    return folder / f"index2-{key}"


def _stored_indexes(folder: Path, key: str) -> list[Path]:
    """Returns the paths of a table's index files: of the present format, and of the format up to version 0.2.0.

    Raises:
        CheckpointError: there is something else at one of these paths, such as a folder.
    """
    return [path for path in (index_path(folder, key), folder / f"index-{key}") if _index_exists(path)]


def _index_exists(path: Path) -> bool:
    """Returns whether the index file of a table exists.

    Raises:
        CheckpointError: there is something else at this path, such as a folder.
    """
    try:
        return files.is_regular_file(path)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; remove it to have the index rebuilt") from error


def write_indexes(folder: Path, manifest: Manifest) -> None:
    """Writes all indexes that the save in `folder` stores; the manifest file need not exist yet.

    Writing uses up to 256 MiB of memory.

    Raises:
        OSError: the disk is full.
        CheckpointError: a file of the save is damaged.
    """
    for table in manifest.tables:
        if has_stored_index(manifest, table.key):
            write_index(folder, manifest, table.key)


def has_stored_index(manifest: Manifest, key: str) -> bool:
    """Returns whether a save stores an index of this table. In a save of many tables, small tables have none."""
    return not manifest.has_many_tables or sum(file.rows for file in manifest.files_of(key, REMOVED, ROWS)) > SMALL_ROWS


def check_indexes(folder: Path, manifest: Manifest) -> None:
    """Compares each stored index of the save in `folder` with a rebuilt index, and looks up every id in it.

    Raises:
        OSError: the disk has no space for the rebuilt index.
        CheckpointError: an index does not match the rows of the save.
    """
    for table in manifest.tables:
        stored = _stored_indexes(folder, table.key)
        if not stored:
            continue
        built = _build_index(folder, manifest, table.key, folder)
        try:
            for path in stored:
                if not same_index(str(built), str(path), manifest.id):
                    raise CheckpointError(f"{path}: damaged; {_REMOVE}")
                _check_rows(folder, manifest, table, path)
        except ValueError as error:  # the engine raises ValueError; CheckpointError is a subclass
            raise CheckpointError(str(error)) from error
        finally:
            built.unlink()


def _check_rows(folder: Path, manifest: Manifest, table: SavedTable, path: Path) -> None:
    """Looks up every id of a table in the index `path`, and compares the weights with the files.

    The last file that contains an id has its valid row. This check detects faults of the code that builds indexes,
    which a comparison with a rebuilt index cannot.

    Raises:
        CheckpointError: the index finds other weights or none for an id, or finds a removed id.
    """
    served = open_served_table([(folder, manifest, table, path)])
    sources = reversed(manifest.files_of(table.key, REMOVED, ROWS))
    # Files are grouped by layer and role, newest first, because the newest entry of an id is the valid one.
    groups = [list(files) for _, files in itertools.groupby(sources, lambda file: (file.layer, file.role))]
    later_ids: Int64Array = np.empty(0, np.int64)  # ids in newer groups, ascending
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
                        raise CheckpointError(f"{path}: damaged, id {wrong[0]} has another row in the index; {_REMOVE}")
                    if number < len(groups):
                        in_group.append(ids)
        if number < len(groups):
            later_ids = np.unique(np.concatenate(in_group))


def _wrong_ids(served: ServedTable, ids: Int64Array, weights: np.ndarray | None) -> Int64Array:
    """Returns the ids whose rows in `served` differ from `weights` `[n, ...]`; without weights, the ids in `served`."""
    rows = np.empty((len(ids), served.row_bytes), np.uint8)
    found = served.lookup(ids, np.zeros(served.row_bytes, np.uint8), rows)
    wrong: np.ndarray = found if weights is None else ~found | (rows != weights.view(np.uint8)).any(1)
    return np.ascontiguousarray(ids[wrong])


def open_served_table(saves: Sequence[tuple[Path, Manifest, SavedTable, Path]]) -> ServedTable:
    """Maps the rows of a table into memory for lookups.

    Args:
        saves: for each save of a chain, newest first, its folder, manifest, table, and the path of the table's index.

    Raises:
        CheckpointError: a file is missing, damaged or belongs to another save.
    """
    served = []
    for folder, manifest, table, index in saves:
        files = []
        for file in manifest.files_of(table.key, ROWS):  # an index numbers files in this order
            with open_file(folder, manifest, file) as reader:
                files.append((str(reader.path), reader.starts[WEIGHT], file.rows))
        served.append((str(index), manifest.id, files))
    try:
        return ServedTable(served, table.weight_dtype, table.embedding_dim)
    except (OSError, ValueError) as error:
        raise CheckpointError(str(error)) from error


def write_index(folder: Path, manifest: Manifest, key: str) -> None:
    """Writes the index of one table under a temporary name and renames it, so that readers never see a partial file."""
    files.rename(_build_index(folder, manifest, key, folder), index_path(folder, key))


def _build_index(folder: Path, manifest: Manifest, key: str, target: Path) -> Path:
    """Builds an index in the folder `target` under a unique temporary name, and returns its path."""
    built = target / f".index-{uuid.uuid4().hex}"
    numbers = {file.location: number for number, file in enumerate(manifest.files_of(key, ROWS))}
    sources = manifest.files_of(key, REMOVED, ROWS)
    for file in sources:  # opening a file checks its row count, which determines the index size
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
    """Returns the path of a table's index; builds the index if the save has none.

    Args:
        folder: folder of the save.
        manifest: manifest of the save.
        key: key of the table.
        temporary_folder: folder for an index that the save does not store; see `has_stored_index`.

    Raises:
        CheckpointError: the index cannot be written, or there is something else at its path, such as a folder.
    """
    if stored := _stored_indexes(folder, key):
        return stored[0]
    if not has_stored_index(manifest, key):
        return _build_index(folder, manifest, key, temporary_folder)
    path = index_path(folder, key)
    try:
        write_index(folder, manifest, key)
    except OSError as error:
        raise CheckpointError(
            f"{path}: the save has no index of table {key!r}, and none can be written: {error}; write one with "
            "rec_sdk_torch.saves.format.index.write_indexes where the folder is writable"
        ) from error
    return path
