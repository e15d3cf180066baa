"""The layout of an embedding: its tables, and their groups, which are built at the first use."""

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
    """The tables of one embedding and their groups. It has no reference to a module or a prefetch queue.

    Attributes:
        tables: the configs of the tables.
        optimizers: the optimizer of each table; None if it has none yet.
        pooled: whether lookups pool rows into one output.
        options: the current options of the embedding.
        num_features: number of features of all tables.
        feature_dims: the embedding dim of each feature.
        frozen: the frozen tables; None if there are none.
        padding_ids: the padding ids; None if no table has one.
        locks: locks of the tables.
        edges: the tables' parameters as inputs of backward passes.
        built: the groups; empty before the first use.
        used_optimizers: the distinct optimizers of the groups.
        works_on_tables: whether a backward pass may end an accumulation window, evict ids or run an optimizer's pass
            over whole tables.
        windows: backward passes so far, by length of the accumulation window.
        pending_gradients: gradients that `step()` will apply (`update="step"`).
        needed_rows: number of rows of each table that the first training batch and the batches planned ahead of it can
            need; None before that batch.
        evicted: by table name, the buffers of evicted rows of tables with `keep_evicted`.
        replicated: names of the tables that every rank of a sharded collection holds in full.
        owned_ids: by table name, functions that return the ids that always have rows; see `Group.owned_ids`.
        fill: function that fills the rows of new tables.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        options: EmbeddingOptions,
        optimizer: TableOptimizer | None,
        fill: Callable[[Layout], None],
    ) -> None:
        """Checks tables and options; allocates nothing.

        Args:
            tables: configs of the tables, at least one.
            options: options of the embedding.
            optimizer: the optimizer of all tables; None: optimizers are set later.
            fill: fills the rows of the new tables when the groups are built.

        Raises:
            ValueError, TypeError, MemoryError: invalid tables or options.
        """
        check_names(tables)
        self.tables = list(tables)
        self._index = {table.name: index for index, table in enumerate(self.tables)}
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
        """The device of the caches."""
        return self.options.device

    def config(self, name: str) -> TableConfig:
        """Returns the config of table `name`.

        Raises:
            KeyError: there is no such table.
        """
        if not isinstance(name, str) or name not in self._index:
            raise KeyError(f"no table is named {name!r}, only {list(self._index)}")
        return self.tables[self._index[name]]

    def tables_named(self, names: Sequence[str]) -> frozenset[str]:
        """Returns the set of `names`; the names of all tables if it is empty.

        Raises:
            KeyError: there is no table with one of the names.
        """
        for name in names:
            self.config(name)
        return frozenset(names) or frozenset(self._index)

    def optimizer_of(self, name: str) -> TableOptimizer | None:
        """Returns the optimizer of table `name`; None if it has none yet."""
        return self.optimizers[self._index[name]]

    def find_table(self, name: str) -> tuple[Group, int]:
        """Returns the group of table `name`, and the table's index in the group."""
        for group in self.groups:
            if name in group.table_indices:
                return group, group.table_indices[name]
        raise KeyError(f"no table is named {name!r}")

    # ---- groups

    @property
    def groups(self) -> list[Group]:
        """The groups; the first access builds the groups and fills new tables."""
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
        """Checks that the tables are not on the meta device; raises RuntimeError otherwise."""
        if self.device.type == "meta":
            raise RuntimeError("this embedding is on the meta device: it has no rows, give a real device=")

    def cache_sizes(self) -> list[int]:
        """Returns the number of cache slots of each table, before or after the groups are built."""
        if self.built:
            sizes = {member.config.name: member.slots for group in self.built for member in group.members}
            return [sizes[table.name] for table in self.tables]
        return self._sizes()

    def _sizes(self) -> list[int]:
        """Computes the number of cache slots of each table for groups that are about to be built."""
        self.check_not_meta()
        free = backend_for(self.device).free_memory(self.device)
        sizes_in_bytes = [record_layout(t, o).bytes for t, o in zip(self.tables, self.optimizers, strict=True)]
        options = self.tables, sizes_in_bytes, self.options.cache, self.options.batch_hint, free
        try:
            return cache_slots(*options, self.needed_rows)
        except (ValueError, MemoryError):
            if self.needed_rows is None:
                raise
            return cache_slots(*options)  # needed_rows is an upper bound: batches may fit into fewer slots

    def fit_caches(self, batch: Batch, batches: int) -> bool:
        """Enlarges the caches to hold `batches` batches as large as `batch`, the first training batch.

        A number of rows that `cache=` sets is not changed. Groups that already exist, such as after a load, are rebuilt
        only if this batch might not fit. Rebuilding needs host and device memory for the old and the new groups.

        Returns:
            False if the batch determines no size, because it has no lookups or is malformed; else True.
        """
        if not batch.is_well_formed or not len(batch.values):
            return False
        lookups = batch.lookup_counts(np.arange(self.num_features))
        rows = [int(lookups[list(features)].sum()) for features in self._features]
        self.needed_rows = [min(batches * need, t.num_embeddings) for need, t in zip(rows, self.tables, strict=True)]
        if self.built and not self.window_open() and not self.in_flight() and self._rebuild_would_add_slots(rows):
            stored = sum(group.memory(None)["store_bytes"] for group in self.built)
            if stored < available_memory():
                self._rebuild()
        return True

    def _rebuild_would_add_slots(self, rows: Sequence[int]) -> bool:
        """Returns whether rebuilt groups would give more slots to a table that now has fewer than `rows` requires."""
        current = self.cache_sizes()
        if all(have >= need for have, need in zip(current, rows, strict=True)):
            return False
        try:
            rebuilt = self._sizes()
        except (ValueError, MemoryError):  # the existing caches use the device's memory
            return False
        return any(have < min(need, size) for have, need, size in zip(current, rows, rebuilt, strict=True))

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
            group_columns = [columns[f] for member in members for f in member.features] if self.pooled else []
            choices = options.seed, options.bounds_check_mode, options.cache_policy
            stores, row_ids = self._store_folder, options.updates_at_step  # users read pending gradients by id
            group = Group(members, group_columns, options.device, *choices, serial, stores, row_ids)
            group.set_evict_step_interval(options.evict_step_interval)
            if options.frozen:
                group.freeze(options.frozen)
            group.enable_norms(options.grad_norms)
            local = group.table_indices
            group.owned_ids = {local[name]: ids for name, ids in self.owned_ids.items() if name in local}
            group.evicted = {local[name]: buffer for name, buffer in self.evicted.items() if name in local}
            groups.append(group)
        logger.debug("caches on %s: %s", options.device, {t.name: n for t, n in zip(self.tables, slots, strict=True)})
        return groups

    def _use_groups(self, groups: list[Group]) -> None:
        """Replaces the groups and the attributes that depend on them."""
        self.works_on_tables = not self.options.updates_at_step and any(group.works_on_tables for group in groups)
        optimizers = {id(optimizer): optimizer for group in groups for optimizer in group.optimizers}
        self.used_optimizers = list(optimizers.values())
        self.built = groups

    def _rebuild(self) -> None:
        """Builds new groups, for other optimizers, another device or other cache sizes, and moves the rows to them."""
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
        """Checks that every table has an optimizer.

        Raises:
            RuntimeError: a table has no optimizer.
        """
        missing = [t.name for t, optimizer in zip(self.tables, self.optimizers, strict=True) if optimizer is None]
        if missing:
            raise RuntimeError(
                f"tables {missing} have no optimizer: call apply_optimizer_in_backward on their parameters "
                "before the first training forward (or use eval() / torch.no_grad() to read only)"
            )

    def sample_weights(self, batch: Batch) -> list[torch.Tensor | None]:
        """Returns the per-sample weights of a batch, for each group.

        Raises:
            ValueError: the tables are not pooled.
        """
        if not self.pooled:
            raise ValueError("per-sample weights need pooled tables")
        return [group.sample_weights(batch) for group in self.groups]

    # ---- changes

    def set_optimizers(self, optimizers: Mapping[int, TableOptimizer]) -> None:
        """Sets the optimizers of tables by index; existing rows keep their weights.

        Raises:
            RuntimeError: a table already has another optimizer.
        """
        before = list(self.optimizers)
        for table, optimizer in optimizers.items():
            if before[table] is not None and before[table] is not optimizer:
                raise RuntimeError(f"table {self.tables[table].name!r} has an optimizer already")
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
        """Makes groups that are built later store their rows on disk, in `folder` of the option `host_store`."""
        self._store_folder, self.locks.store = folder, folder.path

    def copy_rows(self, other: Layout) -> None:
        """Copies the evicted rows of `other`, and builds groups with its rows if `other` is built."""
        for name, buffer in self.evicted.items():
            buffer.chunks[:] = other.evicted[name].chunks
        self.needed_rows = other.needed_rows
        if other.built:
            fresh = self._build()
            move_rows(other.built, fresh)
            self._use_groups(fresh)

    def without_padding_and_frozen(self, batch: Batch, frozen: FrozenTables | None) -> Batch:
        """Returns the planned part of a training batch, without padding ids and without lookups of `frozen` tables."""
        if self.padding_ids is not None:
            batch = self.padding_ids.remove_from(batch)
        return batch if frozen is None else frozen.trained_part(batch)

    def freeze(self, names: frozenset[str]) -> None:
        """Freezes these tables and thaws all others. Requires both locks.

        Raises:
            RuntimeError: batches are in flight, or gradients are pending or accumulated.
        """
        self._check_idle("tables are frozen or thawed")
        self.frozen = FrozenTables.from_tables(self.tables, names)
        for group in self.built:
            group.freeze(names)

    # ---- pending gradients and batches in flight

    def window_open(self) -> bool:
        """Returns whether an accumulation window is open, or gradients are pending for `step()`."""
        if self.pending_gradients.backward_passes:
            return True
        windows = [group.accumulation_buffer for group in self.built if group.accumulation_buffer is not None]
        return any(self.windows.values()) or any(window.is_open() for window in windows)

    def ends_window(self) -> bool:
        """Returns whether the next backward pass ends an accumulation window."""
        counts = count_backward_passes(
            self.windows, [group.accumulate_step for group in self.built if group.accumulation_buffer is not None]
        )
        return any(count >= length for length, count in counts.items())

    def discard_gradients(self) -> None:
        """Discards pending and accumulated gradients; a load does this."""
        with self.locks.exclusive():
            self.windows, self.pending_gradients = {}, NO_PENDING_GRADIENTS
            for group in self.built:
                if group.accumulation_buffer is not None:
                    group.swap.settle()
                    group.accumulation_buffer.drop()

    def in_flight(self) -> int:
        """Returns the number of planned batches whose update has not been launched."""
        most = 0
        for group in self.built:
            most = max(most, group.in_flight())
        return most

    def check_no_gradients(self, what: str) -> None:
        """Checks that no gradients are pending or accumulated; `what` names the operation that would lose them.

        Raises:
            RuntimeError: gradients are pending or accumulated.
        """
        if self.pending_gradients.backward_passes:
            raise RuntimeError(f"gradients are pending: call step() or zero_grad() of the optimizer before {what}")
        if self.window_open():
            raise RuntimeError(f"an accumulation window is open; finish it before {what}")

    def _check_idle(self, what: str) -> None:
        """Checks that no gradients are pending and no batch is in flight; raises RuntimeError otherwise."""
        self.check_no_gradients(what)
        self.check_not_in_flight(what)

    def check_not_in_flight(self, what: str) -> None:
        """Checks that no batch is in flight; `what` names the operation that requires it.

        Raises:
            RuntimeError: the update of a planned batch has not been launched.
        """
        if self.in_flight():
            raise RuntimeError(
                f"batches are in flight: run their backward, or drop the outputs of their forward, before {what}"
            )
