"""The swap of a group: rows that a batch misses come from the host store, rows that it evicts go back there.

Nobody waits for a copy that he does not need. Rows that leave are in transit until `land` has them in the store; who
wants one of them lands the plan that took it out, and no other.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from .. import _engine
from ..ops import ops
from .batch import Batch, Int64Array
from .plan import Plan, PlanArrays
from .transfers import Arrival, Departure, Transfers

FillNew = Callable[[np.ndarray, np.ndarray, torch.Tensor], None]
"""(places, tables, records) -> nothing: gives new rows among `records` other weights than the engine's."""


@dataclass(frozen=True, eq=False)
class _Copies:
    """Of rows that leave, on their way to the host."""

    records: Departure
    sums: Departure | None

    def arrived(self) -> bool:
        return self.records.done() and (self.sums is None or self.sums.done())


@dataclass(eq=False)
class _Staged:
    """A plan that is not applied: what has been made ready. Does not hold the plan, which may be dropped."""

    arrays: PlanArrays
    arrival: Arrival
    leaving: _Copies | None = None
    records: Arrival | None = None
    sums: Arrival | None = None


class Swap:
    """Plans batches of one group, and brings the cache to where their plans want it.

    Plans are made under the embedding's planning lock; all else is called under its launch lock.
    """

    def __init__(
        self,
        engine: _engine.Engine,
        cache: torch.Tensor,
        weights: torch.Tensor,
        sums: torch.Tensor | None,
        transfers: Transfers,
        fill_new: FillNew,
    ) -> None:
        """
        Args:
            engine: the rows' directory and store.
            cache: uint8 `[slots, bytes]`.
            weights: view `[slots, D]` of the cache.
            sums: float32 `[slots, 2 * D]`, gradients of an accumulation window.
            transfers: to the cache's device.
            fill_new: for tables with an `init_fn`.
        """
        self.engine = engine
        self.cache = cache
        self.weights = weights
        self.sums = sums
        self.transfers = transfers
        self._fill_new = weakref.WeakMethod(fill_new)  # of who holds this: a cycle would keep the cache too long
        self._staged: dict[int, _Staged] = {}
        self._leaving: dict[int, tuple[_engine.Plan, _Copies]] = {}  # by serial, rows in transit
        self._landing = threading.Lock()

    # ---- planning

    def plan(self, batch: Batch, keys: Int64Array) -> Plan:
        """The plan of a training batch. Waits for nothing."""
        for serial, (_, copies) in list(self._leaving.items()):
            if copies.arrived():
                self.land(serial)
        arguments = (batch.values, batch.offsets, keys, batch.batch_size, batch.weights is not None)
        if self.transfers.pinned:
            staging = self.transfers.staging(1, self.engine.arena_bytes(*arguments))[0]
            host = self.engine.plan(*arguments, staging.numpy())
            staged = self._send_arrays(staging[: host.arena.nbytes], host)
        else:
            host = self.engine.plan(*arguments)
            arrays = PlanArrays.on_host(host)
            staged = _Staged(arrays, Arrival((), arrays.slots))
        if host.rows_in:
            self._staged[host.serial] = staged
        return Plan(host, staged.arrays, staged.arrival)

    def _send_arrays(self, arena: torch.Tensor, host: _engine.Plan) -> _Staged:
        arrival = self.transfers.send(arena)
        return _Staged(PlanArrays.of(arrival.tensors[0], host.fields), arrival)

    def cancel(self, plan: Plan) -> None:
        """Undoes the newest plan, which is not applied: what was to leave stays."""
        self.engine.cancel(plan.host)
        self._staged.pop(plan.host.serial, None)

    # ---- applying

    def stage(self, plan: Plan) -> None:
        """Applies the plans before this one, and makes ready what it brings in. All that can fail of a swap."""
        hosts = self.engine.unapplied(plan.host)  # these do not pin: rows in transit hold one
        for host in hosts[:-1]:
            self._apply(host)
        for host in hosts[-1:]:
            if host.rows_in:
                self._stage(host, self._staged_of(host))

    def finish(self, plan: Plan) -> None:
        """Brings in what `plan` needs, which is staged and has begun. Its arrays may be used from now on."""
        for host in self.engine.unapplied(plan.host):  # unless another thread did, on its way to a later plan
            self._finish(host, self._staged_of(host) if host.rows_in else None)
        plan.arrival.wait()

    def apply_all(self) -> None:
        """Applies every plan there is: the cache holds all rows that the engine says it does."""
        for host in self.engine.unapplied():
            self._apply(host)

    def _apply(self, host: _engine.Plan) -> None:
        """May be done again from the start if it was interrupted: what leaves is kept before anything is written."""
        staged = self._staged_of(host)
        self._stage(host, staged)
        _engine.begin([host])
        self._finish(host, staged)

    def _staged_of(self, host: _engine.Plan) -> _Staged:
        staged = self._staged.get(host.serial)
        if staged is None:  # made by a thread that was interrupted
            staged = self._staged[host.serial] = self._send_arrays(torch.from_numpy(host.arena), host)
        return staged

    def _finish(self, host: _engine.Plan, staged: _Staged | None) -> None:
        if staged is not None:
            if staged.leaving is not None:
                self._leaving[host.serial] = host, staged.leaving
            self._write(staged)
        self.engine.applied(host)
        for serial in [serial for serial in self._staged if serial <= host.serial]:
            del self._staged[serial]

    def _stage(self, host: _engine.Plan, staged: _Staged) -> None:
        """Starts the copies that a plan needs, both ways. Changes nothing."""
        staged.arrival.wait()
        arrays = staged.arrays
        if arrays.swap_out_slots is not None and staged.leaving is None:
            staged.leaving = self._take_out(arrays, arrays.swap_out_slots)
        if arrays.swap_in_slots is not None and staged.records is None:
            for serial in host.sources:
                self.land(serial)
            if self.sums is not None and arrays.window_in_slots is not None:
                staging = self.transfers.staging(host.window_in, self.sums.shape[1], torch.float32)
                self.engine.read_sums(host, staging.numpy())
                staged.sums = self.transfers.send(staging)
            staging = self.transfers.staging(host.rows_in, self.cache.shape[1])
            fill_new = self._fill_new()
            new = self.engine.read_in(host, staging.numpy())
            if fill_new is not None:
                fill_new(*new, staging)
            staged.records = Arrival((staging,), staging) if self.transfers.direct else self.transfers.send(staging)

    def _take_out(self, arrays: PlanArrays, slots: torch.Tensor) -> _Copies:
        """Copies the rows that leave, with the updates that the current stream has been given."""
        if self.transfers.direct:
            staging = self.transfers.staging(len(slots), self.cache.shape[1])
            ops.gather_rows.out(self.cache, slots, out=staging)
            records = self.transfers.used(staging)
        else:
            records = self.transfers.fetch(ops.gather_rows(self.cache, slots))
        sums = None
        if self.sums is not None and arrays.window_out_slots is not None:
            sums = self.transfers.fetch(self.sums.index_select(0, arrays.window_out_slots))
        return _Copies(records, sums)

    def _write(self, staged: _Staged) -> None:
        arrays = staged.arrays
        if self.sums is not None and arrays.window_out_slots is not None:
            self.sums.index_fill_(0, arrays.window_out_slots, 0.0)
        if self.sums is not None and arrays.window_in_slots is not None and staged.sums is not None:
            self.sums.index_copy_(0, arrays.window_in_slots, *staged.sums.wait())
        if arrays.swap_in_slots is not None and staged.records is not None:
            ops.scatter_rows(self.cache, arrays.swap_in_slots, *staged.records.wait())
            if self.transfers.direct:
                self.transfers.used(staged.records.memory)

    # ---- landing

    def land(self, serial: int) -> None:
        """Writes the rows that plan `serial` took out to the host store. Waits for their copy alone."""
        with self._landing:
            host, copies = self._leaving.get(serial, (None, None))
            if host is None or copies is None:
                return
            sums = None if copies.sums is None else copies.sums.wait().numpy()
            self.engine.land(host, copies.records.wait().numpy(), sums)
            self._leaving.pop(serial, None)

    def settle(self) -> None:
        """Applies all plans and lands all rows, for who reads or writes whole tables."""
        self.apply_all()
        for serial in list(self._leaving):
            self.land(serial)
