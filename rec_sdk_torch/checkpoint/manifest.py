"""The manifest of a save: what it is, its tables, and every file with its checksums. The checkpoint page of the docs
has the format.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from .errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = "rec_sdk_torch checkpoint"
VERSION = 1
FULL, DELTA = "full", "delta"

ROWS, REMOVED, WINDOW, CANDIDATES = "rows", "removed", "window", "candidates"
"""Roles of files that this package reads."""

_Record = TypeVar("_Record")


@dataclass(frozen=True)
class SavedFile:
    """A file of tensors.

    Attributes:
        path: within the folder of the save, with `/`.
        role: what it holds: `rows`, `removed`, `window`, `candidates`; files of other roles are ignored.
        table: the key of its table.
        rank: which rank wrote it.
        layer: layers replace rows of those before.
        rows: ids in it.
        bytes: of the file.
        checksums: CRC-32 of the header and of each tensor.
    """

    path: str
    role: str
    table: str
    rank: int
    layer: int
    rows: int
    bytes: int
    checksums: dict[str, int]


@dataclass(frozen=True)
class SavedTable:
    """A table.

    Attributes:
        key: names it in this save: its name, with `.1`, `.2` behind it for further tables of that name.
        name, module: the table's, and the path of its module in the model that was saved.
        num_embeddings, embedding_dim, hashed, capacity, pooling: of its config, of the whole table.
        weight_dtype: `F32`, `F16` or `BF16`.
        seed: of the initial weights.
        parts: elements of each part of a row, by name, `weight` first.
        columns: further columns of a row, by name their data type in the files.
        optimizer: its place in the manifest's optimizers; None without.
        rows: ids in the table at the moment of the save, in all ranks.
        clocks: what else the table counts, by name.
    """

    key: str
    name: str
    module: str
    num_embeddings: int
    embedding_dim: int
    hashed: bool
    capacity: int
    pooling: str
    weight_dtype: str
    seed: int
    parts: dict[str, int]
    optimizer: int | None
    rows: int
    columns: dict[str, str] = field(default_factory=dict)
    clocks: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SavedOptimizer:
    """An optimizer of some tables.

    Attributes:
        class_name: the class that the user named.
        kernel: its update, by name.
        options: learning rate and the other options.
        step: updates applied.
        accumulate_step: backward passes of an accumulation window.
    """

    class_name: str
    kernel: str
    options: dict[str, Any]
    step: int
    accumulate_step: int


@dataclass(frozen=True)
class Manifest:
    """One save.

    Attributes:
        id: 32 hexadecimal digits, of this save alone.
        kind: `full`, or `delta`: what changed since `previous`.
        base: the id of the full save that a chain of deltas begins with; of a full save its own.
        previous: the id of the save before a delta; None for a full save.
        sequence: 0 for a full save, 1 for the first delta, and so on.
        created: date and time, UTC.
        world_size: ranks that wrote it.
        windows: backward passes of the open accumulation windows: by module path, then by the length of the window.
    """

    id: str
    kind: str
    base: str
    previous: str | None
    sequence: int
    created: str
    world_size: int
    tables: list[SavedTable]
    optimizers: list[SavedOptimizer]
    windows: dict[str, dict[str, int]]
    files: list[SavedFile]

    def table(self, key: str) -> SavedTable:
        return next(table for table in self.tables if table.key == key)

    def files_of(self, key: str, *roles: str) -> list[SavedFile]:
        """Files of a table with these roles, in the order in which they are to be read."""
        order = {role: place for place, role in enumerate((REMOVED, ROWS, WINDOW, CANDIDATES))}
        found = [file for file in self.files if file.table == key and file.role in roles]
        return sorted(found, key=lambda file: (file.layer, order.get(file.role, len(order)), file.rank, file.path))

    def to_bytes(self) -> bytes:
        """The manifest as its file has it."""
        body = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}
        return _text({**body, "checksum": zlib.crc32(_text(body))})


def _text(body: dict[str, Any]) -> bytes:
    return (json.dumps(body, indent=1, sort_keys=True) + "\n").encode()


def _record(cls: type[_Record], fields: dict[str, Any]) -> _Record:
    """Fields that this version does not know are left out."""
    known = {each.name for each in dataclasses.fields(cls)}  # type: ignore[arg-type]
    return cls(**{name: value for name, value in fields.items() if name in known})


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the save in `folder`.

    Raises:
        CheckpointError: there is none, it is damaged, or it is of another program or a later version.
    """
    path = Path(folder) / MANIFEST
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is no save: it has no {MANIFEST}") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        body = json.loads(raw)
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise CheckpointError(f"{path}: not of a save of rec_sdk_torch, or damaged")
        if body.get("version") != VERSION:
            raise CheckpointError(f"{path}: of format version {body.get('version')}, this one reads {VERSION}")
        checksum = body.pop("checksum", None)
        if checksum != zlib.crc32(_text(body)) or raw != _text({**body, "checksum": checksum}):
            raise CheckpointError(f"{path}: damaged, its checksum is wrong")
        body["tables"] = [_record(SavedTable, table) for table in body["tables"]]
        body["optimizers"] = [_record(SavedOptimizer, optimizer) for optimizer in body["optimizers"]]
        body["files"] = [_record(SavedFile, file) for file in body["files"]]
        return _record(Manifest, body)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: damaged: {error}") from error
