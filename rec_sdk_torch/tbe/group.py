"""A group: tables of one record layout, with one host store, device cache and plan for all of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from .. import _engine
from ..backends.devices import backend_for
from ..ops import ops, parallel_runner
from .batch import Batch, Int64Array
from .optimizer import TableOptimizer
from .record import RecordLayout
from .swap import PlanArrays, PlannedBatch, PreparedSwap, Swap
from .table import WEIGHT_DTYPES, BoundsCheckMode, Pooling, TableConfig
from .transfers import Arrival, Transfers

_engine.set_parallel_runner(*parallel_runner())

_CHUNK_BYTES = 64 << 20
"""Records that pass through one staging buffer when whole tables are read, written or looked up."""


@dataclass(frozen=True)
class Member:
    """A table of a group.

    Attributes:
        config: the table.
        features: which features of the embedding look it up.
        slots: its rows in the device cache.
        optimizer: what updates it; None while none is known (the group can then only be read).
    """

    config: TableConfig
    features: tuple[int, ...]
    slots: int
    optimizer: TableOptimizer | None


def record_layout(config: TableConfig, optimizer: TableOptimizer | None) -> RecordLayout:
    """The record of a row of `config`, with the states of `optimizer`."""
    states = optimizer.spec.states if optimizer else ()
    dim = config.embedding_dim
    return RecordLayout(dim, config.weight_dtype, tuple(state.elements(dim) for state in states))


def _table_spec(member: Member, seed: int, bounds_check: BoundsCheckMode) -> _engine.TableSpec:
    config = member.config
    low, high = config.init_range
    initializer = _engine.Initializer(config.initializer_type.value, low, high, config.init_mean, config.init_stddev)
    optimizer = member.optimizer
    return _engine.TableSpec(
        name=config.name,
        hashed=config.hashed,
        num_embeddings=config.num_embeddings,
        slots=member.slots,
        capacity=config.capacity,
        initializer=initializer,
        seed=seed,
        state_init=optimizer.spec.state_init(optimizer.options) if optimizer else [],
        bounds_check=bounds_check.value,
    )


class Group:
    """Tables of one record layout and one optimizer kernel."""

    def __init__(
        self,
        members: Sequence[Member],
        columns: Sequence[int],
        device: torch.device,
        seed: int,
        bounds_check: BoundsCheckMode,
        *,
        run_init_fns: bool = True,
    ) -> None:
        """Allocates the cache.

        Args:
            members: the tables, at least one.
            columns: first output column of each feature of each table, in order; empty for a sequence.
            device: where the cache lives.
            seed: of the initial weights.
            bounds_check: what an id outside an index table does.
            run_init_fns: whether index tables with an `init_fn` are filled now; not when their rows are about to
                be copied from elsewhere.
        """
        self.members = list(members)
        self.names = [member.config.name for member in members]
        self.features: Int64Array = np.array([f for m in members for f in m.features], np.int64)
        first = self.members[0]
        self.layout = record_layout(first.config, first.optimizer)
        self.optimizer = first.optimizer
        self.accumulate_step = first.optimizer.accumulate_step if first.optimizer else 1
        """Backward passes of this group's accumulation window."""
        self.pooled = first.config.pooling is not Pooling.NONE
        self._device = device
        backend = backend_for(device)
        means = [m.config.pooling is Pooling.MEAN for m in members for _ in m.features]
        engine = _engine.Engine(
            [_table_spec(member, seed, bounds_check) for member in members],
            self.layout.dim,
            WEIGHT_DTYPES.index(self.layout.weight_dtype),
            list(self.layout.state_elements),
            [index for index, member in enumerate(members) for _ in member.features],
            list(columns),
            means if self.pooled else [],
        )
        slots = sum(member.slots for member in members)
        cache = backend.allocate_cache(slots, self.layout.bytes, device)
        self._columns = torch.tensor(list(columns), dtype=torch.int64, device=device)
        self._means = torch.tensor(means, dtype=torch.bool, device=device)
        optimizers = [member.optimizer for member in members if member.optimizer]
        self.optimizers = list({id(optimizer): optimizer for optimizer in optimizers}.values())
        ranks = {id(optimizer): rank for rank, optimizer in enumerate(self.optimizers)}
        self._optimizer_of_table = [ranks[id(optimizer)] for optimizer in optimizers]
        pending = torch.zeros((slots, 2 * self.layout.dim), device=device) if self.accumulate_step > 1 else None
        self._transfers = Transfers(device, backend)
        self._sent_coefficients: tuple[list[list[float]], Arrival] = ([], Arrival((), cache))
        self.swap = Swap(engine, cache, self.layout.weight(cache), pending, self._transfers)
        self._may_warn = bounds_check is BoundsCheckMode.WARNING and not all(m.config.hashed for m in members)
        self._with_init_fn = [i for i, m in enumerate(members) if m.config.hashed and m.config.init_fn is not None]
        self._chunk = max(1024, _CHUNK_BYTES // self.layout.bytes)
        for index, member in enumerate(members):
            if run_init_fns and member.config.init_fn is not None and not member.config.hashed:
                self._initialise(index)

    @property
    def engine(self) -> _engine.Engine:
        """The host engine, once it has all rows that left the cache."""
        self.swap.settle()
        return self.swap.engine

    @property
    def cache(self) -> torch.Tensor:
        """The device cache, uint8 `[slots, bytes]`."""
        return self.swap.cache

    @property
    def pending(self) -> torch.Tensor | None:
        """Gradients of the open window, float32 `[slots, 2 * D]`: sums and compensations."""
        return self.swap.pending

    @property
    def window_open(self) -> bool:
        """Whether gradients wait for the end of their window."""
        if self.pending is None:
            return False
        return bool(len(self.swap.engine.pending_slots()[0]) or len(self.swap.engine.pending_away()[0]))

    def stats(self) -> dict[str, int]:
        """The engine's counters."""
        return self.swap.engine.stats()

    def reset_stats(self) -> None:
        self.swap.engine.reset_stats()

    # ---- planning and swapping

    def prepare(self, batch: Batch) -> PreparedSwap:
        """Plans a training batch and starts its swap; the plan pins the batch's rows until it is released.

        The cache itself is changed by `execute`, or not at all after `cancel`.

        Raises:
            CacheTooSmallError: a table's cache holds fewer rows than the batch needs.
            CapacityError: a bounded hash table is full.
            IndexError, ValueError, TypeError: ids or offsets that cannot be right.
        """
        keys = batch.feature_keys[self.features]
        plan = self.engine.plan(batch.values, batch.offsets, keys, batch.batch_size, batch.weights is not None)
        try:
            self._warn_of_bounds()
            return self.swap.prepare(plan, self._run_init_fns)
        except BaseException:
            self.swap.cancel(plan)
            raise

    def _warn_of_bounds(self) -> None:
        if not self._may_warn:
            return
        for name, count, example in self.swap.engine.take_bounds_warnings():
            warnings.warn(
                f"table {name!r}: {count} ids are out of range (such as {example}) and read row 0", stacklevel=6
            )

    def _run_init_fns(self, new: np.ndarray, tables: np.ndarray, records: torch.Tensor) -> None:
        """Lets hash tables with an `init_fn` fill their rows among `records[new]`, which are of `tables`."""
        for index in self._with_init_fn if len(new) else ():
            rows = torch.from_numpy(new[tables == index]).long()
            self.layout.weight(records)[rows] = self._drawn(self.members[index].config, len(rows))

    def _drawn(self, config: TableConfig, rows: int) -> torch.Tensor:
        assert config.init_fn is not None
        weight = torch.empty((rows, config.embedding_dim), dtype=config.weight_dtype)
        with torch.no_grad():
            result = config.init_fn(weight)
        return result if isinstance(result, torch.Tensor) else weight

    # ---- lookup

    def weights_of(self, batch: Batch) -> torch.Tensor | None:
        """The batch's per-sample weights in the order of this group's lookups, differentiable."""
        order = None if batch.weights is None else batch.order(self.features)
        if batch.weights is None or order is None:
            return batch.weights
        return batch.weights.index_select(0, *self._transfers.put(order))

    def lookup(self, batch: PlannedBatch, weights: torch.Tensor | None, out: torch.Tensor | None) -> torch.Tensor:
        """Rows of a planned batch: `[n, D]`, or pooled into this group's columns of `out` `[B, total]`."""
        rows, plan = self.swap.weights, batch.arrays
        if out is None:
            sequence: torch.Tensor = ops.lookup_sequence(rows, plan.slots)
            return sequence
        ops.lookup_pooled(rows, plan.slots, plan.offsets, weights, self._columns, self._means, 0, out)
        return out

    def read(self, batch: Batch, weights: torch.Tensor | None, out: torch.Tensor | None) -> torch.Tensor:
        """As `lookup` without a plan: changes nothing, and unknown ids read their initial weight.

        Rows that are not resident pass through a temporary cache, chunk by chunk, so any batch can be read
        with any cache, by the same operators.
        """
        keys = batch.feature_keys[self.features]
        borders = self.engine.bag_ranges(batch.offsets, keys, batch.batch_size, self._chunk)
        parts: list[torch.Tensor] = []
        done = 0
        for begin, end in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
            plan = self.engine.find(batch.values, batch.offsets, keys, batch.batch_size, begin, end)
            rows = self._readable(plan)
            index, offsets = self._transfers.put(plan.index, plan.offsets)
            if out is None:
                parts.append(ops.lookup_sequence(rows, index))
                continue
            part = weights[done : done + len(plan.index)] if weights is not None else None
            ops.lookup_pooled(rows, index, offsets, part, self._columns, self._means, begin, out)
            done += len(plan.index)
        self._warn_of_bounds()
        if out is not None:
            return out
        return torch.cat(parts) if parts else torch.empty((0, self.layout.dim), device=self._device)

    def _readable(self, plan: _engine.ReadPlan) -> torch.Tensor:
        if plan.all_resident:
            return self.swap.weights
        staging = self._transfers.staging(plan.host_count, self.layout.bytes)
        self._run_init_fns(*self.engine.read(plan, staging.numpy()), staging)
        resident = ops.gather_rows(self.cache, *self._transfers.put(plan.resident_slots))
        return self.layout.weight(torch.cat([resident, *self._transfers.send(staging).wait()]))

    # ---- update

    def coefficients(self) -> torch.Tensor:
        """This update's coefficients of every table, float32 `[T, 8]` on the device.

        Raises:
            TypeError, ValueError: an option of an optimizer was changed to something no update may use.
        """
        # Numbers: an option may be a tensor, which changes without becoming another.
        rows = [[float(value) for value in optimizer.coefficients()] for optimizer in self.optimizers]
        if rows != self._sent_coefficients[0]:  # some optimizers' never change
            of_tables = np.array(rows, np.float32)[self._optimizer_of_table]
            self._sent_coefficients = (rows, self._transfers.send_arrays([of_tables]))
        return self._sent_coefficients[1].wait()[0]

    def weights_grad(self, batch: PlannedBatch, grad: torch.Tensor) -> torch.Tensor:
        """Gradient of the per-sample weights, float32 `[n]`, from that of the output, `[B, total]`."""
        rows, plan = self.swap.weights, batch.arrays
        result: torch.Tensor = ops.pooled_weights_grad(rows, plan.slots, plan.offsets, grad, self._columns, self._means)
        return result

    def update(
        self,
        batch: PlannedBatch,
        grad: torch.Tensor | None,
        weights: torch.Tensor | None,
        coefficients: torch.Tensor | None,
    ) -> None:
        """Aggregates `grad` per row; updates the rows when `coefficients` are given (the window's end)."""
        plan, pending = batch.arrays, self.pending
        if grad is not None and plan.unique_slots.shape[0]:
            segments = (plan.segment_offsets, plan.grad_row, None, plan.grad_column, self._scale(plan, weights))
            if pending is not None:
                ops.accumulate_rows(pending, [grad], plan.unique_slots, *segments)
                self.swap.engine.mark_pending(batch.plan)
            elif coefficients is not None:
                self._update_rows(self.cache, grad, plan.unique_slots, plan.table_offsets, *segments, coefficients)
        if pending is not None and coefficients is not None:
            self._close_window(pending, coefficients)

    @staticmethod
    def _scale(plan: PlanArrays, weights: torch.Tensor | None) -> torch.Tensor | None:
        """What multiplies each lookup's gradient: its sample weight, over its bag's length for MEAN."""
        if weights is None:
            return plan.scale
        assert plan.positions is not None, "the plan is of a batch without weights"
        weight = weights.detach().index_select(0, plan.positions)
        return weight if plan.scale is None else weight * plan.scale

    def _update_rows(self, cache: torch.Tensor, grad: torch.Tensor, *segments: torch.Tensor | None) -> None:
        assert self.optimizer is not None
        kernel = self.optimizer.spec.kernel
        ops.update_rows(cache, [grad], *segments, kernel, self.layout.dim, self.layout.weight_dtype)

    def _update_from_sums(
        self, cache: torch.Tensor, sums: torch.Tensor, slots: np.ndarray, tables: np.ndarray, c: torch.Tensor
    ) -> None:
        """Updates `slots` of `cache` from one row of pending sums each, `sums[slot]`."""
        borders = np.arange(len(slots) + 1, dtype=np.int32)
        rows, table_offsets, segments = self._transfers.put(slots, tables, borders)
        self._update_rows(cache, sums, rows, table_offsets, segments, rows, None, None, None, c)

    def _close_window(self, pending: torch.Tensor, coefficients: torch.Tensor) -> None:
        slots, tables = self.swap.engine.pending_slots()
        if len(slots):
            self._update_from_sums(self.cache, pending, slots, tables, coefficients)
            self._clear_sums(slots)
        rows, away = self.swap.engine.pending_away()
        for begin in range(0, len(rows), self._chunk):
            self._update_away(rows[begin : begin + self._chunk], begin, away, coefficients)
        self.swap.engine.clear_pending()

    def _clear_sums(self, slots: np.ndarray) -> None:
        if self.pending is not None:
            (rows,) = self._transfers.put(slots.astype(np.int64))
            self.pending.index_fill_(0, rows, 0.0)

    def _update_away(self, rows: Int64Array, begin: int, tables: np.ndarray, coefficients: torch.Tensor) -> None:
        """Updates rows of the window that left the cache, from `begin` on among all such rows."""
        records = self._transfers.staging(len(rows), self.layout.bytes)
        sums = self._transfers.staging(len(rows), 2 * self.layout.dim, torch.float32)
        self.engine.read_away(begin, begin + len(rows), records.numpy(), sums.numpy())
        (cache,), (sums,) = self._transfers.send(records).wait(), self._transfers.send(sums).wait()
        borders = (np.clip(tables, begin, begin + len(rows)) - begin).astype(np.int32)
        self._update_from_sums(cache, sums, np.arange(len(rows), dtype=np.int32), borders, coefficients)
        engine = self.swap.engine

        def store(updated: torch.Tensor) -> None:
            for table, (low, high) in enumerate(pairwise(borders.tolist())):
                engine.write_rows(table, rows[low:high], updated[low:high].numpy())

        self.swap.owe(cache, store)

    # ---- whole tables

    def read_table(self, table: int) -> Iterator[tuple[Int64Array, torch.Tensor]]:
        """Every row of a table in row order, chunk by chunk: (ids int64 `[n]`, records uint8 `[n, bytes]`)."""
        ids, slots = self.engine.table_rows(table)
        for begin in range(0, len(ids), self._chunk):
            chunk = slice(begin, min(begin + self._chunk, len(ids)))
            rows = np.arange(chunk.start, chunk.stop, dtype=np.int64)
            yield ids[chunk], self._read_rows(table, ids[chunk], rows, slots[chunk])

    def read_kept(self, table: int) -> Iterator[tuple[Int64Array, torch.Tensor]]:
        """As `read_table`, without the rows that still are as they were initialised."""
        ids, slots = self.engine.table_rows(table)
        kept = self.engine.kept_rows(table)
        for begin in range(0, len(kept), self._chunk):
            rows = kept[begin : begin + self._chunk]
            yield ids[rows], self._read_rows(table, ids[rows], rows, slots[rows])

    def _read_rows(self, table: int, ids: Int64Array, rows: Int64Array, slots: np.ndarray) -> torch.Tensor:
        records = torch.empty((len(rows), self.layout.bytes), dtype=torch.uint8)
        self.engine.read_rows(table, ids, rows, records.numpy())
        resident = np.flatnonzero(slots >= 0)
        if len(resident):
            current = ops.gather_rows(self.cache, *self._transfers.put(slots[resident]))
            records[torch.from_numpy(resident)] = current.cpu()
        return records

    def read_rows(self, table: int, ids: Int64Array) -> tuple[Int64Array, np.ndarray, torch.Tensor]:
        """(rows, slots, records) of `ids`; unknown ids of a hash table are added with their initial record."""
        rows, slots = self.engine.insert(table, ids)
        return rows, slots, self._read_rows(table, ids, rows, slots)

    def write_rows(self, table: int, rows: Int64Array, slots: np.ndarray, records: torch.Tensor) -> None:
        """Replaces the records of rows that `read_rows` gave."""
        self.engine.write_rows(table, rows, records.numpy())
        resident = np.flatnonzero(slots >= 0)
        if len(resident):
            fresh = records[torch.from_numpy(resident)].to(self._device)
            ops.scatter_rows(self.cache, *self._transfers.put(slots[resident]), fresh)

    def drop_pending(self) -> None:
        """Forgets the gradients of an open window."""
        if self.pending is not None:
            self._clear_sums(self.engine.pending_slots()[0])
            self.engine.clear_pending()

    def write_weights(self, table: int, ids: Int64Array, weight: torch.Tensor) -> None:
        """Sets the weights of `ids`, `[n, D]`; their states stay."""
        self._write_part(table, ids, self.layout.weight, weight)

    def write_state(self, table: int, index: int, ids: Int64Array, values: torch.Tensor) -> None:
        """Sets one state of `ids`, `[n, D]` or `[n, 1]`; weights and other states stay."""
        self._write_part(table, ids, lambda records: self.layout.state(records, index), values)

    def _write_part(
        self, table: int, ids: Int64Array, part: Callable[[torch.Tensor], torch.Tensor], values: torch.Tensor
    ) -> None:
        """Sets `part` of the records of `ids` to `values`, chunk by chunk."""
        for begin in range(0, len(ids), self._chunk):
            chunk = slice(begin, begin + self._chunk)
            rows, slots, records = self.read_rows(table, ids[chunk])
            part(records).copy_(values[chunk])
            self.write_rows(table, rows, slots, records)

    def _initialise(self, table: int) -> None:
        config = self.members[table].config
        self.write_weights(table, np.arange(config.num_embeddings), self._drawn(config, config.num_embeddings))
