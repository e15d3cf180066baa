"""Gradients of rows that wait for an update which comes later than the backward pass (`update="step"`)."""

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
    """Rows of one group, with their aggregated gradients: it is updated as a plan whose rows have one lookup each.

    The rows have to stay in their slots meanwhile.

    Attributes:
        arrays: of the plan that this stands for. n rows.
        sums: float32 `[n, 2 * D]`, sum and compensation of each row.
        values: float32 `[n, D]`, the sums as they were handed out, for changes in place; None before.
    """

    arrays: PlanArrays
    sums: torch.Tensor
    values: torch.Tensor | None = None

    @property
    def host(self) -> GroupGradients:
        """Stands for the plan of the engine."""
        return self

    @property
    def segment_lookups(self) -> int:
        """Lookups that have a row: n."""
        return len(self.sums)

    @property
    def gradient(self) -> torch.Tensor:
        """The gradient of each row, in the first D columns."""
        return self.sums if self.values is None else self.values

    def with_editable_values(self) -> GroupGradients:
        """The same rows in the order of their tables and ids, with values that may be changed.

        This order, and so a norm of the values, depends on no cache and no thread.
        """
        if self.values is not None:
            return self
        assert self.arrays.unique_ids is not None
        ids, of_table = self.arrays.unique_ids.cpu().numpy(), self._tables_of_rows()
        rows = self._chosen(np.lexsort((ids, of_table)), of_table)
        return replace(rows, values=rows.sums[:, : rows.sums.shape[1] // 2].contiguous())

    def count(self, table: int) -> int:
        """The number of rows of a table."""
        begin, end = self.arrays.table_offsets[table : table + 2].tolist()
        return int(end - begin)

    def checksum_of_change(self, table: int) -> int:
        """A checksum of a table's gradient, if it was changed since it was handed out; else 0."""
        if self.values is None:
            return 0
        begin, end = self.arrays.table_offsets[table : table + 2].tolist()
        now = self.values[begin:end]
        before = self.sums[begin:end, : now.shape[1]].contiguous()
        if torch.equal(before.view(torch.int32), now.view(torch.int32)):  # as bits: a NaN is equal to itself
            return 0
        return zlib.crc32(now.cpu().numpy().tobytes(), 1)

    def table_gradients(self) -> list[torch.Tensor]:
        """The gradient of each table's rows, float32 `[n, D]`; what is changed in it is changed for the update.

        They were handed out.
        """
        assert self.values is not None
        borders = self.arrays.table_offsets.tolist()
        return [self.values[begin:end] for begin, end in itertools.pairwise(borders)]

    def _folded(self) -> torch.Tensor:
        """New sums, with the values that were handed out: the compensation of a value that was changed is gone."""
        sums = self.sums.clone()
        if self.values is not None:
            dim = self.values.shape[1]
            sums[:, dim:].masked_fill_(sums[:, :dim] != self.values, 0.0)
            sums[:, :dim] = self.values
        return sums

    def exclude_tables(self, tables: Collection[int]) -> GroupGradients:
        """The same, but for the rows of some tables."""
        of_table = self._tables_of_rows()
        return self._chosen(np.flatnonzero(~np.isin(of_table, list(tables))), of_table)

    def _tables_of_rows(self) -> np.ndarray:
        counts = self.arrays.table_offsets.cpu().numpy()
        return np.repeat(np.arange(len(counts) - 1), np.diff(counts))

    def _chosen(self, rows: np.ndarray, of_table: np.ndarray) -> GroupGradients:
        """These of the rows, table by table; `of_table`: the table of each row."""
        places = torch.from_numpy(rows).to(self.sums.device)
        ids = self.arrays.unique_ids
        arrays = _arrays(
            self.arrays.unique_slots.index_select(0, places),
            None if ids is None else ids.index_select(0, places),
            _borders(of_table[rows], len(self.arrays.table_offsets) - 1).to(self.sums.device),
        )
        return GroupGradients(arrays, self._folded().index_select(0, places))


def _borders(of_table: np.ndarray, tables: int) -> torch.Tensor:
    """The borders of tables among rows, int32 `[T + 1]`, from the table of each row, ascending."""
    return torch.from_numpy(np.searchsorted(of_table, np.arange(tables + 1)).astype(np.int32))


def _arrays(slots: torch.Tensor, ids: torch.Tensor | None, tables: torch.Tensor) -> PlanArrays:
    """The arrays of a plan for an update of rows from one gradient each, in their order."""
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
    """The gradients of a backward pass, with those that waited `before`, which stay as they are; None for no row.

    Args:
        before: of the same group.
        plan: of the batch.
        grads: that of the pooled output, or one of each feature; None for a feature that is not part of the loss.
        weights: the per-sample weights.
        dim: D.
    """
    rows = touched_rows(plan, grads, weights)
    if rows is None:
        return before
    present, slots, ids, tables, segments = rows
    if before is None:
        arrays = _arrays(slots, ids, tables)
        sums, places = present[0].new_zeros((len(slots), 2 * dim)), arrays.grad_row
    else:
        arrays, of_before, places = _union(before.arrays, _arrays(slots, ids, tables))
        sums = present[0].new_zeros((len(arrays.unique_slots), 2 * dim))
        sums.index_copy_(0, of_before, before._folded())
    accumulate_rows(sums, present, places, *segments)
    return GroupGradients(arrays, sums)


def _union(one: PlanArrays, other: PlanArrays) -> tuple[PlanArrays, torch.Tensor, torch.Tensor]:
    """The rows of both; where those of one are among them, int64, and those of the other, int32."""
    device = one.unique_slots.device
    keys = [_keys(arrays) for arrays in (one, other)]
    merged, first = np.unique(np.concatenate(keys), return_index=True)
    places = [torch.from_numpy(np.searchsorted(merged, each)).to(device) for each in keys]
    chosen, ids = torch.from_numpy(first).to(device), None
    if one.unique_ids is not None and other.unique_ids is not None:
        ids = torch.cat([one.unique_ids, other.unique_ids]).index_select(0, chosen)
    slots = torch.cat([one.unique_slots, other.unique_slots]).index_select(0, chosen)
    tables = _borders(merged >> 32, len(one.table_offsets) - 1).to(device)
    return _arrays(slots, ids, tables), places[0], places[1].to(torch.int32)


def _keys(arrays: PlanArrays) -> np.ndarray:
    """A number of each row, int64: ordered by table, then slot."""
    slots, borders = arrays.unique_slots.cpu().numpy().astype(np.int64), arrays.table_offsets.cpu().numpy()
    return np.repeat(np.arange(len(borders) - 1, dtype=np.int64) << 32, np.diff(borders)) | slots
