"""Groups of tables that share a record layout, and therefore an engine, a device cache and a plan for each batch."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence

import numpy as np
import torch

from ... import _engine
from ...operators.calls import lookup_pooled, lookup_sequence, ops, update_rows
from ...operators.devices.backends import Backend, backend_for
from ...operators.record import dtype_codes
from ...operators.schemas import parallel_runner
from ...rules import Norm
from ..config.lifecycle import warn_of_evictions, warn_of_timestamps
from ..config.table import BoundsCheckMode, Pooling, warn_of_bounds
from .accumulation import AccumulationBuffer, Segments
from .batch import Batch, Int64Array
from .evicted import EvictedRowsBuffer
from .group_spec import ChangeObserver, InitFns, Member, fill_default_rows, make_engine, record_layout, state_inits
from .norms import UpdateNorms
from .plan import Plan
from .profiler_ranges import profiled
from .store_folder import StoreFolder
from .swap import Swap, fused_lookup
from .touched_rows import UpdatePlan, touched_rows
from .transfers import Transfers
from .update_arguments import UpdateArguments
from .update_journal import Call, Run, UpdateJournal

_engine.set_parallel_runner(*parallel_runner())

CHUNK_BYTES = 64 << 20
"""Maximum size of a staging buffer when whole tables are read, written or looked up."""


class Group:
    """Tables that share a record layout, an optimizer kernel and a rounding mode, with their device cache.

    A training batch takes four calls: `plan`, `stage`, `lookup` and, in the backward pass, `update_call`. `plan`
    requires the embedding's planning lock, all other calls its launch lock.

    Attributes:
        table_indices: the index of each table in `members`, by name.
        features: int64, the features of the embedding that look up these tables.
        accumulate_step: backward passes of an accumulation window; 1 if each backward pass updates.
        owned_ids: by table index, functions that return ids that have rows even before any batch contains them: the
            local shard of an index table, which is stored as a hash table.
        optimizers: the distinct optimizers of the members.
        engine: the row directory and host store.
        intervals: training steps between evictions of each member's ids; 0: steps evict none.
        swap: the swap, which copies rows between the host store and the cache.
        has_lifecycles: whether a table has rules that admit or evict ids.
        evicts_by_norm: whether a table evicts ids by the norm of their weights.
        works_on_tables: whether a step may end an accumulation window, evict ids or run an optimizer's table pass.
        swapping_ns: nanoseconds that lookups spent in swaps.
        warns: whether `warn` can warn at all.
        accumulation_buffer: accumulated gradients; None if each backward pass updates.
        norms: gradient norms of the last update; None if they are not computed.
        snapshots: by table index, the snapshots of running saves, which must copy rows before they change.
        evicted: by table index, the buffers of evicted rows of tables with `keep_evicted`.
        chunk: number of rows in a staging buffer when whole tables are read, written or looked up.
    """

    def __init__(
        self,
        members: Sequence[Member],
        columns: Sequence[int],
        device: torch.device,
        seed: int,
        bounds_check: BoundsCheckMode,
        cache_policy: str,
        serial: int = 0,
        stores: StoreFolder | None = None,
        row_ids: bool = False,
    ) -> None:
        """Allocates the cache.

        Args:
            members: the tables, at least one.
            columns: first output column of each feature, table by table; empty for a sequence.
            device: the device of the cache.
            seed: seed of the initial weights.
            bounds_check: the effect of an id outside an index table.
            cache_policy: the engine's name of the policy that chooses victims.
            serial: the first version number of rows.
            stores: the folder of host stores on disk; None keeps them in memory.
            row_ids: whether plans always have `unique_ids`, the ids of their rows; else only with stochastic rounding.
        """
        self.members = list(members)
        self.table_indices = {member.config.name: index for index, member in enumerate(self.members)}
        self.owned_ids: dict[int, Callable[[], Int64Array]] = {}
        self.features: Int64Array = np.array([f for m in members for f in m.features], np.int64)
        self._features_ascend = bool((np.diff(self.features) > 0).all())
        first = self.members[0]
        self.layout = record_layout(first.config, first.optimizer)
        self.accumulate_step = first.optimizer.accumulate_step if first.optimizer else 1
        self._kernel = first.optimizer.spec.kernel if first.optimizer else ""
        self._device = device
        means = [m.config.pooling is Pooling.MEAN for m in members for _ in m.features]
        backend, spec = backend_for(device), (members, self.layout, columns, means)
        self._rounds_stochastically = first.config.rounds_stochastically and first.optimizer is not None
        self._make_engine = functools.partial(
            make_engine,
            *spec,
            seed,
            bounds_check,
            cache_policy,
            stores=stores,
            row_ids=self._rounds_stochastically or row_ids,
            state_inits=state_inits(members),
            origins=backend.joins_lookups,
        )
        self.engine = self._make_engine(serial=serial)
        self._earlier_stats: dict[int | None, dict[str, int]] = {}
        self.swapping_ns = 0
        self._state_dtypes = dtype_codes(self.layout.state_dtypes)
        self._may_warn = bounds_check is BoundsCheckMode.WARNING and not all(m.config.hashed for m in members)
        self._init_fns = InitFns.of(members, self.layout)
        self.set_evict_step_interval(None)
        self._frozen = [False] * len(members)
        lifecycles = [member.config.lifecycle for member in members if member.config.lifecycle is not None]
        self._has_timestamps = any("timestamp" in lifecycle.columns() for lifecycle in lifecycles)
        self.warns = self._may_warn or self._has_timestamps
        self.has_lifecycles = bool(lifecycles)
        self.evicts_by_norm = any(lifecycle.rule(Norm) for lifecycle in lifecycles)
        self.norms: UpdateNorms | None = None
        self.snapshots: dict[int, ChangeObserver] = {}
        self.evicted: dict[int, EvictedRowsBuffer] = {}
        self.chunk = max(1024, CHUNK_BYTES // self.layout.bytes)
        # Buffers are created outside of inference mode: training steps cannot change inference tensors.
        with torch.inference_mode(False):
            self._create_device_state(backend, columns, means)
        self._arguments = UpdateArguments(members, seed, self._transfers)
        self.optimizers = self._arguments.optimizers
        passes = any(optimizer.spec.table_pass for optimizer in self.optimizers)
        self.works_on_tables = self.accumulate_step > 1 or self.has_lifecycles or passes

    def _create_device_state(self, backend: Backend, columns: Sequence[int], means: Sequence[bool]) -> None:
        slots = sum(member.cache_slots for member in self.members)
        cache = backend.allocate_cache(slots, self.layout.bytes, self._device)
        fill_default_rows(self.members, self.layout.weight(cache))
        self._columns = torch.tensor(list(columns), dtype=torch.int64, device=self._device)
        self._means = torch.tensor(list(means), dtype=torch.bool, device=self._device)
        self._transfers = Transfers(self._device, backend)
        self.accumulation_buffer = None
        if self.accumulate_step > 1:
            tables_with_ids = len(self.members) if self._rounds_stochastically else 0
            self.accumulation_buffer = AccumulationBuffer(
                self.engine, slots, self.layout.dim, self._transfers, self.chunk, tables_with_ids
            )
        sums = self.accumulation_buffer.sums if self.accumulation_buffer else None
        self.swap = Swap(self.engine, cache, self.layout.weight(cache), sums, self._transfers, self._init_fns)

    # ---- whole tables

    def fresh_engine(self) -> _engine.Engine:
        """Creates an engine of the same tables without rows; version numbers continue. No batch may be in flight."""
        engine = self._make_engine(serial=self.engine.saves.next_version())
        for table in range(len(self.members)):
            engine.saves.forget_changes(table, engine.saves.version() + 1)  # all rows are new: no row counts as changed
        return engine

    def replace_engine(self, engine: _engine.Engine, earlier_stats: dict[int | None, dict[str, int]]) -> None:
        """Replaces the engine, and with it the rows of all tables; idempotent. Call `Swap.settle` first.

        `engine` is a result of `fresh_engine`. `earlier_stats`, a result of `all_stats`, is included in `stats`.
        """
        if engine is self.engine:
            return
        if self.accumulation_buffer is not None:
            self.accumulation_buffer.drop()
            self.accumulation_buffer.replace_engine(engine)
        for snapshot in self.snapshots.values():
            snapshot.before_replacement()
        engine.lifecycle.freeze(self._frozen)
        self._earlier_stats, self.swap.engine, self.engine = earlier_stats, engine, engine

    def stats(self, table: int | None) -> dict[str, int]:
        """Returns the counters of a table, or of all tables; `pinned_rows` and `evicted_waiting` count current rows."""
        counters = self.engine.tables.stats(table)
        for name, count in self._earlier_stats.get(table, {}).items():
            if name in counters:
                before = counters[name]
                counters[name] = max(before, count) if name == "largest_batch" else before + count
        evicted = sum(buffer.rows() for buffer in self.evicted_buffers(table))
        return counters | {"pinned_rows": self.engine.tables.pinned(table), "evicted_waiting": evicted}

    def evicted_buffers(self, table: int | None) -> list[EvictedRowsBuffer]:
        """Returns the buffers of evicted rows of one table or, with None, of all tables."""
        return [buffer for index, buffer in self.evicted.items() if table in (None, index)]

    def memory(self, table: int | None) -> dict[str, int]:
        """Returns the bytes that the engine allocates for one table or, with None, for all tables, by kind."""
        return self.engine.tables.memory(table)

    def version(self) -> int:
        """Returns the current version: a row that changes later has a larger version number."""
        return self.engine.saves.version()

    def in_flight(self) -> int:
        """Returns the number of planned batches whose update has not been launched."""
        return self.engine.in_flight()

    def all_stats(self) -> dict[int | None, dict[str, int]]:
        """Returns the `stats` of each table under its index, and of all tables under the key None."""
        return {table: self.stats(table) for table in (None, *range(len(self.members)))}

    def reset_stats(self) -> None:
        """Sets every counter to zero."""
        self._earlier_stats = {}
        self.swapping_ns = 0
        self.engine.tables.reset_stats()

    # ---- a training batch

    def announce(self, batch: Batch) -> _engine.Announcement:
        """Passes a future batch to the cache policy; announced batches must be planned in the order of announcement."""
        return self.engine.announce(batch.values, batch.offsets, self._keys(batch), batch.batch_size)

    def plan(self, batch: Batch, announced: _engine.Announcement | None = None) -> Plan:
        """Plans a training batch and pins its rows until the plan is released or dropped; `announced`: from `announce`.

        Raises:
            CacheTooSmallError: a table's cache holds fewer rows than the batch needs.
            CapacityError: a bounded hash table is full.
            IndexError, ValueError, TypeError: invalid ids or offsets.
        """
        return self.swap.plan(batch, self._keys(batch), announced)

    def _keys(self, batch: Batch) -> Int64Array:
        """Returns the key that each feature of the group reads, int64."""
        keys = batch.feature_keys
        return keys if self._features_ascend and len(keys) == len(self.features) else keys[self.features]

    def read_ahead(self, plan: Plan) -> None:
        """Starts to stage the misses of a plan before its forward, unless a table has an init_fn."""
        if self._init_fns is None:  # an init_fn draws random numbers, so only forwards call it, in a fixed order
            self.swap.read_ahead(plan)

    def warn(self, plan: Plan) -> None:
        """Warns of out-of-range ids and of rejected timestamps in the plan."""
        if self._may_warn:
            warn_of_bounds(plan.host.bounds_warnings)
        if self._has_timestamps:
            warn_of_timestamps(plan.host.rejected_timestamps)

    def warn_of_evictions(self) -> None:
        """Warns of tables in which one eviction removed over half of the rows, and of large buffers of evicted rows."""
        if self.has_lifecycles:
            warn_of_evictions(self.engine.lifecycle.take_large_evictions())
            for buffer in self.evicted.values():
                buffer.warn()

    def sample_weights(self, batch: Batch) -> torch.Tensor | None:
        """Returns the batch's per-sample weights in the order of this group's lookups, differentiable."""
        order = None if batch.weights is None else batch.lookup_order(self.features)
        if batch.weights is None or order is None:
            return batch.weights
        return batch.weights.index_select(0, *self._transfers.to_device(order))

    def stage(self, plan: Plan) -> None:
        """Stages the misses of a plan for `lookup`. After it returns, the swap cannot fail."""
        if self._transfers.pinned:
            self._transfers.follow_previous_stream()
        self.swap.stage(plan)

    def lookup(self, plan: Plan, weights: torch.Tensor | None, out: torch.Tensor | None) -> torch.Tensor:
        """Swaps in the rows of a started plan and looks them up.

        Args:
            plan: a result of `plan` that `stage` has staged and the engine has started.
            weights: the per-sample weights, float32 `[n]`.
            out: float32 `[B, total]`, in whose columns of this group the pooled rows are stored; None for a sequence.

        Returns:
            float32 `[n, D]`, a row for each lookup; or `out`.
        """
        begin = time.perf_counter_ns()
        arrays = plan.arrays
        fused = None  # the operator that swaps and looks up in one launch, for plans with `origins`
        if arrays.origins is not None:
            fused = fused_lookup(self.layout, arrays, (weights, self._columns, self._means, 0, out))
        with profiled("apply"):
            results = self.swap.apply(plan, fused)
        self.swapping_ns += time.perf_counter_ns() - begin
        if not results:
            return self.lookup_resident(plan, weights, out)
        with profiled("lookup"):  # the swap has also launched the lookup
            if plan.upload is not None:
                plan.upload.wait()
            rows: torch.Tensor = results[0]
            return rows if out is None else out

    def lookup_resident(
        self, plan: Plan, weights: torch.Tensor | None, out: torch.Tensor | None, kept: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Looks up the rows of an applied plan in the cache, or in `kept`, a result of `copy_rows`; see `lookup`."""
        if self._transfers.pinned:
            self._transfers.follow_previous_stream()
            if plan.upload is not None:
                plan.upload.wait()
        arrays = plan.arrays
        rows, slots = (self.swap.weights, arrays.slots) if kept is None else (kept, self._identity_slots(kept))
        with profiled("lookup"):
            if out is None:
                return lookup_sequence(rows, slots)
            lookup_pooled(rows, slots, arrays.offsets, weights, self._columns, self._means, 0, out)
            return out

    def _identity_slots(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.arange(len(rows), dtype=torch.int32, device="cpu").to(self._device)

    def copy_rows(self, plan: Plan) -> torch.Tensor:
        """Returns a copy of the weights that the plan's lookups read, float32 `[n, D]`."""
        self._transfers.follow_previous_stream()
        return lookup_sequence(self.swap.weights, plan.arrays.slots)

    def weights_grad(self, plan: Plan, grad: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        """Returns the gradient of the per-sample weights, float32 `[n]`, from the gradient `grad` of the pooled output.

        `rows` is a result of `copy_rows`, or None if the rows have not changed since the lookup.
        """
        self._transfers.follow_previous_stream()
        slots = plan.arrays.slots if rows is None else self._identity_slots(rows)
        rows = self.swap.weights if rows is None else rows
        result: torch.Tensor = ops.pooled_weights_grad(
            rows, slots, plan.arrays.offsets, grad, self._columns, self._means
        )
        return result

    def read_weights_grad(self, batch: Batch, rows: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """Returns the gradient of the per-sample weights of a batch that `read` looked up; `rows`: its rows."""
        self._transfers.follow_previous_stream()
        slots = self._identity_slots(rows)
        (offsets,) = self._transfers.to_device(batch.repacked_offsets(self.features))
        result: torch.Tensor = ops.pooled_weights_grad(rows, slots, offsets, grad, self._columns, self._means)
        return result

    def update_call(
        self,
        plan: UpdatePlan,
        grads: Sequence[torch.Tensor | None],
        weights: torch.Tensor | None,
        coefficients: Mapping[int, Sequence[float]],
    ) -> Call | None:
        """Returns the C call that aggregates gradients per row and updates the rows; None if no row has a gradient.

        Only for a group without an accumulation buffer. May be called again after an interrupt.

        Args:
            plan: the plan of the batch.
            grads: the gradient of the pooled output, or one of each feature; None for a feature outside the loss.
            weights: the per-sample weights.
            coefficients: the coefficients of the next update, by `id()` of the optimizer.
        """
        if self._transfers.pinned:
            self._transfers.follow_previous_stream()
        rows = touched_rows(plan, grads, weights)
        if rows is None:
            return None
        present, slots, ids, tables, segments = rows
        if self.snapshots:
            changing = slots.cpu().numpy()
            for snapshot in self.snapshots.values():
                snapshot.before_update(changing)
        return self._update_call(None, self.swap.cache, present, slots, ids, tables, segments, coefficients)

    def accumulate(
        self, plan: Plan, grads: Sequence[torch.Tensor | None], weights: torch.Tensor | None, journal: UpdateJournal
    ) -> None:
        """Adds gradients to the accumulation buffer, once per journal; `update_call` describes the arguments."""
        assert self.accumulation_buffer is not None
        self._transfers.follow_previous_stream()
        rows = touched_rows(plan, grads, weights)
        if rows is not None:
            present, slots, _, _, segments = rows
            self.accumulation_buffer.add(plan, present, slots, segments, journal)

    def close_window(self, coefficients: Mapping[int, Sequence[float]], journal: UpdateJournal) -> None:
        """Ends an accumulation window: updates its rows and clears the buffer; skips calls that the journal records."""
        assert self.accumulation_buffer is not None
        self.swap.settle()
        for table, snapshot in self.snapshots.items():
            snapshot.before_change(self.engine.saves.window_ids(table))

        def update(
            key: Hashable,
            run: Run,
            cache: torch.Tensor,
            sums: torch.Tensor,
            slots: torch.Tensor,
            ids: torch.Tensor | None,
            tables: torch.Tensor,
            borders: torch.Tensor,
        ) -> None:
            segments = (borders, slots, None, None, None, None)
            run(*self._update_call(key, cache, [sums], slots, ids, tables, segments, coefficients))

        self.accumulation_buffer.close(self.swap.cache, update, journal)

    def before_change(self, table: int, ids: Int64Array | None = None) -> None:
        """Lets a running save copy rows before they change; `ids`: None for all rows. Call `Swap.settle` first."""
        snapshot = self.snapshots.get(table)
        if snapshot is not None:
            snapshot.before_all_change() if ids is None else snapshot.before_change(ids)

    def _update_call(
        self,
        key: Hashable,
        cache: torch.Tensor,
        grads: list[torch.Tensor],
        slots: torch.Tensor,
        ids: torch.Tensor | None,
        tables: torch.Tensor,
        segments: Segments,
        coefficients: Mapping[int, Sequence[float]],
    ) -> Call:
        (*arrays, hot), kind = segments, (self._kernel, self.layout.dim, self.layout.weight_dtype)
        call = update_rows, cache, grads, slots, tables, *arrays, self._arguments.coefficients(coefficients), *kind
        if hot is None and self.norms is None and not (self._rounds_stochastically or self._state_dtypes):
            return call  # calls with fewer arguments are faster
        norms = None if self.norms is None else self.norms.buffer_for_call(key, slots, tables)
        rounding = (ids, self._arguments.seeds()) if self._rounds_stochastically else (None, None)
        return *call, *rounding, self._state_dtypes, hot, norms

    def enable_norms(self, on: bool) -> None:
        """Turns the computation of gradient norms in updates on or off."""
        self.norms = UpdateNorms() if on else None

    def set_evict_step_interval(self, steps: int | None) -> None:
        """Sets the number of steps between evictions for all tables; None restores each table's configured number."""
        lifecycles = [member.config.lifecycle for member in self.members]
        configured = [0 if lifecycle is None else lifecycle.every for lifecycle in lifecycles]
        self.intervals = configured if steps is None else [steps] * len(lifecycles)

    def freeze(self, names: Collection[str]) -> None:
        """Freezes these tables and thaws all others: the clocks of a frozen table stop and no rule evicts its ids."""
        self._frozen = [member.config.name in names for member in self.members]
        self.swap.settle()
        self.engine.lifecycle.freeze(self._frozen)

    def evicts_at_step_end(self) -> bool:
        """Returns whether the end of the current step evicts ids; if so, no plan may be made before it."""
        return self.has_lifecycles and self.engine.lifecycle.evicts(self.intervals)

    # ---- reading

    def read(self, batch: Batch, weights: torch.Tensor | None, out: torch.Tensor | None) -> torch.Tensor:
        """Looks up a batch without changing the tables or the cache; an unknown id reads its initial weight.

        Rows outside the cache are copied to a temporary cache, chunk by chunk, so a batch of any size can be read. No
        plan may be made meanwhile. For arguments and result see `lookup`.
        """
        keys = batch.feature_keys[self.features]
        borders = self.engine.bag_ranges(batch.offsets, keys, batch.batch_size, self.chunk)
        parts: list[torch.Tensor] = []
        lookups = 0
        self._transfers.follow_previous_stream()
        self.swap.apply_all()
        for begin, end in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
            plan = self.engine.find(batch.values, batch.offsets, keys, batch.batch_size, begin, end)
            rows = self._gather_rows(plan)
            index, offsets = self._transfers.to_device(plan.index, plan.offsets)
            if out is None:
                parts.append(lookup_sequence(rows, index))
                continue
            part = weights[lookups : lookups + len(plan.index)] if weights is not None else None
            lookup_pooled(rows, index, offsets, part, self._columns, self._means, begin, out)
            lookups += len(plan.index)
        if self._may_warn:
            warn_of_bounds(self.engine.tables.take_bounds_warnings())
        if out is not None:
            return out
        if len(parts) == 1:
            return parts[0]
        empty = torch.empty((0, self.layout.dim), dtype=torch.float32, device=self._device)
        return torch.cat(parts) if parts else empty

    def _gather_rows(self, plan: _engine.ReadPlan) -> torch.Tensor:
        if plan.all_resident:
            return self.swap.weights
        for serial in plan.sources:
            self.swap.complete_write_back(serial)
        staging = self._transfers.staging(plan.host_count, self.layout.bytes)
        new = self.engine.read(plan, staging.numpy())
        if self._init_fns is not None:
            self._init_fns(*new, staging)
        resident = ops.gather_rows(self.swap.cache, *self._transfers.to_device(plan.resident_slots))
        return self.layout.weight(torch.cat([resident, *self._transfers.upload(staging).wait()]))

    # ---- records

    def gather(self, slots: np.ndarray) -> torch.Tensor:
        """Copies the records in `slots` of the cache to the host; returns uint8 `[n, bytes]`."""
        self._transfers.follow_previous_stream()
        records: torch.Tensor = ops.gather_rows(self.swap.cache, *self._transfers.to_device(slots)).cpu()
        return records

    def scatter(self, slots: np.ndarray, records: torch.Tensor) -> None:
        """Copies `records`, uint8 `[n, bytes]` on the host, to slots of the cache."""
        self._transfers.follow_previous_stream()
        ops.scatter_rows(self.swap.cache, *self._transfers.to_device(slots), records.to(self._device))
