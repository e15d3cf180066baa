"""Pending gradients of one group: backward passes accumulate them until `step()` (`update="step"`)."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ...operators.calls import accumulate_rows
from .plan import Plan, PlanArrays
from .touched_rows import touched_rows


@dataclass(eq=False)
class GroupGradients:
    """Rows of one group with their aggregated gradients, with the interface of a plan that has one lookup per row.

    The rows must stay in their slots until the update.

    Attributes:
        arrays: plan arrays for the n rows.
        sums: float32 `[n, 2 * D]`, sum and rounding compensation of each row.
        values: float32 `[n, D]`, the gradients that the user may change in place; None until they are requested.
    """

    arrays: PlanArrays
    sums: torch.Tensor
    values: torch.Tensor | None = None

    @property
    def host(self) -> GroupGradients:
        """This object, which also stands for the engine's plan in `UpdatePlan`."""
        return self

    @property
    def segment_lookups(self) -> int:
        """The number of lookups with a row: n."""
        return len(self.sums)

    @property
    def gradient(self) -> torch.Tensor:
        """The gradient of each row: the first D columns of a float32 tensor `[n, D]` or `[n, 2 * D]`."""
        return self.sums if self.values is None else self.values

    def with_editable_values(self) -> GroupGradients:
        """Returns the rows sorted by table and id, with `values` that may be changed in place.

        The order does not depend on the cache or on threads, and so neither do the bits of a norm of the values.
        """
        if self.values is not None:
            return self
        assert self.arrays.unique_ids is not None
        ids, tables = self.arrays.unique_ids.cpu().numpy(), self._tables_of_rows()
        rows = self._select(np.lexsort((ids, tables)), tables)
        return replace(rows, values=rows.sums[:, : rows.sums.shape[1] // 2].contiguous())

    def count(self, table: int) -> int:
        """Returns the number of rows of a table."""
        begin, end = self.arrays.table_offsets[table : table + 2].tolist()
        return int(end - begin)

    def checksum_of_change(self, table: int) -> int:
        """Returns a checksum of a table's gradient if the user has changed it; else 0."""
        if self.values is None:
            return 0
        begin, end = self.arrays.table_offsets[table : table + 2].tolist()
        now = self.values[begin:end]
        before = self.sums[begin:end, : now.shape[1]].contiguous()
        if torch.equal(before.view(torch.int32), now.view(torch.int32)):  # compared as bits: a NaN equals itself
            return 0
        return zlib.crc32(now.cpu().numpy().tobytes(), 1)

    def table_gradients(self) -> list[torch.Tensor]:
        """Returns the gradient of each table, float32 `[n, D]`: views of `values`, which must not be None."""
        assert self.values is not None
        borders = self.arrays.table_offsets.tolist()
        return [self.values[begin:end] for begin, end in itertools.pairwise(borders)]

    def _edited_sums(self) -> torch.Tensor:
        """Returns a copy of the sums with the user's changes; for a changed value, the rounding compensation is 0."""
        sums = self.sums.clone()
        if self.values is not None:
            dim = self.values.shape[1]
            sums[:, dim:].masked_fill_(sums[:, :dim] != self.values, 0.0)
            sums[:, :dim] = self.values
        return sums

    def exclude_tables(self, tables: Collection[int]) -> GroupGradients:
        """Returns these gradients without the rows of `tables`."""
        row_tables = self._tables_of_rows()
        return self._select(np.flatnonzero(~np.isin(row_tables, list(tables))), row_tables)

    def _tables_of_rows(self) -> np.ndarray:
        counts = self.arrays.table_offsets.cpu().numpy()
        return np.repeat(np.arange(len(counts) - 1), np.diff(counts))

    def _select(self, rows: np.ndarray, tables: np.ndarray) -> GroupGradients:
        """Returns the rows at the indices `rows`, sorted by table; `tables`: the table of each row of this object."""
        indices = torch.from_numpy(rows).to(self.sums.device)
        ids = self.arrays.unique_ids
        arrays = _one_lookup_per_row(
            self.arrays.unique_slots.index_select(0, indices),
            None if ids is None else ids.index_select(0, indices),
            _table_offsets(tables[rows], len(self.arrays.table_offsets) - 1).to(self.sums.device),
        )
        return GroupGradients(arrays, self._edited_sums().index_select(0, indices))


def _table_offsets(row_tables: np.ndarray, tables: int) -> torch.Tensor:
    """Returns the offsets of the tables, int32 `[T + 1]`; `row_tables`: the table of each row, ascending."""
    return torch.from_numpy(np.searchsorted(row_tables, np.arange(tables + 1)).astype(np.int32))


def _one_lookup_per_row(slots: torch.Tensor, ids: torch.Tensor | None, tables: torch.Tensor) -> PlanArrays:
    """Returns plan arrays for an update of rows that have one gradient each, in the same order."""
    borders = torch.arange(len(slots) + 1, dtype=torch.int32, device=slots.device)
    arrays: dict[str, Any] = dict.fromkeys(PlanArrays._fields)
    arrays |= {"slots": slots, "unique_slots": slots, "unique_ids": ids, "table_offsets": tables}
    return PlanArrays(**arrays | {"segment_offsets": borders, "grad_row": borders[:-1]})


def add_gradients(
    before: GroupGradients | None,
    plan: Plan,
    grads: Sequence[torch.Tensor | None],
    weights: torch.Tensor | None,
    dim: int,
) -> GroupGradients | None:
    """Returns the sum of pending gradients and the gradients of a backward pass; None if there are no rows.

    Args:
        before: pending gradients of the same group, which are not changed.
        plan: the plan of the batch.
        grads: the gradient of the pooled output, or one of each feature; None for a feature outside the loss.
        weights: the per-sample weights.
        dim: the embedding dimension D.
    """
    rows = touched_rows(plan, grads, weights)
    if rows is None:
        return before
    present, slots, ids, tables, segments = rows
    if before is None:
        arrays = _one_lookup_per_row(slots, ids, tables)
        sums, targets = present[0].new_zeros((len(slots), 2 * dim)), arrays.grad_row
    else:
        arrays, sources, targets = _merge_rows(before.arrays, _one_lookup_per_row(slots, ids, tables))
        sums = present[0].new_zeros((len(arrays.unique_slots), 2 * dim))
        sums.index_copy_(0, sources, before._edited_sums())
    accumulate_rows(sums, present, targets, *segments)
    return GroupGradients(arrays, sums)


def _merge_rows(one: PlanArrays, other: PlanArrays) -> tuple[PlanArrays, torch.Tensor, torch.Tensor]:
    """Returns the union of the rows, then the index in the union of each row of `one`, int64, and of `other`, int32."""
    device = one.unique_slots.device
    keys = [_slot_keys(arrays) for arrays in (one, other)]
    merged, first = np.unique(np.concatenate(keys), return_index=True)
    indices = [torch.from_numpy(np.searchsorted(merged, each)).to(device) for each in keys]
    chosen, ids = torch.from_numpy(first).to(device), None
    if one.unique_ids is not None and other.unique_ids is not None:
        ids = torch.cat([one.unique_ids, other.unique_ids]).index_select(0, chosen)
    slots = torch.cat([one.unique_slots, other.unique_slots]).index_select(0, chosen)
    tables = _table_offsets(merged >> 32, len(one.table_offsets) - 1).to(device)
    return _one_lookup_per_row(slots, ids, tables), indices[0], indices[1].to(torch.int32)


def _slot_keys(arrays: PlanArrays) -> np.ndarray:
    """Returns a sort key of each row, int64: the table in the upper 32 bits, the slot in the lower."""
    slots, borders = arrays.unique_slots.cpu().numpy().astype(np.int64), arrays.table_offsets.cpu().numpy()
    return np.repeat(np.arange(len(borders) - 1, dtype=np.int64) << 32, np.diff(borders)) | slots
