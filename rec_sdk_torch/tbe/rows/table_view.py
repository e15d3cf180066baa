"""The one door to whole tables: saves, the optimizer's states, shards and exports use nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from ..cache.batch import Int64Array
from ..cache.cache_warming import warm_rows
from ..cache.device_cache import Group
from ..cache.evicted import EvictedChunk, EvictedRows
from ..cache.eviction import remove
from ..cache.group_spec import draw_initial_weights, stored_bytes
from ..config.optimizer import TableOptimizer
from .layout import Layout
from .row_parts import WEIGHT, as_stored, part_view, read_parts, write_parts
from .table_chunks import SaveView
from .user_tensors import (
    check_evicted_rows,
    columns_problem,
    columns_to_host,
    distinct_ids_problem,
    hash_ids_problem,
    heats_to_host,
    ids_to_host,
    tensor_problem,
    to_host,
)


@dataclass(frozen=True, eq=False)
class Chunk:
    """Some rows of a table.

    Attributes:
        ids: int64 `[n]`.
        parts: of those rows, by name: `weight` `[n, D]` in the table's data type, states
            `[n, D]` or `[n, 1]` in theirs.
    """

    ids: torch.Tensor
    parts: dict[str, torch.Tensor]


class TableView(SaveView):
    """One whole table of an embedding.

    A call sees one moment of the table. For one moment of several calls or tables, hold `embedding.exclusive()`.

    Attributes:
        layout: the groups that the table is in.
        config: of the table.
        shard: (rank, world size) of the processes that the table is divided among.
        offset: what row 0 of an index table is in the whole of its shards.
    """

    shard = (0, 1)
    offset = 0

    def __init__(self, layout: Layout, name: str) -> None:
        """
        Raises:
            KeyError: there is no such table.
        """
        self.config = layout.config(name)
        self.layout = layout

    def parts(self) -> dict[str, tuple[int, ...]]:
        """Names of the parts of a row and their shapes, `weight` first."""
        dim = self.config.embedding_dim
        optimizer = self.layout.optimizer_of(self.config.name)
        states = optimizer.spec.states if optimizer else ()
        return {WEIGHT: (dim,), **{state.name: (state.elements(dim),) for state in states}}

    def dtypes(self) -> dict[str, torch.dtype]:
        """Data types of the parts of a row, by name."""
        optimizer = self.layout.optimizer_of(self.config.name)
        states = {state.name: optimizer.state_dtype(state.name) for state in optimizer.spec.states} if optimizer else {}
        return {WEIGHT: self.config.weight_dtype, **states}

    def count(self) -> int:
        """Rows: ids known of a hash table, `num_embeddings` of an index table."""
        with self.layout.locks.exclusive():
            group, table = self.locate()
            return group.engine.tables.row_count(table)

    def ids(self) -> torch.Tensor:
        """Ids of a hash table, or row numbers of an index table, in row order: int64 `[n]`.

        In a hash table that is the order of arrival; an id that comes after a removal takes the place of a removed one.
        """
        with self.layout.locks.exclusive():
            group, table = self.locate()
            return torch.from_numpy(group.engine.tables.rows(table)[0])

    def version(self) -> int:
        """A number for `chunks(since=)`: rows that change from now on are of a later version."""
        with self.layout.locks.exclusive():
            return self.locate()[0].engine.saves.version()

    def chunks(
        self, parts: Sequence[str] | None = None, *, kept: bool = False, since: int | None = None
    ) -> Iterator[Chunk]:
        """Rows in row order, some at a time; all rows if nothing else is said.

        Args:
            parts: names of the parts that are wanted; None for all.
            kept: leaves out rows that are as they were initialised.
            since: only rows that changed after `version` gave this number, and perhaps some that did shortly before.

        Raises:
            ValueError: `since` for a table without `track_changes`.
        """
        with self.layout.locks.exclusive():
            group, table = self.locate()
            if since is not None:
                ids, _ = group.engine.saves.changed_ids(table, since)
            else:
                ids = group.engine.saves.ids_with_records(table) if kept else group.engine.tables.rows(table)[0]
        for begin in range(0, len(ids), group.chunk):
            yield self.read(torch.from_numpy(ids[begin : begin + group.chunk]), parts)

    def read(self, ids: torch.Tensor, parts: Sequence[str] | None = None) -> Chunk:
        """Rows of `ids`, int64 `[n]`. An id that a hash table does not know has its initial row, and is not added.

        Raises:
            IndexError: an index table has no such row.
            KeyError: the table has no such part.
        """
        wanted = ids_to_host(self.config.name, ids)
        with self.layout.locks.exclusive():
            group, table = self.locate()
            return Chunk(ids, as_stored(self.config, read_parts(group, table, wanted, self.part_indices(parts))))

    def knows(self, ids: torch.Tensor) -> torch.Tensor:
        """Which of `ids`, int64 `[n]`, are rows: bool `[n]`."""
        with self.layout.locks.exclusive():
            group, table = self.locate()
            return torch.from_numpy(group.engine.tables.find_rows(table, ids_to_host(self.config.name, ids))[0] >= 0)

    def part_indices(self, parts: Sequence[str] | None) -> dict[str, int]:
        """Returns the place of each part in a record by name: -1 for the weight, else the index of the state."""
        known = {name: index - 1 for index, name in enumerate(self.parts())}
        return known if parts is None else {name: known[name] for name in parts}

    def write(self, ids: torch.Tensor, parts: Mapping[str, torch.Tensor]) -> None:
        """Sets parts of the rows of `ids`; their other parts stay. A hash table adds ids that it does not know.

        All or nothing: after an exception the table is as before.

        Raises:
            IndexError: an index table has no such row.
            CapacityError, MemoryError: the rows do not fit.
            ValueError, KeyError: ids or parts that are not the table's.
        """
        load(self.layout, [TableWrite(self, ids, parts)])

    def add(self, ids: torch.Tensor, change: torch.Tensor) -> None:
        """Adds `change` `[n, D]` to the weights of the rows of `ids`, int64 `[n]`; 16-bit weights round once.

        Raises:
            KeyError: an id is no row of the table; nothing was changed.
            ValueError: shapes that do not fit, or an id that is there twice.
        """
        name = self.config.name
        if len(ids.unique()) != len(ids):
            raise ValueError(f"table {name!r}: {len(ids) - len(ids.unique())} ids are duplicates")
        with self.layout.locks.exclusive():
            unknown = ids.cpu()[~self.knows(ids)]
            if len(unknown):
                raise KeyError(f"table {name!r}: {len(unknown)} ids have no row (such as {int(unknown[0])})")
            weight = self.read(ids, [WEIGHT]).parts[WEIGHT]
            if change.shape != weight.shape:
                raise ValueError(
                    f"table {name!r}: change has shape {tuple(change.shape)}, expected {tuple(weight.shape)}"
                )
            self.write(ids, {WEIGHT: (weight.float() + change.detach().cpu()).to(weight.dtype)})

    def remove(self, ids: torch.Tensor) -> int:
        """Takes ids out of a hash table, or makes rows of an index table initial; how many were known.

        Raises:
            RuntimeError: a batch in flight uses one of them; nothing was removed.
        """
        wanted = ids_to_host(self.config.name, ids)
        with self.layout.locks.exclusive():
            return remove(*self.locate(), wanted)

    def put_back(self, rows: EvictedRows, *, overwrite: bool = True) -> int:
        """Makes rows that `take_evicted` gave rows of the table again; how many.

        Weights, states and columns are as they were then; of an id that is there twice, as it was when it left last.
        Columns or states that `rows` lack are those of a new row, or stay as they are.

        Args:
            rows: all or some of those that were taken.
            overwrite: ids that have come back since get this row, and lose the one that they have; else they keep it.

        Raises:
            CapacityError, MemoryError: the rows do not fit; nothing was changed, as after every exception.
            ValueError, TypeError: states or columns that the table does not keep, or shapes that do not fit.
        """
        check_evicted_rows(self.config.name, rows)
        chosen = rows.latest()
        with self.layout.locks.exclusive():
            if not overwrite:
                chosen = chosen[~self.knows(chosen.ids)]
            parts = {WEIGHT: chosen.weight, **chosen.states}
            load(self.layout, [TableWrite(self, chosen.ids, parts, columns=chosen.columns)])
        return len(chosen)

    def reset(self) -> None:
        """Takes out all ids of a hash table, or makes rows of an index table initial; no row is handed out.

        Nothing is counted any more of ids without a row, either; clocks go on.

        Raises:
            RuntimeError: a batch in flight uses one of them; nothing was removed.
        """
        with self.layout.locks.exclusive():
            group, table = self.locate()
            group.before_change(table)
            group.engine.tables.remove(table, self.ids().numpy())
            group.engine.lifecycle.set_candidates(table, np.empty(0, np.int64), {})
            if table in group.evicted:
                group.evicted[table].chunks.clear()

    def copy_shard(self, old: TableView, owned: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Copies rows of a whole table to this part of it, with their counts, evicted rows and the optimizer's steps.

        Args:
            old: the whole table.
            owned: which of some ids, int64 `[n]`, are of this part, bool `[n]`.
        """
        for chunk in old.chunks(kept=old.config.lifecycle is None):  # rules count rows that are as at first, too
            here = owned(chunk.ids)
            self.write(chunk.ids[here], {name: part[here] for name, part in chunk.parts.items()})
        if old.config.lifecycle is not None:
            self.copy_shard_lifecycle(old, self.ids(), owned)
        if self.config.name in old.layout.evicted:
            pieces = [EvictedChunk.now(rows[owned(rows.ids)]) for rows in old.pending_evicted_rows()]
            self.layout.evicted[self.config.name].chunks[:] = pieces
        before, now = (view.layout.optimizer_of(self.config.name) for view in (old, self))
        if before is not None and now is not None:
            load(self.layout, [], [(now, before.step)])

    def warm(self, ids: torch.Tensor, heats: torch.Tensor | None = None) -> int:
        """Brings rows of `ids`, int64 `[n]`, hottest first, to free slots of the device cache; how many came.

        Passes over ids that a hash table does not know, rows in the cache, and those whose gradients wait outside it.
        `heats`: in how many batches each was used lately, float `[n]`, for policies that count; None: in the latest.

        Raises:
            IndexError: an index table has no such row.
            RuntimeError: batches are in flight.
            ValueError: other heats than one number from 0 on for each id.
        """
        wanted, counted = ids_to_host(self.config.name, ids), heats_to_host(self.config.name, ids, heats)
        with self.layout.locks.exclusive():
            return warm_rows(*self.locate(), wanted, counted)

    def memory(self) -> dict[str, int]:
        """Bytes that the table takes, by kind: `store_bytes`, `disk_bytes` and others, as the engine names them."""
        group, table = self.locate()
        return group.memory(table)

    def stored_bytes(self) -> int:
        """Bytes of a row in host memory."""
        return stored_bytes(self.config, self.layout.optimizer_of(self.config.name))

    def in_place(self) -> dict[str, torch.Tensor]:
        """Views of the rows of an index table in the cache, by part: `[rows, D]`, or `[rows, 1]`.

        Raises:
            RuntimeError: they are not resident in their order.
        """
        with self.layout.locks.exclusive():
            group, table = self.locate()
            rows = self.config.num_embeddings
            slots = group.engine.tables.find_rows(table, np.arange(rows, dtype=np.int64))[1]
            begin = int(slots[0])
            if not np.array_equal(slots, np.arange(begin, begin + rows)):
                raise RuntimeError(f"table {self.config.name!r}: its rows are not resident in their order")
            records = group.swap.cache[begin : begin + rows]
            return {name: part_view(group, place)(records).detach() for name, place in self.part_indices(None).items()}


@dataclass(frozen=True, eq=False)
class TableWrite:
    """New values of some rows of a table.

    Attributes:
        view: the table.
        ids: int64 `[n]`; None for all rows of an index table.
        parts: by name, `[n, ...]`.
        whole: the table is to have no other ids.
        initial: parts that all other rows have at first, by name, one number each.
        columns: what the table's rules keep of the rows, by name, `[n]`.
    """

    view: TableView
    ids: torch.Tensor | None
    parts: Mapping[str, torch.Tensor]
    whole: bool = False
    initial: Mapping[str, float] | None = None
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def problem(self) -> str | None:
        """Says why it cannot be loaded; None when it can."""
        config = self.view.config
        if self.ids is not None:
            problem = hash_ids_problem(config, self.ids) if config.hashed else distinct_ids_problem(self.ids)
            if problem:
                return problem
        rows = config.num_embeddings if self.ids is None else self.ids.numel()
        shapes = self.view.parts()
        for name, values in self.parts.items():
            if name not in shapes:
                return f"it has no part {name!r}, only {list(shapes)}"
            problem = tensor_problem(values)
            if problem:
                return f"{name} {problem}"
            if tuple(values.shape) != (rows, *shapes[name]):
                return f"shape {tuple(values.shape)} of {name}, expected {(rows, *shapes[name])}"
        return columns_problem(config, self.columns, rows)


class _WriteTables:
    """Contents on their way into tables: all of them, or after an exception none."""

    def __init__(
        self,
        contents: Sequence[TableWrite],
        numbers: Sequence[tuple[TableOptimizer, int]],
        drop_windows: Callable[[], None] | None,
    ) -> None:
        """`numbers`: the steps that optimizers are to have counted. `drop_windows`: where open windows are to go."""
        self._contents = contents
        self._numbers = numbers
        self._drop_windows = drop_windows
        self._preserved_rows: list[_PreservedRows | None] = []
        self.started = False

    def run(self) -> None:
        if not self.started:
            self._prepare()
        if self._drop_windows is not None:
            self._drop_windows()
        for content, preserved in zip(self._contents, self._preserved_rows, strict=True):
            _write(content, preserved)
        for optimizer, step in self._numbers:
            optimizer.step = step

    def _prepare(self) -> None:
        """Everything that can fail; leaves no trace then."""
        self._contents = [
            replace(content, parts={name: to_host(part) for name, part in content.parts.items()})
            for content in self._contents
        ]
        added: list[tuple[Group, int, Int64Array]] = []
        try:
            for content in self._contents:
                group, table = content.view.locate()
                ids = _ids_to_write(content)
                rows, _ = group.engine.tables.find_rows(table, ids)
                added.append((group, table, ids[rows < 0]))
                rows, _ = group.engine.tables.insert(table, ids)
                group.engine.tables.reserve_rows(table, rows)
                if content.initial:
                    others = group.engine.saves.unlisted_ids(table, ids)
                    group.engine.tables.reserve_rows(table, group.engine.tables.find_rows(table, others)[0])
            self._preserved_rows = [_preserved_rows(content) for content in self._contents]
            self.started = True
        except BaseException:
            for group, table, ids in () if self.started else added:
                group.engine.tables.remove(table, ids, candidates=False)
            raise


def load(
    layout: Layout,
    contents: Sequence[TableWrite],
    steps: Sequence[tuple[TableOptimizer, int]] = (),
    *,
    drop_windows: bool = False,
) -> None:
    """Sets rows of tables, and the steps that optimizers have counted: all, or after an exception nothing.

    Raises:
        ValueError: contents that do not fit their tables.
        IndexError, CapacityError, MemoryError: rows that there cannot be.
        RuntimeError: ids are to leave that a batch in flight uses.
    """
    for content in contents:
        problem = content.problem()
        if problem:
            raise ValueError(f"table {content.view.config.name!r}: {problem}")
    with layout.locks.exclusive():
        layout.locks.keep_rows(layout.groups if contents else [])
        layout.locks.run_resumable(_WriteTables(contents, steps, layout.drop_windows if drop_windows else None))


def fill_tables(layout: Layout) -> None:
    """Draws the rows of new index tables with an `init_fn`. Hash tables draw new rows when they come."""
    for table in layout.tables:
        if table.init_fn is not None and not table.hashed:
            rows = draw_initial_weights(table, table.num_embeddings)
            load(layout, [TableWrite(TableView(layout, table.name), None, {WEIGHT: rows})])


def _ids_to_write(content: TableWrite) -> Int64Array:
    if content.ids is None:
        return np.arange(content.view.config.num_embeddings, dtype=np.int64)
    return ids_to_host(content.view.config.name, content.ids)


@dataclass(frozen=True, eq=False)
class _PreservedRows:
    """All parts of the rows that a table is to have, and what is counted of them; candidates, or a sketch."""

    parts: dict[str, torch.Tensor]
    columns: dict[str, np.ndarray]
    candidates: tuple[Int64Array, dict[str, np.ndarray]]
    sketch: np.ndarray


def _preserved_rows(content: TableWrite) -> _PreservedRows | None:
    """The part of a table that stays, where it has other rows too; None where it has no others.

    Raises:
        RuntimeError: batches in flight use rows of the table.
    """
    group, table = content.view.locate()
    ids = _ids_to_write(content)
    if not content.whole or not len(group.engine.saves.unlisted_ids(table, ids)):
        return None
    if group.engine.in_flight():
        raise RuntimeError(
            f"ids of table {content.view.config.name!r} cannot be replaced while batches are in flight: run their "
            "backward, or drop the outputs of their forward"
        )
    columns = group.engine.lifecycle.read_columns(table, group.engine.tables.find_rows(table, ids)[0])
    parts = content.view.read(torch.from_numpy(ids)).parts
    return _PreservedRows(
        parts, columns, group.engine.lifecycle.candidates(table), group.engine.lifecycle.sketch(table)
    )


def _write(content: TableWrite, preserved: _PreservedRows | None) -> None:
    """May be done again from the start."""
    group, table = content.view.locate()
    ids = _ids_to_write(content)
    group.before_change(table, None if content.whole or content.initial else ids)
    parts = {**(preserved.parts if preserved else {}), **content.parts}
    if preserved is not None:  # begun anew, rows have the order of the ids, as in the table that was saved
        group.engine.tables.clear(table)
        rows, _ = group.engine.tables.insert(table, ids)
        group.engine.lifecycle.write_columns(table, rows, preserved.columns)
        group.engine.lifecycle.set_candidates(table, *preserved.candidates)
        if len(preserved.sketch):
            group.engine.lifecycle.set_sketch(table, [preserved.sketch])
    places = content.view.part_indices(list(parts))
    write_parts(group, table, ids, {places[name]: part for name, part in parts.items()})
    if content.columns:
        given = columns_to_host(content.view.config.name, content.columns)
        group.engine.lifecycle.write_columns(table, group.engine.tables.find_rows(table, ids)[0], given)
    others = group.engine.saves.unlisted_ids(table, ids) if content.initial else np.empty(0, np.int64)
    for name, number in (content.initial or {}).items():
        initial = torch.tensor(number, dtype=torch.float32, device="cpu").expand(len(others), 1)
        write_parts(group, table, others, {content.view.part_indices([name])[name]: initial})
