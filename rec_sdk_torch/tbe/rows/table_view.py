"""Read and write access to one table, across cache and host store.

Saves, optimizer states, sharding and export are built on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from ...runtime.former_names import accepts_former_members
from ..cache.batch import Int64Array
from ..cache.cache_warming import warm_rows
from ..cache.device_cache import Group
from ..cache.evicted import EvictedChunk, EvictedRows
from ..cache.eviction import remove
from ..cache.group_spec import draw_initial_weights, stored_bytes
from ..config.optimizer import TableOptimizer
from .layout import Layout
from .row_parts import WEIGHT, Chunk, as_stored, part_view, read_parts, write_parts
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


@accepts_former_members(
    take_over="copy_shard",
    begin_anew="reset",
    part_places="part_indices",
    evicted_waiting="pending_evicted_rows",
    take_over_counts="copy_shard_lifecycle",
    id_pieces="id_chunks",
    piece_rows="chunk_rows",
    knows_changes="has_changes_since",
)
class TableView(SaveView):
    """Read and write access to one table of an embedding.

    Each call is atomic. For a consistent state over several calls or tables, hold `embedding.exclusive()`.

    Attributes:
        layout: the layout of the table's embedding.
        config: the table's config.
        shard: (rank, world size) of a sharded table; (0, 1) otherwise.
        offset: the row number, in the unsharded index table, of this shard's row 0.
    """

    shard = (0, 1)
    offset = 0

    def __init__(self, layout: Layout, name: str) -> None:
        """Creates a view of the table `name`.

        Raises:
            KeyError: there is no such table.
        """
        self.config = layout.config(name)
        self.layout = layout

    def parts(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of each part of a row by name, `weight` first."""
        dim = self.config.embedding_dim
        optimizer = self.layout.optimizer_of(self.config.name)
        states = optimizer.spec.states if optimizer else ()
        return {WEIGHT: (dim,), **{state.name: (state.elements(dim),) for state in states}}

    def dtypes(self) -> dict[str, torch.dtype]:
        """Returns the data type of each part of a row by name."""
        optimizer = self.layout.optimizer_of(self.config.name)
        states = {state.name: optimizer.state_dtype(state.name) for state in optimizer.spec.states} if optimizer else {}
        return {WEIGHT: self.config.weight_dtype, **states}

    def count(self) -> int:
        """Returns the number of rows: the ids of a hash table, `num_embeddings` of an index table."""
        with self.layout.locks.exclusive():
            group, table = self.locate()
            return group.engine.tables.row_count(table)

    def ids(self) -> torch.Tensor:
        """Returns the ids of a hash table, or the row numbers of an index table, in row order: int64 `[n]`.

        The row order of a hash table is the order of insertion, except that new ids reuse the rows of removed ones.
        """
        with self.layout.locks.exclusive():
            group, table = self.locate()
            return torch.from_numpy(group.engine.tables.rows(table)[0])

    def version(self) -> int:
        """Returns the current version for `chunks(since=)`: rows that change from now on have a later version."""
        with self.layout.locks.exclusive():
            return self.locate()[0].engine.saves.version()

    def chunks(
        self, parts: Sequence[str] | None = None, *, kept: bool = False, since: int | None = None
    ) -> Iterator[Chunk]:
        """Yields rows in chunks, in row order.

        Args:
            parts: names of the parts to read; None for all.
            kept: whether rows that still have their initial values are skipped.
            since: a result of `version`: only rows that changed later are read, and perhaps a few that changed earlier.

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
        """Reads the rows of `ids`, int64 `[n]`. Unknown ids of a hash table read their initial row and are not added.

        Raises:
            IndexError: an index table has no such row.
            KeyError: the table has no such part.
        """
        array = ids_to_host(self.config.name, ids)
        with self.layout.locks.exclusive():
            group, table = self.locate()
            return Chunk(ids, as_stored(self.config, read_parts(group, table, array, self.part_indices(parts))))

    def knows(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns which of `ids`, int64 `[n]`, have a row: bool `[n]`."""
        with self.layout.locks.exclusive():
            group, table = self.locate()
            return torch.from_numpy(group.engine.tables.find_rows(table, ids_to_host(self.config.name, ids))[0] >= 0)

    def part_indices(self, parts: Sequence[str] | None) -> dict[str, int]:
        """Returns the index of each part by name: -1 for the weight, i for state i; None for all parts."""
        known = {name: index - 1 for index, name in enumerate(self.parts())}
        return known if parts is None else {name: known[name] for name in parts}

    def write(self, ids: torch.Tensor, parts: Mapping[str, torch.Tensor]) -> None:
        """Writes parts of the rows of `ids`; other parts do not change. A hash table adds unknown ids.

        After an exception the table is unchanged.

        Args:
            ids: int64 `[n]`, distinct.
            parts: values by name, `[n, ...]`.

        Raises:
            IndexError: an index table has no such row.
            CapacityError, MemoryError: the rows do not fit.
            ValueError, KeyError: invalid ids or parts.
        """
        load(self.layout, [TableWrite(self, ids, parts)])

    def add(self, ids: torch.Tensor, change: torch.Tensor) -> None:
        """Adds `change`, `[n, D]`, to the weights of the rows of `ids`, int64 `[n]`; 16-bit sums are rounded once.

        Raises:
            KeyError: an id has no row; nothing was changed.
            ValueError: shapes that do not match, or duplicate ids.
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
        """Removes ids from a hash table, or resets rows of an index table; returns how many ids the table contained.

        Raises:
            RuntimeError: a batch in flight uses one of the ids; nothing was removed.
        """
        array = ids_to_host(self.config.name, ids)
        with self.layout.locks.exclusive():
            return remove(*self.locate(), array)

    def put_back(self, rows: EvictedRows, *, overwrite: bool = True) -> int:
        """Writes evicted rows back to the table; returns how many rows were written.

        Weights, states and columns are restored. For an id with several rows, the row that was evicted last is used.
        States and columns that `rows` lack get the values of a new row, or do not change if the id has a row.

        Args:
            rows: all or some of the rows that `take_evicted` returned.
            overwrite: whether ids that have a row again get the evicted row; else these ids are skipped.

        Raises:
            CapacityError, MemoryError: the rows do not fit. Nothing was changed, as after every exception.
            ValueError, TypeError: states or columns that the table does not have, or shapes that do not match.
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
        """Removes all ids of a hash table, or resets all rows of an index table.

        Candidates and buffered evicted rows are deleted too; the removed rows do not become evicted rows. Clocks keep
        their values.

        Raises:
            RuntimeError: a batch in flight uses rows of the table; nothing was removed.
        """
        with self.layout.locks.exclusive():
            group, table = self.locate()
            group.before_change(table)
            group.engine.tables.remove(table, self.ids().numpy())
            group.engine.lifecycle.set_candidates(table, np.empty(0, np.int64), {})
            if table in group.evicted:
                group.evicted[table].chunks.clear()

    def copy_shard(self, old: TableView, owned: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Copies this shard's rows from an unsharded table, with counts, evicted rows and the optimizer's step.

        Args:
            old: the view of the unsharded table.
            owned: a function of ids, int64 `[n]`, that returns for each id whether this shard owns it, bool `[n]`.
        """
        # With rules, rows that still have their initial values are copied too.
        for chunk in old.chunks(kept=old.config.lifecycle is None):
            mask = owned(chunk.ids)
            self.write(chunk.ids[mask], {name: part[mask] for name, part in chunk.parts.items()})
        if old.config.lifecycle is not None:
            self.copy_shard_lifecycle(old, self.ids(), owned)
        if self.config.name in old.layout.evicted:
            pieces = [EvictedChunk.now(rows[owned(rows.ids)]) for rows in old.pending_evicted_rows()]
            self.layout.evicted[self.config.name].chunks[:] = pieces
        before, now = (view.layout.optimizer_of(self.config.name) for view in (old, self))
        if before is not None and now is not None:
            load(self.layout, [], [(now, before.step)])

    def warm(self, ids: torch.Tensor, heats: torch.Tensor | None = None) -> int:
        """Copies rows to free slots of the device cache; returns how many rows were copied.

        Skips unknown ids of a hash table, cached rows, and rows with accumulated gradients outside the cache.

        Args:
            ids: int64 `[n]`, hottest first.
            heats: decayed number of batches that used each row, float `[n]`, for cache policies that count batches.
                None: as if only the latest batch had used each row.

        Raises:
            IndexError: an index table has no such row.
            RuntimeError: batches are in flight.
            ValueError: `heats` are not one number of at least 0 for each id.
        """
        array, counts = ids_to_host(self.config.name, ids), heats_to_host(self.config.name, ids, heats)
        with self.layout.locks.exclusive():
            return warm_rows(*self.locate(), array, counts)

    def memory(self) -> dict[str, int]:
        """Returns the bytes that the engine allocates for the table by kind, such as `store_bytes` and `disk_bytes`."""
        group, table = self.locate()
        return group.memory(table)

    def stored_bytes(self) -> int:
        """Returns the bytes of a row in the host store."""
        return stored_bytes(self.config, self.layout.optimizer_of(self.config.name))

    def in_place(self) -> dict[str, torch.Tensor]:
        """Returns views of all rows of an index table in the cache, by part: `[rows, D]` or `[rows, 1]`.

        Raises:
            RuntimeError: the rows are not all in the cache, in adjacent slots in row order.
        """
        with self.layout.locks.exclusive():
            group, table = self.locate()
            rows = self.config.num_embeddings
            slots = group.engine.tables.find_rows(table, np.arange(rows, dtype=np.int64))[1]
            begin = int(slots[0])
            if not np.array_equal(slots, np.arange(begin, begin + rows)):
                raise RuntimeError(f"table {self.config.name!r}: its rows are not all in the cache, in row order")
            records = group.swap.cache[begin : begin + rows]
            return {name: part_view(group, index)(records).detach() for name, index in self.part_indices(None).items()}


@dataclass(frozen=True, eq=False)
class TableWrite:
    """Rows to be written to a table by `load`.

    Attributes:
        view: the table.
        ids: int64 `[n]`, distinct; None for all rows of an index table.
        parts: new values by name, `[n, ...]`.
        replace_all: whether all ids that are not in `ids` are removed.
        initial: parts, by name, that are set to one number in all other rows.
        columns: new columns of the rows by name, `[n]`; see `TableView.row_columns`.
    """

    view: TableView
    ids: torch.Tensor | None
    parts: Mapping[str, torch.Tensor]
    replace_all: bool = False
    initial: Mapping[str, float] | None = None
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def problem(self) -> str | None:
        """Returns why the rows cannot be written, as the end of an error message; None if they can."""
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
    """Writes to several tables, as resumable work: either all are made or, after an exception, none is."""

    def __init__(
        self,
        contents: Sequence[TableWrite],
        steps: Sequence[tuple[TableOptimizer, int]],
        discard_gradients: Callable[[], None] | None,
    ) -> None:
        """Stores the arguments.

        Args:
            contents: the writes.
            steps: optimizers with their new number of steps.
            discard_gradients: discards pending and accumulated gradients; None keeps them.
        """
        self._contents = contents
        self._steps = steps
        self._discard_gradients = discard_gradients
        self._preserved_rows: list[_PreservedRows | None] = []
        self.started = False

    def run(self) -> None:
        if not self.started:
            self._prepare()
        if self._discard_gradients is not None:
            self._discard_gradients()
        for content, preserved in zip(self._contents, self._preserved_rows, strict=True):
            _write(content, preserved)
        for optimizer, step in self._steps:
            optimizer.step = step

    def _prepare(self) -> None:
        """Makes all preparations that can fail; after an exception, the tables are unchanged."""
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
    discard_gradients: bool = False,
) -> None:
    """Writes rows to tables, and sets the number of steps of optimizers; after an exception nothing has changed.

    Args:
        layout: the layout of the tables.
        contents: the writes.
        steps: optimizers with their new number of steps.
        discard_gradients: whether pending and accumulated gradients are discarded.

    Raises:
        ValueError: contents that do not match their table.
        IndexError, CapacityError, MemoryError: a table cannot contain the rows.
        RuntimeError: a batch in flight uses an id that would be removed.
    """
    for content in contents:
        problem = content.problem()
        if problem:
            raise ValueError(f"table {content.view.config.name!r}: {problem}")
    with layout.locks.exclusive():
        layout.locks.keep_rows(layout.groups if contents else [])
        discard = layout.discard_gradients if discard_gradients else None
        layout.locks.run_resumable(_WriteTables(contents, steps, discard))


def fill_tables(layout: Layout) -> None:
    """Fills new index tables that have an `init_fn`. A hash table calls its `init_fn` when an id gets a row."""
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
    """The parts and columns of the rows that a write preserves, and the table's candidates and sketch."""

    parts: dict[str, torch.Tensor]
    columns: dict[str, np.ndarray]
    candidates: tuple[Int64Array, dict[str, np.ndarray]]
    sketch: np.ndarray


def _preserved_rows(content: TableWrite) -> _PreservedRows | None:
    """Reads what the table must keep when the write removes rows; returns None if it removes none.

    Raises:
        RuntimeError: batches in flight use rows of the table.
    """
    group, table = content.view.locate()
    ids = _ids_to_write(content)
    if not content.replace_all or not len(group.engine.saves.unlisted_ids(table, ids)):
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
    """Writes the rows; idempotent, so that it can be repeated after an interrupt."""
    group, table = content.view.locate()
    ids = _ids_to_write(content)
    group.before_change(table, None if content.replace_all or content.initial else ids)
    parts = {**(preserved.parts if preserved else {}), **content.parts}
    if preserved is not None:  # cleared and filled again, so that the rows are in the order of `ids`
        group.engine.tables.clear(table)
        rows, _ = group.engine.tables.insert(table, ids)
        group.engine.lifecycle.write_columns(table, rows, preserved.columns)
        group.engine.lifecycle.set_candidates(table, *preserved.candidates)
        if len(preserved.sketch):
            group.engine.lifecycle.set_sketch(table, [preserved.sketch])
    indices = content.view.part_indices(list(parts))
    write_parts(group, table, ids, {indices[name]: part for name, part in parts.items()})
    if content.columns:
        columns = columns_to_host(content.view.config.name, content.columns)
        group.engine.lifecycle.write_columns(table, group.engine.tables.find_rows(table, ids)[0], columns)
    others = group.engine.saves.unlisted_ids(table, ids) if content.initial else np.empty(0, np.int64)
    for name, number in (content.initial or {}).items():
        initial = torch.tensor(number, dtype=torch.float32, device="cpu").expand(len(others), 1)
        write_parts(group, table, others, {content.view.part_indices([name])[name]: initial})
