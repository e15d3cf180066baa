"""The plan of a batch for one group, from planning to the update, with its staged copies."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from ... import _engine
from ...operators.segments import HOT_SEGMENT_FIELDS
from .transfers import Download, Upload


class PlanArrays(NamedTuple):
    """Arrays of a plan on the device; None for arrays that the batch does not need.

    The plan has N lookups, B samples, F features, U distinct rows, I misses, T tables, and H rows with more than 128
    lookups. Slots index the group's cache. In segment order, the lookups of each distinct row are adjacent, in the
    order of the batch.

    Attributes:
        offsets: int64 `[F * B + 1]`, offsets of the group's bags, feature-major; only for pooled groups.
        slots: int32 `[N]`, the slot of each lookup.
        unique_slots: int32 `[U]`, the slots of the distinct rows, table by table; unordered within a table.
        table_offsets: int32 `[T + 1]`, offsets of the tables in `unique_slots`.
        segment_offsets: int32 `[U + 1]`, offsets of the distinct rows' lookups in segment order.
        grad_row: int32 `[N]` in segment order, the row of the gradient tensor: the lookup for a sequence, the sample
            for pooled groups.
        grad_source: int32 `[N]` in segment order, the feature; only for sequences with one gradient tensor per feature.
        grad_column: int32 `[N]` in segment order, the first column in the gradient; only for pooled groups.
        scale: float32 `[N]` in segment order, 1 / bag length for MEAN, else 1; only for groups with a
            MEAN feature.
        positions: int32 `[N]`, the lookup at each index of the segment order; only for weighted bags.
        swap_in_slots: int32 `[I]`, the slots that misses are copied to; some of them hold victims.
        swap_out_places: int32 `[I]`, the index of the victim in each of these slots among all victims, or -1 for a free
            slot; only for batches with victims.
        window_out_slots: int64, the slots of victims that have accumulated gradients.
        window_in_slots: int64, the slots of misses that have accumulated gradients.
        unique_ids: int64 `[U]`, the id of each distinct row; only for groups that round stochastically or have
            pending gradients.
        hot_segments: int32 `[H, 4]`, the H rows' segments, which a device sums in parts; see `rec_sdk::update_rows`.
        origins: int32 `[N]`, the location of each lookup's row before the swap: its slot, or the number of slots + i
            for the i-th miss; only for batches with misses, on devices that swap and look up in one launch.
    """

    offsets: torch.Tensor | None
    slots: torch.Tensor
    unique_slots: torch.Tensor
    table_offsets: torch.Tensor
    segment_offsets: torch.Tensor
    grad_row: torch.Tensor
    grad_source: torch.Tensor | None
    grad_column: torch.Tensor | None
    scale: torch.Tensor | None
    positions: torch.Tensor | None
    swap_in_slots: torch.Tensor | None
    swap_out_places: torch.Tensor | None
    window_out_slots: torch.Tensor | None
    window_in_slots: torch.Tensor | None
    unique_ids: torch.Tensor | None
    hot_segments: torch.Tensor | None
    origins: torch.Tensor | None


_HOT_SEGMENTS = PlanArrays._fields.index("hot_segments")
_OTHER_TYPES: dict[str, type[np.generic]] = {
    "offsets": np.int64,
    "scale": np.float32,
    "window_out_slots": np.int64,
    "window_in_slots": np.int64,
    "unique_ids": np.int64,
}
_DTYPES = [_OTHER_TYPES.get(name) for name in PlanArrays._fields]
"""NumPy types of the arrays; None for int32, the type of the arena that holds all arrays."""


_from_capsule = torch._C._from_dlpack  # faster than torch.from_dlpack, which first checks the type of its argument


def arrays_on_host(host: _engine.Plan) -> PlanArrays:
    """Returns the arrays in the engine's plan as tensors, without a copy; for caches on the CPU."""
    # tuple.__new__ is a C function and is faster than PlanArrays(...)
    return tuple.__new__(PlanArrays, [None if part is None else _from_capsule(part) for part in host.capsules])


def arrays_on_device(arena: torch.Tensor, host: _engine.Plan) -> PlanArrays:
    """Returns the plan's arrays as views of `arena`, uint8, a copy of the plan's arena on the device."""
    words = arena.view(torch.int32)
    views = [None if field is None else words.narrow(0, *field) for field in host.fields]
    for index, dtype in enumerate(_DTYPES):
        view = views[index]
        if view is not None and dtype is not None:
            views[index] = view.view(torch.int64 if dtype is np.int64 else torch.float32)
    hot = views[_HOT_SEGMENTS]
    if hot is not None:
        views[_HOT_SEGMENTS] = hot.view(-1, HOT_SEGMENT_FIELDS)
    return PlanArrays(*views)  # type: ignore[arg-type]  # the engine always fills the required fields


@dataclass(eq=False)
class StagedPlan:
    """Copies and buffers of a plan that is not applied yet. They are freed with the plan and do not keep it alive.

    Attributes:
        arrays: the plan's arrays on the device.
        upload: the copy of the arrays to the device.
        host: the engine's plan in a form that does not pin rows; None until the plan is staged.
        lock: held while `records` are read, possibly ahead of the forward in another thread.
        victims: buffers for the victims; None before the plan is staged, or if there are no victims.
        records: the copy of the misses' records, uint8 `[I, bytes]`; None before it is started.
        late: indices of the late misses, which could not be read ahead because their write-back was pending.
        late_rows: the copy of the slots and records of the late misses.
        sums: the copy of the misses' accumulated gradients, float32 `[n, 2 * D]`.
    """

    arrays: PlanArrays
    upload: Upload
    host: _engine.Plan | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    victims: VictimBuffers | None = None
    records: Upload | None = None
    late: np.ndarray | None = None
    late_rows: Upload | None = None
    sums: Upload | None = None


@dataclass(eq=False, slots=True)
class VictimBuffers:
    """Buffers for the victims of a plan, allocated before the swap so that the swap cannot fail.

    Attributes:
        rows: uint8 `[O, bytes]`, receives the victims in the swap.
        staging: the host buffer that `rows` is downloaded to; may be `rows` itself.
        sums: the download of the victims' accumulated gradients.
        swapped: the result of the swap operator; empty before it has run.
    """

    rows: torch.Tensor
    staging: torch.Tensor
    sums: Download | None
    swapped: list[Any] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Plan:
    """The slots of a batch's rows in one group. The rows stay in the cache until the plan is released or dropped.

    Attributes:
        host: the engine's plan; a plan that was not applied undoes itself when it is dropped.
        arrays: the plan's arrays on the device.
        upload: the copy of the arrays; None if they need no copy.
        staged: staged copies until the plan is applied or released; None for a plan without misses.
    """

    host: _engine.Plan
    arrays: PlanArrays
    upload: Upload | None
    staged: StagedPlan | None

    def release(self) -> None:
        """Unpins the plan's rows, which later plans may then evict."""
        self.host.release()
        self.staged = None
