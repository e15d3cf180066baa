"""Touched rows: the rows of a batch that have a gradient, with the gradients of each row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from ...operators.segments import hot_segments
from .accumulation import Segments
from .plan import PlanArrays

TouchedRows = tuple[list[torch.Tensor], torch.Tensor, torch.Tensor | None, torch.Tensor, Segments]
"""(gradients, unique_slots, unique_ids, table_offsets, segments) of the rows that have a gradient."""


class _HasSegmentLookups(Protocol):
    @property
    def segment_lookups(self) -> int: ...


class UpdatePlan(Protocol):
    """The part of a plan that an update reads: its arrays, and the number of lookups that have a row."""

    @property
    def arrays(self) -> PlanArrays: ...

    @property
    def host(self) -> _HasSegmentLookups: ...


def touched_rows(
    plan: UpdatePlan, grads: Sequence[torch.Tensor | None], weights: torch.Tensor | None
) -> TouchedRows | None:
    """Returns the rows that have a gradient; None if there are none.

    Args:
        plan: the plan of the batch.
        grads: for a sequence, one gradient per feature. For a pooled group, a list with the gradient of its output; if
            some tables are not trained, this gradient for each trained table, and None for each other table.
        weights: the per-sample weights.
    """
    present = [grad for grad in grads if grad is not None] if len(grads) != 1 or grads[0] is None else [grads[0]]
    if not present or not plan.arrays.unique_slots.shape[0]:
        return None
    arrays = plan.arrays
    scale = arrays.scale if weights is None else _scale(arrays, weights)
    if len(present) < len(grads):
        return _trained_rows(arrays, grads, scale)
    lookup_arrays: Segments = (arrays.grad_row, arrays.grad_source, arrays.grad_column, scale)
    count = plan.host.segment_lookups
    if count < arrays.grad_row.shape[0]:  # lookups of ids without a row are at the end and have no gradient
        lookup_arrays = tuple(None if array is None else array[:count] for array in lookup_arrays)
    segments = (arrays.segment_offsets, *lookup_arrays, arrays.hot_segments)
    return present, arrays.unique_slots, arrays.unique_ids, arrays.table_offsets, segments


def _trained_rows(
    arrays: PlanArrays, grads: Sequence[torch.Tensor | None], scale: torch.Tensor | None
) -> TouchedRows | None:
    """Selects the lookups with a gradient, and their rows, for `grads` of which some are None."""
    device = arrays.slots.device
    has_grad = np.array([grad is not None for grad in grads])
    borders, tables = arrays.segment_offsets.cpu().numpy(), arrays.table_offsets.cpu().numpy()
    present, source = [grad for grad in grads if grad is not None], None
    if arrays.grad_source is None:
        row_tables = np.repeat(np.arange(len(grads)), np.diff(tables))
        kept = has_grad[np.repeat(row_tables, np.diff(borders))]
        present = present[:1]
    else:
        features = arrays.grad_source.cpu().numpy()[: borders[-1]]
        kept = has_grad[features]
        source = (np.cumsum(has_grad) - 1)[features[kept]]  # indices into `present`
    offsets = np.concatenate([[0], np.cumsum(kept)])[borders]
    rows = np.flatnonzero(np.diff(offsets))
    if not len(rows):
        return None

    def put(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int32)).to(device)

    def select(array: torch.Tensor | None, indices: torch.Tensor) -> Any:
        return None if array is None else array.index_select(0, indices)

    lookups, segment_offsets = torch.from_numpy(np.flatnonzero(kept)).to(device), np.append(offsets[rows], offsets[-1])
    segments = (
        put(segment_offsets),
        select(arrays.grad_row, lookups),
        None if source is None else put(source),
        select(arrays.grad_column, lookups),
        select(scale, lookups),
        put(hot_segments(segment_offsets)),
    )
    indices = torch.from_numpy(rows).to(device)
    slots, ids = select(arrays.unique_slots, indices), select(arrays.unique_ids, indices)
    return present, slots, ids, put(np.searchsorted(rows, tables)), segments


def _scale(arrays: PlanArrays, weights: torch.Tensor) -> torch.Tensor:
    """Returns the factor of each lookup's gradient: its per-sample weight, divided by the bag length for MEAN."""
    assert arrays.positions is not None, "the plan is of a batch without weights"
    weight = weights.detach().index_select(0, arrays.positions)
    return weight if arrays.scale is None else weight * arrays.scale
