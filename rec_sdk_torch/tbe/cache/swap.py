"""The swap of a group: misses are copied from the host store to the cache, victims from the cache to the host store.

No call waits for a copy that it does not need. A victim's write-back is pending until `complete_write_back` has stored
its row. A plan or a read that needs this row first completes the write-backs of the plan that evicted it.
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

SwapLookup = tuple[Any, Sequence[object]]
"""An operator overload that swaps and looks up in one launch, and its arguments after the arguments of the swap."""

FillNew = Callable[[np.ndarray, np.ndarray, torch.Tensor], None]
"""(indices, tables, records) -> None: replaces the engine's initial weights of new rows, `records[indices]`."""


def fused_lookup(layout: RecordLayout, arrays: PlanArrays, pooled: Sequence[Any]) -> SwapLookup:
    """Returns the operator that swaps in and looks up the rows of a plan with `origins`, in one launch.

    Args:
        layout: the record layout.
        arrays: the arrays of the plan.
        pooled: the arguments of `lookup_pooled` after `offsets`; the last one is None for a sequence.
    """
    rows = layout.dim, layout.weight_dtype, arrays.slots, arrays.origins
    if pooled[-1] is None:
        return ops.swap_lookup_sequence.default, rows
    return ops.swap_lookup_pooled.default, (*rows, arrays.offsets, *pooled)


@dataclass(eq=False, slots=True)
class _WriteBack:
    """The pending write-back of a plan's victims: the downloads of their records and accumulated gradients."""

    records: Download
    sums: Download | None


_SWAP_IN_SLOTS = PlanArrays._fields.index("swap_in_slots")


class Swap:
    """Plans the batches of one group and applies the plans to its cache.

    Plans are applied in the order in which they were made. To apply a plan, it is first staged, which can fail; then
    the engine starts it, after which it can only be completed; then its rows are swapped in.

    `plan` and `drop` require the embedding's planning lock, and `read_ahead` runs in the thread that plans. All other
    calls require the launch lock.
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
        """Creates a swap without plans.

        Args:
            engine: the row directory and host store.
            cache: uint8 `[slots, bytes]`.
            weights: view `[slots, D]` of the cache.
            sums: float32 `[slots, 2 * D]`, accumulated gradients; None without an accumulation buffer.
            transfers: copies to and from the cache's device.
            fill_new: fills new rows of tables with an `init_fn`; None if there are no such tables.
        """
        self.engine = engine
        self.cache = cache
        self.record_bytes = cache.shape[1]
        self.weights = weights
        self.sums = sums
        self.transfers = transfers
        self._fill_new = fill_new
        self._staged: dict[int, weakref.ref[StagedPlan]] = {}  # by serial number; weak: the plans own them
        self._started: dict[int, StagedPlan] = {}  # started plans by serial number
        self._write_backs: dict[int, tuple[_engine.Plan, _WriteBack]] = {}  # pending write-backs by serial number
        # `plan`, `read_ahead` and `stage` may complete write-backs at the same time.
        self._write_back_lock = threading.Lock()

    def staging_bytes(self) -> int:
        """Returns the bytes of staged plans and of pending write-backs."""
        tensors: list[torch.Tensor] = []
        pending = {staged for ref in list(self._staged.values()) if (staged := ref()) is not None}
        for staged in pending.union(self._started.values()):
            uploads = staged.upload, staged.records, staged.late_rows, staged.sums
            tensors += [upload.memory for upload in uploads if upload is not None]
            tensors += [] if staged.victims is None else [staged.victims.staging]
        for _, copies in list(self._write_backs.values()):
            tensors += [download.tensor for download in (copies.records, copies.sums) if download is not None]
        return sum(tensor.nbytes for tensor in tensors)

    def slot_bytes(self) -> int:
        """Returns the bytes of one slot: its record, and its accumulated gradient if the group has such gradients."""
        matrices = [matrix for matrix in (self.cache, self.sums) if matrix is not None]
        return sum(matrix.shape[1] * matrix.element_size() for matrix in matrices)

    # ---- planning

    def plan(self, batch: Batch, keys: Int64Array, announced: _engine.Announcement | None = None) -> Plan:
        """Plans a training batch, without waiting for any copy.

        Args:
            batch: the batch.
            keys: int64, the key that each feature of the group reads.
            announced: the result of `Group.announce` for this batch, if it was announced.
        """
        if self._write_backs or self._staged:
            self._complete_downloads()
        arguments = (batch.values, batch.offsets, keys, batch.batch_size, batch.weighted, batch.joined)
        if self.transfers.pinned:
            staging = self.transfers.staging(1, self.engine.arena_bytes(*arguments))[0]
            host = self.engine.plan(*arguments, staging.numpy(), announced, *batch.signals)
            staged = self._upload_arrays(staging[: host.arena.nbytes], host)
            arrays, upload, misses = staged.arrays, staged.upload, host.rows_in
        else:
            host = self.engine.plan(*arguments, None, announced, *batch.signals)
            arrays, upload, misses = arrays_on_host(host), None, host.rows_in
            if misses:
                staged = StagedPlan(arrays, Upload((), arrays.slots))
        if not misses:
            return Plan(host, arrays, upload, None)
        self._staged[host.serial] = weakref.ref(staged)
        return Plan(host, arrays, upload, staged)

    def _complete_downloads(self) -> None:
        """Completes the write-backs whose downloads are done, and removes the entries of dropped plans."""
        for serial, (_, copies) in list(self._write_backs.items()):
            if not self.transfers.pinned or self._is_downloaded(copies):
                self.complete_write_back(serial)
        for serial, ref in list(self._staged.items()):
            if ref() is None:
                self._staged.pop(serial, None)

    def _upload_arrays(self, arena: torch.Tensor, host: _engine.Plan) -> StagedPlan:
        upload = self.transfers.upload(arena)
        return StagedPlan(arrays_on_device(upload.tensors[0], host), upload)

    def drop(self, plan: Plan) -> None:
        """Releases a plan. A plan that was not started is undone after all later plans are undone: its victims stay."""
        staged = plan.staged
        with staged.lock if staged else contextlib.nullcontext():  # another thread may be in `read_ahead` of this plan
            plan.release()

    def read_ahead(self, plan: Plan) -> None:
        """Starts to stage the misses of a plan before its forward, in the thread that plans, without the launch lock.

        `stage` copies the late misses later: rows that an earlier plan evicts, and whose write-back is still pending.
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
        """Applies all plans before `plan` and stages the misses of `plan`. After the call, swapping cannot fail."""
        host = plan.host.next  # pending write-backs keep this reference, which does not pin rows
        if host is None and not plan.host.applied:
            *before, host = self.engine.unapplied(plan.host)
            for earlier in before:
                self._stage_and_apply(earlier)
        if plan.staged is not None and host is not None:
            plan.staged.host = host
            self._stage_misses(host, plan.staged)

    def apply(self, plan: Plan, fused: SwapLookup | None = None) -> Sequence[Any]:
        """Swaps in the rows of a started plan. Its arrays may be used after `plan.upload`.

        Returns:
            The results of `fused`. Empty: `fused` was not called, and the rows must still be looked up.
        """
        staged = plan.staged
        results: Sequence[Any] = ()
        if not plan.host.applied:  # another thread may have applied this plan in order to apply a later one
            results = self._swap(plan.host if staged is None or staged.host is None else staged.host, staged, fused)
        plan.staged = None
        return results

    def apply_all(self) -> None:
        """Applies all plans, so that the cache matches the engine's row directory."""
        for host in self.engine.unapplied():
            self._stage_and_apply(host)

    def _stage_and_apply(self, host: _engine.Plan) -> None:
        """Stages a plan, starts it and runs its swap. Safe to repeat after an interrupt: rows are not swapped twice."""
        staged = self._staged_of(host)
        self._stage_misses(host, staged)
        _engine.start_plans([host])
        self._swap(host, staged)

    def _staged_of(self, host: _engine.Plan) -> StagedPlan:
        staged = self._started.get(host.serial)
        if staged is None:
            known = self._staged.get(host.serial)
            staged = None if known is None else known()
        if staged is None:  # the plan was dropped, but later plans were not
            staged = self._upload_arrays(torch.from_numpy(host.arena), host)
        return staged

    def _swap(self, host: _engine.Plan, staged: StagedPlan | None, fused: SwapLookup | None = None) -> Sequence[Any]:
        results: Sequence[Any] = ()
        if staged is not None:
            self._started[host.serial] = staged  # records whether the swap has run, for a repeat after an interrupt
            results = self._launch_swap(staged, fused)
            if staged.victims is not None:
                self._write_backs[host.serial] = host, self._download_victims(staged.victims)
        self.engine.applied(host)
        for serial in list(self._staged):  # iterates over a copy, since the planning thread adds entries
            if serial <= host.serial:
                self._staged.pop(serial, None)
        self._started.clear()  # only one plan is started at a time
        return results

    def _stage_misses(self, host: _engine.Plan, staged: StagedPlan) -> None:
        """Allocates buffers for the victims and starts to upload the misses. Does not change the cache."""
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
                for serial in host.sources:  # until its write-back, a victim is not in the host store
                    self.complete_write_back(serial)
                staging = self.transfers.staging(host.rows_in, self.record_bytes)
                new = self.engine.read_in(host, staging.numpy(), self._fill_new is not None)
                if self._fill_new is not None:
                    self._fill_new(*new, staging)
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
        """Allocates buffers for the victims' records, and starts to download their accumulated gradients."""
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

    def _launch_swap(self, staged: StagedPlan, fused: SwapLookup | None) -> Sequence[Any]:
        """Launches the swap on the current stream, after the updates that were launched there.

        Returns:
            The results of `fused`; empty if it was not called. `fused` reads all misses from one buffer, so it is not
            called for plans with late misses, which are in a second buffer.
        """
        arrays = staged.arrays
        if self.sums is not None and arrays.window_out_slots is not None:
            self.sums.index_fill_(0, arrays.window_out_slots, 0.0)
        if self.sums is not None and arrays.window_in_slots is not None and staged.sums is not None:
            self.sums.index_copy_(0, arrays.window_in_slots, *staged.sums.wait())
        if arrays.swap_in_slots is None or staged.records is None:
            return ()
        upload = staged.records
        (records,) = upload.tensors if upload.event is None else upload.wait()
        victims = staged.victims
        called: list[Any] = [] if victims is None else victims.swapped
        rows = None if victims is None else victims.rows
        if rows is not None and self.transfers.pinned and rows.device.type != "cpu":
            # `stage` may have allocated the buffer on another stream: the allocator must not reuse it before this swap.
            rows.record_stream(torch.get_device_module(rows.device).current_stream(rows.device))
        swap = self.cache, arrays.swap_in_slots, arrays.swap_out_places, records, rows
        if fused is not None and staged.late_rows is None and not called:
            operator, lookup = fused
            call_once(operator, (*swap, *lookup), called)
            return called
        if victims is None:
            ops.scatter_rows(self.cache, arrays.swap_in_slots, records)
        else:
            call_once(ops.swap_rows.default, swap, called)
        if staged.late_rows is not None:
            ops.scatter_rows(self.cache, *staged.late_rows.wait())
        if self.transfers.direct:
            self.transfers.hold_until_used(staged.records.memory)
        return ()

    def _download_victims(self, victims: VictimBuffers) -> _WriteBack:
        """Starts the download of the victims, which the swap has copied to `victims.rows`."""
        if self.transfers.direct:
            return _WriteBack(self.transfers.hold_until_used(victims.rows), victims.sums)
        if not self.transfers.pinned:
            return _WriteBack(Download(victims.rows, None), victims.sums)
        return _WriteBack(self.transfers.download(victims.rows, victims.staging), victims.sums)

    # ---- write-backs

    def _is_downloaded(self, copies: _WriteBack) -> bool:
        """Returns whether the victims have reached host memory, so that `complete_write_back` does not wait."""
        if not self.transfers.pinned:
            return True
        return copies.records.done() and (copies.sums is None or copies.sums.done())

    def complete_write_back(self, serial: int) -> None:
        """Stores the victims of the plan `serial` in the host store; waits only for the victims' download."""
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
        """Applies all plans and completes all write-backs. Then whole tables can be read and written."""
        self.apply_all()
        for serial in list(self._write_backs):
            self.complete_write_back(serial)
