"""A rank's batch as the ranks see it: each id of a table once, in the order of the ranks it is sent to."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..tbe.batch import Batch, Int64Array
from ..tbe.table import BoundsCheckMode, Pooling, TableConfig
from .placement import Placement


@dataclass(frozen=True)
class Tables:
    """Tables of a collection, and where they live.

    Attributes:
        configs: as they are without sharding.
        placements: of each.
        world_size: W.
        bounds_check: what an id outside an index table does.
    """

    configs: Sequence[TableConfig]
    placements: Sequence[Placement]
    world_size: int
    bounds_check: BoundsCheckMode

    def same_dim(self) -> list[list[int]]:
        """Tables, by index, whose rows travel in one tensor."""
        groups: dict[int, list[int]] = {}
        for index, config in enumerate(self.configs):
            groups.setdefault(config.embedding_dim, []).append(index)
        return list(groups.values())

    def features(self, table: int) -> range:
        """Those that look up a table."""
        begin = sum(config.num_features for config in self.configs[:table])
        return range(begin, begin + self.configs[table].num_features)


@dataclass(frozen=True)
class Lookups:
    """Lookups of the tables of one dim, feature by feature.

    Attributes:
        tables, features: by index.
        rows: received, U.
        slots: int32 `[n]`, the received row of each lookup.
        lengths: of each bag, int64 `[F * B]`.
        source: int64 `[n]`, where each lookup is in the batch's values.
    """

    tables: list[int]
    features: list[int]
    rows: int
    slots: np.ndarray
    lengths: Int64Array
    source: Int64Array


class UniqueBatch:
    """What a rank asks others for.

    Attributes:
        batch: as it came.
        ids: int64 `[U]`: of each rank, and there of each table, the distinct ids.
        counts: int64 `[W, T]`, how many those are.
        lookups: of the tables of each dim.
    """

    def __init__(self, batch: Batch, tables: Tables) -> None:
        """
        Raises:
            IndexError: an index table has no such id, and its check is FATAL.
        """
        self.batch = batch
        found = [_distinct(batch, tables, index) for index in range(len(tables.configs))]
        counts = [np.bincount(one.owners, minlength=tables.world_size) for one in found]
        self.counts: Int64Array = np.stack(counts, axis=1).astype(np.int64)
        ends = [np.concatenate([[0], np.cumsum(of_table)]) for of_table in counts]
        pieces = [
            one.ids[end[rank] : end[rank + 1]]
            for rank in range(tables.world_size)
            for one, end in zip(found, ends, strict=True)
        ]
        self.ids: Int64Array = np.concatenate(pieces)
        self.lookups = [self._lookups(group, found, tables) for group in tables.same_dim()]

    def _lookups(self, group: list[int], found: Sequence[_Distinct], tables: Tables) -> Lookups:
        of_group = self.counts[:, group]  # rows come rank by rank, and there table by table
        first = (np.cumsum(of_group.ravel()) - of_group.ravel()).reshape(of_group.shape)
        slots, lengths, source = [], [], []
        for place, table in enumerate(group):
            one = found[table]
            before = np.cumsum(of_group[:, place]) - of_group[:, place]
            position = np.arange(len(one.ids)) + (first[:, place] - before)[one.owners]
            slots.append(position[one.inverse].astype(np.int32))
            lengths.append(one.lengths)
            source.append(one.source)
        features = [feature for table in group for feature in tables.features(table)]
        arrays = np.concatenate(slots), np.concatenate(lengths), np.concatenate(source)
        return Lookups(group, features, int(of_group.sum()), *arrays)


@dataclass(frozen=True)
class _Distinct:
    """Ids of one table by rank `[u]`, their ranks `[u]`, the one of each lookup `[n]`; of bags, the lengths."""

    ids: Int64Array
    owners: Int64Array
    inverse: Int64Array
    lengths: Int64Array
    source: Int64Array


def _distinct(batch: Batch, tables: Tables, table: int) -> _Distinct:
    size, offsets = batch.batch_size, batch.offsets.astype(np.int64)
    keys = [int(batch.feature_keys[feature]) for feature in tables.features(table)]
    source = np.concatenate([np.arange(offsets[key * size], offsets[(key + 1) * size]) for key in keys])
    lengths = np.concatenate([np.diff(offsets[key * size : (key + 1) * size + 1]) for key in keys])
    values = _in_bounds(batch.values[source].astype(np.int64), tables.configs[table], tables.bounds_check)
    distinct, inverse = np.unique(values, return_inverse=True)
    owners = tables.placements[table].owner(distinct)
    order = np.argsort(owners, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return _Distinct(distinct[order], owners[order], place[inverse.ravel()], lengths, source)


def _in_bounds(ids: Int64Array, table: TableConfig, mode: BoundsCheckMode) -> Int64Array:
    """`ids`, with row 0 in place of what an index table does not have: only whoever asks can tell."""
    if table.hashed:
        return ids
    wrong = (ids < 0) | (ids >= table.num_embeddings)
    if not wrong.any():
        return ids
    what = f"table {table.name!r}: {int(wrong.sum())} ids are out of range (such as {int(ids[wrong][0])})"
    if mode is BoundsCheckMode.FATAL:
        raise IndexError(f"{what}, allowed are 0 .. {table.num_embeddings - 1}")
    if mode is BoundsCheckMode.WARNING:
        warnings.warn(f"{what} and read row 0", stacklevel=6)
    return np.where(wrong, 0, ids)


class Segments:
    """Lookups of one dim on the device, as the operators read them."""

    def __init__(self, lookups: Lookups, tables: Tables, columns: Sequence[int], size: int, device: torch.device):
        """`columns`: of each feature of the collection in the pooled output. `size`: samples."""
        self.lookups = lookups
        self.dim = tables.configs[lookups.tables[0]].embedding_dim
        pooling = [tables.configs[table].pooling for table in lookups.tables for _ in tables.features(table)]
        means = np.array([each is Pooling.MEAN for each in pooling])
        offsets = np.concatenate([[0], np.cumsum(lookups.lengths)])
        self._put = lambda array: torch.from_numpy(np.ascontiguousarray(array)).to(device)
        self.slots = self._put(lookups.slots)
        self.source = self._put(lookups.source)
        self.offsets, self.means = self._put(offsets), self._put(means)
        own = np.array([columns[feature] for feature in lookups.features], np.int64)
        self.columns = self._put(own)
        self._shape = size, own, means

    def by_row(self, pooled: bool, weights: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Segments of the received rows: segment_offsets, grad_row, grad_source, grad_column, scale."""
        lookups = self.lookups
        order = np.argsort(lookups.slots, kind="stable")
        borders = np.concatenate([[0], np.cumsum(np.bincount(lookups.slots, minlength=lookups.rows))])
        put = self._put
        if not pooled:
            return put(borders.astype(np.int32)), put(order.astype(np.int32)), None, None, None
        size, columns, means = self._shape
        bag = np.repeat(np.arange(len(lookups.lengths)), lookups.lengths)[order]
        feature = bag // size if size else bag
        scale = None
        if means.any():
            lengths = np.maximum(lookups.lengths, 1)[bag].astype(np.float32)
            scale = put(np.where(means[feature], np.float32(1) / lengths, np.float32(1)).astype(np.float32))
        if weights is not None:
            own = weights.detach().index_select(0, put(order))
            scale = own if scale is None else own * scale
        row = bag % size if size else bag
        return (
            put(borders.astype(np.int32)),
            put(row.astype(np.int32)),
            None,
            put(columns[feature].astype(np.int32)),
            scale,
        )
