"""Ids that mean nothing: the lookups of a batch that have one are taken out before it is planned."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..config.table import TableConfig
from .batch import Batch, Int64Array


class PaddingIds:
    """The `padding_idx` of the tables of one embedding."""

    def __init__(self, tables: Sequence[TableConfig]) -> None:
        of_features = [table.padding_idx for table in tables for _ in range(table.num_features)]
        self._ids = np.array([0 if padding is None else padding for padding in of_features], np.int64)
        self._has = np.array([padding is not None for padding in of_features])

    @classmethod
    def from_tables(cls, tables: Sequence[TableConfig]) -> PaddingIds | None:
        """None where no table has such an id."""
        return cls(tables) if any(table.padding_idx is not None for table in tables) else None

    def remove_from(self, batch: Batch) -> Batch:
        """The batch without its lookups of such ids, feature by feature; the batch itself where it has none."""
        if not batch.is_well_formed:
            return batch  # the planner says what is wrong
        features = np.arange(len(self._ids))
        lengths, order = batch.lookup_counts(features), batch.lookup_order(features)
        values = batch.values if order is None else batch.values[order]
        return batch.select((values != self._ids.repeat(lengths)) | ~self._has.repeat(lengths))


def restore_padding_rows(rows: Sequence[torch.Tensor], batch: Batch, *, joined: bool) -> list[torch.Tensor]:
    """Rows of the batch as it was given: zeros for the ids that mean nothing.

    Args:
        rows: float32 `[n, D]`, of the lookups that were left.
        batch: from `PaddingIds.remove_from`.
        joined: `rows` is one tensor, of all features; else there is one for each of them.
    """
    if batch.parent is None or batch.kept_lookups is None:
        return list(rows)
    features = np.arange(len(batch.feature_keys))
    ends, given = batch.lookup_counts(features).cumsum(), batch.parent.lookup_counts(features)
    if joined:
        return [_spread(rows[0], batch.kept_lookups, int(given.sum()))]
    parts = np.split(batch.kept_lookups, ends[:-1])
    begins = given.cumsum() - given
    pairs = zip(rows, parts, begins, given.tolist(), strict=True)
    return [_spread(part, kept - begin, count) for part, kept, begin, count in pairs]


def _spread(rows: torch.Tensor, places: Int64Array, count: int) -> torch.Tensor:
    if len(places) == count:
        return rows
    return rows.new_zeros((count, rows.shape[1])).index_copy(0, torch.from_numpy(places).to(rows.device), rows)
