"""Rows of a batch that have a gradient, and what is aggregated for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from ...segments import hot_segments
from .accumulation import Segments
from .plan import PlanArrays

GradedRows = tuple[list[torch.Tensor], torch.Tensor, torch.Tensor | None, torch.Tensor, Segments]
"""Gradients, and unique_slots, unique_ids, table_offsets and segments of the rows that have some."""


class _Lookups(Protocol):
    @property
    def segment_lookups(self) -> int: ...


class GradedPlan(Protocol):
    """The part of a plan that an update needs: its arrays, and how many lookups have a row."""

    @property
    def arrays(self) -> PlanArrays: ...

    @property
    def host(self) -> _Lookups: ...


def graded_rows(
    plan: GradedPlan, grads: Sequence[torch.Tensor | None], weights: torch.Tensor | None
) -> GradedRows | None:
    """The rows that have a gradient; None for no row."""
    present = [grad for grad in grads if grad is not None] if len(grads) != 1 or grads[0] is None else [grads[0]]
    if not present or not plan.arrays.unique_slots.shape[0]:
        return None
    arrays = plan.arrays
    if len(present) < len(grads):
        return _with_gradient(arrays, grads)
    scale = arrays.scale if weights is None else _scale(arrays, weights)
    of_lookups: Segments = (arrays.grad_row, arrays.grad_source, arrays.grad_column, scale)
    count = plan.host.segment_lookups
    if count < arrays.grad_row.shape[0]:  # without the lookups of ids that have no row
        of_lookups = tuple(None if array is None else array[:count] for array in of_lookups)
    segments = (arrays.segment_offsets, *of_lookups, arrays.hot_segments)
    return present, arrays.unique_slots, arrays.unique_ids, arrays.table_offsets, segments


def _with_gradient(arrays: PlanArrays, grads: Sequence[torch.Tensor | None]) -> GradedRows | None:
    """The same where features of a sequence are not part of the loss: without their lookups, and without the rows
    that have no others.
    """
    assert arrays.grad_source is not None, "one feature has one gradient or none"
    device = arrays.slots.device
    numbers = np.cumsum([grad is not None for grad in grads]) - 1
    source, borders, tables = (
        array.cpu().numpy() for array in (arrays.grad_source, arrays.segment_offsets, arrays.table_offsets)
    )
    source = source[: borders[-1]]
    kept = np.array([grad is not None for grad in grads])[source]
    before = np.concatenate([[0], np.cumsum(kept)])[borders]
    rows = np.flatnonzero(np.diff(before))
    if not len(rows):
        return None

    def put(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int32)).to(device)

    lookups = torch.from_numpy(np.flatnonzero(kept)).to(device)
    own_borders = np.append(before[rows], before[-1])
    segments = (
        put(own_borders),
        arrays.grad_row.index_select(0, lookups),
        put(numbers[source[kept]]),
        None,
        None,
        put(hot_segments(own_borders)),
    )
    there = torch.from_numpy(rows).to(device)
    slots = arrays.unique_slots.index_select(0, there)
    ids = None if arrays.unique_ids is None else arrays.unique_ids.index_select(0, there)
    present = [grad for grad in grads if grad is not None]
    return present, slots, ids, put(np.searchsorted(rows, tables)), segments


def _scale(arrays: PlanArrays, weights: torch.Tensor) -> torch.Tensor:
    """Factors of the lookups' gradients: the sample weight, over the bag's length for MEAN."""
    assert arrays.positions is not None, "the plan is of a batch without weights"
    weight = weights.detach().index_select(0, arrays.positions)
    return weight if arrays.scale is None else weight * arrays.scale
