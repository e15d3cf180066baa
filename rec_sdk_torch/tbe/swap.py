"""The swap of a group: rows that a batch misses come from the host store, rows that it evicts go back there.

Nothing here waits for the device but `settle`: the rows that leave reach the store when it is next asked for rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch

from .. import _engine
from ..ops import ops
from .transfers import Arrival, Departure, Transfers

FillNew = Callable[[np.ndarray, np.ndarray, torch.Tensor], None]
"""(places, tables, records) -> nothing: gives new rows among `records` other weights than the engine's."""


class PlanArrays(NamedTuple):
    """A plan's arrays on the device, those that its batch needs; `_engine.SwapPlan` describes them, but for two.

    Attributes:
        left: slots of rows that leave with pending gradients, int64 `[P]`.
        back: slots of rows that come back with pending gradients, int64 `[Q]`.
    """

    slots: torch.Tensor
    unique_slots: torch.Tensor
    table_offsets: torch.Tensor
    segment_offsets: torch.Tensor
    grad_row: torch.Tensor
    offsets: torch.Tensor | None
    grad_column: torch.Tensor | None
    scale: torch.Tensor | None
    positions: torch.Tensor | None
    swap_out_slots: torch.Tensor | None
    swap_in_slots: torch.Tensor | None
    left: torch.Tensor | None
    back: torch.Tensor | None


_arrays_of_batch = attrgetter(*PlanArrays._fields[: PlanArrays._fields.index("swap_out_slots")])
_NO_SWAP = (None, None, None, None)


def _arrays_of_swap(plan: _engine.SwapPlan) -> list[np.ndarray | None]:
    """The last four of `PlanArrays`, those that are not empty."""
    out, into = plan.swap_out_slots, plan.swap_in_slots
    left, back = out[plan.pending_out].astype(np.int64), into[plan.pending_in].astype(np.int64)
    return [array if len(array) else None for array in (out, into, left, back)]


class PlannedBatch(NamedTuple):
    """A batch that is planned, and pinned until `plan` is released."""

    plan: _engine.SwapPlan
    arrays: PlanArrays


@dataclass(frozen=True, eq=False)
class _Leaving:
    """What the host is owed: `store` takes it when it has arrived."""

    departure: Departure
    store: Callable[[torch.Tensor], None]
    plan: _engine.SwapPlan | None


class PreparedSwap(NamedTuple):
    """A planned batch whose rows are on their way to the device.

    Attributes:
        swap: of the batch's group.
        batch: the plan.
        arrays: of the plan.
        records: the rows that come, uint8 `[I, bytes]`; None for no rows.
        sums: the pending gradients that come back, float32 `[Q, 2 * D]`; None for none.
    """

    swap: Swap
    batch: PlannedBatch
    arrays: Arrival
    records: Arrival | None
    sums: Arrival | None

    def execute(self) -> None:
        """Writes to the cache. May be done again from the start if it was interrupted."""
        self.arrays.wait()
        arrays, pending = self.batch.arrays, self.swap.pending
        if pending is not None and arrays.left is not None:
            pending.index_fill_(0, arrays.left, 0.0)
        if pending is not None and arrays.back is not None and self.sums is not None:
            pending.index_copy_(0, arrays.back, *self.sums.wait())
        if self.records is not None and arrays.swap_in_slots is not None:
            self.swap.write_cache(arrays.swap_in_slots, self.records)

    def cancel(self) -> None:
        """Leaves group and engine as if the batch had not come."""
        self.swap.cancel(self.batch.plan)


class Swap:
    """Moves rows between the host store and the device cache of one group."""

    def __init__(
        self,
        engine: _engine.Engine,
        cache: torch.Tensor,
        weights: torch.Tensor,
        pending: torch.Tensor | None,
        transfers: Transfers,
    ) -> None:
        """
        Args:
            engine: rows that left may still be on their way to its store; `settle` ends that.
            cache: uint8 `[slots, bytes]`.
            weights: view `[slots, D]` of the cache.
            pending: float32 `[slots, 2 * D]`, gradients of an accumulation window.
            transfers: to the cache's device.
        """
        self.engine = engine
        self._pending = pending
        self._cache = cache
        self._weights = weights
        self._transfers = transfers
        self._leaving: list[_Leaving] = []
        self._lock = threading.RLock()

    @property
    def cache(self) -> torch.Tensor:
        """uint8 `[slots, bytes]`, for the current stream: behind what other streams do with it."""
        self._transfers.follow()
        return self._cache

    @property
    def weights(self) -> torch.Tensor:
        """The weights in the cache, `[slots, D]`, likewise."""
        self._transfers.follow()
        return self._weights

    @property
    def pending(self) -> torch.Tensor | None:
        """float32 `[slots, 2 * D]`, likewise."""
        self._transfers.follow()
        return self._pending

    def settle(self) -> None:
        """Writes the rows that left to the host store. Waits for their own copies only, mostly long done."""
        with self._lock:
            while self._leaving:
                leaving = self._leaving[0]
                leaving.store(leaving.departure.wait())  # may be done again, should an interrupt come now
                del self._leaving[0]

    def prepare(self, plan: _engine.SwapPlan, fill_new: FillNew) -> PreparedSwap:
        """Starts the copies that the latest plan needs, both ways. The cache itself is changed by `execute`.

        Args:
            plan: to be cancelled after an exception.
            fill_new: for tables with an `init_fn`.
        """
        arrays, arrival = self._send_plan(plan)
        batch = PlannedBatch(plan, arrays)
        if arrays.swap_out_slots is not None:
            arrival.wait()
            self._take_out(batch, arrays.swap_out_slots)
        records = sums = None
        if arrays.swap_in_slots is not None:
            staging = self._transfers.staging(plan.rows_in, self._cache.shape[1])
            fill_new(*self.engine.read_in(plan, staging.numpy()), staging)
            records = self._send_records(staging)
        if self._pending is not None and arrays.back is not None:
            staging = self._transfers.staging(len(plan.pending_in), self._pending.shape[1], torch.float32)
            self.engine.read_pending(plan, staging.numpy())
            sums = self._transfers.send(staging)
        return PreparedSwap(self, batch, arrival, records, sums)

    def _send_plan(self, plan: _engine.SwapPlan) -> tuple[PlanArrays, Arrival]:
        arrays = (*_arrays_of_batch(plan), *(_arrays_of_swap(plan) if plan.rows_out or plan.rows_in else _NO_SWAP))
        arrival = self._transfers.send_arrays([array for array in arrays if array is not None])
        tensors = iter(arrival.tensors)
        return PlanArrays._make([None if array is None else next(tensors) for array in arrays]), arrival

    def _take_out(self, batch: PlannedBatch, slots: torch.Tensor) -> None:
        """Copies the rows that leave, with the updates that the current stream has been given."""
        plan, engine = batch.plan, self.engine
        rows = self._read_cache(slots)
        owed = [_Leaving(rows, lambda host: engine.write_back(plan, host.numpy()), plan)]
        if self.pending is not None and batch.arrays.left is not None:
            sums = self._transfers.fetch(self.pending.index_select(0, batch.arrays.left))
            owed.append(_Leaving(sums, lambda host: engine.write_pending(plan, host.numpy()), plan))
        with self._lock:
            self._leaving += owed

    def cancel(self, plan: _engine.SwapPlan) -> None:
        """Undoes the latest plan: what was to leave stays."""
        with self._lock:
            self.engine.cancel(plan)  # which may refuse
            self._leaving = [leaving for leaving in self._leaving if leaving.plan is not plan]

    def owe(self, rows: torch.Tensor, store: Callable[[torch.Tensor], None]) -> None:
        """Copies `rows` to the host, for `store` to take when the engine is next asked for rows."""
        with self._lock:
            self._leaving.append(_Leaving(self._transfers.fetch(rows), store, None))

    # ---- the cache, through copies or, where kernels reach page-locked memory, directly

    def _read_cache(self, slots: torch.Tensor) -> Departure:
        if not self._transfers.direct:
            return self._transfers.fetch(ops.gather_rows(self.cache, slots))
        staging = self._transfers.staging(len(slots), self._cache.shape[1])
        ops.gather_rows.out(self.cache, slots, out=staging)
        return self._transfers.used(staging)

    def _send_records(self, staging: torch.Tensor) -> Arrival:
        return Arrival((staging,), staging) if self._transfers.direct else self._transfers.send(staging)

    def write_cache(self, slots: torch.Tensor, records: Arrival) -> None:
        """Replaces `slots` of the cache."""
        ops.scatter_rows(self.cache, slots, *records.wait())
        if self._transfers.direct:
            self._transfers.used(records.memory)
