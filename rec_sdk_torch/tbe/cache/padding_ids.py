"""Ids that mean nothing: the lookups of a batch that have one are taken out before it is planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from ..config.life import SeenArrays
from ..config.table import TableConfig
from .batch import Batch, Int64Array


class PaddingIds:
    """The `padding_idx` of the tables of one embedding."""

    def __init__(self, tables: Sequence[TableConfig]) -> None:
        of_features = [table.padding_idx for table in tables for _ in range(table.num_features)]
        self._features = np.arange(len(of_features))
        self._ids = np.array([0 if padding is None else padding for padding in of_features], np.int64)
        self._has = np.array([padding is not None for padding in of_features])

    @classmethod
    def of(cls, tables: Sequence[TableConfig]) -> PaddingIds | None:
        """None where no table has such an id."""
        return cls(tables) if any(table.padding_idx is not None for table in tables) else None

    def without(self, batch: Batch) -> Batch:
        """The batch without its lookups of such ids, feature by feature; the batch itself where it has none."""
        lengths = batch.lookups(self._features)
        if lengths.sum() == 0 or (np.diff(batch.offsets) < 0).any() or batch.offsets[-1] != len(batch.values):
            return batch  # there is none, or the planner says what is wrong
        order = batch.order(self._features)
        values = batch.values if order is None else batch.values[order]
        means = (values != self._ids.repeat(lengths)) | ~self._has.repeat(lengths)
        if means.all():
            return batch
        kept = np.flatnonzero(means)
        before = np.concatenate([[0], np.cumsum(means)])
        places = kept if order is None else order[kept]
        return replace(
            batch,
            values=batch.values[places],
            offsets=before[batch.bags(self._features)],
            feature_keys=self._features,
            weights=None if batch.weights is None else _chosen(batch.weights, places),
            seen=self._seen(batch, places),
            given=batch,
            kept=kept,
        )

    def _seen(self, batch: Batch, places: Int64Array) -> SeenArrays:
        shows, clicks, timestamps, latest = batch.seen
        return SeenArrays(
            None if shows is None else shows[places],
            None if clicks is None else clicks[places],
            None if timestamps is None else timestamps[places],
            None if latest is None else latest[batch.feature_keys],
        )


def _chosen(weights: torch.Tensor, places: Int64Array) -> torch.Tensor:
    return weights.index_select(0, torch.from_numpy(places).to(weights.device))


def with_zeros(rows: Sequence[torch.Tensor], batch: Batch, *, joined: bool) -> list[torch.Tensor]:
    """Rows of the batch as it was given: zeros for the ids that mean nothing.

    Args:
        rows: float32 `[n, D]`, of the lookups that were left.
        batch: from `PaddingIds.without`.
        joined: `rows` is one tensor, of all features; else there is one for each of them.
    """
    if batch.given is None or batch.kept is None:
        return list(rows)
    features = np.arange(len(batch.feature_keys))
    ends, given = batch.lookups(features).cumsum(), batch.given.lookups(features)
    if joined:
        return [_spread(rows[0], batch.kept, int(given.sum()))]
    parts = np.split(batch.kept, ends[:-1])
    begins = given.cumsum() - given
    pairs = zip(rows, parts, begins, given.tolist(), strict=True)
    return [_spread(part, kept - begin, count) for part, kept, begin, count in pairs]


def _spread(rows: torch.Tensor, places: Int64Array, count: int) -> torch.Tensor:
    if len(places) == count:
        return rows
    return rows.new_zeros((count, rows.shape[1])).index_copy(0, torch.from_numpy(places).to(rows.device), rows)
