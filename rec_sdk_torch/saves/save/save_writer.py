"""A save on its way to the disk."""

from __future__ import annotations

import contextlib
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from ...rules import Sketch
from ...tbe import WEIGHT, CopyOnWriteBuffer, Group, Snapshot, SnapshotRows, TableView, next_serial, versions
from ..format import files
from ..format.folders import UNFINISHED, Place, is_whole, next_name, remember
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
    formats,
)
from ..format.sketches import saved_sketch
from ..format.tensors import DTYPES, TensorSpec
from ..owners import Owner
from .base_saves import Mark, marks_of, places_of, set_mark
from .draft import Start, draft_of, formats_of
from .rank_writer import CACHED_SPECS, Piece, RankFiles, row_specs, saved_heat

ASIDE_BYTES = 64 << 20
"""Bytes of rows put aside that a save keeps in memory; more wait on the disk."""


def begin(path: Path, follows: Sequence[Sequence[Place]]) -> Start:
    """Makes the folder of a save, on rank 0, which holds the lock of `path`.

    Args:
        path: where saves are.
        follows: of each embedding on each rank, rank 0 first, saves that a delta can follow, the first of them best.
    """
    for left in path.glob(f"{UNFINISHED}*"):  # no other process writes here now: these broke off
        files.remove_tree(left)
    identity = uuid.uuid4().hex
    folder = path / f"{UNFINISHED}{identity}"
    before = _followed(follows)
    if before is None:
        start = Start(identity, identity, None, 0, str(folder))
    else:
        start = Start(identity, before.base, before.save, before.sequence + 1, str(folder), before.folders)
    files.new_folder(folder)
    return start


def _followed(follows: Sequence[Sequence[Place]]) -> Place | None:
    """The first save that is whole and that all can follow."""
    for place in follows[0] if follows else ():
        if all(any(each.save == place.save for each in own) for own in follows[1:]) and is_whole(place):
            return place
    return None


@dataclass
class Written:
    """The files that a rank has written.

    Attributes:
        files: for the manifest.
        rows: of each table, by its key.
        versions: of each embedding.
        clocks: of each table that admits or evicts ids, by its key.
        evicted_before: of each table, by its key, evicted rows that wait and are in the save before.
        serial: later than those of all evicted rows of the moment.
    """

    files: list[SavedFile]
    rows: dict[str, int] = field(default_factory=dict)
    versions: list[list[int]] = field(default_factory=list)
    clocks: dict[str, dict[str, int]] = field(default_factory=dict)
    evicted_before: dict[str, int] = field(default_factory=dict)
    serial: int = field(default_factory=next_serial)


def follows(owners: Sequence[Owner], path: str) -> list[list[Place]]:
    """For each embedding, the saves that a delta in the folder `path` could follow, the first of them best.

    It is the one before it in a folder that has a whole chain, and elsewhere the last save of the model, wherever that
    is; where it is not there any more, one before it.
    """
    marks, result = [marks_of(owner.embedding) for owner in owners], []
    now = formats_of(owners) if any(marks) else ()
    for owner, of_owner in zip(owners, marks, strict=True):
        places = []
        for mark in of_owner:
            since = [(owner.embedding.view(table), _version(owner, table, mark)) for table in owner.configs]
            if mark.formats == now and all(view.has_changes_since(version) for view, version in since):
                places.append(mark.place)
        result.append(sorted(places, key=lambda place: place.folders != (path,)))
    return result


def _version(owner: Owner, table: str, mark: Mark) -> int:
    """The version of a table's group at the moment of a save."""
    return mark.versions[owner.embedding.groups.index(owner.embedding.layout.find_table(table)[0])]


def check_tracked(owners: Sequence[Owner]) -> None:
    """
    Raises:
        ValueError: tables that do not know which of their rows changed.
    """
    missing = [name for owner in owners for name, config in owner.configs.items() if not config.track_changes]
    if missing:
        raise ValueError(
            f"tables {missing} do not keep what changed, so that incremental=True is not possible: set "
            "is_incremental=True in their configs (track_changes=True in a TableConfig)"
        )


def check_shared(owners: Sequence[Owner], ranks: int) -> None:
    """
    Raises:
        ValueError: tables of which each of several ranks has rows of its own, beside others that the ranks share.
    """
    alone = [owner for owner in owners if owner.exchange is None]
    if ranks > 1 and alone:
        raise ValueError(
            f"tables {[name for owner in alone for name in owner.configs]} are not sharded, so that each of {ranks} "
            f"ranks has rows of its own: shard them too, or save the modules {[owner.path for owner in alone]} and the "
            "sharded ones by themselves, those to a folder of each rank"
        )


@dataclass
class TableMoment:
    """The part of a table that one rank has at the moment of a save.

    Attributes:
        key: of the table in the save.
        owner, view: the table.
        specs, count: of its file of rows.
        snapshot: the rows that it knows.
        initial: ids that it does not know have initial rows in the save.
        removed: ids that have left it since the save before.
        others: the files that it has beside its rows: role, tensors, count, and pieces, which nothing changes.
    """

    key: str
    owner: Owner
    view: TableView
    specs: Sequence[TensorSpec]
    count: int
    snapshot: Snapshot
    initial: bool
    removed: torch.Tensor | None = None
    others: deque[tuple[str, Sequence[TensorSpec], int, Iterator[Piece]]] = field(default_factory=deque)


@dataclass
class Moment:
    """All tables of a model on one rank, at the moment of a save: training may go on.

    Attributes:
        tables: with rows that wait.
        groups: of each embedding.
        draft: the manifest without what is written.
        aside: where rows wait that were about to change.
    """

    tables: list[TableMoment]
    groups: list[list[Group]]
    draft: Manifest
    aside: CopyOnWriteBuffer
    out: RankFiles
    written: Written

    def close(self) -> None:
        for table in self.tables:
            table.snapshot.close()
        self.out.close()


def take(owners: Sequence[Owner], keys: dict[tuple[int, str], str], start: Start, rank: int) -> Moment:
    """Takes one moment of all tables, whose embeddings the caller holds. `close` it.

    Sums of open windows are written now; all else waits for `write`.
    """
    draft = draft_of(owners, keys, start)
    out = RankFiles(Path(start.folder), rank, start.id, draft.many)
    groups = [list(owner.embedding.groups) for owner in owners]
    moment = Moment([], groups, draft, CopyOnWriteBuffer(Path(start.folder), ASIDE_BYTES), out, Written(out.written))
    of_draft = {table.key: table for table in draft.tables}
    try:
        for place, owner in enumerate(owners):
            mark = next((each for each in marks_of(owner.embedding) if each.place.save == start.previous), None)
            for name in owner.configs:
                saved = of_draft[keys[place, name]]
                if not owner.saves(name):
                    moment.written.rows[saved.key] = 0
                    continue
                since = None if mark is None else _version(owner, name, mark)
                moment.tables.append(_take_table(moment, owner, saved, since))
                _take_evicted(moment, moment.tables[-1], None if mark is None else mark.evicted.get(name))
            moment.written.versions.append(versions(owner.embedding.layout))
    except BaseException:
        moment.close()
        raise
    return moment


def _take_table(moment: Moment, owner: Owner, saved: SavedTable, since: int | None) -> TableMoment:
    """`saved`: the table in the draft of the manifest."""
    name, key = saved.name, saved.key
    view = owner.embedding.view(name)
    rows = moment.written.rows[key] = owner.count(view)
    dtypes = view.dtypes()
    parts = tuple((part, dtypes[part], elements) for part, elements in saved.parts.items())
    specs = row_specs(parts, tuple((column, DTYPES[kind]) for column, kind in saved.columns.items()))
    gone = None if since is None else view.removed(since)
    ids = None
    if since is not None and gone is not None and len(gone) and not view.config.hashed:
        ids, gone = view.changed(since)  # rows of an index table that were removed are initial ones now
    snapshot = Snapshot(view, moment.aside, ids, since if ids is None else None)
    try:
        initial = since is None and owner.configs[name].hashed != view.config.hashed
        count = rows if initial else snapshot.count
        table = TableMoment(key, owner, view, specs, count, snapshot, initial)
        if gone is not None and len(gone):
            table.removed = torch.from_numpy(gone)
        waiting = view.window_count()
        if waiting:
            pieces = ({"ids": torch.from_numpy(ids), "sums": sums} for ids, sums in view.window_rows())
            of_sums = TensorSpec("sums", torch.float32, (0, 2 * view.config.embedding_dim))
            moment.out.other(WINDOW, key, [TensorSpec("ids", torch.int64, (0,)), of_sums], waiting, pieces)
        hot = view.cached()
        if view.config.lifecycle is not None:
            moment.written.clocks[key] = view.clocks()
            if view.config.lifecycle.admits:
                candidates, columns = view.candidates()
                waits = {"ids": candidates, **{f"column.{name}": values for name, values in columns.items()}}
                of_waits = [TensorSpec(name, values.dtype, (0,)) for name, values in waits.items()]
                table.others.append((CANDIDATES, of_waits, len(candidates), iter([waits])))
            if view.config.lifecycle.rule(Sketch):
                sketch = saved_sketch(owner, name, view.sketch())
                cells = {"ids": sketch, SKETCH: sketch}
                table.others.append((SKETCH, [TensorSpec(SKETCH, torch.uint8, (0,))], len(sketch), iter([cells])))
        if hot is not None and len(hot.ids):
            table.others.append((CACHED, CACHED_SPECS, len(hot.ids), map(saved_heat, [hot])))
    except BaseException:
        snapshot.close()
        raise
    return table


def _take_evicted(moment: Moment, table: TableMoment, since: int | None) -> None:
    """Takes the evicted rows that wait and are not in the save before, which had all up to the serial `since`."""
    waiting = table.view.pending_evicted_rows(-1 if since is None else since)
    count = sum(map(len, waiting))
    departures = table.owner.embedding.layout.evicted.get(table.view.config.name)
    if departures is not None:
        moment.written.evicted_before[table.key] = departures.rows() - count
    if waiting:
        pieces = (
            _tensors(rows.ids, {WEIGHT: rows.weight, **rows.states}, rows.columns) | {"reason": rows.reason}
            for rows in waiting
        )
        table.others.append((EVICTED, [*table.specs, TensorSpec("reason", torch.uint8, (0,))], count, pieces))


def write(moment: Moment) -> Written:
    """Writes this rank's rows of a moment. Training may go on."""
    out = moment.out
    for table in moment.tables:
        if table.removed is not None:
            out.removed(table.key, 0, table.removed)
        out.rows(table.key, 0, table.specs, table.count, _pieces(table))
        table.snapshot.close()
        while table.others:  # each is written and forgotten
            role, specs, count, pieces = table.others.popleft()
            out.other(role, table.key, specs, count, pieces)
    out.finish()
    return moment.written


def _pieces(table: TableMoment) -> Iterator[Piece]:
    config = table.owner.configs[table.view.config.name]
    known = np.zeros((config.num_embeddings + 7) // 8 if table.initial else 0, np.uint8)
    for rows in table.snapshot.chunks():
        if table.initial:
            np.bitwise_or.at(known, rows.ids >> 3, np.left_shift(1, rows.ids & 7).astype(np.uint8))
        yield _piece(table.snapshot, rows)
    step = 8 * table.snapshot.size
    for begin in range(0, config.num_embeddings if table.initial else 0, step):
        some = np.arange(begin, min(begin + step, config.num_embeddings), dtype=np.int64)
        some = some[table.owner.mine(config.name, some)]
        some = some[known[some >> 3] >> (some & 7).astype(np.uint8) & 1 == 0]
        for place in range(0, len(some), table.snapshot.size):
            yield _piece(table.snapshot, table.snapshot.initial(some[place : place + table.snapshot.size]))


def _piece(snapshot: Snapshot, rows: SnapshotRows) -> Piece:
    columns = {name: torch.from_numpy(values) for name, values in rows.columns.items()}
    return _tensors(torch.from_numpy(rows.ids), snapshot.parts(rows), columns)


def _tensors(
    ids: torch.Tensor, parts: Mapping[str, torch.Tensor], columns: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Rows as a file has them."""
    states = {f"state.{name}": part for name, part in parts.items() if name != WEIGHT}
    return {"ids": ids, WEIGHT: parts[WEIGHT], **states, **{f"column.{name}": each for name, each in columns.items()}}


def manifest_of(draft: Manifest, written: Sequence[Written]) -> Manifest:
    """The manifest of a save whose files the ranks have written."""
    tables = []
    for table in draft.tables:
        before = [each.evicted_before.get(table.key, 0) for each in written]
        rows, clocks = sum(each.rows[table.key] for each in written), written[0].clocks.get(table.key, {})
        tables.append(replace(table, rows=rows, clocks=clocks, evicted_before=before if any(before) else []))
    files = [file for each in written for file in each.files]
    return replace(draft, tables=tables, files=files, world_size=len(written))


def finish(owners: Sequence[Owner], path: Path, start: Start, manifest: Manifest) -> Path:
    """Makes a save of what is written, on rank 0."""
    folder = Path(start.folder)
    write_indexes(folder, manifest)
    files.write_file(folder / MANIFEST, manifest.to_bytes())
    files.sync_folder(folder)
    before = {place.path for owner in owners for place in places_of(owner.embedding)}
    target = path / next_name(path, before)
    files.rename(folder, target)
    files.sync_folder(path)
    with contextlib.suppress(OSError):  # it has been removed
        remember(target, manifest)
    return target


def note(owners: Sequence[Owner], save: Path, start: Start, moment: Moment) -> None:
    """Lets later deltas follow this save, which is in the folder `save`."""
    folders = tuple(dict.fromkeys([str(save.parent), *start.folders]))
    place, now = Place(start.id, start.base, start.sequence, save.name, folders), formats(moment.draft.tables)
    for owner, version, groups in zip(owners, moment.written.versions, moment.groups, strict=True):
        evicted = dict.fromkeys(owner.configs, moment.written.serial)
        set_mark(owner.embedding, place, now, version, groups, evicted)
