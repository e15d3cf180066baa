"""The public methods of every module with tables: access to a table by name, options, and statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..runtime.numbers import as_int
from .cache.device_cache import Group
from .cache.evicted import EvictedRows
from .cache.norms import NORMS
from .options import Scaler
from .rows.gradients import TableGradient, collect_gradients
from .rows.layout import Layout
from .rows.table_view import TableView, load
from .step.gradient_check import GradientGuard
from .step.html import tables_html
from .step.monitor import Monitor, memory_report


class Embedding(Protocol):
    """The attributes of a table-batched embedding that `TableMethods` uses.

    Attributes:
        layout: the tables.
        guard: the checks of gradients.
        monitor: the counters.
    """

    layout: Layout
    guard: GradientGuard
    monitor: Monitor


class TableMethods:
    """Methods that `TableBatchedEmbedding`, collections, their shards and the module with FBGEMM's interface share.

    An unknown table name raises KeyError. In a sharded collection, the methods act on the rows of this rank.

    Attributes:
        embedding: the embedding with the tables; for an embedding, this is the embedding itself.
    """

    if TYPE_CHECKING:  # at run time, this property would hide the attribute of the same name in subclasses

        @property
        def embedding(self) -> Embedding: ...

    def sync_optimizers(self) -> None:
        """Sets the optimizers that were applied to the tables' parameters since the last call."""

    def view(self, name: str) -> TableView:
        """Returns the `TableView` of the table `name`, for reading and writing its rows."""
        self.sync_optimizers()
        return TableView(self.embedding.layout, name)

    @property
    def device(self) -> torch.device:
        """The device of the caches and outputs."""
        return self.embedding.layout.device

    def exclusive(self) -> AbstractContextManager[None]:
        """Returns a context in which no other thread plans, reads or updates, so that no table changes."""
        return self.embedding.layout.locks.exclusive()

    # ---- one table

    def warm(self, table: str, ids: torch.Tensor) -> int:
        """Copies the rows of `ids`, hottest first, to free slots of the device cache; see `TableView.warm`.

        `Saver.load` warms the cache by itself; `load_state_dict` does not, since a state dict does not record which
        rows were hot. Every rank may call this method with the same `ids`: it skips ids that other ranks own.

        Returns:
            How many rows were copied.
        """
        return self.view(table).warm(ids)

    def evict(self, table: str) -> int:
        """Evicts the ids that the table's rules choose now; returns how many had rows. See `TableView.evict`."""
        return self.view(table).evict()

    def take_evicted(self, table: str, at_most: int | None = None) -> EvictedRows:
        """Removes and returns buffered evicted rows of a table with `keep_evicted`; see `TableView.take_evicted`."""
        return self.view(table).take_evicted(at_most)

    def put_back(self, table: str, rows: EvictedRows, *, overwrite: bool = True) -> int:
        """Inserts evicted rows into their table again; returns how many were inserted. See `TableView.put_back`.

        The rows may come from any rank of a sharded table. Every rank may call this method with the same `rows`: it
        skips, and does not count, rows that other ranks own.
        """
        return self.view(table).put_back(rows, overwrite=overwrite)

    def clocks(self, table: str) -> dict[str, int]:
        """Returns the clocks by which a table's rules measure age and idleness; see `TableView.clocks`."""
        return self.view(table).clocks()

    def set_clocks(self, table: str, clocks: Mapping[str, int]) -> None:
        """Sets the clocks by which a table's rules measure age and idleness; see `TableView.set_clocks`.

        All ranks should call this method.
        """
        self.view(table).set_clocks(clocks)

    # ---- collected gradients

    def take_gradients(self) -> dict[str, TableGradient]:
        """Returns the gradients that SparseGradients has summed since the last call, by table name, and clears them.

        The gradient of a table without lookups since then has no rows. In FBGEMM's interface, the optimizer NONE
        collects gradients.

        Raises:
            RuntimeError: no table has the optimizer SparseGradients.
        """
        taken: dict[str, TableGradient] = {}
        with self.exclusive():
            for group in self.embedding.layout.groups:
                if group.optimizers and group.optimizers[0].spec.collects_gradients:
                    taken |= collect_gradients(group)
        if not taken:
            raise RuntimeError("no table collects its gradients: apply the optimizer SparseGradients first")
        return taken

    def add_to_rows(self, table: str, ids: torch.Tensor, change: torch.Tensor) -> None:
        """Adds `change`, `[n, D]`, to the weights of the rows of `ids`, `[n]`; see `TableView.add`."""
        TableView(self.embedding.layout, table).add(ids, change)

    # ---- frozen tables

    def freeze(self, *tables: str) -> None:
        """Freezes tables, or all tables if none is named: training no longer changes their rows, states and ids.

        Lookups of frozen tables behave as in evaluation mode, and have no gradient. `requires_grad_(False)` on a
        table's parameter does the same. All ranks must call this method.

        Raises:
            KeyError: there is no such table.
            RuntimeError: an accumulation buffer has gradients, or a batch in flight will update rows.
        """
        self.sync_optimizers()
        layout = self.embedding.layout
        self._set_frozen(layout.options.frozen | layout.tables_named(tables))

    def thaw(self, *tables: str) -> None:
        """Unfreezes tables, or all tables if none is named; their clocks run again. Raises the errors of `freeze`."""
        layout = self.embedding.layout
        self._set_frozen(layout.options.frozen - layout.tables_named(tables))

    def _set_frozen(self, names: frozenset[str]) -> None:
        with self.exclusive():
            self.embedding.layout.freeze(names)
            self._set_options(frozen=names)

    # ---- options

    def _set_options(self, **changes: Any) -> None:
        layout, guard = self.embedding.layout, self.embedding.guard
        options = layout.options = replace(layout.options, **changes)
        guard.check_finite, guard.scaler = options.check_finite, options.grad_scaler

    def set_evict_step_interval(self, steps: int | None) -> None:
        """Sets how many training steps lie between evictions of ids, for all tables with eviction rules.

        Args:
            steps: 1 or more; None: the number in each table's configuration.

        Raises:
            ValueError: `steps` is less than 1.
        """
        with self.exclusive():
            self._set_options(evict_step_interval=steps)
            for group in self.embedding.layout.built:
                group.set_evict_step_interval(steps)

    def set_optimizer_step(self, step: int) -> None:
        """Sets how many updates the optimizers of all tables have made; the next update has number `step` + 1.

        Raises:
            ValueError: `step` is not an int of at least 0.
        """
        number = as_int(step)
        if number is None or number < 0:
            raise ValueError(f"step is {step!r}, expected an int of at least 0")
        self.sync_optimizers()
        layout = self.embedding.layout
        load(layout, [], [(optimizer, number) for optimizer in layout.optimizers if optimizer is not None])

    def set_grad_scaler(self, scaler: Scaler | None) -> None:
        """Sets the `torch.amp.GradScaler` that scales the losses; None: there is none.

        Output gradients are then divided by `scaler.get_scale()` before the update. If one of them is not finite, the
        whole update is skipped: no row, step or accumulation buffer changes, and `skipped_updates` increases.

        Raises:
            TypeError: `scaler` lacks the methods `get_scale` and `is_enabled`.
        """
        self._set_options(grad_scaler=scaler)

    @property
    def skipped_updates(self) -> int:
        """How many updates were skipped because scaled gradients overflowed on some rank; see `set_grad_scaler`."""
        return self.embedding.guard.skipped

    # ---- norms of gradients

    def count_grad_norms(self, on: bool = True) -> None:
        """Starts or stops recording gradient norms in updates of the backward pass, which keeps no gradients.

        `counted_norms`, and `grad_norm` of a collection, return the norms of the last update after this call. Rows and
        outputs do not depend on it. All ranks must call this method.

        Raises:
            ValueError: the option is `update="step"`, with which the gradients can be read before the update.
        """
        layout = self.embedding.layout
        options = replace(layout.options, grad_norms=on)
        with layout.locks.exclusive():
            if options.grad_norms is not layout.options.grad_norms:
                for group in layout.built:
                    group.enable_norms(options.grad_norms)
            self._set_options(grad_norms=on)

    @property
    def counts_grad_norms(self) -> bool:
        """Whether norms of gradients are recorded for `counted_norms`."""
        return self.embedding.layout.options.grad_norms and not self._gradient_collecting_tables()

    def _gradient_collecting_tables(self) -> list[str]:
        """Returns the names of the tables whose optimizer is SparseGradients, which makes no updates."""
        pairs = zip(self.embedding.layout.tables, self.embedding.layout.optimizers, strict=True)
        return [table.name for table, optimizer in pairs if optimizer is not None and optimizer.spec.collects_gradients]

    def counted_norms(self, norm_type: float = 2.0) -> dict[str, float]:
        """Returns the norm of each table's gradient, by name, in the last update of its rows.

        The gradient of a row is the sum over its lookups: before `max_gradient` bounds it, without the scale of a
        GradScaler, and over all backward passes of an accumulation buffer. The norm is 0 for a table that is frozen,
        had no gradient, or has not been updated since recording started. A skipped update leaves the norms as they
        were. The call blocks until the device has computed the norms.

        Args:
            norm_type: p of the norm, 2 or infinity.

        Raises:
            RuntimeError: norms are not recorded, or the optimizer is SparseGradients, which makes no updates.
            ValueError: `norm_type` is neither 2 nor infinity.
        """
        layout, norm_type = self.embedding.layout, float(norm_type)
        if not layout.options.grad_norms:
            raise RuntimeError(
                "the gradients of these tables are used up in the backward pass: call count_grad_norms() before it, or "
                "make the tables with update='step'"
            )
        if self._gradient_collecting_tables():
            raise RuntimeError(
                f"tables {self._gradient_collecting_tables()} make no updates: take_gradients() returns their gradients"
            )
        if norm_type not in NORMS:
            raise ValueError(f"norm_type is {norm_type}, allowed are {list(NORMS)}")
        norms = dict.fromkeys((table.name for table in layout.tables), 0.0)
        layout.locks.catch_up()
        with layout.locks.launch:
            layout.locks.complete()
            for group in layout.built:
                if group.norms is None:
                    continue
                group.swap.transfers.follow_previous_stream()
                norms.update(
                    zip(group.table_indices, group.norms.table_norms(len(group.members), norm_type), strict=True)
                )
        return norms | dict.fromkeys(layout.options.frozen, 0.0)

    # ---- statistics

    @property
    def cache_sizes(self) -> dict[str, int]:
        """Capacity of the device cache in rows of each table, by name; available before the cache is allocated.

        Raises:
            RuntimeError: the tables are on the meta device.
        """
        self.sync_optimizers()
        layout = self.embedding.layout
        return dict(zip([table.name for table in layout.tables], layout.cache_sizes(), strict=True))

    def cache_stats(self, table: str | None = None) -> dict[str, int]:
        """Returns exact counts since the start or the last `reset_cache_stats`; `table`: None for all tables.

        Counts of lookups and cache: `batches`, `lookups`, `unique_rows` (distinct rows), `unique_misses` (of these,
        rows that the cache did not hold), `new_rows`, `rows_in` and `bytes_in` (copied to the cache), `rows_out` and
        `bytes_out` (written back), `bounds_errors`, `largest_batch` (the most distinct rows of one table in a batch),
        `warmed_rows` (copied to the cache by a load or `warm`).

        Counts of admission and eviction: `admitted` (ids that got a row), `not_admitted_lookups` (lookups that read the
        default value), `evicted` (ids that rules evicted).

        Present values, not counts: `pinned_rows` (rows that batches in flight pin in the cache), `evicted_waiting`
        (evicted rows that `take_evicted` has not returned yet).

        Only without `table`: `copied_batches` (batches whose ids were copied from a device), `depth_reached` (the most
        batches planned ahead at once), and host times in microseconds: `plan_us` (planning, in any thread) and
        `wait_us` (plans and swaps, in training forwards).

        Raises:
            KeyError: no table has this name.
        """
        return self.embedding.monitor.cache_stats(self._groups_of(table), table)

    def reset_cache_stats(self) -> None:
        """Sets every counter of `cache_stats` to zero."""
        self.embedding.monitor.reset()
        for group in self.embedding.layout.built:
            group.reset_stats()

    def memory_report(self, table: str | None = None) -> dict[str, int]:
        """Returns the memory of one table or, with None, of all tables, in bytes by kind; zeros before the first use.

        - `device`: the cache, and accumulation buffers.
        - `host`: committed memory of rows in the host store.
        - `disk`: files of a host store on disk.
        - `index`: maps from ids to rows.
        - `columns`: values that options store for each row (`track_changes`, eviction rules), and logs of changed and
          evicted ids. An index table stores these values for all of its rows.
        - `candidates`: counts of ids that are not admitted yet.
        - `evicted`: evicted rows that `take_evicted` has not returned yet.
        - `staging`, only without `table`: plans and staging buffers of batches in flight.

        Raises:
            KeyError: no table has this name.
        """
        return memory_report(self._groups_of(table), table)

    def _groups_of(self, table: str | None) -> Sequence[Group]:
        layout = self.embedding.layout
        layout.locks.check_process()
        if table is not None:
            layout.config(table)  # raises KeyError for an unknown table
        return layout.built

    def _title(self) -> str:
        return type(self).__name__

    def _repr_html_(self) -> str:
        """Returns an HTML overview with one line for each table, which notebooks display."""
        return tables_html(self._title(), self.embedding.layout, self.embedding.monitor)
