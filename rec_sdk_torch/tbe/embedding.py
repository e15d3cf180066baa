"""The table-batched embedding: one call looks up many tables, which may be larger than device memory."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch

from ..operators.calls import empty_output
from ..runtime.eager import check_batch, eager
from ..runtime.exits import calls
from .cache.batch import Batch, Int64Array
from .cache.device_cache import Group
from .cache.padding_ids import restore_padding_rows
from .cache.store_folder import folder_for_copy
from .config.cache_size import BatchHint, CacheOption
from .config.lifecycle import IdSignals
from .config.optimizer import TableOptimizer
from .config.table import BoundsCheckMode, TableConfig
from .options import Device, EmbeddingOptions, Folder
from .rows.layout import Layout
from .rows.state_dict import TablesModule, load_tables, refuse_sharing, save_table
from .rows.table_view import fill_tables
from .step.deferred_update import DeferredStep, PendingGradientMethods
from .step.gradient_check import GradientGuard
from .step.monitor import Monitor, describe_table
from .step.prefetch_queue import Prefetched, PrefetchQueue
from .step.reading import read_batch
from .step.recompute import Recomputations, RecomputedStep, saved_tensors_hooks
from .step.step import FusedLookup, Step, look_up
from .table_methods import TableMethods


class TableBatchedEmbedding(TableMethods, PendingGradientMethods, TablesModule):
    """Embedding tables in host memory, whose hot rows are in a device cache and are updated in the backward pass.

    Rows and cache are allocated at the first training forward, load or read, for the optimizers known then. If the
    optimizers change later, the rows are copied to a new layout.

    Example:
        >>> import torch
        >>> from rec_sdk_torch import TableBatchedEmbedding, TableConfig, TableOptimizer
        >>> sgd = TableOptimizer.create(torch.optim.SGD, {"lr": 0.1})
        >>> embedding = TableBatchedEmbedding([TableConfig("t", 100, 4)], optimizer=sgd, cache=10, device="cpu")
        >>> pooled = embedding(torch.tensor([7, -7, 7]), torch.tensor([0, 2, 3]))  # two bags: [7, -7] and [7]
        >>> pooled.sum().backward()  # updates two rows
        >>> pooled.shape, embedding.table_ids("t").tolist()
        (torch.Size([2, 4]), [7, -7])
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        *,
        optimizer: TableOptimizer | None = None,
        cache: CacheOption = None,
        batch_hint: BatchHint | None = None,
        device: Device = None,
        seed: int | None = None,
        bounds_check_mode: BoundsCheckMode | str = BoundsCheckMode.WARNING,
        check_finite: str = "off",
        cache_policy: str = "lrfu",
        update: str = "backward",
        host_store: Folder = None,
    ) -> None:
        """Checks the configuration; allocates nothing yet.

        Args:
            tables: configurations with unique names. Either all tables are pooled, or all have `Pooling.NONE`.
            optimizer: the optimizer of every table. `set_optimizers` sets one for each table.
            cache: size of the device cache: rows of each table (int), a fraction of each table (float), bytes of all
                tables (`"2GiB"`), one of these by table name (dict), or derived from the batches (None).
            batch_hint: the batches that a derived cache must hold.
            device: the device of the cache; None: torch's default device.
            seed: the seed of the initial weights; None: drawn from torch's generator.
            bounds_check_mode: the reaction to an id outside an index table.
            check_finite: the reaction to a NaN or infinite gradient: "off" (no reaction), "warn" or "raise".
            cache_policy: the policy that chooses victims when the cache is full, see docs/cache.md. It does not change
                results.
            update: when rows are updated: in the "backward" pass, or by "step" of the optimizer.
            host_store: a folder whose memory-mapped files hold the rows; None: the rows are in host memory.

        Raises:
            ValueError, TypeError: a table or an option is invalid.
            MemoryError: the host has too little memory for the index tables.
        """
        options = EmbeddingOptions(
            cache=cache,
            batch_hint=batch_hint,
            device=device,
            seed=seed,
            bounds_check_mode=bounds_check_mode,
            check_finite=check_finite,
            cache_policy=cache_policy,
            update=update,
            host_store=host_store,
        )
        self._set_up(tables, options, optimizer)

    @classmethod
    def from_options(
        cls, tables: Sequence[TableConfig], options: EmbeddingOptions, optimizer: TableOptimizer | None = None
    ) -> Self:
        """Creates an embedding from options in one object, such as `other.options`. Raises as the constructor does."""
        embedding = cls.__new__(cls)
        embedding._set_up(tables, options, optimizer)
        return embedding

    def _set_up(
        self, tables: Sequence[TableConfig], options: EmbeddingOptions, optimizer: TableOptimizer | None
    ) -> None:
        super().__init__()
        self.layout = Layout(tables, options, optimizer, fill_tables)
        self.guard = GradientGuard()
        self.monitor = Monitor()
        self.queue = PrefetchQueue(self.layout, self.monitor, self.may_plan_ahead)
        self._set_options()
        self.tables = self.layout.tables
        self.pooled = self.layout.pooled
        self.num_features = self.layout.num_features
        self.feature_dims = self.layout.feature_dims
        self._width = sum(self.feature_dims) if self.pooled else 0
        self._keys = np.arange(self.num_features, dtype=np.int64)
        self._trainable = False
        self._step = DeferredStep if options.updates_at_step else Step
        self._anchor: torch.Tensor | None = None
        self._recomputations = Recomputations()

    @property
    def embedding(self) -> Self:
        """The embedding itself; methods that it shares with collections read this property."""
        return self

    @property
    def options(self) -> EmbeddingOptions:
        """The present options: the constructor's arguments with all later changes."""
        return self.layout.options

    def set_parameter(self, table: str, parameter: torch.Tensor) -> None:
        """Makes `parameter`, which has no elements, the parameter of a table in `inputs=`; see `ParameterEdges`."""
        self.layout.edges.add(table, parameter)
        self._anchor = None

    def execute_parameter(self, table: str) -> None:
        """Makes backward passes of later lookups execute the node of the table's parameter, for its hooks."""
        self.layout.edges.execute(table)
        self._anchor = None

    # ---- layout

    @property
    def optimizers(self) -> list[TableOptimizer | None]:
        """The optimizer of each table; None for a table without one."""
        return self.layout.optimizers

    @property
    def groups(self) -> list[Group]:
        """The groups of tables with the same record layout. The first access allocates the groups."""
        return self.layout.groups

    def set_optimizers(self, optimizers: Mapping[int, TableOptimizer]) -> None:
        """Sets optimizers by the index of their table. Existing rows keep their weights.

        Raises:
            RuntimeError: a table already has another optimizer.
        """
        self.layout.set_optimizers(optimizers)

    # ---- rows of a table

    def table_ids(self, name: str) -> Int64Array:
        """Returns the ids of a hash table in row order, or all row numbers of an index table; int64 `[n]`."""
        ids: Int64Array = self.view(name).ids().numpy()
        return ids

    # ---- prefetching

    def prefetch(
        self,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        per_sample_weights: torch.Tensor | None = None,
        *,
        shows: torch.Tensor | None = None,
        clicks: torch.Tensor | None = None,
        timestamps: torch.Tensor | None = None,
    ) -> Prefetched:
        """Plans the batch of a future training forward, and starts to copy its missing rows, in another thread.

        Takes the arguments of `forward`, which later recognizes the batch by its ids. The forwards must run in the
        order of the prefetches, and the ids must not be changed before their forward. Prefetching changes no result.

        Raises:
            RuntimeError: 16 batches are prefetched already.
        """
        batch_size = self.batch_size(offsets)
        weighted = per_sample_weights is not None
        signals = IdSignals(shows, clicks, timestamps)
        prefetched = Prefetched(indices, offsets, batch_size, self._keys, weighted, offsets, not self.pooled, signals)
        self.queue.add(prefetched)
        return prefetched

    def forget(self, prefetched: Prefetched | None = None) -> None:
        """Removes a batch from the prefetch queue; None: all batches. Does nothing after the batch's forward."""
        self.queue.remove(prefetched)

    def may_plan_ahead(self) -> bool:
        """Returns whether training batches can be planned: after the first training forward, and in training mode."""
        return self.training and self._trainable and bool(self.layout.built)

    # ---- forward

    def batch_size(self, offsets: torch.Tensor) -> int:
        """Returns B, the number of samples in a batch, from its offsets `[F * B + 1]`.

        Raises:
            ValueError: the number of offsets does not match the F features.
        """
        batch_size, rest = divmod(offsets.numel() - 1, self.num_features)
        if rest or offsets.numel() < 1:
            raise ValueError(f"offsets has {offsets.numel()} entries, expected features ({self.num_features}) * B + 1")
        return batch_size

    @eager
    def forward(
        self,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        per_sample_weights: torch.Tensor | None = None,
        *,
        shows: torch.Tensor | None = None,
        clicks: torch.Tensor | None = None,
        timestamps: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Looks up a batch whose features are in the order of the tables.

        Args:
            indices: ids, int32 or int64 `[n]`: all ids of the first feature, then of the second, and so on.
            offsets: int32 or int64 `[F * B + 1]`: where each bag begins in `indices`.
            per_sample_weights: float32 `[n]`, for pooled tables only.
            shows, clicks, timestamps: integers `[n]`, for tables that admit or evict ids by them: how often each id
                was shown, 1 or more (None: once), how often it was clicked, and the time in seconds.

        Returns:
            float32 `[B, sum of the features' dims]` for pooled tables; float32 `[n, D]` for sequence tables, which must
            all have the same dim D.

        Raises:
            ValueError: the number of offsets does not match the features, or sequence tables have different dims.
        """
        check_batch(indices)
        if not self.pooled and len(set(self.feature_dims)) > 1:
            raise ValueError(f"sequence tables of dims {self.feature_dims} cannot be joined: use an embedding for each")
        size, signals = self.batch_size(offsets), IdSignals(shows, clicks, timestamps)
        batch = self.queue.batch(
            offsets, indices, offsets, size, self._keys, per_sample_weights, not self.pooled, signals
        )
        if self.pooled:
            return self.lookup_pooled(batch)
        if self.layout.frozen is not None:  # trained and frozen rows form separate outputs
            return torch.cat(self.lookup_features(replace(batch, joined=False)))
        outputs = self._lookup(batch)
        if len(outputs) > 1:
            pairs = zip(outputs, self._lookup_counts(batch), strict=True)
            parts = [part for rows, group_lengths in pairs for part in rows.split(group_lengths)]
            outputs = (torch.cat(self._by_feature(parts)),)
        return outputs[0] if batch.parent is None else restore_padding_rows(outputs, batch, joined=True)[0]

    def lookup_pooled(self, batch: Batch) -> torch.Tensor:
        """Returns the pooled rows of a batch, float32 `[B, sum of the features' dims]`."""
        return self._lookup(batch)[0]

    def lookup_features(self, batch: Batch) -> list[torch.Tensor]:
        """Returns the rows of each feature of a batch, float32 `[n_f, D_f]`."""
        parts = self._lookup(batch)
        rows = list(parts) if len(self.layout.built) == 1 else self._by_feature(parts)
        return rows if batch.parent is None else restore_padding_rows(rows, batch, joined=False)

    def _by_feature(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Reorders outputs, one for each feature, from the order of the groups to the order of the features."""
        features = [feature for group in self.groups for feature in group.features.tolist()]
        by_feature = dict(zip(features, parts, strict=True))
        return [by_feature[feature] for feature in range(self.num_features)]

    def _lookup_counts(self, batch: Batch) -> list[list[int]]:
        """Returns the number of lookups of each feature of each group."""
        return [batch.lookup_counts(group.features).tolist() for group in self.layout.built]

    @calls
    def _lookup(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Looks up a batch; trains it if training is enabled.

        Returns:
            The pooled output alone. Without pooling, for each group: the rows of each feature, or of all features
            together if the batch is `joined`.
        """
        frozen = self.layout.frozen
        if not (self.training and torch.is_grad_enabled()):
            return self._read(batch, batch if frozen is None else frozen.trained_part(batch))
        if frozen is None:
            return self._train(batch)
        trained, read = frozen.trained_part(batch), frozen.frozen_part(batch)
        if frozen.all_frozen:
            return self._read(read, trained)
        return frozen.merge_outputs(self._train(trained), self._read(read, None), self.groups)

    def _output_shape(self, batch: Batch) -> tuple[list[list[int]] | None, tuple[int, int] | None]:
        """Returns the arguments `lengths` and `shape` of `Step` for a batch."""
        lengths = None if self.pooled or batch.joined else self._lookup_counts(batch)
        return lengths, (batch.batch_size, self._width) if self.pooled else None

    def _read(self, batch: Batch, prefetched_as: Batch | None) -> tuple[torch.Tensor, ...]:
        """Looks up a batch without training.

        Args:
            batch: the lookups.
            prefetched_as: the form in which the prefetch queue may hold the batch, which the call removes there.
        """
        layout, groups = self.layout, self.layout.groups
        weights = [None] * len(groups) if batch.weights is None else layout.sample_weights(batch)
        lengths, shape = self._output_shape(batch)
        with layout.locks.exclusive():
            if prefetched_as is not None:
                self.queue.remove_read(prefetched_as)
            out = None if shape is None else empty_output(shape, self.device)
            return read_batch(layout.groups, batch, weights, lengths, out)

    def _train(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        layout = self.layout
        if not self._trainable:
            layout.check_not_meta()
            layout.check_trainable()
            self._trainable = layout.fit_caches(batch.original, self.queue.batches_to_hold())
        groups = layout.built or layout.groups
        weights = () if batch.weights is None else layout.sample_weights(batch)
        lengths, shape = (None, (batch.batch_size, self._width)) if self.pooled else self._output_shape(batch)
        if self._anchor is None:
            with layout.locks.launch:
                if self._anchor is None:  # tested again under the lock: backward passes only find the latest anchor
                    self._anchor = layout.edges.anchor(self.device)
        hooks = saved_tensors_hooks(True)
        if hooks is not None:
            earlier = self._recomputations.find_step(hooks[0], batch)
            if earlier is not None:
                repeated: tuple[torch.Tensor, ...] = FusedLookup.apply(self._anchor, RecomputedStep(earlier), *weights)
                return repeated
        if layout.locks.unfinished is not None:
            layout.locks.catch_up()  # before this batch is planned: a plan prevents changes of whole tables
        monitor = self.monitor
        step = self._step(layout, self.guard, monitor, self.queue.take(batch), lengths, shape)
        monitor.copied_batches += batch.copied
        if hooks is not None:
            self._recomputations.add(hooks[0], batch, step)
        try:
            outputs = FusedLookup.apply(self._anchor, step, *weights) if weights else look_up(self._anchor, step)
        except BaseException:
            step.release()  # explicit, since the traceback may keep the step alive
            raise
        self.queue.plan_next()
        monitor.forwards += 1
        if monitor.forwards >= monitor.next_check:
            monitor.check(groups)
        return outputs

    # ---- torch.nn.Module

    def extra_repr(self) -> str:
        """Returns one line for each table, for `repr`."""
        return "\n".join(f"{table.name}: {self.describe(table.name)}" for table in self.tables)

    def describe(self, name: str, requested: Sequence[tuple[type, Mapping[str, Any]]] = ()) -> str:
        """Describes a table in one line: rows, columns, data type, kind, cache and optimizer. Allocates nothing.

        Args:
            name: the name of the table.
            requested: (class, options) of optimizers that have been applied to the table but are not set yet.
        """
        return describe_table(self.layout, name, requested)

    def _apply(self, fn: Any, recurse: bool = True) -> TableBatchedEmbedding:
        """Moves the cache for `.to(device)`; raises RuntimeError for `.to(dtype)` and `share_memory()`."""
        probe: Any = torch.empty(0, dtype=torch.float32, device=self.device)
        probe.share_memory_ = refuse_sharing
        probe = fn(probe)
        if probe.dtype != torch.float32:
            raise RuntimeError(f"tables cannot be converted to {probe.dtype}: set the data type in their config")
        if probe.device != self.device:
            self.layout.move_to(probe.device)
            self._anchor = None
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> TableBatchedEmbedding:
        layout, options, folder = self.layout, self.options, None
        if options.host_store is not None and self.device.type != "meta":
            folder = folder_for_copy(options.host_store)
            options = replace(options, host_store=folder.path)
        clone = TableBatchedEmbedding.from_options(self.tables, options)
        if folder is not None:
            clone.layout.store_in(folder)
        memo[id(self)] = clone
        clone.training = self.training
        with self.exclusive():
            layout.check_no_gradients("the embedding is copied")
            clone.layout.optimizers = copy.deepcopy(self.optimizers, memo)
            clone.layout.copy_rows(layout)
        return clone

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Adds the key `<table>.weight` for each table, and `<table>.ids` for a hash table."""
        for table in self.tables:
            save_table(self.layout, table.name, destination, f"{prefix}{table.name}.")

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        prefixes = {table.name: f"{prefix}{table.name}." for table in self.tables}
        load_tables(self.layout, state_dict, prefix, prefixes, self._strict, missing_keys, unexpected_keys, error_msgs)
