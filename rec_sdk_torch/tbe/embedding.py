"""The table-batched embedding: many tables behind one call, larger than device memory."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch

from .._exits import calls
from ..backends.devices import backend_for
from ..eager import check_batch, eager
from .cache.batch import Batch, Int64Array
from .cache.device_cache import Group
from .cache.group_spec import Member, alike, drawn, record_layout, stored_bytes
from .cache.store_folder import StoreFolder, folder_for_copy
from .config.cache_size import BatchHint, CacheOption, cache_slots, check_host_memory
from .config.life import Seen
from .config.optimizer import TableOptimizer
from .config.table import BoundsCheckMode, Pooling, TableConfig, check_names
from .options import Device, EmbeddingOptions, Folder, Scaler
from .rows.row_parts import WEIGHT
from .rows.state_dict import TablesModule, load_tables, refuse_sharing, save_table
from .rows.table_view import Content, Load, TableView, move_rows
from .step.lookup import BatchLookup, fused_lookup, new_output, split_rows
from .step.monitor import Inspected
from .step.prefetch_queue import LookAhead, LooksAhead
from .step.reading import ReadPooled, wants_grad
from .step.steps import Steps


class TableBatchedEmbedding(LooksAhead, Inspected, TablesModule):
    """Embedding tables in host memory with their hot rows in a device cache, updated in the backward pass.

    Layout and cache are fixed at the first training forward, load or read, from the optimizers known then;
    when they change later, the rows move to the new layout.

    Attributes:
        tables: their configs.
        options: everything beside the tables, as it is now.
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
        host_store: Folder = None,
    ) -> None:
        """Checks the configuration; allocates nothing yet.

        Args:
            tables: unique names; all pooled, or none (`Pooling.NONE`).
            optimizer: of every table; others by `set_optimizers`.
            others: as `EmbeddingOptions` describes them.

        Raises:
            ValueError, TypeError: tables or options that cannot be met.
            MemoryError: index tables that the host cannot hold.
        """
        options = EmbeddingOptions(
            cache=cache,
            batch_hint=batch_hint,
            device=device,
            seed=seed,
            bounds_check_mode=bounds_check_mode,
            check_finite=check_finite,
            cache_policy=cache_policy,
            host_store=host_store,
        )
        self._set_up(tables, options, optimizer)

    @classmethod
    def from_options(
        cls, tables: Sequence[TableConfig], options: EmbeddingOptions, optimizer: TableOptimizer | None = None
    ) -> Self:
        """An embedding with options that are in one object, such as those of another embedding.

        Raises:
            ValueError, TypeError, MemoryError: as the constructor.
        """
        embedding = cls.__new__(cls)
        embedding._set_up(tables, options, optimizer)
        return embedding

    def _set_up(
        self, tables: Sequence[TableConfig], options: EmbeddingOptions, optimizer: TableOptimizer | None
    ) -> None:
        super().__init__()
        check_names(tables)
        self.tables = list(tables)
        self._index = {table.name: place for place, table in enumerate(self.tables)}
        self.pooled = self.tables[0].pooling is not Pooling.NONE
        if any((table.pooling is not Pooling.NONE) is not self.pooled for table in self.tables):
            raise ValueError("pooled tables and sequence tables (Pooling.NONE) cannot share an embedding")
        if optimizer is not None and not isinstance(optimizer, TableOptimizer):
            raise TypeError(f"optimizer is {optimizer!r}, expected a TableOptimizer: TableOptimizer.create(class, ...)")
        options.check(self.tables)
        self.num_features = sum(table.num_features for table in self.tables)
        ends = np.cumsum([table.num_features for table in self.tables])
        self._features = [tuple(range(end - t.num_features, end)) for end, t in zip(ends, self.tables, strict=True)]
        self.feature_dims = [table.embedding_dim for table in self.tables for _ in range(table.num_features)]
        self.optimizers: list[TableOptimizer | None] = [optimizer] * len(self.tables)
        self._trainable = False
        self._groups: list[Group] | None = None
        self._store_folder: StoreFolder | None = None
        self.steps = Steps(LookAhead(self))
        self._set_options(options)
        self._width = sum(self.feature_dims) if self.pooled else 0
        self._keys = np.arange(self.num_features, dtype=np.int64)
        self._anchor = self._make_anchor()

    def _set_options(self, options: EmbeddingOptions) -> None:
        self.options = options
        self.device = options.device
        self.steps.guard.check_finite = options.check_finite
        self.steps.guard.scaler = options.grad_scaler

    def _make_anchor(self) -> torch.Tensor:
        """What makes autograd record lookups."""
        with torch.inference_mode(False):
            return torch.empty(0, dtype=torch.float32, device=self.device, requires_grad=True)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keeps other threads from planning, reading or updating: what is seen inside is one moment of all tables."""
        with self.steps.alone():
            self.steps.complete()
            yield

    # ---- layout

    def set_optimizers(self, optimizers: Mapping[int, TableOptimizer]) -> None:
        """Makes these the optimizers of tables, by index; rows that exist already keep their weights.

        Raises:
            RuntimeError: a table has another optimizer.
        """
        before = list(self.optimizers)
        for table, optimizer in optimizers.items():
            if before[table] is not None and before[table] is not optimizer:
                raise RuntimeError(f"table {self.tables[table].name!r} has its optimizer already")
        for table, optimizer in optimizers.items():
            self.optimizers[table] = optimizer
        try:
            if self._groups is not None and any(o is not b for o, b in zip(self.optimizers, before, strict=True)):
                self._rebuild()
        except BaseException:
            self.optimizers = before
            raise

    def set_grad_scaler(self, scaler: Scaler | None) -> None:
        """Tells which `torch.amp.GradScaler` scales the losses; None: none does.

        Output gradients are then divided by `scaler.get_scale()` before the update. Where one is not finite the
        update is skipped as a whole: no row, step or accumulation window changes, and `skipped_updates` counts it.

        Raises:
            TypeError: something without `get_scale` and `is_enabled`.
        """
        self._set_options(replace(self.options, grad_scaler=scaler))

    @property
    def skipped_updates(self) -> int:
        """Updates that were skipped because gradients that a GradScaler had scaled overflowed."""
        return self.steps.guard.skipped

    @property
    def groups(self) -> list[Group]:
        """The groups, built at first use."""
        if self._groups is None:
            self._check_real()
            with self.exclusive():
                if self._groups is None:
                    self._groups = self._build()
                    try:
                        self._fill_tables()
                    except BaseException:
                        self._groups = None
                        raise
        return self._groups

    def _fill_tables(self) -> None:
        """Rows of tables that are new: index tables with an `init_fn`. Hash tables draw new rows when they come."""
        for table in self.tables:
            if table.init_fn is not None and not table.hashed:
                self.load([Content(self.view(table.name), None, {WEIGHT: drawn(table, table.num_embeddings)})])

    def _check_real(self) -> None:
        if self.device.type == "meta":
            raise RuntimeError("this embedding is on the meta device: it has no rows, give a real device=")

    def _slots(self) -> list[int]:
        """Rows of each table that the device cache holds."""
        if self._groups is not None:
            sizes = {member.config.name: member.slots for group in self._groups for member in group.members}
            return [sizes[table.name] for table in self.tables]
        self._check_real()
        free = backend_for(self.device).free_memory(self.device)
        sizes_in_bytes = [record_layout(t, o).bytes for t, o in zip(self.tables, self.optimizers, strict=True)]
        return cache_slots(self.tables, sizes_in_bytes, self.options.cache, self.options.batch_hint, free)

    def _build(self, serial: int = 0) -> list[Group]:
        slots, options = self._slots(), self.options
        if options.host_store is None:
            stored = [stored_bytes(t, o) for t, o in zip(self.tables, self.optimizers, strict=True)]
            check_host_memory(self.tables, stored)
        elif self._store_folder is None:
            self._store_folder = StoreFolder(options.host_store)
            self.steps.store = options.host_store
        columns = (np.cumsum(self.feature_dims) - self.feature_dims).tolist()
        groups = []
        for indices in alike(self.tables, self.optimizers):
            members = [Member(self.tables[i], self._features[i], slots[i], self.optimizers[i]) for i in indices]
            own = [columns[f] for member in members for f in member.features] if self.pooled else []
            choices = options.seed, options.bounds_check_mode, options.cache_policy
            groups.append(Group(members, own, self.device, *choices, serial, self._store_folder))
            groups[-1].set_evict_step_interval(options.evict_step_interval)
        return groups

    def set_evict_step_interval(self, steps: int | None) -> None:
        """Training steps between evictions of ids, of all tables that evict some; None: what their configs say.

        Raises:
            ValueError: less than one.
        """
        options = replace(self.options, evict_step_interval=steps)
        with self.exclusive():
            self._set_options(options)
            for group in self._groups or []:
                group.set_evict_step_interval(steps)

    def window_open(self) -> bool:
        """Whether an accumulation window has begun and not ended."""
        windows = [group.window for group in self._groups or [] if group.window is not None]
        return any(self.steps.windows.values()) or any(window.is_open() for window in windows)

    def drop_windows(self) -> None:
        """Forgets open accumulation windows, with the gradients in them; loading does so."""
        with self.exclusive():
            self.steps.windows = {}
            for group in self._groups or []:
                if group.window is not None:
                    group.swap.settle()
                    group.window.drop()

    def _check_idle(self, what: str) -> None:
        """Raises RuntimeError where gradients would be lost by `what`."""
        if self.window_open():
            raise RuntimeError(f"an accumulation window is open; finish it before {what}")
        if self.in_flight():
            raise RuntimeError(
                f"batches are in flight: run their backward, or drop the outputs of their forward, before {what}"
            )

    def _rebuild(self) -> None:
        """Lays the groups out anew, for other optimizers or another device, and moves the rows over."""
        with self.exclusive():
            self._check_idle("the embedding changes")
            old, self._groups = self._groups or [], None
            try:
                fresh = self._build(max((group.engine.version() for group in old), default=0))
                move_rows(old, fresh)
            finally:
                self._groups = old
            self._groups = fresh

    def find_table(self, name: str) -> tuple[Group, int]:
        """The group that holds table `name`, and its place there."""
        for group in self.groups:
            if name in group.places:
                return group, group.places[name]
        raise KeyError(f"no table is named {name!r}")

    def optimizer_of(self, name: str) -> TableOptimizer | None:
        """The optimizer of table `name`."""
        return self.optimizers[self._index[name]]

    # ---- whole tables

    def view(self, name: str) -> TableView:
        """The whole table `name`.

        Raises:
            KeyError: there is no such table.
        """
        if name not in self._index:
            raise KeyError(f"no table is named {name!r}, only {list(self._index)}")
        return TableView(self, self.tables[self._index[name]])

    def load(
        self,
        contents: Sequence[Content],
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
        with self.exclusive():
            self.steps.keep_rows(self.groups if contents else [])
            self.steps.do(Load(contents, steps, self.drop_windows if drop_windows else None))

    # ---- forward

    def _batch_size(self, offsets: torch.Tensor) -> int:
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
        """Looks up a batch, features in table order.

        Args:
            indices: ids, int32 or int64 `[n]`, feature-major.
            offsets: int32 or int64 `[F * B + 1]`.
            per_sample_weights: float32 `[n]`, pooled tables only.
            shows, clicks, timestamps: of each id, integers `[n]`, for tables whose ids are admitted or evicted by
                them: how often it was seen, 1 or more (None: once), how often clicked, when, in seconds.

        Returns:
            float32 `[B, sum of the features' dims]`, or `[n, D]` for sequence tables, which must then be of
            one dim.
        """
        check_batch(indices)
        if not self.pooled and len(set(self.feature_dims)) > 1:
            raise ValueError(f"sequence tables of dims {self.feature_dims} cannot be joined: use an embedding for each")
        size, seen = self._batch_size(offsets), Seen(shows, clicks, timestamps)
        arrays = offsets, indices, offsets
        batch = self.steps.ahead.batch(*arrays, size, self._keys, per_sample_weights, not self.pooled, seen)
        if self.pooled:
            return self.lookup_pooled(batch)
        outputs = self._lookup(batch)
        if len(outputs) == 1:  # whose rows are in feature order already
            return outputs[0]
        return torch.cat(self._in_order(split_rows(outputs, self._lengths(batch))))

    def lookup_pooled(self, batch: Batch) -> torch.Tensor:
        """Pooled rows, float32 `[B, sum of the features' dims]`."""
        return self._lookup(batch)[0]

    def lookup_features(self, batch: Batch) -> list[torch.Tensor]:
        """Rows of each feature, float32 `[n_f, D_f]`."""
        return self._in_order(self._lookup(batch))

    def _in_order(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Rows of each feature, from those in the order of the groups."""
        features = [feature for group in self.groups for feature in group.features.tolist()]
        of_features = dict(zip(features, parts, strict=True))
        return [of_features[feature] for feature in range(self.num_features)]

    def _lengths(self, batch: Batch) -> list[list[int]]:
        """Of each group the lookups of each of its features."""
        return [batch.lookups(group.features).tolist() for group in self.groups]

    @calls
    def _lookup(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        """The pooled output; or, group by group, the rows of each feature or, joined, of all features."""
        if batch.weights is not None and not self.pooled:
            raise ValueError("per-sample weights need pooled tables")
        groups = self.groups
        weights = [group.weights_of(batch) for group in groups]
        lengths = None if self.pooled or batch.joined else self._lengths(batch)
        shape = (batch.batch_size, self._width) if self.pooled else None
        if self.training and torch.is_grad_enabled():
            self._check_trainable()
            self.steps.catch_up()  # before there is a plan, beside which whole tables cannot be worked on
            call = BatchLookup(self.steps, groups, self.steps.ahead.plans_of(batch), lengths, shape)
            self.steps.monitor.copied_batches += batch.copied
            try:
                outputs = fused_lookup(self._anchor, call, weights)
            except BaseException:
                call.release()  # now: the traceback may live on
                raise
            self.steps.ahead.go_on()
            self.steps.monitor.count_forward(groups)
            return outputs
        with self.exclusive():
            self.steps.ahead.was_read(batch)
            out = new_output(shape, self.device)
            if out is not None and wants_grad(weights):
                return (ReadPooled.apply(groups, batch, out, *weights),)
            read = [group.read(batch, weight, out) for group, weight in zip(self.groups, weights, strict=True)]
        if lengths is not None:
            return split_rows(read, lengths)
        return tuple(read) if out is None else (out,)

    def _check_trainable(self) -> None:
        if self._trainable:
            return
        missing = [t.name for t, optimizer in zip(self.tables, self.optimizers, strict=True) if optimizer is None]
        if missing:
            raise RuntimeError(
                f"tables {missing} have no optimizer: call apply_optimizer_in_backward on their parameters "
                "before the first training forward (or use eval() / torch.no_grad() to read only)"
            )
        self._trainable = True

    # ---- what torch.nn.Module does to modules

    def _apply(self, fn: Any, recurse: bool = True) -> TableBatchedEmbedding:
        """`.to(device)` moves the cache; a change of dtype is refused, and so is `share_memory()`."""
        probe: Any = torch.empty(0, dtype=torch.float32, device=self.device)
        probe.share_memory_ = refuse_sharing
        probe = fn(probe)
        if probe.dtype != torch.float32:
            raise RuntimeError(f"tables cannot be converted to {probe.dtype}: set the data type in their config")
        if probe.device != self.device:
            backend_for(probe.device)
            before = self.options
            self._set_options(replace(before, device=probe.device))
            try:
                if self._groups is not None:
                    self._rebuild()
            except BaseException:
                self._set_options(before)
                raise
            self._anchor = self._make_anchor()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> TableBatchedEmbedding:
        options, folder = self.options, None
        if options.host_store is not None and self.device.type != "meta":
            folder = folder_for_copy(options.host_store)
            options = replace(options, host_store=folder.path)
        twin = TableBatchedEmbedding.from_options(self.tables, options)
        if folder is not None:
            twin._store_folder, twin.steps.store = folder, folder.path
        memo[id(self)] = twin
        twin.training = self.training
        with self.exclusive():
            if self.window_open():
                raise RuntimeError("an accumulation window is open; finish it before the embedding is copied")
            twin.optimizers = copy.deepcopy(self.optimizers, memo)
            if self._groups is not None:
                fresh = twin._build()
                move_rows(self._groups, fresh)
                twin._groups = fresh
        return twin

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """`<table>.weight`, and of a hash table `<table>.ids`."""
        for table in self.tables:
            save_table(self, table.name, destination, f"{prefix}{table.name}.")

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
        load_tables(self, state_dict, prefix, prefixes, self._strict, missing_keys, unexpected_keys, error_msgs)

    def table_ids(self, name: str) -> Int64Array:
        """Ids of a hash table in order of arrival, or the row numbers of an index table; int64 `[n]`."""
        ids: Int64Array = self.view(name).ids().numpy()
        return ids
