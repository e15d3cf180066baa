"""Padding ids: their lookups are removed from a batch before planning, and their outputs are zeros."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..config.table import TableConfig
from .batch import Batch, Int64Array


class PaddingIds:
    """The padding ids (`padding_idx`) of the tables of one embedding."""

    def __init__(self, tables: Sequence[TableConfig]) -> None:
        feature_padding = [table.padding_idx for table in tables for _ in range(table.num_features)]
        self._ids = np.array([0 if padding is None else padding for padding in feature_padding], np.int64)
        self._has = np.array([padding is not None for padding in feature_padding])

    @classmethod
    def from_tables(cls, tables: Sequence[TableConfig]) -> PaddingIds | None:
        """Returns the padding ids of the tables; None if no table has one."""
        return cls(tables) if any(table.padding_idx is not None for table in tables) else None

    def remove_from(self, batch: Batch) -> Batch:
        """Returns the batch without lookups of padding ids, feature by feature; the batch itself if there are none."""
        if not batch.is_well_formed:
            return batch  # the offsets are invalid; the planner reports the error
        features = np.arange(len(self._ids))
        lengths, order = batch.lookup_counts(features), batch.lookup_order(features)
        values = batch.values if order is None else batch.values[order]
        return batch.select((values != self._ids.repeat(lengths)) | ~self._has.repeat(lengths))


def restore_padding_rows(rows: Sequence[torch.Tensor], batch: Batch, *, joined: bool) -> list[torch.Tensor]:
    """Inserts zeros for padding ids in the looked-up rows of a batch.

    Args:
        rows: float32 `[n, D]`, the rows of the lookups in `batch`.
        batch: a result of `PaddingIds.remove_from`.
        joined: whether `rows` has one tensor for all features; else it has one for each feature.

    Returns:
        float32 `[m, D]` each, a row for each lookup of the original batch.
    """
    if batch.parent is None or batch.kept_lookups is None:
        return list(rows)
    features = np.arange(len(batch.feature_keys))
    ends, counts = batch.lookup_counts(features).cumsum(), batch.parent.lookup_counts(features)
    if joined:
        return [_scatter(rows[0], batch.kept_lookups, int(counts.sum()))]
    parts = np.split(batch.kept_lookups, ends[:-1])
    begins = counts.cumsum() - counts
    pairs = zip(rows, parts, begins, counts.tolist(), strict=True)
    return [_scatter(part, kept - begin, count) for part, kept, begin, count in pairs]


def _scatter(rows: torch.Tensor, indices: Int64Array, count: int) -> torch.Tensor:
    if len(indices) == count:
        return rows
    return rows.new_zeros((count, rows.shape[1])).index_copy(0, torch.from_numpy(indices).to(rows.device), rows)
