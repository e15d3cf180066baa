"""Whole tables that are replaced by what was saved, all of them or, after an exception, none."""

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
from .row_parts import WEIGHT, part_bytes
from .table_lifecycle import CLOCKS, INITIAL_CLOCKS
from .table_view import Chunk, TableView
from .user_tensors import columns_to_host


@dataclass(frozen=True, eq=False)
class RemovedIds:
    """Ids that are no rows any more, int64 `[n]`."""

    ids: torch.Tensor


@dataclass(frozen=True, eq=False)
class SavedRows(Chunk):
    """Rows with what the table counts of each.

    Attributes:
        columns: as `TableView.row_columns` has them.
    """

    columns: Mapping[str, torch.Tensor]


@dataclass(frozen=True, eq=False)
class LifecycleState:
    """The state of a table that admits or evicts ids, beside its rows.

    Attributes:
        clocks: as `TableView.clocks` has them.
        candidates: as `TableView.candidates` has them; None for a table that admits every id.
        sketches: those that the table's sketch counts at least as much as; it does not begin with the candidates then.
    """

    clocks: Mapping[str, int]
    candidates: tuple[torch.Tensor, Mapping[str, torch.Tensor]] | None
    sketches: Sequence[torch.Tensor] = ()


@dataclass(frozen=True, eq=False)
class TableSource:
    """The new contents of a table.

    Attributes:
        view: the table.
        layers: gives what to do, from an empty table on: rows that come or change, ids that leave. More than once.
        window: gradients that wait: ids, float32 `[n, 2 * D]`.
        life: None for a table that keeps every id.
        rows: how many ids there are about.
        evicted: gives rows that had left the table and were not taken.
    """

    view: TableView
    layers: Callable[[], Iterator[SavedRows | RemovedIds]]
    window: Callable[[], Iterator[tuple[Int64Array, torch.Tensor]]]
    lifecycle: LifecycleState | None = None
    rows: int = 0
    evicted: Callable[[], list[EvictedRows]] = list

    @property
    def clocks(self) -> Mapping[str, int]:
        """The clocks of the table when it has these contents: what these do not say of a row begins then."""
        return INITIAL_CLOCKS if self.lifecycle is None else self.lifecycle.clocks


class Replacement:
    """Puts what was saved in the place of an embedding's tables, all of them.

    `prepare` does all that can fail, beside the tables; `Locks.run_resumable` then puts the new ones in their place.
    Where memory has no room for both the tables are emptied first, and stay empty if `prepare` fails.

    Attributes:
        rounded: names of tables of which the data type of the cache rounds weights, known after `prepare`.
    """

    def __init__(
        self,
        layout: Layout,
        sources: Sequence[TableSource],
        optimizers: Sequence[tuple[TableOptimizer, int, Mapping[str, Any]]],
        windows: Mapping[int, int],
        *,
        beside: bool = True,
    ) -> None:
        """
        Args:
            layout: has the tables.
            sources: of all of them.
            optimizers: with the steps they are to have counted and options that they are to have.
            windows: backward passes of the open accumulation windows of each length.
            beside: there is room for the rows of both.
        """
        self._layout = layout
        self._sources = sources
        self._optimizers = optimizers
        self._windows = windows
        self._beside = beside
        self._emptied = False
        self._new: list[tuple[Group, _engine.Engine, dict[int | None, dict[str, int]]]] = []
        self._evicted: dict[str, list[EvictedChunk]] = {}
        self.rounded: list[str] = []
        self.started = False

    def prepare(self) -> None:
        """Reads all rows. No other thread may plan, read or update from here on until it is done."""
        groups = self._layout.groups
        try:
            if not self._beside:
                self._empty()
            engines = [group.fresh_engine() if self._beside else group.engine for group in groups]
            self._new = [(group, engine, group.counts()) for group, engine in zip(groups, engines, strict=True)]
            for source in self._sources:
                group, table = source.view.locate()
                if _fill(source, group, engines[groups.index(group)], table):
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
        """Forgets what was prepared."""
        self._new, self._evicted = [], {}
        if self._emptied:
            self._empty()

    def _empty(self) -> None:
        self._emptied = True
        self._layout.drop_windows()
        for group in self._layout.groups:
            group.swap.settle()
            for table in range(len(group.members)):
                group.before_change(table)
                group.engine.tables.clear(table)
                group.engine.lifecycle.set_clock(table, *INITIAL_CLOCKS.values())

    def run(self) -> None:
        """Puts the new rows in the places of the old. It may be run again where an interrupt has broken it off."""
        self.started = True
        for group, engine, counted in self._new:
            group.adopt(engine, counted)
            engine.saves.next_version()
        for name, rows in self._evicted.items():
            self._layout.evicted[name].chunks[:] = rows
        for optimizer, step, options in self._optimizers:
            optimizer.step = step
            optimizer.options.update(options)
        self._layout.windows = dict(self._windows)


def _is_rounded(config: TableConfig, weights: torch.Tensor) -> bool:
    """Returns whether weights change on their way through the data type of the table's cache."""
    if config.cache_dtype in (None, config.weight_dtype):
        return False
    stored = weights.to(config.weight_dtype)
    cached = stored.to(config.cache_dtype).to(config.weight_dtype)
    return not bool(((stored == cached) | stored.isnan()).all())


def _fill(source: TableSource, group: Group, engine: _engine.Engine, table: int) -> bool:
    """Makes an empty table of `engine`, the group's or one that will be, what the source says: no row is cached.

    Returns:
        whether weights were rounded to the data type of the cache.
    """
    rounded = False
    places, name = source.view.part_indices(None), source.view.config.name
    engine.lifecycle.set_clock(table, *map(source.clocks.__getitem__, CLOCKS))  # of rows without counts
    engine.saves.reserve_ids(table, source.rows)
    for layer in source.layers():
        ids: Int64Array = layer.ids.numpy()
        if isinstance(layer, RemovedIds):
            engine.tables.remove(table, ids)
            continue
        parts = [part_bytes(group, places[part], values) for part, values in layer.parts.items()]
        rounded = rounded or (WEIGHT in layer.parts and _is_rounded(source.view.config, layer.parts[WEIGHT]))
        rows = engine.saves.load_rows(table, ids, parts, len(parts) == len(places))
        if layer.columns and len(ids):
            engine.lifecycle.write_columns(table, rows, columns_to_host(name, layer.columns))
    for ids, sums in source.window():
        engine.saves.put_spilled(table, engine.tables.find_rows(table, ids)[0], sums.contiguous().numpy())
    if source.lifecycle is not None:
        if source.lifecycle.candidates is not None:
            waiting, columns = source.lifecycle.candidates
            engine.lifecycle.set_candidates(table, waiting.numpy(), columns_to_host(name, columns))
        if source.lifecycle.sketches:
            engine.lifecycle.set_sketch(table, [sketch.numpy() for sketch in source.lifecycle.sketches])
    return rounded
