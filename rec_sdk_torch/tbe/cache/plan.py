"""The plan of a batch: the one object of a batch that goes from planning to the update."""

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
    """A plan's arrays on the device; None where the batch does not need one.

    N lookups, B samples, F features, U distinct rows, T tables, H rows of more than 128 lookups. Slots are those of the
    group's cache. Segment order has the lookups of each distinct row side by side, in the order of the batch.

    Attributes:
        offsets: int64 `[F * B + 1]`, the group's bags, feature-major; pooled groups.
        slots: int32 `[N]`, the slot of each lookup.
        unique_slots: int32 `[U]`, tables in order; the rows of a table are in no order.
        table_offsets: int32 `[T + 1]`, the distinct rows of each table.
        segment_offsets: int32 `[U + 1]`, the lookups of each distinct row in segment order.
        grad_row: int32 `[N]` in segment order, the row of the gradient: the lookup among those of the gradient for a
            sequence, the sample when pooled.
        grad_source: int32 `[N]` in segment order, the feature; sequences whose features have a gradient each.
        grad_column: int32 `[N]` in segment order, the first column of the gradient; pooled groups.
        scale: float32 `[N]` in segment order, 1 / length of the bag for MEAN, else 1; groups with a MEAN feature.
        positions: int32 `[N]`, segment order -> lookup; weighted bags.
        swap_in_slots: int32, slots of the rows that come; rows that leave are in some of them.
        swap_out_places: int32, for each of `swap_in_slots` the place of its row among those that leave, which are
            numbered in this order, or -1 if the slot is free; batches that evict rows.
        window_out_slots: int64, those of rows that leave with sums of an open window.
        window_in_slots: int64, those of `swap_in_slots` with sums that come back.
        unique_ids: int64 `[U]`, the id of each distinct row; groups that round stochastically, or whose gradients wait
            for `step()`.
        hot_segments: int32 `[H, 4]`, what devices sum in chunks, as `rec_sdk::update_rows` takes it.
        origins: int32 `[N]`, where the row of each lookup is before the swap: its slot, or the slots of the cache + i
            if it is the i-th of the rows that come; batches that bring rows in, on devices that swap rows and look them
            up in one launch.
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
"""Data types of the arrays; None for int32, which the arena has all of them as."""


_from_capsule = torch._C._from_dlpack  # of torch.from_dlpack, which asks first whether it was given a tensor


def arrays_on_host(host: _engine.Plan) -> PlanArrays:
    """The plan's own arrays, where host and device are one."""
    # not PlanArrays(...), which is a function of Python
    return tuple.__new__(PlanArrays, [None if part is None else _from_capsule(part) for part in host.capsules])


def arrays_on_device(arena: torch.Tensor, host: _engine.Plan) -> PlanArrays:
    """Views of `arena`, uint8, at the places that the plan names."""
    words = arena.view(torch.int32)
    views = [None if field is None else words.narrow(0, *field) for field in host.fields]
    for place, dtype in enumerate(_DTYPES):
        view = views[place]
        if view is not None and dtype is not None:
            views[place] = view.view(torch.int64 if dtype is np.int64 else torch.float32)
    hot = views[_HOT_SEGMENTS]
    if hot is not None:
        views[_HOT_SEGMENTS] = hot.view(-1, HOT_SEGMENT_FIELDS)
    return PlanArrays(*views)  # type: ignore[arg-type]  # the engine gives what is never None


@dataclass(eq=False)
class StagedPlan:
    """Copies and memory that are ready for a plan which is not applied. They go with the plan, and do not hold it.

    Attributes:
        host: the engine's plan as it does not pin rows, once it is staged.
        lock: held while `records` are made ready, which may be ahead of time in another thread.
        late: places among the rows that come of those that were not read ahead; `late_rows` are their slots, records.
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
    """Memory for rows that leave, made before they do.

    Attributes:
        rows: uint8 `[O, bytes]`, where they are put.
        staging: the same in host memory, which may be `rows` itself.
        sums: of an accumulation window.
        swapped: what the swap gave, once they have been put there, and others into their slots.
    """

    rows: torch.Tensor
    staging: torch.Tensor
    sums: Download | None
    swapped: list[Any] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Plan:
    """The rows that a batch needs of one group. They stay in the cache until the plan is released or dropped.

    Attributes:
        host: the engine's plan; one that was not applied undoes itself when it is dropped.
        arrays: on the device.
        arrival: of the arrays; None where they are there.
        staged: until the plan is applied or released; None where no rows come.
    """

    host: _engine.Plan
    arrays: PlanArrays
    upload: Upload | None
    staged: StagedPlan | None

    def release(self) -> None:
        """Ends the pins of its rows."""
        self.host.release()
        self.staged = None
