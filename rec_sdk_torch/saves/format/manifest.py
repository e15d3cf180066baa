"""The manifest of a save, which lists tables, optimizers, the position in a chain, and files with checksums.

docs/save_format.md describes the format.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from .errors import CheckpointError
from .files import read_regular_file
from .quantized import BITS
from .schema import InRange, Matches, OneOf, ScalarOrList, decode
from .tensors import Pack, TensorReader

MANIFEST = "manifest.json"
FORMAT = "rec_sdk_torch checkpoint"
VERSION, PACKED_VERSION, FOLDERS_VERSION, QUANTIZED_VERSION, EVICTED_VERSION = 1, 2, 3, 4, 5
"""Versions of the format: the first one; with packs; with chains across folders; with quantized rows; with evicted rows
in the previous save.
"""
MANY_TABLES = 16
"""Saves of at least this many tables use packs, and store no index of small tables."""
FULL, DELTA = "full", "delta"

ROWS, REMOVED, WINDOW, CANDIDATES, CACHED = "rows", "removed", "window", "candidates", "cached"
EVICTED, SKETCH = "evicted", "sketch"
ROLES = (REMOVED, ROWS, WINDOW, CANDIDATES, CACHED, EVICTED, SKETCH)
"""Roles of files that this package reads, in reading order."""

WEIGHT = "weight"
"""The part of a row that every table has."""

_NAME = "[A-Za-z0-9_]{1,100}"
_PART = "(?!\\.\\.?(/|$))[ -.0-~]+"
Count = Annotated[int, InRange(0)]
Id = Annotated[str, Matches("[0-9a-f]{32}", "32 hexadecimal digits")]
Name = Annotated[str, Matches(_NAME, "1 to 100 letters, digits and underscores")]
Key = Annotated[
    str, Matches(rf"{_NAME}(\.[1-9][0-9]{{0,8}})?", "the name of a table, optionally with a dot and a number")
]
InnerPath = Annotated[str, Matches(f"{_PART}(/{_PART})*", "the path of a file in the folder of the save")]
RelativeFolder = Annotated[str, Matches("[^/\0][^\0]*", "a path relative to the folder of the saves")]
Checksum = Annotated[int, InRange(0, 2**32 - 1)]
ColumnType = Annotated[str, OneOf(("I64", "F64"))]
CLOCKS = ("batches", "steps", "timestamp")
_Timestamp = Annotated[int, InRange(-(2**63))]
_Length = Annotated[str, Matches("[1-9][0-9]{0,18}", "the length of a window")]


@dataclass(frozen=True)
class SavedFile:
    """A tensor file of a save: a file of its own, or a range of bytes in a pack file.

    Attributes:
        path: path relative to the folder of the save, with `/`; for a file in a pack, the path of the pack.
        role: kind of content: `rows`, `removed`, `window`, `candidates`, `cached`, `evicted` or `sketch`. Readers
            ignore files of other roles.
        table: key of the table.
        rank: rank that wrote the file.
        layer: number of the layer; a row replaces the row of the same id in lower layers.
        rows: number of ids in the file; for a sketch, number of bytes of its state.
        bytes: size of the file.
        checksums: CRC-32 of the header and of each tensor, by name.
        offset: offset in the pack; None for a file that is not in a pack.
    """

    path: InnerPath
    role: Annotated[str, Matches(r"[A-Za-z0-9_-]+", "the name of a role")]
    table: str
    rank: Count
    layer: Count
    rows: Count
    bytes: Annotated[int, InRange(8)]
    checksums: dict[str, Checksum]
    offset: Count | None = None

    @property
    def location(self) -> tuple[str, int | None]:
        """Path and offset, which together identify the file, because files in one pack have the same path."""
        return self.path, self.offset


@dataclass(frozen=True)
class RowFormat:
    """The format of a table's rows in a save. All saves of a chain have the same row formats.

    Attributes:
        hashed, embedding_dim, weight_dtype, parts, columns: as in `SavedTable`.
        num_embeddings: size of an index table; None for a hash table.
    """

    hashed: bool
    embedding_dim: int
    weight_dtype: str
    parts: dict[str, int]
    columns: dict[str, str]
    num_embeddings: int | None

    def difference(self, later: RowFormat) -> tuple[str, object, object] | None:
        """Returns name and both values of the first field that differs in `later`, or None if the formats are equal."""
        for field_ in dataclasses.fields(self):
            before, now = getattr(self, field_.name), getattr(later, field_.name)
            if before != now:
                return field_.name, before, now
        return None


RowFormats = tuple[tuple[str, str, RowFormat], ...]
"""Module path, name and row format of each table of a model."""


@dataclass(frozen=True)
class SavedTable:
    """A table of a save.

    Attributes:
        key: unique name in this save: the table's name; further tables of the same name have `.1`, `.2` appended.
        name: name of the table.
        module: path of its module in the saved model.
        num_embeddings, embedding_dim, hashed, capacity, pooling: fields of the config of the whole table.
        weight_dtype: `F32`, `F16` or `BF16`; for quantized rows `Q8` or `Q4`.
        seed: seed of the initial weights.
        parts: number of elements of each part of a row, by name, `weight` first.
        columns: data type of each further column of a row, by name.
        optimizer: index in the manifest's optimizers; None without an optimizer.
        rows: number of ids in the table, over all ranks.
        clocks: counters of the table's admission and eviction, by name.
        evicted_before: for each rank, how many of the last evicted rows in the previous saves of the chain are still
            pending. Empty for a full save, or if there are none.
    """

    key: Key
    name: Name
    module: str
    num_embeddings: Annotated[int, InRange(1, 2**32 - 2)]
    embedding_dim: Annotated[int, InRange(1, 2**31 - 1)]
    hashed: bool
    capacity: Annotated[int, InRange(0, 2**32 - 2)]
    pooling: Annotated[str, OneOf(("none", "sum", "mean"))]
    weight_dtype: Annotated[str, OneOf(("F32", "F16", "BF16", *BITS))]
    seed: Annotated[int, InRange(0, 2**64 - 1)]
    parts: dict[Name, Annotated[int, InRange(1, 2**31 - 1)]]
    optimizer: Count | None
    rows: Count
    columns: dict[Name, ColumnType] = field(default_factory=dict)
    clocks: dict[Annotated[str, OneOf(CLOCKS)], _Timestamp] = field(default_factory=dict)
    evicted_before: list[Count] = field(default_factory=list)

    @property
    def row_format(self) -> RowFormat:
        """The format of the table's rows."""
        rows = None if self.hashed else self.num_embeddings
        return RowFormat(self.hashed, self.embedding_dim, self.weight_dtype, self.parts, self.columns, rows)

    def check(self) -> None:
        """Checks that the fields fit each other.

        Raises:
            ValueError: two fields contradict each other.
        """
        where = f"table {self.key!r}"
        if self.key.partition(".")[0] != self.name:
            raise ValueError(f"{where} has the name {self.name!r}")
        if self.parts.get(WEIGHT) != self.embedding_dim or set(self.parts.values()) - {1, self.embedding_dim}:
            raise ValueError(f"{where} has parts {self.parts} with embedding_dim {self.embedding_dim}")
        if self.optimizer is None and len(self.parts) > 1:
            raise ValueError(f"{where} has parts {sorted(self.parts)} and no optimizer")
        if self.weight_dtype in BITS and (self.optimizer is not None or self.clocks):
            raise ValueError(f"{where} has quantized rows with an optimizer or clocks: such rows are for serving only")
        if any((kind == "F64") != (name == "score") for name, kind in self.columns.items()):
            raise ValueError(f"{where} has columns {self.columns}, expected I64, and F64 for score")
        if self.clocks and (self.clocks.keys() != set(CLOCKS) or min(self.clocks["batches"], self.clocks["steps"]) < 0):
            raise ValueError(f"{where} has clocks {self.clocks}, expected {list(CLOCKS)}, the first two not negative")
        if self.columns and not self.clocks:
            raise ValueError(f"{where} has columns {self.columns} and no clocks")
        if not self.hashed and (self.clocks or self.columns or self.rows != self.num_embeddings):
            raise ValueError(
                f"{where} is an index table of {self.num_embeddings} rows, and has {self.rows}, clocks {self.clocks} "
                f"and columns {self.columns}"
            )


def row_formats(tables: Iterable[SavedTable]) -> RowFormats:
    """Returns module, name and row format of each table. A delta may follow a save only if all of them are equal."""
    return tuple((table.module, table.name, table.row_format) for table in tables)


@dataclass(frozen=True)
class SavedOptimizer:
    """An optimizer that one or several tables of a save use.

    Attributes:
        class_name: qualified name of the optimizer class that the user passed.
        kernel: name of the update kernel, that is of its formula.
        options: values of the optimizer's options, such as the learning rate.
        step: number of applied updates.
        accumulate_step: backward passes per update.
    """

    class_name: Annotated[str, Matches(r"[\w.<>]+", "the name of a class")]
    kernel: Annotated[str, Matches(r"\w+", "the name of an update")]
    options: dict[str, Annotated[Any, ScalarOrList()]]
    step: Count
    accumulate_step: Annotated[int, InRange(1)]


@dataclass(frozen=True)
class Manifest:
    """The description of one save.

    Attributes:
        id: 32 hexadecimal digits, unique to this save.
        kind: `full`, or `delta` for the changes since `previous`.
        base: id of the full save that the chain begins with; for a full save its own id.
        previous: id of the save that a delta follows; None for a full save.
        sequence: position in the chain: 0 for the full save, 1 for the first delta, and so on.
        created: date and time, UTC.
        world_size: number of ranks that wrote the save.
        tables: all tables.
        optimizers: all optimizers.
        windows: number of backward passes in each open accumulation buffer, by module path and `accumulate_step`.
        files: all tensor files.
        folders: other folders that hold saves of the chain, as paths relative to this save's parent folder.
    """

    id: Id
    kind: Annotated[str, OneOf((FULL, DELTA))]
    base: Id
    previous: Id | None
    sequence: Count
    created: str
    world_size: Annotated[int, InRange(1, 2**31 - 1)]
    tables: list[SavedTable]
    optimizers: list[SavedOptimizer]
    windows: dict[str, dict[_Length, Annotated[int, InRange(1)]]]
    files: list[SavedFile]
    folders: list[RelativeFolder] = field(default_factory=list)

    def check(self) -> None:
        """Checks that the fields fit each other.

        Raises:
            ValueError: two fields contradict each other.
        """
        full = self.kind == FULL
        if full != (self.previous is None) or full != (self.base == self.id) or full != (self.sequence == 0):
            raise ValueError(
                f"kind {self.kind}, id {self.id}, base {self.base}, previous {self.previous} and sequence "
                f"{self.sequence} contradict each other"
            )
        if full and self.folders:
            raise ValueError(f"a full save follows no other save, but names folders {self.folders}")
        datetime.fromisoformat(self.created)
        for table in self.tables:
            table.check()
            ranks = 0 if full or not table.clocks else self.world_size
            if len(table.evicted_before) not in (0, ranks):
                raise ValueError(
                    f"table {table.key!r} has evicted rows of {len(table.evicted_before)} ranks in the previous save, "
                    f"expected {ranks}"
                )
            if table.optimizer is not None and table.optimizer >= len(self.optimizers):
                raise ValueError(f"table {table.key!r} has optimizer {table.optimizer} of {len(self.optimizers)}")
        twice = [key for key, count in Counter([table.key for table in self.tables]).items() if count > 1]
        if twice:
            raise ValueError(f"tables {twice} occur twice")
        for module, counts in self.windows.items():
            if any(count >= int(length) for length, count in counts.items()):
                raise ValueError(f"windows of {module!r} are {counts}: more backward passes than their lengths")
        self._check_no_overlap()
        self._check_files()

    def _check_no_overlap(self) -> None:
        """Checks that files in a pack do not overlap."""
        ordered = sorted([(file.path, file.offset or 0, file.bytes) for file in self.files])
        for (path, begin, size), (next_path, next_begin, _) in itertools.pairwise(ordered):
            if path == next_path and next_begin < begin + size:
                raise ValueError(f"{path} has files at bytes {begin} and {next_begin}, which overlap")

    def _check_files(self) -> None:
        tables = {table.key: table for table in self.tables}
        for file in self.files:
            if file.rank >= self.world_size:
                raise ValueError(f"{file.path} is of rank {file.rank}, the save has {self.world_size} ranks")
            if file.role not in ROLES:
                continue
            if file.table not in tables:
                raise ValueError(f"{file.path} is of table {file.table!r}, the save has only {sorted(tables)}")
            if file.role in (CANDIDATES, SKETCH) and not tables[file.table].clocks:
                raise ValueError(f"{file.path} has the {file.role} of table {file.table!r}, which has no clocks")
            if file.role == EVICTED and not tables[file.table].clocks:
                raise ValueError(f"{file.path} has evicted rows of table {file.table!r}, which has no clocks")
            if file.role == WINDOW and not self.windows.get(tables[file.table].module):
                raise ValueError(f"{file.path} has gradients of table {file.table!r}, whose window is not open")
        for key, table in tables.items():
            row_count = sum(file.rows for file in self.files_of(key, ROWS))
            if self.kind == FULL and row_count < table.rows:
                raise ValueError(f"table {key!r} has {table.rows} rows, its files only {row_count}: files are missing")

    def table(self, key: str) -> SavedTable:
        return self._by_key[key]

    @property
    def has_many_tables(self) -> bool:
        """Whether the save has many tables, so that small files are packed and small tables have no index."""
        return len(self.tables) >= MANY_TABLES

    @cached_property
    def _by_key(self) -> dict[str, SavedTable]:
        return {table.key: table for table in self.tables}

    @cached_property
    def packs(self) -> dict[str, Pack]:
        """The open packs of the save, by path; they are closed when the manifest object is deleted."""
        return {}

    @cached_property
    def pack_readers(self) -> dict[tuple[str, int | None], TensorReader]:
        """The readers of files in packs, by the file's location."""
        return {}

    @cached_property
    def by_module(self) -> dict[tuple[str, str], SavedTable]:
        """The first table with each module path and name."""
        return {(table.module, table.name): table for table in reversed(self.tables)}

    @cached_property
    def by_name(self) -> dict[str, list[SavedTable]]:
        """The tables with each name."""
        found: dict[str, list[SavedTable]] = defaultdict(list)
        for table in self.tables:
            found[table.name].append(table)
        return dict(found)

    @cached_property
    def _files_in_reading_order(self) -> dict[tuple[str, str], list[SavedFile]]:
        """The files of each table and role, in the order in which they are read."""
        found: dict[tuple[str, str], list[SavedFile]] = defaultdict(list)
        for file in sorted(self.files, key=lambda file: (file.layer, file.rank, file.path)):
            found[file.table, file.role].append(file)
        return dict(found)

    def files_of(self, key: str, role: str, *more: str) -> list[SavedFile]:
        """Returns the files of a table that have one of the roles, in the order in which they are read."""
        found = self._files_in_reading_order.get((key, role), [])
        if more:
            roles = (role, *more)
            found = [file for each in roles for file in self._files_in_reading_order.get((key, each), ())]
            found.sort(key=lambda file: (file.layer, ROLES.index(file.role), file.rank, file.path))
        return found

    def to_bytes(self) -> bytes:
        """Returns the content of the manifest file, with its checksum."""
        files = [{name: value for name, value in vars(file).items() if value is not None} for file in self.files]
        version = max([VERSION, *(each for each, _, needs in _FEATURES if needs(self))])
        own = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        if not self.folders:
            del own["folders"]
        tables = [dict(vars(table)) for table in self.tables]
        for table in tables:
            if not table["evicted_before"]:
                del table["evicted_before"]
        lists = {"tables": tables, "optimizers": list(map(vars, self.optimizers)), "files": files}
        body = {**own, **lists, "format": FORMAT, "version": version}
        lines = ",\n".join(f" {_encode(name)}: {_to_json_lines(body[name])}" for name in sorted(body))
        text = f"{{\n{lines}\n}}\n".encode()
        end = text.index(_KEY_AFTER_CHECKSUM)
        return text[:end] + b'\n "checksum": %d,' % zlib.crc32(text) + text[end:]


_FEATURES: tuple[tuple[int, str, Callable[[Manifest], bool]], ...] = (
    (PACKED_VERSION, "files are in packs", lambda save: any(file.offset is not None for file in save.files)),
    (FOLDERS_VERSION, "it follows saves in other folders", lambda save: bool(save.folders)),
    (QUANTIZED_VERSION, "its rows are quantized", lambda save: any(t.weight_dtype in BITS for t in save.tables)),
    (EVICTED_VERSION, "evicted rows are in the previous save", lambda save: any(t.evicted_before for t in save.tables)),
)
"""Each later version of the format: number, feature in words, and a test that a manifest uses the feature."""

_KEY_AFTER_CHECKSUM = b'\n "created": '
"""The key that follows the checksum. Only `base` precedes the checksum, and its digits cannot contain this text."""
_CHECKSUM = re.compile(rb'\n "checksum": ([0-9]+),(?=' + re.escape(_KEY_AFTER_CHECKSUM) + b")")


_encode = json.JSONEncoder(sort_keys=True).encode
"""Encodes without indentation, because only then does Python use its C encoder: manifests of many tables are long."""


def _to_json_lines(value: Any) -> str:
    """Converts a value to JSON on one line, or a list of objects, such as the files, to one line per object."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n  " + ",\n  ".join(map(_encode, value)) + "\n ]"
    return _encode(value)


def _checksum_matches(raw: bytes, body: dict[str, Any]) -> bool:
    """Returns whether the checksum in a manifest equals the CRC-32 of the rest of its text; removes it from `body`."""
    found = _CHECKSUM.search(raw)
    if found is None or body.pop("checksum", None) != int(found[1]):
        return False
    return zlib.crc32(raw[found.end() :], zlib.crc32(raw[: found.start()])) == int(found[1])


Chain = Sequence[tuple[Path, Manifest]]
"""A chain of saves, each with its folder: a full save, then its deltas in order."""


def read_manifest(folder: Path) -> Manifest:
    """Reads and checks the manifest of the save in `folder`.

    Raises:
        CheckpointError: the file is missing or damaged, or was written by another program or a later version.
    """
    path = Path(folder) / MANIFEST
    try:
        raw = read_regular_file(path, path.parent)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a save: it has no {MANIFEST}") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        body = json.loads(raw)
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise CheckpointError(f"{path}: not a manifest of rec_sdk_torch, or damaged")
        version = body.get("version")
        if type(version) is not int or not VERSION <= version <= EVICTED_VERSION:
            raise CheckpointError(f"{path}: of format version {version}, this one reads up to {EVICTED_VERSION}")
        if not _checksum_matches(raw, body):
            raise CheckpointError(f"{path}: damaged, its checksum is wrong")
        manifest = decode(Manifest, body, "")
        manifest.check()
        for since, what, needs in _FEATURES:
            if version < since and needs(manifest):
                raise ValueError(f"{what}, which requires format version {since}")
        return manifest
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged: {error}") from error
