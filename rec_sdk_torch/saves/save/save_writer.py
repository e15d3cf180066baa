"""The steps of a save: chooses a base save, takes a snapshot, writes rows, and gives the folder its final name."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from ...rules import Sketch
from ...tbe import WEIGHT, CopyOnWriteBuffer, Group, Snapshot, SnapshotRows, TableView, next_serial, start_versions
from ..format import files
from ..format.folders import UNFINISHED, SaveLocation, cache_chain_link, is_chain_intact, next_name
from ..format.index import write_indexes
from ..format.manifest import (
    CACHED,
    CANDIDATES,
    EVICTED,
    MANIFEST,
    SKETCH,
    WINDOW,
    Manifest,
    SavedFile,
    SavedTable,
    row_formats,
)
from ..format.sketches import serialize_sketch
from ..format.tensors import DTYPES, TensorSpec
from ..owners import TableOwner
from .base_saves import BaseSave, base_saves_of, save_locations_of, set_base_save
from .draft import SaveIdentity, current_formats, draft_manifest
from .rank_writer import CACHED_SPECS, Chunk, RankFiles, cached_rows_chunk, row_specs

COPY_ON_WRITE_BYTES = 64 << 20
"""Bytes of changed rows that a save keeps in memory; further rows are spilled to disk."""


def create_save_folder(path: Path, bases: Sequence[Sequence[SaveLocation]]) -> SaveIdentity:
    """Creates the temporary folder of a save and chooses the base save. Only rank 0, which locks `path`, calls this.

    Args:
        path: folder of saves.
        bases: for each embedding of each rank (rank 0 first), the saves that a delta can follow, best first.
    """
    for name in os.listdir(path):
        if name.startswith(UNFINISHED):  # only crashed saves leave these: this rank holds the lock
            files.remove_tree(path / name)
    save_id = uuid.uuid4().hex
    folder = path / f"{UNFINISHED}{save_id}"
    base = _common_base(bases)
    if base is None:
        identity = SaveIdentity(save_id, save_id, None, 0, str(folder))
    else:
        identity = SaveIdentity(save_id, base.base, base.save, base.sequence + 1, str(folder), base.folders)
    files.create_folder(folder)
    return identity


def _common_base(bases: Sequence[Sequence[SaveLocation]]) -> SaveLocation | None:
    """Returns the best save with an intact chain that all embeddings on all ranks can follow; None if there is none."""
    for location in bases[0] if bases else ():
        if all(any(each.save == location.save for each in own) for own in bases[1:]) and is_chain_intact(location):
            return location
    return None


@dataclass
class RankResult:
    """The manifest entries that one rank contributes to a save.

    Attributes:
        files: entries of this rank's files.
        rows: number of rows of each table on this rank, by key.
        versions: for each embedding, the version of each group of tables.
        clocks: clocks of each table that admits or evicts ids, by key.
        evicted_before: by key, how many pending evicted rows earlier saves of the chain already have.
        serial: a serial number greater than the serials of all evicted rows in the snapshot.
    """

    files: list[SavedFile]
    rows: dict[str, int] = field(default_factory=dict)
    versions: list[list[int]] = field(default_factory=list)
    clocks: dict[str, dict[str, int]] = field(default_factory=dict)
    evicted_before: dict[str, int] = field(default_factory=dict)
    serial: int = field(default_factory=next_serial)


def possible_bases(owners: Sequence[TableOwner], path: str) -> list[list[SaveLocation]]:
    """Returns, for each embedding, the saves that a delta in the folder `path` can follow, best first.

    A save whose whole chain is in `path` comes first. The other recorded saves of the model, in any folder, follow,
    newest first; an older one is used if the newest no longer exists.
    """
    base_saves, result = [base_saves_of(owner.embedding) for owner in owners], []
    formats = current_formats(owners) if any(base_saves) else ()
    for owner, owner_saves in zip(owners, base_saves, strict=True):
        locations = []
        for base_save in owner_saves:
            since = [(owner.embedding.view(table), _version_at(owner, table, base_save)) for table in owner.configs]
            if base_save.formats == formats and all(view.has_changes_since(version) for view, version in since):
                locations.append(base_save.location)
        result.append(sorted(locations, key=lambda location: location.folders != (path,)))
    return result


def _version_at(owner: TableOwner, table: str, base_save: BaseSave) -> int:
    """Returns the version of a table's group at the time of `base_save`."""
    return base_save.versions[owner.embedding.groups.index(owner.embedding.layout.find_table(table)[0])]


def check_changes_tracked(owners: Sequence[TableOwner]) -> None:
    """Checks that all tables track changes, as incremental saves require.

    Raises:
        ValueError: a table does not track changes.
    """
    missing = [name for owner in owners for name, config in owner.configs.items() if not config.track_changes]
    if missing:
        raise ValueError(
            f"tables {missing} do not track changes, which incremental=True requires: set "
            "is_incremental=True in their configs (track_changes=True in a TableConfig)"
        )


def check_all_sharded(owners: Sequence[TableOwner], ranks: int) -> None:
    """Checks that all tables are sharded if several ranks save together.

    Raises:
        ValueError: a table is not sharded, so that each rank has different rows for it.
    """
    unsharded = [owner for owner in owners if owner.exchange is None]
    if ranks > 1 and unsharded:
        names = [name for owner in unsharded for name in owner.configs]
        raise ValueError(
            f"tables {names} are not sharded, so that each of {ranks} ranks has rows of its own: shard them too, or "
            f"save the modules {[owner.path for owner in unsharded]} separately, to a folder for each rank"
        )


@dataclass
class TableSnapshot:
    """Snapshot of what one rank writes of a table in a save.

    Attributes:
        key: key of the table in the save.
        owner, view: module that holds the table, and access to the table.
        specs: specs of the tensors in its files of rows.
        count: number of rows to write.
        row_snapshot: snapshot of the rows that the table holds.
        with_initial_rows: whether to also write rows that were never looked up, with their initial values.
        removed: ids that were removed since the base save; None if there are none.
        other_files: for each further file its role, tensor specs, number of rows, and chunks, which later training
            does not change.
    """

    key: str
    owner: TableOwner
    view: TableView
    specs: Sequence[TensorSpec]
    count: int
    row_snapshot: Snapshot
    with_initial_rows: bool
    removed: torch.Tensor | None = None
    other_files: deque[tuple[str, Sequence[TensorSpec], int, Iterator[Chunk]]] = field(default_factory=deque)


@dataclass
class ModelSnapshot:
    """Snapshot of a model's tables on one rank; training may continue while it is written.

    Attributes:
        tables: tables whose rows are still to be written.
        groups: groups of tables of each embedding.
        draft: manifest without files and row counts.
        copy_on_write: buffer for copies of rows that training changes before they are written.
        out: writer of this rank's files.
        result: manifest entries of this rank so far.
    """

    tables: deque[TableSnapshot]
    groups: list[list[Group]]
    draft: Manifest
    copy_on_write: CopyOnWriteBuffer
    out: RankFiles
    result: RankResult

    def close(self) -> None:
        for table in self.tables:
            table.row_snapshot.close()
        self.out.close()


def take_snapshot(
    owners: Sequence[TableOwner], keys: dict[tuple[int, str], str], identity: SaveIdentity, rank: int
) -> ModelSnapshot:
    """Takes a consistent snapshot of all tables. The caller holds `exclusive_tables`, and closes the snapshot later.

    Accumulation buffers are written at once; `write_snapshot` writes all other data.
    """
    draft = draft_manifest(owners, keys, identity)
    out = RankFiles(Path(identity.folder), rank, identity.id, draft.has_many_tables)
    groups = [list(owner.embedding.groups) for owner in owners]
    snapshot = ModelSnapshot(
        deque(),
        groups,
        draft,
        CopyOnWriteBuffer(Path(identity.folder), COPY_ON_WRITE_BYTES),
        out,
        RankResult(out.written),
    )
    of_draft = {table.key: table for table in draft.tables}
    try:
        for position, owner in enumerate(owners):
            base_save = next(
                (each for each in base_saves_of(owner.embedding) if each.location.save == identity.previous), None
            )
            for name in owner.configs:
                saved = of_draft[keys[position, name]]
                if not owner.writes_rows(name):
                    snapshot.result.rows[saved.key] = 0
                    continue
                since = None if base_save is None else _version_at(owner, name, base_save)
                snapshot.tables.append(_take_table_snapshot(snapshot, owner, saved, since))
                _take_evicted(snapshot, snapshot.tables[-1], None if base_save is None else base_save.evicted.get(name))
            snapshot.result.versions.append(start_versions(owner.embedding.layout))
    except BaseException:
        snapshot.close()
        raise
    return snapshot


def _take_table_snapshot(
    snapshot: ModelSnapshot, owner: TableOwner, saved: SavedTable, since: int | None
) -> TableSnapshot:
    """Takes the snapshot of one table; `since` is its version in the base save, or None for a full save."""
    name, key = saved.name, saved.key
    view = owner.embedding.view(name)
    rows = snapshot.result.rows[key] = owner.count(view)
    dtypes = view.dtypes()
    parts = tuple((part, dtypes[part], elements) for part, elements in saved.parts.items())
    specs = row_specs(parts, tuple((column, DTYPES[kind]) for column, kind in saved.columns.items()))
    removed = None if since is None else view.removed(since)
    ids = None
    if since is not None and removed is not None and len(removed) and not view.config.hashed:
        ids, removed = view.changed(since)  # a removed row of an index table is saved with its initial values
    row_snapshot = Snapshot(view, snapshot.copy_on_write, ids, since if ids is None else None)
    try:
        with_initial_rows = since is None and owner.configs[name].hashed != view.config.hashed
        count = rows if with_initial_rows else row_snapshot.count
        table = TableSnapshot(key, owner, view, specs, count, row_snapshot, with_initial_rows)
        if removed is not None and len(removed):
            table.removed = torch.from_numpy(removed)
        gradient_count = view.window_count()
        if gradient_count:
            chunks = ({"ids": torch.from_numpy(ids), "sums": sums} for ids, sums in view.window_rows())
            sums_spec = TensorSpec("sums", torch.float32, (0, 2 * view.config.embedding_dim))
            snapshot.out.write_role_file(
                WINDOW, key, [TensorSpec("ids", torch.int64, (0,)), sums_spec], gradient_count, chunks
            )
        if view.config.lifecycle is not None:
            snapshot.result.clocks[key] = view.clocks()
            if view.config.lifecycle.admits:
                candidates, columns = view.candidates()
                candidate_columns = {
                    "ids": candidates,
                    **{f"column.{name}": values for name, values in columns.items()},
                }
                candidate_specs = [TensorSpec(name, values.dtype, (0,)) for name, values in candidate_columns.items()]
                table.other_files.append((CANDIDATES, candidate_specs, len(candidates), iter([candidate_columns])))
            if view.config.lifecycle.rule(Sketch):
                sketch = serialize_sketch(owner, name, view.sketch())
                cells = {"ids": sketch, SKETCH: sketch}
                table.other_files.append((SKETCH, [TensorSpec(SKETCH, torch.uint8, (0,))], len(sketch), iter([cells])))
    except BaseException:
        row_snapshot.close()
        raise
    return table


def _take_cached(table: TableSnapshot) -> None:
    """Adds the list of cached rows to the files of a table; training need not wait until it is made."""
    cached = table.row_snapshot.cached()
    if cached is not None and len(cached.ids):
        table.other_files.append((CACHED, CACHED_SPECS, len(cached.ids), map(cached_rows_chunk, [cached])))


def _take_evicted(snapshot: ModelSnapshot, table: TableSnapshot, since: int | None) -> None:
    """Adds to the snapshot the pending evicted rows that the base save lacks: those after the serial number `since`."""
    evicted_rows = table.view.pending_evicted_rows(-1 if since is None else since)
    count = sum(map(len, evicted_rows))
    pending_evicted = table.owner.embedding.layout.evicted.get(table.view.config.name)
    if pending_evicted is not None:
        snapshot.result.evicted_before[table.key] = pending_evicted.rows() - count
    if evicted_rows:
        chunks = (
            _tensors(rows.ids, {WEIGHT: rows.weight, **rows.states}, rows.columns) | {"reason": rows.reason}
            for rows in evicted_rows
        )
        table.other_files.append((EVICTED, [*table.specs, TensorSpec("reason", torch.uint8, (0,))], count, chunks))


def write_snapshot(snapshot: ModelSnapshot) -> RankResult:
    """Writes this rank's files and returns their manifest entries; training may continue meanwhile."""
    out = snapshot.out
    for table in snapshot.tables:
        _take_cached(table)
    while snapshot.tables:
        table = snapshot.tables[0]
        if table.removed is not None:
            out.write_removed(table.key, 0, table.removed)
        out.write_rows(table.key, 0, table.specs, table.count, _row_chunks(table))
        table.row_snapshot.close()
        while table.other_files:  # removed one by one, so that the memory of each is freed once it is written
            role, specs, count, chunks = table.other_files.popleft()
            out.write_role_file(role, table.key, specs, count, chunks)
        snapshot.tables.popleft()
    out.finish()
    return snapshot.result


def _row_chunks(table: TableSnapshot) -> Iterator[Chunk]:
    """Yields the rows that the table holds, then, if `with_initial_rows`, the initial rows of this rank's other ids."""
    config = table.owner.configs[table.view.config.name]
    held = np.zeros(
        (config.num_embeddings + 7) // 8 if table.with_initial_rows else 0, np.uint8
    )  # bitmap of the ids whose rows the table holds
    for rows in table.row_snapshot.chunks():
        if table.with_initial_rows:
            np.bitwise_or.at(held, rows.ids >> 3, np.left_shift(1, rows.ids & 7).astype(np.uint8))
        yield _chunk(table.row_snapshot, rows)
    step = 8 * table.row_snapshot.size
    for begin in range(0, config.num_embeddings if table.with_initial_rows else 0, step):
        ids = np.arange(begin, min(begin + step, config.num_embeddings), dtype=np.int64)
        ids = ids[table.owner.owned(config.name, ids)]
        ids = ids[held[ids >> 3] >> (ids & 7).astype(np.uint8) & 1 == 0]
        for start in range(0, len(ids), table.row_snapshot.size):
            yield _chunk(table.row_snapshot, table.row_snapshot.initial(ids[start : start + table.row_snapshot.size]))


def _chunk(row_snapshot: Snapshot, rows: SnapshotRows) -> Chunk:
    columns = {name: torch.from_numpy(values) for name, values in rows.columns.items()}
    return _tensors(torch.from_numpy(rows.ids), row_snapshot.parts(rows), columns)


def _tensors(
    ids: torch.Tensor, parts: Mapping[str, torch.Tensor], columns: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Returns ids, parts and columns of rows by the names of the tensors in a file."""
    states = {f"state.{name}": part for name, part in parts.items() if name != WEIGHT}
    return {"ids": ids, WEIGHT: parts[WEIGHT], **states, **{f"column.{name}": each for name, each in columns.items()}}


def complete_manifest(draft: Manifest, results: Sequence[RankResult]) -> Manifest:
    """Completes a draft manifest with the files and row counts of all ranks."""
    tables = []
    for table in draft.tables:
        rows = sum(each.rows[table.key] for each in results)
        clocks = results[0].clocks.get(table.key, {})
        evicted_before = [each.evicted_before.get(table.key, 0) for each in results]
        if not any(evicted_before):
            evicted_before = []
        tables.append(SavedTable(**{**vars(table), "rows": rows, "clocks": clocks, "evicted_before": evicted_before}))
    files = [file for each in results for file in each.files]
    return replace(draft, tables=tables, files=files, world_size=len(results))


def publish_save(owners: Sequence[TableOwner], path: Path, identity: SaveIdentity, manifest: Manifest) -> Path:
    """Writes indexes and manifest, gives the folder its final name and returns its path. Only rank 0 calls this.

    The manifest is written after all other files, and the folder is renamed last, so that a crash never leaves an
    incomplete save that looks complete.
    """
    folder = Path(identity.folder)
    write_indexes(folder, manifest)
    files.write_file(folder / MANIFEST, manifest.to_bytes())
    files.sync_folder(folder)
    earlier = {location.path for owner in owners for location in save_locations_of(owner.embedding)}
    target = path / next_name(path, earlier)
    files.rename(folder, target)
    files.sync_folder(path)
    with contextlib.suppress(OSError):  # another process may have removed the save already
        cache_chain_link(target, manifest)
    return target


def record_base_save(owners: Sequence[TableOwner], save: Path, identity: SaveIdentity, snapshot: ModelSnapshot) -> None:
    """Records the save in the folder `save`, so that later deltas can follow it."""
    folders = tuple(dict.fromkeys([str(save.parent), *identity.folders]))
    location = SaveLocation(identity.id, identity.base, identity.sequence, save.name, folders)
    formats = row_formats(snapshot.draft.tables)
    for owner, version, groups in zip(owners, snapshot.result.versions, snapshot.groups, strict=True):
        evicted = dict.fromkeys(owner.configs, snapshot.result.serial)
        set_base_save(owner.embedding, location, formats, version, groups, evicted)
