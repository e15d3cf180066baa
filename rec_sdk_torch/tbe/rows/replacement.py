"""Replaces the contents of all tables by the contents of a save."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ... import _engine
from ..cache.batch import Int64Array
from ..cache.device_cache import Group
from ..cache.evicted import EvictedChunk, EvictedRows
from ..config.optimizer import TableOptimizer
from ..config.table import TableConfig
from .layout import Layout
from .row_parts import WEIGHT, Chunk, part_bytes
from .table_lifecycle import CLOCKS, INITIAL_CLOCKS
from .table_view import TableView
from .user_tensors import columns_to_host


@dataclass(frozen=True, eq=False)
class RemovedIds:
    """Ids that a delta removes, int64 `[n]`."""

    ids: torch.Tensor


@dataclass(frozen=True, eq=False)
class SavedRows(Chunk):
    """Rows of a save with their counts and clocks.

    Attributes:
        columns: counts and clocks by name, `[n]`; see `TableView.row_columns`.
    """

    columns: Mapping[str, torch.Tensor]


@dataclass(frozen=True, eq=False)
class LifecycleState:
    """The state of a table's admission and eviction that is not part of its rows.

    Attributes:
        clocks: the table's clocks; see `TableView.clocks`.
        candidates: candidates and their columns; see `TableView.candidates`. None for a table that admits every id.
        sketches: states to load into the table's sketch; see `TableView.set_sketch`. Empty: the sketch starts with the
            candidates' counts.
    """

    clocks: Mapping[str, int]
    candidates: tuple[torch.Tensor, Mapping[str, torch.Tensor]] | None
    sketches: Sequence[torch.Tensor] = ()


@dataclass(frozen=True, eq=False)
class TableSource:
    """The new contents of a table.

    Attributes:
        view: the table.
        layers: a function that returns the steps that build the table from an empty one, in order: rows to write and
            ids to remove. It may be called again.
        window: a function that returns accumulated gradients in chunks: ids, and float32 `[n, 2 * D]`.
        lifecycle: state of admission and eviction; None for a table that keeps every id.
        rows: the approximate number of ids, to reserve memory.
        evicted: a function that returns the evicted rows in the save, which `take_evicted` has not returned yet.
    """

    view: TableView
    layers: Callable[[], Iterator[SavedRows | RemovedIds]]
    window: Callable[[], Iterator[tuple[Int64Array, torch.Tensor]]]
    lifecycle: LifecycleState | None = None
    rows: int = 0
    evicted: Callable[[], list[EvictedRows]] = list

    @property
    def clocks(self) -> Mapping[str, int]:
        """The clocks after the load, which also provide the initial values of row columns that the save lacks."""
        return INITIAL_CLOCKS if self.lifecycle is None else self.lifecycle.clocks


class Replacement:
    """Replacement of all tables of an embedding by the contents of a save.

    `prepare` reads the contents into new engines and may fail; `run`, called by `Locks.run_resumable`, switches to
    them. After an exception the tables are unchanged, unless `keep_old` is False: then `prepare` first
    empties the tables, because memory is too small for the old and the new rows, and they stay empty if it fails.

    Attributes:
        rounded: names of tables whose weights the cache's data type has rounded; set by `prepare`.
        started: whether `run` has been called.
    """

    def __init__(
        self,
        layout: Layout,
        sources: Sequence[TableSource],
        optimizers: Sequence[tuple[TableOptimizer, int, Mapping[str, Any]]],
        windows: Mapping[int, int],
        *,
        keep_old: bool = True,
    ) -> None:
        """Stores the arguments; reads nothing.

        Args:
            layout: the layout of the tables.
            sources: the new contents of all tables.
            optimizers: optimizers with their new number of steps and their new options.
            windows: backward passes so far, by length of the accumulation window.
            keep_old: whether the old rows are kept until `run`, so that memory must hold both the old and the new rows.
        """
        self._layout = layout
        self._sources = sources
        self._optimizers = optimizers
        self._windows = windows
        self._keep_old = keep_old
        self._emptied = False
        self._new: list[tuple[Group, _engine.Engine, dict[int | None, dict[str, int]]]] = []
        self._evicted: dict[str, list[EvictedChunk]] = {}
        self.rounded: list[str] = []
        self.started = False

    def prepare(self) -> None:
        """Reads the save's rows. No other thread may plan, read or update from this call until `run` has returned."""
        groups = self._layout.groups
        try:
            if not self._keep_old:
                self._empty()
            engines = [group.fresh_engine() if self._keep_old else group.engine for group in groups]
            self._new = [(group, engine, group.all_stats()) for group, engine in zip(groups, engines, strict=True)]
            for source in self._sources:
                group, table = source.view.locate()
                if _copy_table(source, group, engines[groups.index(group)], table):
                    self.rounded.append(source.view.config.name)
                if source.view.config.name in self._layout.evicted:
                    shape = source.view.row_schema(source.clocks)
                    self._evicted[source.view.config.name] = [
                        EvictedChunk.now(shape.fit(rows)) for rows in source.evicted()
                    ]
        except BaseException:
            self.drop()
            raise

    def drop(self) -> None:
        """Discards the new rows that `prepare` has read."""
        self._new, self._evicted = [], {}
        if self._emptied:
            self._empty()

    def _empty(self) -> None:
        self._emptied = True
        self._layout.discard_gradients()
        for group in self._layout.groups:
            group.swap.settle()
            for table in range(len(group.members)):
                group.before_change(table)
                group.engine.tables.clear(table)
                group.engine.lifecycle.set_clock(table, *INITIAL_CLOCKS.values())

    def run(self) -> None:
        """Switches the tables to the new rows; idempotent, so that it can be repeated after an interrupt."""
        self.started = True
        for group, engine, counted in self._new:
            group.replace_engine(engine, counted)
            engine.saves.next_version()
        for name, rows in self._evicted.items():
            self._layout.evicted[name].chunks[:] = rows
        for optimizer, step, options in self._optimizers:
            optimizer.step = step
            optimizer.options.update(options)
        self._layout.windows = dict(self._windows)


def _is_rounded(config: TableConfig, weights: torch.Tensor) -> bool:
    """Returns whether a round trip through the cache's data type changes weights."""
    if config.cache_dtype in (None, config.weight_dtype):
        return False
    stored = weights.to(config.weight_dtype)
    cached = stored.to(config.cache_dtype).to(config.weight_dtype)
    return not bool(((stored == cached) | stored.isnan()).all())


def _copy_table(source: TableSource, group: Group, engine: _engine.Engine, table: int) -> bool:
    """Fills an empty table of `engine` with the contents of `source`; no row is copied to the cache.

    Returns:
        Whether the cache's data type has rounded weights.
    """
    rounded = False
    indices, name = source.view.part_indices(None), source.view.config.name
    # The clocks are set before the rows, since they provide the values of columns that rows lack.
    engine.lifecycle.set_clock(table, *map(source.clocks.__getitem__, CLOCKS))
    engine.saves.reserve_ids(table, source.rows)
    for layer in source.layers():
        ids: Int64Array = layer.ids.numpy()
        if isinstance(layer, RemovedIds):
            engine.tables.remove(table, ids)
            continue
        parts = [part_bytes(group, indices[part], values) for part, values in layer.parts.items()]
        rounded = rounded or (WEIGHT in layer.parts and _is_rounded(source.view.config, layer.parts[WEIGHT]))
        rows = engine.saves.load_rows(table, ids, parts, len(parts) == len(indices))
        if layer.columns and len(ids):
            engine.lifecycle.write_columns(table, rows, columns_to_host(name, layer.columns))
    for ids, sums in source.window():
        engine.saves.put_spilled(table, engine.tables.find_rows(table, ids)[0], sums.contiguous().numpy())
    if source.lifecycle is not None:
        if source.lifecycle.candidates is not None:
            candidates, columns = source.lifecycle.candidates
            engine.lifecycle.set_candidates(table, candidates.numpy(), columns_to_host(name, columns))
        if source.lifecycle.sketches:
            engine.lifecycle.set_sketch(table, [sketch.numpy() for sketch in source.lifecycle.sketches])
    return rounded
