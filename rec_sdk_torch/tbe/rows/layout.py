"""The layout of an embedding: the groups that its tables' rows are in, built at the first use."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from ..._engine import available_memory
from ...operators.devices.backends import backend_for
from ..cache.accumulation import count_backward_passes
from ..cache.batch import Batch, Int64Array
from ..cache.device_cache import Group
from ..cache.evicted import EvictedRowsBuffer
from ..cache.group_spec import Member, partition_into_groups, record_layout, stored_bytes
from ..cache.padding_ids import PaddingIds
from ..cache.store_folder import StoreFolder
from ..config.cache_size import cache_slots, check_host_memory
from ..config.optimizer import TableOptimizer
from ..config.table import Pooling, TableConfig, check_names
from ..options import EmbeddingOptions
from .frozen import FrozenTables
from .locks import Locks
from .move import move_rows
from .parameter_edges import ParameterEdges
from .pending_gradients import NO_PENDING_GRADIENTS, PendingGradients

logger = logging.getLogger(__name__)


class Layout:
    """Tables and the groups that their rows are in. It holds no module and no queue.

    Attributes:
        tables: their configs.
        optimizers: of each table; None while it has none.
        pooled: whether lookups pool rows.
        options: everything beside the tables, as it is now.
        num_features: of all tables.
        feature_dims: the columns of each feature.
        frozen: the tables that training only reads; None where there is none.
        padding_ids: ids that mean nothing; None where no table has one.
        locks: order the threads that use the tables.
        edges: from lookups to the tables' parameters, in the autograd graph.
        built: the groups; empty before the first use.
        used_optimizers: those of the groups, each once.
        works_on_tables: whether backward passes may do something to whole tables: end a window, evict ids, or pass over
            all rows.
        windows: backward passes so far of the accumulation windows of each length.
        pending_gradients: gradients that `step()` will apply.
        needed_rows: rows of each table that the first training batch and the batches planned ahead of it can need; None
            before that batch.
        evicted: by name, of tables whose rows are handed out when they leave: where these wait.
        replicated: by name, tables that all ranks of a sharded collection have.
        owned_ids: by name, ids whose rows a table has though they may not have been met.
        fill: fills tables that are new.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        options: EmbeddingOptions,
        optimizer: TableOptimizer | None,
        fill: Callable[[Layout], None],
    ) -> None:
        """Checks tables and options, and allocates nothing.

        Raises:
            ValueError, TypeError, MemoryError: tables or options that cannot be met.
        """
        check_names(tables)
        self.tables = list(tables)
        self._index = {table.name: place for place, table in enumerate(self.tables)}
        self.pooled = self.tables[0].pooling is not Pooling.NONE
        if any((table.pooling is not Pooling.NONE) is not self.pooled for table in self.tables):
            raise ValueError("pooled tables and sequence tables (Pooling.NONE) cannot share an embedding")
        if optimizer is not None and not isinstance(optimizer, TableOptimizer):
            raise TypeError(f"optimizer is {optimizer!r}, expected a TableOptimizer: TableOptimizer.create(class, ...)")
        options.check(self.tables)
        if optimizer is not None and options.updates_at_step:
            optimizer.check_deferrable()
        self.options = options
        self._store_folder: StoreFolder | None = None
        self.num_features = sum(table.num_features for table in self.tables)
        ends = np.cumsum([table.num_features for table in self.tables])
        self._features = [tuple(range(end - t.num_features, end)) for end, t in zip(ends, self.tables, strict=True)]
        self.feature_dims = [table.embedding_dim for table in self.tables for _ in range(table.num_features)]
        self.frozen = FrozenTables.from_tables(self.tables, options.frozen)
        self.padding_ids = PaddingIds.from_tables(self.tables)
        self.optimizers: list[TableOptimizer | None] = [optimizer] * len(self.tables)
        self.locks = Locks()
        self.edges = ParameterEdges()
        self.built: list[Group] = []
        self.used_optimizers: list[TableOptimizer] = []
        self.works_on_tables = False
        self.windows: dict[int, int] = {}
        self.pending_gradients: PendingGradients = NO_PENDING_GRADIENTS
        self.needed_rows: list[int] | None = None
        self.evicted = {
            t.name: EvictedRowsBuffer(t.name)
            for t in self.tables
            if t.lifecycle is not None and t.lifecycle.keep_evicted
        }
        self.replicated: frozenset[str] = frozenset()
        self.owned_ids: dict[str, Callable[[], Int64Array]] = {}
        self.fill = fill

    # ---- tables

    @property
    def device(self) -> torch.device:
        """Where the caches live."""
        return self.options.device

    def config(self, name: str) -> TableConfig:
        """The config of table `name`.

        Raises:
            KeyError: there is no such table.
        """
        if not isinstance(name, str) or name not in self._index:
            raise KeyError(f"no table is named {name!r}, only {list(self._index)}")
        return self.tables[self._index[name]]

    def tables_named(self, names: Sequence[str]) -> frozenset[str]:
        """The tables of these names; all where none is named.

        Raises:
            KeyError: there is no such table.
        """
        for name in names:
            self.config(name)
        return frozenset(names) or frozenset(self._index)

    def optimizer_of(self, name: str) -> TableOptimizer | None:
        """The optimizer of table `name`."""
        return self.optimizers[self._index[name]]

    def find_table(self, name: str) -> tuple[Group, int]:
        """The group that holds table `name`, and its place there."""
        for group in self.groups:
            if name in group.table_indices:
                return group, group.table_indices[name]
        raise KeyError(f"no table is named {name!r}")

    # ---- groups

    @property
    def groups(self) -> list[Group]:
        """The groups, built at the first use."""
        if not self.built:
            self.check_not_meta()
            with self.locks.exclusive():
                if not self.built:
                    self._use_groups(self._build())
                    try:
                        self.fill(self)
                    except BaseException:
                        self.built = []
                        raise
        return self.built

    def check_not_meta(self) -> None:
        """Raises RuntimeError for tables on the meta device."""
        if self.device.type == "meta":
            raise RuntimeError("this embedding is on the meta device: it has no rows, give a real device=")

    def cache_sizes(self) -> list[int]:
        """Rows of each table that the device cache holds, or will hold."""
        if self.built:
            sizes = {member.config.name: member.slots for group in self.built for member in group.members}
            return [sizes[table.name] for table in self.tables]
        return self._sizes()

    def _sizes(self) -> list[int]:
        """Rows of each table that a cache which is made now holds."""
        self.check_not_meta()
        free = backend_for(self.device).free_memory(self.device)
        sizes_in_bytes = [record_layout(t, o).bytes for t, o in zip(self.tables, self.optimizers, strict=True)]
        options = self.tables, sizes_in_bytes, self.options.cache, self.options.batch_hint, free
        try:
            return cache_slots(*options, self.needed_rows)
        except (ValueError, MemoryError):
            if self.needed_rows is None:
                raise
            return cache_slots(*options)  # no memory for what batches can need, which is more than they do need

    def fit_caches(self, batch: Batch, batches: int) -> bool:
        """Lets the caches hold so many batches as large as `batch`, the first one that is trained.

        Sizes that `cache=` gives as numbers of rows stay. Groups that were built before, by a load, are laid out anew
        only where this batch might not fit, and host and device have memory for both.

        Returns:
            False: the batch says nothing, since it has no lookups or is not well formed.
        """
        if not batch.is_well_formed or not len(batch.values):
            return False
        lookups = batch.lookup_counts(np.arange(self.num_features))
        rows = [int(lookups[list(features)].sum()) for features in self._features]
        self.needed_rows = [min(batches * own, t.num_embeddings) for own, t in zip(rows, self.tables, strict=True)]
        if self.built and not self.window_open() and not self.in_flight() and self._could_hold_more(rows):
            stored = sum(group.memory(None)["store_bytes"] for group in self.built)
            if stored < available_memory():
                self._rebuild()
        return True

    def _could_hold_more(self, rows: Sequence[int]) -> bool:
        """Returns whether a table has fewer slots than `rows` of it, and would have more in a cache beside this one."""
        before = self.cache_sizes()
        if all(have >= own for have, own in zip(before, rows, strict=True)):
            return False
        try:
            wanted = self._sizes()
        except (ValueError, MemoryError):  # the caches that there are have taken the device's memory
            return False
        return any(have < min(own, want) for have, own, want in zip(before, rows, wanted, strict=True))

    def _build(self, serial: int = 0) -> list[Group]:
        slots, options = self._sizes(), self.options
        if options.host_store is None:
            stored = [stored_bytes(t, o) for t, o in zip(self.tables, self.optimizers, strict=True)]
            check_host_memory(self.tables, stored)
        elif self._store_folder is None:
            self.store_in(StoreFolder(options.host_store))
        columns = (np.cumsum(self.feature_dims) - self.feature_dims).tolist()
        groups = []
        for indices in partition_into_groups(self.tables, self.optimizers):
            members = [Member(self.tables[i], self._features[i], slots[i], self.optimizers[i]) for i in indices]
            own = [columns[f] for member in members for f in member.features] if self.pooled else []
            choices = options.seed, options.bounds_check_mode, options.cache_policy
            stores, row_ids = self._store_folder, options.updates_at_step  # gradients are handed out by id
            group = Group(members, own, options.device, *choices, serial, stores, row_ids)
            group.set_evict_step_interval(options.evict_step_interval)
            if options.frozen:
                group.freeze(options.frozen)
            group.count_norms(options.grad_norms)
            local = group.table_indices
            group.owned_ids = {local[name]: ids for name, ids in self.owned_ids.items() if name in local}
            group.evicted = {local[name]: buffer for name, buffer in self.evicted.items() if name in local}
            groups.append(group)
        logger.debug("caches on %s: %s", options.device, {t.name: n for t, n in zip(self.tables, slots, strict=True)})
        return groups

    def _use_groups(self, groups: list[Group]) -> None:
        """Makes these the groups."""
        self.works_on_tables = not self.options.updates_at_step and any(group.works_on_tables for group in groups)
        optimizers = {id(optimizer): optimizer for group in groups for optimizer in group.optimizers}
        self.used_optimizers = list(optimizers.values())
        self.built = groups

    def _rebuild(self) -> None:
        """Lays the groups out anew, for other optimizers or another device, and moves the rows over."""
        with self.locks.exclusive():
            self._check_idle("the embedding changes")
            old, self.built = self.built, []
            try:
                fresh = self._build(max((group.version() for group in old), default=0))
                move_rows(old, fresh)
            finally:
                self.built = old
            self._use_groups(fresh)

    def check_trainable(self) -> None:
        """
        Raises:
            RuntimeError: a table has no optimizer.
        """
        missing = [t.name for t, optimizer in zip(self.tables, self.optimizers, strict=True) if optimizer is None]
        if missing:
            raise RuntimeError(
                f"tables {missing} have no optimizer: call apply_optimizer_in_backward on their parameters "
                "before the first training forward (or use eval() / torch.no_grad() to read only)"
            )

    def weights_of(self, batch: Batch) -> list[torch.Tensor | None]:
        """The per-sample weights of each group.

        Raises:
            ValueError: the tables are not pooled.
        """
        if not self.pooled:
            raise ValueError("per-sample weights need pooled tables")
        return [group.weights_of(batch) for group in self.groups]

    # ---- changes

    def set_optimizers(self, optimizers: Mapping[int, TableOptimizer]) -> None:
        """Makes these the optimizers of tables, by index; rows that exist already keep their weights.

        Raises:
            RuntimeError: a table has another optimizer.
        """
        before = list(self.optimizers)
        for table, optimizer in optimizers.items():
            if before[table] is not None and before[table] is not optimizer:
                raise RuntimeError(f"table {self.tables[table].name!r} has its optimizer already")
            if self.options.updates_at_step:
                optimizer.check_deferrable()
        for table, optimizer in optimizers.items():
            self.optimizers[table] = optimizer
        try:
            if self.built and any(o is not b for o, b in zip(self.optimizers, before, strict=True)):
                self._rebuild()
        except BaseException:
            self.optimizers = before
            raise

    def move_to(self, device: torch.device) -> None:
        """Moves the caches to another device."""
        backend_for(device)
        before, self.options = self.options, replace(self.options, device=device)
        try:
            if self.built:
                self._rebuild()
        except BaseException:
            self.options = before
            raise

    def store_in(self, folder: StoreFolder) -> None:
        """Keeps rows in this folder, which is that of the options."""
        self._store_folder, self.locks.store = folder, folder.path

    def copy_rows(self, other: Layout) -> None:
        """Builds groups with the rows of `other`, if that one is built, and has its rows to hand out."""
        for name, buffer in self.evicted.items():
            buffer.chunks[:] = other.evicted[name].chunks
        self.needed_rows = other.needed_rows
        if other.built:
            fresh = self._build()
            move_rows(other.built, fresh)
            self._use_groups(fresh)

    def planned_part(self, batch: Batch, frozen: FrozenTables | None) -> Batch:
        """The part of a training batch, as it was given, that there is a plan of.

        It has no id that means nothing, and nothing of the tables that are `frozen`.
        """
        if self.padding_ids is not None:
            batch = self.padding_ids.remove_from(batch)
        return batch if frozen is None else frozen.trained_part(batch)

    def freeze(self, names: frozenset[str]) -> None:
        """Makes these the frozen tables. Both locks are held.

        Raises:
            RuntimeError: gradients would be lost.
        """
        self._check_idle("tables are frozen or thawed")
        self.frozen = FrozenTables.from_tables(self.tables, names)
        for group in self.built:
            group.freeze(names)

    # ---- windows and batches in flight

    def window_open(self) -> bool:
        """Whether an accumulation window has begun and not ended, or gradients wait for `step()`."""
        if self.pending_gradients.backward_passes:
            return True
        windows = [group.accumulation_buffer for group in self.built if group.accumulation_buffer is not None]
        return any(self.windows.values()) or any(window.is_open() for window in windows)

    def ends_window(self) -> bool:
        """Whether the next backward pass ends an accumulation window of several."""
        counts = count_backward_passes(
            self.windows, [group.accumulate_step for group in self.built if group.accumulation_buffer is not None]
        )
        return any(count >= length for length, count in counts.items())

    def drop_windows(self) -> None:
        """Forgets gradients that wait for `step()` or for the end of a window; loading does so."""
        with self.locks.exclusive():
            self.windows, self.pending_gradients = {}, NO_PENDING_GRADIENTS
            for group in self.built:
                if group.accumulation_buffer is not None:
                    group.swap.settle()
                    group.accumulation_buffer.drop()

    def in_flight(self) -> int:
        """Batches that are planned and whose update is not launched."""
        most = 0
        for group in self.built:
            most = max(most, group.in_flight())
        return most

    def check_no_gradients(self, what: str) -> None:
        """
        Raises:
            RuntimeError: gradients wait for an update that would be lost by `what`.
        """
        if self.pending_gradients.backward_passes:
            raise RuntimeError(f"gradients are pending: call step() or zero_grad() of the optimizer before {what}")
        if self.window_open():
            raise RuntimeError(f"an accumulation window is open; finish it before {what}")

    def _check_idle(self, what: str) -> None:
        """Raises RuntimeError where gradients would be lost by `what`."""
        self.check_no_gradients(what)
        self.check_not_in_flight(what)

    def check_not_in_flight(self, what: str) -> None:
        """
        Raises:
            RuntimeError: batches are planned and not updated, so that `what` cannot be.
        """
        if self.in_flight():
            raise RuntimeError(
                f"batches are in flight: run their backward, or drop the outputs of their forward, before {what}"
            )
