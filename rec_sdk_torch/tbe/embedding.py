"""The table-batched embedding: many tables behind one call, larger than device memory."""

from __future__ import annotations

import copy
import operator
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .._engine import available_memory
from ..backends.devices import backend_for, parse_device
from ..eager import eager
from .batch import Batch, Int64Array
from .cache_size import BatchHint, CacheOption, cache_slots, check_cache_option, warn_of_one_row
from .group import Group, Member, record_layout
from .lookup import PlannedLookup, fused_lookup
from .optimizer import TableOptimizer
from .swap import PreparedSwap
from .table import BoundsCheckMode, Pooling, TableConfig, check_names

COUNTERS = (
    "batches",
    "lookups",
    "unique_rows",
    "unique_misses",
    "new_rows",
    "rows_in",
    "rows_out",
    "bytes_in",
    "bytes_out",
    "bounds_errors",
)


@dataclass
class _Progress:
    """What every step changes; apart from the module, whose attributes are slow to set.

    Attributes:
        windows: backward passes so far of the accumulation windows of each length.
        copied_batches: batches whose ids came from a device.
    """

    windows: dict[int, int] = field(default_factory=dict)
    copied_batches: int = 0


def _bounds_check(mode: BoundsCheckMode | str) -> BoundsCheckMode:
    try:
        return mode if isinstance(mode, BoundsCheckMode) else BoundsCheckMode(mode.lower())
    except (ValueError, AttributeError):
        known = [m.value for m in BoundsCheckMode]
        raise ValueError(f"bounds_check_mode is {mode!r}, allowed are {known}") from None


class TableBatchedEmbedding(torch.nn.Module):
    """Embedding tables in host memory with their hot rows in a device cache, updated in the backward pass.

    Layout and cache are fixed at the first training forward, load or read, from the optimizers known then;
    when they change later, the rows move to the new layout.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        *,
        optimizer: TableOptimizer | None = None,
        cache: CacheOption = None,
        batch_hint: BatchHint | None = None,
        device: torch.device | str | int | None = None,
        seed: int | None = None,
        bounds_check_mode: BoundsCheckMode | str = BoundsCheckMode.WARNING,
    ) -> None:
        """Checks the configuration; allocates nothing yet.

        Args:
            tables: unique names; all pooled, or none (`Pooling.NONE`).
            optimizer: of every table; others by `set_optimizers`.
            cache: size of the device cache: rows per table (int), a fraction of `num_embeddings` (float),
                bytes of all tables (`"2GiB"`), one of these by table name (dict), or None (derived).
            batch_hint: the batches a derived cache must hold.
            device: where the cache lives; the host when None, an accelerator when an int. `meta` allocates nothing and
                cannot forward.
            seed: of the initial weights, `torch.initial_seed()` when None.
            bounds_check_mode: what an id outside an index table does.

        Raises:
            ValueError, TypeError: tables or options that cannot be met.
            MemoryError: index tables that the host cannot hold.
        """
        super().__init__()
        check_names(tables)
        self.tables = list(tables)
        self.pooled = self.tables[0].pooling is not Pooling.NONE
        if any((table.pooling is not Pooling.NONE) is not self.pooled for table in self.tables):
            raise ValueError("pooled tables and sequence tables (Pooling.NONE) cannot share an embedding")
        self.device = parse_device(device)
        if self.device.type != "meta":
            backend_for(self.device)
            self._check_host_memory([table.weight_bytes for table in self.tables])
        if optimizer is not None and not isinstance(optimizer, TableOptimizer):
            raise TypeError(
                f"optimizer is {optimizer!r}, expected a TableOptimizer: TableOptimizer.create(class, keywords)"
            )
        check_cache_option(self.tables, cache)
        warn_of_one_row(self.tables, cache)
        self.cache_option = cache
        self.batch_hint = batch_hint or BatchHint()
        self.batch_hint.rows(self.tables)
        self.seed = (torch.initial_seed() if seed is None else operator.index(seed)) & (2**64 - 1)
        self.bounds_check = _bounds_check(bounds_check_mode)
        self.num_features = sum(table.num_features for table in self.tables)
        ends = np.cumsum([table.num_features for table in self.tables])
        self._features = [tuple(range(end - t.num_features, end)) for end, t in zip(ends, self.tables, strict=True)]
        self.feature_dims = [table.embedding_dim for table in self.tables for _ in range(table.num_features)]
        self.optimizers: list[TableOptimizer | None] = [optimizer] * len(self.tables)
        self._trainable = False
        self._groups: list[Group] | None = None
        self._progress = _Progress()
        self._lock = threading.RLock()
        self._width = sum(self.feature_dims) if self.pooled else 0
        self._keys = np.arange(self.num_features, dtype=np.int64)
        self._anchor = torch.empty(0, device=self.device, requires_grad=True)

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

    @property
    def groups(self) -> list[Group]:
        """The groups, built at first use."""
        if self._groups is None:
            self._check_real()
            with self._lock:
                self._groups = self._groups or self._build(run_init_fns=True)
        return self._groups

    def _check_real(self) -> None:
        if self.device.type == "meta":
            raise RuntimeError("this embedding is on the meta device: it has no rows, give a real device=")

    def cache_sizes(self) -> dict[str, int]:
        """Rows of each table that the device cache holds."""
        return dict(zip([table.name for table in self.tables], self._slots(), strict=True))

    def _slots(self) -> list[int]:
        if self._groups is not None:
            sizes = {member.config.name: member.slots for group in self._groups for member in group.members}
            return [sizes[table.name] for table in self.tables]
        self._check_real()
        layouts = [record_layout(t, o) for t, o in zip(self.tables, self.optimizers, strict=True)]
        free = backend_for(self.device).free_memory(self.device)
        sizes_in_bytes = [layout.bytes for layout in layouts]
        return cache_slots(self.tables, sizes_in_bytes, self.cache_option, self.batch_hint, free)

    def _check_host_memory(self, row_bytes: Sequence[int]) -> None:
        """Index tables have all their rows from the start: say so now if the host cannot hold them."""
        pairs = list(zip(self.tables, row_bytes, strict=True))
        need = sum(table.num_embeddings * size for table, size in pairs if not table.hashed)
        free = available_memory()
        if need > free:
            names = [table.name for table in self.tables if not table.hashed]
            raise MemoryError(f"index tables {names} need {need} bytes of host memory, {free} are free")

    def _build(self, run_init_fns: bool) -> list[Group]:
        slots = self._slots()
        layouts = [record_layout(t, o) for t, o in zip(self.tables, self.optimizers, strict=True)]
        self._check_host_memory([layout.bytes for layout in layouts])
        alike: dict[object, list[int]] = {}
        for index, (layout, optimizer) in enumerate(zip(layouts, self.optimizers, strict=True)):
            kernel = (optimizer.spec.kernel, optimizer.accumulate_step) if optimizer else None
            alike.setdefault((layout, kernel), []).append(index)
        columns = (np.cumsum(self.feature_dims) - self.feature_dims).tolist()
        groups = []
        for indices in alike.values():
            members = [Member(self.tables[i], self._features[i], slots[i], self.optimizers[i]) for i in indices]
            own = [columns[f] for member in members for f in member.features] if self.pooled else []
            groups.append(Group(members, own, self.device, self.seed, self.bounds_check, run_init_fns=run_init_fns))
        return groups

    @property
    def window_open(self) -> bool:
        """Whether an accumulation window has begun and not ended."""
        return any(self._progress.windows.values()) or any(group.window_open for group in self._groups or [])

    def drop_windows(self) -> None:
        """Forgets open accumulation windows, with the gradients in them; loading does so."""
        with self._lock:
            self._progress.windows.clear()
            for group in self._groups or []:
                group.drop_pending()

    def _rebuild(self) -> None:
        """Lays the groups out anew, for other optimizers or another device, and moves the rows over."""
        with self._lock:
            if self.window_open:
                raise RuntimeError("an accumulation window is open; finish it before the embedding changes")
            old, self._groups = self._groups or [], None
            try:
                fresh = self._build(run_init_fns=False)
            finally:
                self._groups = old
            self._groups = fresh
            for group in old:
                self._adopt(group)

    def _adopt(self, other: Group) -> None:
        for index, name in enumerate(other.names):
            group, table = self.find_table(name)
            same = other.layout == group.layout
            for ids, records in other.read_kept(index):
                group.write_weights(table, ids, other.layout.weight(records))
                for state in range(len(other.layout.state_elements) if same else 0):
                    group.write_state(table, state, ids, other.layout.state(records, state))

    def find_table(self, name: str) -> tuple[Group, int]:
        """The group that holds table `name`, and its place there."""
        for group in self.groups:
            if name in group.names:
                return group, group.names.index(name)
        raise KeyError(f"no table is named {name!r}")

    # ---- forward

    @eager
    def forward(
        self, indices: torch.Tensor, offsets: torch.Tensor, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Looks up a batch, features in table order.

        Args:
            indices: ids, int32 or int64 `[n]`, feature-major.
            offsets: int32 or int64 `[F * B + 1]`.
            per_sample_weights: float32 `[n]`, pooled tables only.

        Returns:
            float32 `[B, sum of the features' dims]`, or `[n, D]` for sequence tables, which must then be of
            one dim.
        """
        batch_size, rest = divmod(offsets.numel() - 1, self.num_features)
        if rest or offsets.numel() < 1:
            raise ValueError(f"offsets has {offsets.numel()} entries, expected features ({self.num_features}) * B + 1")
        batch = Batch.from_tensors(indices, offsets, batch_size, self._keys, per_sample_weights)
        outputs = self._lookup(batch)
        # One group's rows are in feature order already.
        return outputs[0] if len(outputs) == 1 else torch.cat(self._by_feature(batch, outputs))

    def lookup_pooled(self, batch: Batch) -> torch.Tensor:
        """Pooled rows, float32 `[B, sum of the features' dims]`."""
        return self._lookup(batch)[0]

    def lookup_features(self, batch: Batch) -> list[torch.Tensor]:
        """Rows of each feature, float32 `[n_f, D_f]`."""
        return self._by_feature(batch, self._lookup(batch))

    def _by_feature(self, batch: Batch, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        parts: list[torch.Tensor] = [torch.empty(0)] * self.num_features
        for group, output in zip(self.groups, outputs, strict=True):
            lengths = batch.lookups(group.features).tolist()
            for feature, part in zip(group.features.tolist(), output.split(lengths), strict=True):
                parts[feature] = part
        return parts

    def _lookup(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        if batch.weights is not None and not self.pooled:
            raise ValueError("per-sample weights need pooled tables")
        # Plan, swap and lookup of a batch are one step: no other thread's batch or update comes between.
        with self._lock:
            groups = self.groups
            weights: list[torch.Tensor | None] = [group.weights_of(batch) for group in groups]
            if self.training and torch.is_grad_enabled():
                return self._train(groups, batch, weights)
            out = torch.empty((batch.batch_size, self._width), device=self.device) if self.pooled else None
            read = [group.read(batch, weight, out) for group, weight in zip(groups, weights, strict=True)]
        return (out,) if out is not None else tuple(read)

    def _train(self, groups: list[Group], batch: Batch, weights: list[torch.Tensor | None]) -> tuple[torch.Tensor, ...]:
        self._check_trainable()
        batches = [swap.batch for swap in self._swap(groups, batch)]
        self._progress.copied_batches += batch.copied
        call = PlannedLookup(groups, batches, self._width, batch.batch_size, self._advance, self._lock)
        return fused_lookup(self._anchor, call, weights)

    @staticmethod
    def _swap(groups: list[Group], batch: Batch) -> list[PreparedSwap]:
        """Swaps a batch in, for all groups or, after an exception, for none."""
        swaps: list[PreparedSwap] = []
        try:
            for group in groups:
                swaps.append(group.prepare(batch))
        except BaseException:
            for swap in swaps:
                swap.cancel()
            raise
        try:
            for swap in swaps:
                swap.execute()
        except BaseException:
            # The host side has moved on; an interrupt must not leave the cache behind.
            for swap in swaps:
                swap.execute()
                swap.batch.plan.release()
            raise
        return swaps

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

    # ---- update

    def _advance(self) -> dict[int, torch.Tensor]:
        """Counts a backward pass; advances the step of every optimizer whose accumulation window it ends."""
        groups = self.groups
        windows = {group.accumulate_step for group in groups}
        counts = {length: self._progress.windows.get(length, 0) + 1 for length in windows}
        ended = [index for index, group in enumerate(groups) if counts[group.accumulate_step] >= group.accumulate_step]
        optimizers = {id(o): o for index in ended for o in groups[index].optimizers}.values()
        for optimizer in optimizers:
            optimizer.step += 1
        try:
            coefficients = {index: groups[index].coefficients() for index in ended}
        except BaseException:
            for optimizer in optimizers:
                optimizer.step -= 1
            raise
        self._progress.windows = {length: count % length for length, count in counts.items()}
        return coefficients

    # ---- inspection

    def cache_stats(self) -> dict[str, int]:
        """Exact counters since the start or `reset_cache_stats`, summed over groups.

        `batches`, `lookups`, `unique_rows`, `unique_misses`, `new_rows`, `rows_in`, `rows_out`, `bytes_in`,
        `bytes_out`, `bounds_errors`, and `copied_batches` (batches whose ids came from a device).
        """
        total = dict.fromkeys(COUNTERS, 0) | {"copied_batches": self._progress.copied_batches}
        for group in self._groups or []:
            for name, value in group.stats().items():
                total[name] = total.get(name, 0) + value
        return total

    def reset_cache_stats(self) -> None:
        """Sets every counter of `cache_stats` to zero."""
        self._progress.copied_batches = 0
        for group in self._groups or []:
            group.reset_stats()

    # ---- what torch.nn.Module does to modules

    def _apply(self, fn: Any, recurse: bool = True) -> TableBatchedEmbedding:
        """`.to(device)` moves the cache; a change of dtype is refused."""
        probe = fn(torch.empty(0, device=self.device))
        if probe.dtype != torch.float32:
            raise RuntimeError(
                f"embedding tables cannot be converted to {probe.dtype}: set the data type in their config"
            )
        if probe.device != self.device:
            backend_for(probe.device)
            self.device = probe.device
            self._anchor = torch.empty(0, device=self.device, requires_grad=True)
            if self._groups is not None:
                self._rebuild()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> TableBatchedEmbedding:
        twin = TableBatchedEmbedding(
            self.tables,
            cache=copy.copy(self.cache_option),
            batch_hint=self.batch_hint,
            device=self.device,
            seed=self.seed,
            bounds_check_mode=self.bounds_check,
        )
        memo[id(self)] = twin
        twin.optimizers = copy.deepcopy(self.optimizers, memo)
        twin.training = self.training
        if self.window_open:
            raise RuntimeError("an accumulation window is open; finish it before the embedding is copied")
        if self._groups is not None:
            twin._groups = twin._build(run_init_fns=False)
            for group in self._groups:
                twin._adopt(group)
        return twin

    def __reduce__(self) -> Any:
        raise TypeError("embedding tables are not pickled: save state_dict() instead")

    def table_ids(self, name: str) -> Int64Array:
        """Ids of a hash table in order of arrival, or the row numbers of an index table; int64 `[n]`."""
        group, table = self.find_table(name)
        ids: Int64Array = group.engine.table_rows(table)[0]
        return ids

    def extra_repr(self) -> str:
        return ", ".join(f"{t.name}: {t.num_embeddings} x {t.embedding_dim}" for t in self.tables)
