"""Frozen tables: training batches read their rows without updating them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from ..cache.batch import Batch
from ..cache.device_cache import Group
from ..config.table import Pooling, TableConfig


class FrozenTables:
    """The frozen tables of an embedding; splits training batches into trained and frozen lookups.

    Attributes:
        names: names of the frozen tables.
        all_frozen: whether all tables of the embedding are frozen.
    """

    def __init__(self, tables: Sequence[TableConfig], names: frozenset[str]) -> None:
        self.names = names
        self._pooled = tables[0].pooling is not Pooling.NONE
        self.all_frozen = all(table.name in names for table in tables)
        frozen = np.array([table.name in names for table in tables])
        self._features = frozen.repeat([table.num_features for table in tables])
        self._columns = frozen.repeat([table.num_features * table.embedding_dim for table in tables])

    @classmethod
    def from_tables(cls, tables: Sequence[TableConfig], names: frozenset[str]) -> FrozenTables | None:
        """Returns the frozen tables; None if `names` is empty."""
        return cls(tables, names) if names else None

    def trained_part(self, batch: Batch) -> Batch:
        """Returns the lookups of a batch in tables that are not frozen."""
        return self._part(batch, ~self._features)

    def frozen_part(self, batch: Batch) -> Batch:
        """Returns the lookups of a batch in frozen tables."""
        return self._part(batch, self._features)

    def _part(self, batch: Batch, features: np.ndarray) -> Batch:
        if not batch.is_well_formed:
            return batch  # the offsets are invalid; the planner reports the error
        part = batch.select(features.repeat(batch.lookup_counts(np.arange(len(features)))))
        return replace(part, joined=False)

    def merge_outputs(
        self, trained: tuple[torch.Tensor, ...], frozen: tuple[torch.Tensor, ...], groups: Sequence[Group]
    ) -> tuple[torch.Tensor, ...]:
        """Merges the outputs of a batch's trained and frozen part: one pooled output, or one for each feature."""
        if self._pooled:
            columns = torch.from_numpy(self._columns).to(trained[0].device)
            return (torch.where(columns, frozen[0], trained[0]),)
        features = [feature for group in groups for feature in group.features.tolist()]
        pairs = zip(features, trained, frozen, strict=True)
        return tuple(fixed if self._features[feature] else rows for feature, rows, fixed in pairs)
