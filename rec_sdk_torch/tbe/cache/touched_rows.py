"""Rows of a batch that have a gradient, and what is aggregated for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from ...operators.segments import hot_segments
from .accumulation import Segments
from .plan import PlanArrays

TouchedRows = tuple[list[torch.Tensor], torch.Tensor, torch.Tensor | None, torch.Tensor, Segments]
"""Gradients, and unique_slots, unique_ids, table_offsets and segments of the rows that have some."""


class _Lookups(Protocol):
    @property
    def segment_lookups(self) -> int: ...


class UpdatePlan(Protocol):
    """The part of a plan that an update needs: its arrays, and how many lookups have a row."""

    @property
    def arrays(self) -> PlanArrays: ...

    @property
    def host(self) -> _Lookups: ...


def touched_rows(
    plan: UpdatePlan, grads: Sequence[torch.Tensor | None], weights: torch.Tensor | None
) -> TouchedRows | None:
    """Returns the rows that have a gradient; None for no row.

    Args:
        plan: of the batch.
        grads: one for each feature of a sequence; else the gradient of the one output, or where some tables do not
            train, that gradient for each table that trains and None for the others.
        weights: the per-sample weights.
    """
    present = [grad for grad in grads if grad is not None] if len(grads) != 1 or grads[0] is None else [grads[0]]
    if not present or not plan.arrays.unique_slots.shape[0]:
        return None
    arrays = plan.arrays
    scale = arrays.scale if weights is None else _scale(arrays, weights)
    if len(present) < len(grads):
        return _with_gradient(arrays, grads, scale)
    of_lookups: Segments = (arrays.grad_row, arrays.grad_source, arrays.grad_column, scale)
    count = plan.host.segment_lookups
    if count < arrays.grad_row.shape[0]:  # without the lookups of ids that have no row
        of_lookups = tuple(None if array is None else array[:count] for array in of_lookups)
    segments = (arrays.segment_offsets, *of_lookups, arrays.hot_segments)
    return present, arrays.unique_slots, arrays.unique_ids, arrays.table_offsets, segments


def _with_gradient(
    arrays: PlanArrays, grads: Sequence[torch.Tensor | None], scale: torch.Tensor | None
) -> TouchedRows | None:
    """Returns the same where some of `grads` are None: without their lookups, and without rows that have no others."""
    device = arrays.slots.device
    there = np.array([grad is not None for grad in grads])
    borders, tables = arrays.segment_offsets.cpu().numpy(), arrays.table_offsets.cpu().numpy()
    present, source = [grad for grad in grads if grad is not None], None
    if arrays.grad_source is None:
        of_rows = np.repeat(np.arange(len(grads)), np.diff(tables))
        kept = there[np.repeat(of_rows, np.diff(borders))]
        present = present[:1]
    else:
        of_lookups = arrays.grad_source.cpu().numpy()[: borders[-1]]
        kept = there[of_lookups]
        source = (np.cumsum(there) - 1)[of_lookups[kept]]
    before = np.concatenate([[0], np.cumsum(kept)])[borders]
    rows = np.flatnonzero(np.diff(before))
    if not len(rows):
        return None

    def put(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int32)).to(device)

    def chosen(array: torch.Tensor | None, places: torch.Tensor) -> Any:
        return None if array is None else array.index_select(0, places)

    lookups, own_borders = torch.from_numpy(np.flatnonzero(kept)).to(device), np.append(before[rows], before[-1])
    segments = (
        put(own_borders),
        chosen(arrays.grad_row, lookups),
        None if source is None else put(source),
        chosen(arrays.grad_column, lookups),
        chosen(scale, lookups),
        put(hot_segments(own_borders)),
    )
    places = torch.from_numpy(rows).to(device)
    slots, ids = chosen(arrays.unique_slots, places), chosen(arrays.unique_ids, places)
    return present, slots, ids, put(np.searchsorted(rows, tables)), segments


def _scale(arrays: PlanArrays, weights: torch.Tensor) -> torch.Tensor:
    """Factors of the lookups' gradients: the sample weight, over the bag's length for MEAN."""
    assert arrays.positions is not None, "the plan is of a batch without weights"
    weight = weights.detach().index_select(0, arrays.positions)
    return weight if arrays.scale is None else weight * arrays.scale
