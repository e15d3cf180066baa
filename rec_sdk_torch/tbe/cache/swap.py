"""The swap of a group: rows that a batch misses come from the host store, rows that it evicts go back there.

Nothing waits for a copy that it does not need. Rows that leave are in transit until `land` has them in the store; a
plan or a read that wants one of them lands the plan that took it out, and no other.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ... import _engine
from ...operators.calls import call_once, ops
from ...operators.record import RecordLayout
from .batch import Batch, Int64Array
from .plan import Plan, PlanArrays, StagedPlan, VictimBuffers, arrays_on_device, arrays_on_host
from .transfers import Download, Transfers, Upload

FusedLookup = tuple[Any, Sequence[object]]
"""An overload of an operator that swaps rows and looks rows up, and its arguments behind those of the swap."""

FillNew = Callable[[np.ndarray, np.ndarray, torch.Tensor], None]
"""(places, tables, records) -> nothing: gives new rows among `records` other weights than the engine's."""


def fused_lookup(layout: RecordLayout, arrays: PlanArrays, pooled: Sequence[Any]) -> FusedLookup:
    """The lookup of a plan that has `origins`, as part of its swap.

    `pooled` are the arguments of `lookup_pooled` behind its offsets, of which the last is None for a sequence.
    """
    rows = layout.dim, layout.weight_dtype, arrays.slots, arrays.origins
    if pooled[-1] is None:
        return ops.swap_lookup_sequence.default, rows
    return ops.swap_lookup_pooled.default, (*rows, arrays.offsets, *pooled)


@dataclass(eq=False, slots=True)
class _WriteBack:
    """Copies of rows that leave, on their way to the host."""

    records: Download
    sums: Download | None


_SWAP_IN_SLOTS = PlanArrays._fields.index("swap_in_slots")


class Swap:
    """Plans batches of one group, and brings the cache to where their plans want it.

    Plans are made and dropped under the embedding's planning lock, and read ahead in the thread that made them; all
    else is called under its launch lock.
    """

    def __init__(
        self,
        engine: _engine.Engine,
        cache: torch.Tensor,
        weights: torch.Tensor,
        sums: torch.Tensor | None,
        transfers: Transfers,
        fill_new: FillNew | None,
    ) -> None:
        """
        Args:
            engine: the rows' directory and store.
            cache: uint8 `[slots, bytes]`.
            weights: view `[slots, D]` of the cache.
            sums: float32 `[slots, 2 * D]`, gradients of an accumulation window.
            transfers: to the cache's device.
            fill_new: for tables with an `init_fn`; None if there are none.
        """
        self.engine = engine
        self.cache = cache
        self.record_bytes = cache.shape[1]
        self.weights = weights
        self.sums = sums
        self.transfers = transfers
        # A method of the owner of this swap: a cycle would keep the cache too long.
        self._fill_new = None if fill_new is None else weakref.WeakMethod(fill_new)
        self._staged: dict[int, weakref.ref[StagedPlan]] = {}  # by serial; their plans hold them
        self._started: dict[int, StagedPlan] = {}  # by serial, of plans that can only be completed
        self._write_backs: dict[int, tuple[_engine.Plan, _WriteBack]] = {}  # by serial, rows in transit
        self._write_back_lock = threading.Lock()

    def staging_bytes(self) -> int:
        """Host memory of plans that are not applied, and of rows on their way."""
        tensors: list[torch.Tensor] = []
        waiting = {staged for ref in list(self._staged.values()) if (staged := ref()) is not None}
        for staged in waiting.union(self._started.values()):
            arrivals = staged.upload, staged.records, staged.late_rows, staged.sums
            tensors += [arrival.memory for arrival in arrivals if arrival is not None]
            tensors += [] if staged.victims is None else [staged.victims.staging]
        for _, copies in list(self._write_backs.values()):
            tensors += [departure.tensor for departure in (copies.records, copies.sums) if departure is not None]
        return sum(tensor.nbytes for tensor in tensors)

    def slot_bytes(self) -> int:
        """Bytes of a row in the cache and, in a group with a window, of its sums."""
        matrices = [matrix for matrix in (self.cache, self.sums) if matrix is not None]
        return sum(matrix.shape[1] * matrix.element_size() for matrix in matrices)

    # ---- planning

    def plan(self, batch: Batch, keys: Int64Array, announced: _engine.Announcement | None = None) -> Plan:
        """The plan of a training batch, which may have been announced. Waits for nothing."""
        if self._write_backs or self._staged:
            self._complete_downloads()
        arguments = (batch.values, batch.offsets, keys, batch.batch_size, batch.weighted, batch.joined)
        if self.transfers.pinned:
            staging = self.transfers.staging(1, self.engine.arena_bytes(*arguments))[0]
            host = self.engine.plan(*arguments, staging.numpy(), announced, *batch.signals)
            staged = self._upload_arrays(staging[: host.arena.nbytes], host)
            arrays, arrival, comes = staged.arrays, staged.upload, host.rows_in
        else:
            host = self.engine.plan(*arguments, None, announced, *batch.signals)
            arrays, arrival, comes = arrays_on_host(host), None, host.rows_in
            if comes:
                staged = StagedPlan(arrays, Upload((), arrays.slots))
        if not comes:
            return Plan(host, arrays, arrival, None)
        self._staged[host.serial] = weakref.ref(staged)
        return Plan(host, arrays, arrival, staged)

    def _complete_downloads(self) -> None:
        """Lands the rows whose copies have arrived, and forgets plans that were dropped."""
        for serial, (_, copies) in list(self._write_backs.items()):
            if not self.transfers.pinned or self._is_downloaded(copies):
                self.complete_write_back(serial)
        for serial, ref in list(self._staged.items()):
            if ref() is None:
                self._staged.pop(serial, None)

    def _upload_arrays(self, arena: torch.Tensor, host: _engine.Plan) -> StagedPlan:
        arrival = self.transfers.upload(arena)
        return StagedPlan(arrays_on_device(arrival.tensors[0], host), arrival)

    def drop(self, plan: Plan) -> None:
        """Ends a plan. If it has not begun it undoes itself, when those made after it have: what was to leave stays."""
        staged = plan.staged
        with staged.lock if staged else contextlib.nullcontext():
            plan.release()

    def read_ahead(self, plan: Plan) -> None:
        """Starts to bring in the rows of a plan before its turn, in any thread, without the launch lock.

        Rows that a plan before it takes out, and that have not landed, are left to `stage`.
        """
        staged = plan.staged
        if staged is None:
            return
        with staged.lock:
            if staged.records is not None or plan.host.released:
                return
            for serial in plan.host.sources:
                _, copies = self._write_backs.get(serial, (None, None))
                if copies is not None and self._is_downloaded(copies):
                    self.complete_write_back(serial)
            staging = self.transfers.staging(plan.host.rows_in, self.record_bytes)
            staged.late = self.engine.read_ahead(plan.host, staging.numpy())
            staged.records = self._upload_records(staging)

    # ---- applying

    def stage(self, plan: Plan) -> None:
        """Applies the plans before this one, and makes ready what it brings in. All that can fail of a swap."""
        host = plan.host.next  # which does not pin: rows in transit hold it
        if host is None and not plan.host.applied:
            *before, host = self.engine.unapplied(plan.host)
            for other in before:
                self._apply(other)
        if plan.staged is not None and host is not None:
            plan.staged.host = host
            self._stage_misses(host, plan.staged)

    def finish(self, plan: Plan, fused: FusedLookup | None = None) -> Sequence[Any]:
        """Brings in the rows of `plan`, which has begun. Its arrays may be used once they have arrived.

        Returns what `fused` gave; nothing where rows came in another way, and are still to be looked up.
        """
        staged = plan.staged
        done: Sequence[Any] = ()
        if not plan.host.applied:  # as another thread may have, on its way to a later plan
            done = self._finish(plan.host if staged is None or staged.host is None else staged.host, staged, fused)
        plan.staged = None
        return done

    def apply_all(self) -> None:
        """Applies every plan there is: the cache holds all rows that the engine says it does."""
        for host in self.engine.unapplied():
            self._apply(host)

    def _apply(self, host: _engine.Plan) -> None:
        """May be done again from the start if it was interrupted: rows that were swapped are not swapped again."""
        staged = self._staged_of(host)
        self._stage_misses(host, staged)
        _engine.start_plans([host])
        self._finish(host, staged)

    def _staged_of(self, host: _engine.Plan) -> StagedPlan:
        staged = self._started.get(host.serial)
        if staged is None:
            known = self._staged.get(host.serial)
            staged = None if known is None else known()
        if staged is None:  # its plan was dropped, and later ones were not
            staged = self._upload_arrays(torch.from_numpy(host.arena), host)
        return staged

    def _finish(self, host: _engine.Plan, staged: StagedPlan | None, fused: FusedLookup | None = None) -> Sequence[Any]:
        done: Sequence[Any] = ()
        if staged is not None:
            self._started[host.serial] = staged  # completed after an interrupt, it must not swap rows again
            done = self._write(staged, fused)
            if staged.victims is not None:
                self._write_backs[host.serial] = host, self._download_victims(staged.victims)
        self.engine.applied(host)
        for serial in list(self._staged):  # which a thread that plans adds to
            if serial <= host.serial:
                self._staged.pop(serial, None)
        self._started.clear()  # one at a time begins
        return done

    def _stage_misses(self, host: _engine.Plan, staged: StagedPlan) -> None:
        """Takes memory for what leaves, and starts the copies of what comes. Changes nothing."""
        if staged.upload.event is not None:
            staged.upload.wait()
        arrays = staged.arrays
        if arrays.swap_out_places is not None and staged.victims is None:
            staged.victims = self._allocate_victim_buffers(host, arrays)
        if arrays.swap_in_slots is None:
            return
        if self.sums is not None and arrays.window_in_slots is not None and staged.sums is None:
            for serial in host.sources:
                self.complete_write_back(serial)
            sums = self.transfers.staging(host.window_in, self.sums.shape[1], torch.float32)
            self.engine.read_sums(host, sums.numpy())
            staged.sums = self.transfers.upload(sums)
        with staged.lock:
            if staged.records is None:
                for serial in host.sources:
                    self.complete_write_back(serial)
                staging = self.transfers.staging(host.rows_in, self.record_bytes)
                fill_new = None if self._fill_new is None else self._fill_new()
                new = self.engine.read_in(host, staging.numpy(), fill_new is not None)
                if fill_new is not None:
                    fill_new(*new, staging)
                staged.records = self._upload_records(staging)
            elif staged.late is not None and len(staged.late) and staged.late_rows is None:
                for serial in host.sources:
                    self.complete_write_back(serial)
                late = np.empty((len(staged.late), self.record_bytes), np.uint8)
                self.engine.read_late(host, staged.late, late)
                slots = host.views[_SWAP_IN_SLOTS]
                assert slots is not None
                staged.late_rows = self.transfers.upload_arrays([slots[staged.late], late])

    def _upload_records(self, staging: torch.Tensor) -> Upload:
        transfers = self.transfers
        return transfers.upload(staging) if transfers.pinned and not transfers.direct else Upload((staging,), staging)

    def _allocate_victim_buffers(self, host: _engine.Plan, arrays: PlanArrays) -> VictimBuffers:
        """For the rows that leave. Their sums leave already."""
        shape = host.rows_out, self.record_bytes
        if self.transfers.direct:
            staging = rows = self.transfers.staging(*shape)
        else:
            rows = self.cache.new_empty(shape)
            staging = self.transfers.staging(*shape) if self.transfers.pinned else rows
        sums = None
        if self.sums is not None and arrays.window_out_slots is not None:
            sums = self.transfers.download(self.sums.index_select(0, arrays.window_out_slots))
        return VictimBuffers(rows, staging, sums)

    def _write(self, staged: StagedPlan, fused: FusedLookup | None) -> Sequence[Any]:
        """Swaps rows, those that leave with the updates that the current stream has been given.

        Returns what `fused` gave, unless there are late rows: they are not where it would read them.
        """
        arrays = staged.arrays
        if self.sums is not None and arrays.window_out_slots is not None:
            self.sums.index_fill_(0, arrays.window_out_slots, 0.0)
        if self.sums is not None and arrays.window_in_slots is not None and staged.sums is not None:
            self.sums.index_copy_(0, arrays.window_in_slots, *staged.sums.wait())
        if arrays.swap_in_slots is None or staged.records is None:
            return ()
        arrival = staged.records
        (records,) = arrival.tensors if arrival.event is None else arrival.wait()
        leaving = staged.victims
        called: list[Any] = [] if leaving is None else leaving.swapped
        rows = None if leaving is None else leaving.rows
        if rows is not None and self.transfers.pinned and rows.device.type != "cpu":  # perhaps of another stream
            rows.record_stream(torch.get_device_module(rows.device).current_stream(rows.device))
        swap = self.cache, arrays.swap_in_slots, arrays.swap_out_places, records, rows
        if fused is not None and staged.late_rows is None and not called:
            operator, lookup = fused
            call_once(operator, (*swap, *lookup), called)
            return called
        if leaving is None:
            ops.scatter_rows(self.cache, arrays.swap_in_slots, records)
        else:
            call_once(ops.swap_rows.default, swap, called)
        if staged.late_rows is not None:
            ops.scatter_rows(self.cache, *staged.late_rows.wait())
        if self.transfers.direct:
            self.transfers.hold_until_used(staged.records.memory)
        return ()

    def _download_victims(self, leaving: VictimBuffers) -> _WriteBack:
        """Starts to copy the rows that have left to the host."""
        if self.transfers.direct:
            return _WriteBack(self.transfers.hold_until_used(leaving.rows), leaving.sums)
        if not self.transfers.pinned:
            return _WriteBack(Download(leaving.rows, None), leaving.sums)
        return _WriteBack(self.transfers.download(leaving.rows, leaving.staging), leaving.sums)

    # ---- landing

    def _is_downloaded(self, copies: _WriteBack) -> bool:
        """Whether rows that leave are in host memory, so that nothing waits for them."""
        if not self.transfers.pinned:
            return True
        return copies.records.done() and (copies.sums is None or copies.sums.done())

    def complete_write_back(self, serial: int) -> None:
        """Writes the rows that plan `serial` took out to the host store. Waits for their copy alone."""
        with self._write_back_lock:
            host, copies = self._write_backs.get(serial, (None, None))
            if host is None or copies is None:
                return
            records = copies.records
            rows = records.tensor if records.event is None else records.wait()
            sums = None if copies.sums is None else copies.sums.wait().numpy()
            self.engine.complete_write_back(host, rows.numpy(), sums)
            self._write_backs.pop(serial, None)

    def settle(self) -> None:
        """Applies all plans and lands all rows: whole tables may be read and written then."""
        self.apply_all()
        for serial in list(self._write_backs):
            self.complete_write_back(serial)
