"""A group: tables of one record layout, with one host store, device cache and plan for all of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .. import _engine
from ..backends import backend_for
from ..ops import ops, parallel_runner
from .batch import Batch, Int64Array
from .optimizer import TableOptimizer
from .record import RecordLayout
from .table import WEIGHT_DTYPES, BoundsCheckMode, Pooling, TableConfig

_engine.set_parallel_runner(parallel_runner())

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


@dataclass(frozen=True)
class PreparedSwap:
    """A batch's plan, with all that its swap will write to the device at hand.

    Attributes:
        group: whose batch it is.
        plan: pins the batch's rows.
        slots: where the rows that come will be, int32 `[I]`.
        records: those rows, uint8 `[I, bytes]`.
        left: slots of rows that leave with pending gradients, int64 `[P]`; the engine has their sums already.
        back: slots of rows that come back with pending gradients, int64 `[Q]`.
        sums: those gradients, float32 `[Q, 2 * D]`.
    """

    group: Group
    plan: _engine.SwapPlan
    slots: torch.Tensor
    records: torch.Tensor
    left: torch.Tensor | None = None
    back: torch.Tensor | None = None
    sums: torch.Tensor | None = None

    def execute(self) -> None:
        """Writes to the cache. May be done again from the start if it was interrupted."""
        pending = self.group.pending
        if pending is not None and self.left is not None:
            pending.index_fill_(0, self.left, 0.0)
        if pending is not None and self.back is not None and self.sums is not None:
            pending.index_copy_(0, self.back, self.sums)
        if len(self.slots):
            ops.scatter_rows(self.group.cache, self.slots, self.records)

    def cancel(self) -> None:
        """Leaves group and engine as if the batch had not come."""
        self.group.engine.cancel(self.plan)


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
        self.pooled = first.config.pooling is not Pooling.NONE
        self._device = device
        self._backend = backend_for(device)
        means = [m.config.pooling is Pooling.MEAN for m in members for _ in m.features]
        self.engine = _engine.Engine(
            [_table_spec(member, seed, bounds_check) for member in members],
            self.layout.dim,
            WEIGHT_DTYPES.index(self.layout.weight_dtype),
            list(self.layout.state_elements),
            [index for index, member in enumerate(members) for _ in member.features],
            list(columns),
            means if self.pooled else [],
        )
        slots = sum(member.slots for member in members)
        self.cache = self._backend.allocate_cache(slots, self.layout.bytes, device)
        self._columns = torch.tensor(list(columns), dtype=torch.int64, device=device)
        self._means = torch.tensor(means, dtype=torch.bool, device=device)
        optimizers = [member.optimizer for member in members if member.optimizer]
        self.optimizers = list({id(optimizer): optimizer for optimizer in optimizers}.values())
        ranks = {id(optimizer): rank for rank, optimizer in enumerate(self.optimizers)}
        ranks_of_tables = [ranks[id(optimizer)] for optimizer in optimizers]
        self._optimizer_of_table = torch.tensor(ranks_of_tables, dtype=torch.int64, device=device)
        self.pending: torch.Tensor | None = None
        if self.accumulate_step > 1:
            self.pending = torch.zeros((slots, 2 * self.layout.dim), device=device)
        self._with_init_fn = [i for i, m in enumerate(members) if m.config.hashed and m.config.init_fn is not None]
        self._chunk = max(1024, _CHUNK_BYTES // self.layout.bytes)
        for index, member in enumerate(members):
            if run_init_fns and member.config.init_fn is not None and not member.config.hashed:
                self._initialise(index)

    @property
    def accumulate_step(self) -> int:
        """Backward passes of this group's accumulation window."""
        return self.optimizer.accumulate_step if self.optimizer else 1

    @property
    def window_open(self) -> bool:
        """Whether gradients wait for the end of their window."""
        if self.pending is None:
            return False
        return bool(len(self.engine.pending_slots()[0]) or self.engine.pending_away()[-1])

    # ---- planning and swapping

    def prepare(self, batch: Batch) -> PreparedSwap:
        """Plans a training batch and fetches its rows into staging; the plan pins them until it is released.

        The cache itself is changed by `execute`, or not at all after `cancel`.

        Raises:
            CacheTooSmallError: a table's cache holds fewer rows than the batch needs.
            CapacityError: a bounded hash table is full.
            IndexError, ValueError, TypeError: ids or offsets that cannot be right.
        """
        keys = batch.feature_keys[self.features]
        plan = self.engine.plan(batch.values, batch.offsets, keys, batch.batch_size)
        try:
            self._warn_of_bounds()
            leaving = self._to_device(plan.swap_out_slots)
            if len(leaving):
                self.engine.write_back(plan, ops.gather_rows(self.cache, leaving).cpu().numpy())
            slots = self._to_device(plan.swap_in_slots)
            records = self._backend.staging(len(slots), self.layout.bytes)
            self._run_init_fns(*self.engine.read_in(plan, records.numpy()), records)
            pending = () if self.pending is None else self._prepare_pending(self.pending, plan, leaving, slots)
            return PreparedSwap(self, plan, slots, records.to(self._device), *pending)
        except BaseException:
            self.engine.cancel(plan)
            raise

    def _prepare_pending(
        self, pending: torch.Tensor, plan: _engine.SwapPlan, leaving: torch.Tensor, coming: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Saves the pending gradients of rows that leave, and fetches those of rows that come back."""
        left = leaving[self._to_device(plan.pending_out).long()].long()
        self.engine.write_pending(plan, pending.index_select(0, left).cpu().numpy())
        back = coming[self._to_device(plan.pending_in).long()].long()
        sums = self._backend.staging(len(back), 2 * self.layout.dim, torch.float32)
        self.engine.read_pending(plan, sums.numpy())
        return left, back, sums.to(self._device)

    def _warn_of_bounds(self) -> None:
        for name, count, example in self.engine.take_bounds_warnings():
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

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)

    # ---- lookup

    def lookup(self, plan: _engine.SwapPlan, weights: torch.Tensor | None, out: torch.Tensor | None) -> torch.Tensor:
        """Rows of a planned batch: `[n, D]`, or pooled into this group's columns of `out` `[B, total]`."""
        rows = self.layout.weight(self.cache)
        slots = self._to_device(plan.slots)
        if out is None:
            sequence: torch.Tensor = ops.lookup_sequence(rows, slots)
            return sequence
        offsets = self._to_device(plan.offsets)
        ops.lookup_pooled(rows, slots, offsets, weights, self._columns, self._means, 0, out)
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
            rows, index = self._readable(plan), self._to_device(plan.index)
            if out is None:
                parts.append(ops.lookup_sequence(rows, index))
                continue
            part = weights[done : done + len(plan.index)] if weights is not None else None
            offsets = self._to_device(plan.offsets)
            ops.lookup_pooled(rows, index, offsets, part, self._columns, self._means, begin, out)
            done += len(plan.index)
        self._warn_of_bounds()
        if out is not None:
            return out
        return torch.cat(parts) if parts else torch.empty((0, self.layout.dim), device=self._device)

    def _readable(self, plan: _engine.ReadPlan) -> torch.Tensor:
        if plan.all_resident:
            return self.layout.weight(self.cache)
        staging = self._backend.staging(plan.host_count, self.layout.bytes)
        self._run_init_fns(*self.engine.read(plan, staging.numpy()), staging)
        resident = ops.gather_rows(self.cache, self._to_device(plan.resident_slots))
        return self.layout.weight(torch.cat([resident, staging.to(self._device)]))

    # ---- update

    def coefficients(self) -> torch.Tensor:
        """This update's coefficients of every table, float32 `[T, 8]` on the device.

        Raises:
            TypeError, ValueError: an option of an optimizer was changed to something no update may use.
        """
        rows = [optimizer.coefficients() for optimizer in self.optimizers]
        return torch.tensor(rows, dtype=torch.float32, device=self._device)[self._optimizer_of_table]

    def weights_grad(self, plan: _engine.SwapPlan, grad: torch.Tensor) -> torch.Tensor:
        """Gradient of the per-sample weights, float32 `[n]`, from that of the output, `[B, total]`."""
        rows = self.layout.weight(self.cache)
        slots, offsets = self._to_device(plan.slots), self._to_device(plan.offsets)
        result: torch.Tensor = ops.pooled_weights_grad(rows, slots, offsets, grad, self._columns, self._means)
        return result

    def update(
        self,
        plan: _engine.SwapPlan,
        grad: torch.Tensor | None,
        weights: torch.Tensor | None,
        coefficients: torch.Tensor | None,
    ) -> None:
        """Aggregates `grad` per row; updates the rows when `coefficients` are given (the window's end)."""
        if grad is not None and len(plan.unique_slots):
            segments = (self._to_device(plan.segment_offsets), self._to_device(plan.grad_row))
            column = None if plan.grad_column is None else self._to_device(plan.grad_column)
            scale = self._scale(plan, weights)
            slots = self._to_device(plan.unique_slots)
            if self.pending is not None:
                ops.accumulate_rows(self.pending, grad, slots, *segments, column, scale)
                self.engine.mark_pending(plan)
            elif coefficients is not None:
                tables = self._to_device(plan.table_offsets)
                self._update_rows(self.cache, grad, slots, tables, *segments, column, scale, coefficients)
        if self.pending is not None and coefficients is not None:
            self._close_window(coefficients)

    def _scale(self, plan: _engine.SwapPlan, weights: torch.Tensor | None) -> torch.Tensor | None:
        """What multiplies each lookup's gradient: its sample weight, over its bag's length for MEAN."""
        scale = None if plan.scale is None else self._to_device(plan.scale)
        if weights is None:
            return scale
        weight = weights.detach().index_select(0, self._to_device(plan.positions))
        return weight if scale is None else weight * scale

    def _update_rows(self, cache: torch.Tensor, *segments: torch.Tensor | None) -> None:
        assert self.optimizer is not None
        kernel = self.optimizer.spec.kernel
        ops.update_rows(cache, *segments, kernel, self.layout.dim, self.layout.weight_dtype)

    def _update_from_sums(
        self, cache: torch.Tensor, sums: torch.Tensor, slots: np.ndarray, tables: np.ndarray, c: torch.Tensor
    ) -> None:
        """Updates `slots` of `cache` from one row of pending sums each, `sums[slot]`."""
        rows = self._to_device(slots)
        borders = torch.arange(len(slots) + 1, dtype=torch.int32, device=self._device)
        self._update_rows(cache, sums, rows, self._to_device(tables), borders, rows, None, None, c)

    def _close_window(self, coefficients: torch.Tensor) -> None:
        assert self.pending is not None
        slots, tables = self.engine.pending_slots()
        if len(slots):
            self._update_from_sums(self.cache, self.pending, slots, tables, coefficients)
            self.pending.index_fill_(0, self._to_device(slots).long(), 0.0)
        away = self.engine.pending_away()
        for begin in range(0, int(away[-1]), self._chunk):
            end = min(begin + self._chunk, int(away[-1]))
            records = self._backend.staging(end - begin, self.layout.bytes)
            sums = self._backend.staging(end - begin, 2 * self.layout.dim, torch.float32)
            self.engine.read_away(begin, end, records.numpy(), sums.numpy())
            rows = records.to(self._device)
            every = np.arange(end - begin, dtype=np.int32)
            tables = (np.clip(away, begin, end) - begin).astype(np.int32)
            self._update_from_sums(rows, sums.to(self._device), every, tables, coefficients)
            self.engine.write_away(begin, end, rows.cpu().numpy())
        self.engine.clear_pending()

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
            current = ops.gather_rows(self.cache, self._to_device(slots[resident]))
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
            ops.scatter_rows(self.cache, self._to_device(slots[resident]), fresh)

    def drop_pending(self) -> None:
        """Forgets the gradients of an open window."""
        if self.pending is not None:
            slots, _ = self.engine.pending_slots()
            self.pending.index_fill_(0, self._to_device(slots).long(), 0.0)
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
