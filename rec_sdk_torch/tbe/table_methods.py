"""The methods for users that every module with tables has: a table by its name, figures, and switches of all tables."""

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
    """The parts of a table-batched embedding that the methods use.

    Attributes:
        layout: has the tables.
        guard: checks gradients.
        monitor: counts.
    """

    layout: Layout
    guard: GradientGuard
    monitor: Monitor


class TableMethods:
    """Methods of a `TableBatchedEmbedding`, of collections, of their shards, and of FBGEMM's module.

    A name that no table has raises KeyError. A sharded collection's methods are about the rows of this rank.

    Attributes:
        embedding: has the tables; of an embedding, itself.
    """

    if TYPE_CHECKING:  # a property in the class would hide attributes of this name

        @property
        def embedding(self) -> Embedding: ...

    def sync_optimizers(self) -> None:
        """Hands the embedding the optimizers that were applied to its tables' parameters since the last call."""

    def view(self, name: str) -> TableView:
        """Returns read and write access to the whole table `name`."""
        self.sync_optimizers()
        return TableView(self.embedding.layout, name)

    @property
    def device(self) -> torch.device:
        """The compute device, where the caches live."""
        return self.embedding.layout.device

    def exclusive(self) -> AbstractContextManager[None]:
        """Keeps other threads from planning, reading or updating: what is seen inside is one moment of all tables."""
        return self.embedding.layout.locks.exclusive()

    # ---- one table

    def warm(self, table: str, ids: torch.Tensor) -> int:
        """Brings rows that will be hot to the device cache, hottest first, see `TableView.warm`; how many came.

        `Saver.load` does so by itself; after a `load_state_dict` it is not known which rows were hot. Ranks may call it
        with the same `ids`: those of other ranks are passed over.
        """
        return self.view(table).warm(ids)

    def evict(self, table: str) -> int:
        """Takes out the ids of a table that its rules choose now, see `TableView.evict`; how many had rows."""
        return self.view(table).evict()

    def take_evicted(self, table: str, at_most: int | None = None) -> EvictedRows:
        """Hands out rows that left a table with `keep_evicted`, each once, see `TableView.take_evicted`."""
        return self.view(table).take_evicted(at_most)

    def put_back(self, table: str, rows: EvictedRows, *, overwrite: bool = True) -> int:
        """Makes rows that left a table rows of it again, see `TableView.put_back`; how many.

        Rows of a sharded table may have left it on any rank. Ranks may call it with the same `rows`: those of other
        owner ranks are passed over, and not counted.
        """
        return self.view(table).put_back(rows, overwrite=overwrite)

    def clocks(self, table: str) -> dict[str, int]:
        """Reads the clocks that a table's rules go by, see `TableView.clocks`."""
        return self.view(table).clocks()

    def set_clocks(self, table: str, clocks: Mapping[str, int]) -> None:
        """Corrects the clocks that a table's rules go by, see `TableView.set_clocks`. All ranks should call it."""
        self.view(table).set_clocks(clocks)

    # ---- gradients that are handed out

    def take_gradients(self) -> dict[str, TableGradient]:
        """Returns the gradients that tables with the optimizer SparseGradients have summed since the last call.

        They are by table; one without lookups since then has `n` = 0. FBGEMM's module has them with the optimizer NONE.

        Raises:
            RuntimeError: no table has it.
        """
        taken: dict[str, TableGradient] = {}
        with self.exclusive():
            for group in self.embedding.layout.groups:
                if group.optimizers and group.optimizers[0].spec.collects_gradients:
                    taken |= collect_gradients(group)
        if not taken:
            raise RuntimeError("no table hands out its gradients: apply the optimizer SparseGradients first")
        return taken

    def add_to_rows(self, table: str, ids: torch.Tensor, change: torch.Tensor) -> None:
        """Adds `change` `[n, D]` to the weights of rows of a table, see `TableView.add`."""
        TableView(self.embedding.layout, table).add(ids, change)

    # ---- tables that training only reads

    def freeze(self, *tables: str) -> None:
        """Lets training only read some tables, or all if none is named: rows, states and ids stay as they are.

        They are looked up as in evaluation mode, between the training of the others. Gradients end there.
        `requires_grad_(False)` on a table's parameter does the same. All ranks have to call it.

        Raises:
            KeyError: there is no such table.
            RuntimeError: an accumulation window is open, or a batch in flight will update rows.
        """
        self.sync_optimizers()
        layout = self.embedding.layout
        self._set_frozen(layout.options.frozen | layout.tables_named(tables))

    def thaw(self, *tables: str) -> None:
        """Ends `freeze` for some tables, or all, with its errors. Clocks of rules go on from where they stood."""
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
        """Sets the training steps between evictions of ids, of all tables that evict some; None: as in their configs.

        Raises:
            ValueError: less than one.
        """
        with self.exclusive():
            self._set_options(evict_step_interval=steps)
            for group in self.embedding.layout.built:
                group.set_evict_step_interval(steps)

    def set_optimizer_step(self, step: int) -> None:
        """Sets how many updates the optimizers of all tables have made; the next one is number `step` + 1.

        Raises:
            ValueError: no int of at least 0.
        """
        number = as_int(step)
        if number is None or number < 0:
            raise ValueError(f"step is {step!r}, expected an int of at least 0")
        self.sync_optimizers()
        layout = self.embedding.layout
        load(layout, [], [(optimizer, number) for optimizer in layout.optimizers if optimizer is not None])

    def set_grad_scaler(self, scaler: Scaler | None) -> None:
        """Sets the `torch.amp.GradScaler` that scales the losses; None: none does.

        Output gradients are then divided by `scaler.get_scale()` before the update. Where one is not finite the
        update is skipped as a whole: no row, step or accumulation window changes, and `skipped_updates` counts it.

        Raises:
            TypeError: something without `get_scale` and `is_enabled`.
        """
        self._set_options(grad_scaler=scaler)

    @property
    def skipped_updates(self) -> int:
        """Updates that were skipped because gradients that a GradScaler had scaled overflowed, on some rank."""
        return self.embedding.guard.skipped

    # ---- norms of gradients

    def count_grad_norms(self, on: bool = True) -> None:
        """Lets updates in the backward pass count the norms of their gradients for `counted_norms`, or no more.

        `grad_norm` of a collection reads them. The next update is the first that counts. Rows and outputs are the
        same. All ranks have to call it.

        Raises:
            ValueError: with `update="step"`, where gradients can be looked at before the update.
        """
        layout = self.embedding.layout
        options = replace(layout.options, grad_norms=on)
        with layout.locks.exclusive():
            if options.grad_norms is not layout.options.grad_norms:
                for group in layout.built:
                    group.count_norms(options.grad_norms)
            self._set_options(grad_norms=on)

    @property
    def counts_grad_norms(self) -> bool:
        """Whether there are norms for `counted_norms`."""
        return self.embedding.layout.options.grad_norms and not self._tables_without_update()

    def _tables_without_update(self) -> list[str]:
        """Tables whose gradients no update sees."""
        given = zip(self.embedding.layout.tables, self.embedding.layout.optimizers, strict=True)
        return [table.name for table, optimizer in given if optimizer is not None and optimizer.spec.collects_gradients]

    def counted_norms(self, norm_type: float = 2.0) -> dict[str, float]:
        """Returns the norm of each table's gradient in the last update of its rows: of the sum of a row's lookups.

        The gradient is taken before `max_gradient` bounds it, unscaled where there is a GradScaler, and over the
        whole window where gradients are accumulated. 0 where the table had no gradient, is frozen, or no update came
        since counting began. A skipped update leaves the norms as they were. The host waits for the device.

        Args:
            norm_type: p of the norm, 2 or infinity.

        Raises:
            RuntimeError: nothing is counted, or not of such tables: their gradients are handed out.
            ValueError: another norm.
        """
        layout, norm_type = self.embedding.layout, float(norm_type)
        if not layout.options.grad_norms:
            raise RuntimeError(
                "the gradients of these tables are used up in the backward pass: call count_grad_norms() before it, or "
                "make the tables with update='step'"
            )
        if self._tables_without_update():
            raise RuntimeError(
                f"tables {self._tables_without_update()} hand their gradients out: take_gradients() has them"
            )
        if norm_type not in NORMS:
            raise ValueError(f"norm_type is {norm_type}, updates count those of {list(NORMS)}")
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

    # ---- figures

    @property
    def cache_sizes(self) -> dict[str, int]:
        """Rows of each table that the device cache holds, or will hold.

        Raises:
            RuntimeError: the tables are on the meta device.
        """
        self.sync_optimizers()
        layout = self.embedding.layout
        return dict(zip([table.name for table in layout.tables], layout.cache_sizes(), strict=True))

    def cache_stats(self, table: str | None = None) -> dict[str, int]:
        """Returns exact counts since the start or `reset_cache_stats`, summed over groups, or those of one table.

        `batches`, `lookups`, `unique_rows`, `unique_misses`, `new_rows`, `rows_in`, `rows_out`, `bytes_in`,
        `bytes_out`, `bounds_errors`, `largest_batch` (the most distinct rows that a batch had of one table),
        `warmed_rows` (which came to the cache by a load or `warm`) and, now,
        `pinned_rows` (which batches in flight hold in the cache). For tables that admit or evict ids also: `admitted`
        (ids that got a row), `not_admitted_lookups` (which read the default value), `evicted` (ids that left by rule),
        and now `evicted_waiting` (rows that left and wait for `take_evicted`).
        Without `table` also `copied_batches` (batches whose ids came from a device), `depth_reached` (the most batches
        planned ahead at once), and two times of the host in microseconds: `plan_us`, planning in any thread, and
        `wait_us`, what training forwards spent on plans and swaps.

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
        """Returns bytes of all tables, or of one table; zeros before the first use.

        `device`: the cache, and the sums of an accumulation window. `host`: rows in the host store, as far as memory is
        committed. `disk`: files of a host store on disk. `index`: the maps from ids to rows. `columns`: what options
        keep per row (`track_changes`, rules by which ids leave), for all rows of an index table, with the logs of what
        changed and left. `candidates`: what is counted of ids that are not admitted. `evicted`: rows that left and wait
        for `take_evicted`. `staging`, without `table`: plans and rows on their way now.

        Raises:
            KeyError: no table has this name.
        """
        return memory_report(self._groups_of(table), table)

    def _groups_of(self, table: str | None) -> Sequence[Group]:
        layout = self.embedding.layout
        layout.locks.check_process()
        if table is not None:
            layout.config(table)  # which raises for a name that is unknown
        return layout.built

    def _title(self) -> str:
        return type(self).__name__

    def _repr_html_(self) -> str:
        """Returns a line for each table, for notebooks."""
        return tables_html(self._title(), self.embedding.layout, self.embedding.monitor)
