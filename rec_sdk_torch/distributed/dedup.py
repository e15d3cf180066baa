"""Deduplication of a rank's batch: its distinct ids of each table, ordered by owner rank."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .._engine import Deduplicator
from .._engine import UniqueBatch as HostBatch
from ..operators.schemas import COEFFICIENTS
from ..operators.segments import HOT_SEGMENT_FIELDS
from ..runtime.warn import InputWarning, warn
from ..tbe import NEVER, Batch, BoundsCheckMode, IdSignalArrays, IdSignals, Int64Array, Pooling, TableConfig, Transfers
from .placement import Placement
from .replicas import Replicas


@dataclass(frozen=True)
class ShardedTables:
    """The tables of a sharded collection and their placements.

    Attributes:
        configs: configs of the whole tables.
        placements: placement of each table.
        world_size: W, the number of ranks.
        bounds_check: handling of ids outside an index table.
    """

    configs: Sequence[TableConfig]
    placements: Sequence[Placement]
    world_size: int
    bounds_check: BoundsCheckMode

    @functools.cached_property
    def groups(self) -> list[list[int]]:
        """Indices of the tables, grouped by embedding dim; all rows of a group are exchanged in one tensor."""
        groups: dict[int, list[int]] = {}
        for index, config in enumerate(self.configs):
            groups.setdefault(config.embedding_dim, []).append(index)
        return list(groups.values())

    def features(self, table: int) -> range:
        """Returns the indices of the features that look up a table."""
        begin = sum(config.num_features for config in self.configs[:table])
        return range(begin, begin + self.configs[table].num_features)


class Deduplication:
    """Deduplicator of a collection's batches; the engine does the work.

    Attributes:
        groups: see `ShardedTables`.
        row_bytes: int64 `[T]`, bytes of one exchanged row, for each table.
        words_per_id: int64 `[T]`, number of int32 words of id signals that are sent with each id, for each table.
        timestamped: int64, indices of the tables that evict ids by age.
        replicas: the replicated tables.
        training_only: whether training batches send data to owner ranks that evaluation batches do not send.
    """

    def __init__(self, tables: ShardedTables, columns: Sequence[int], pooled: bool, rank: int) -> None:
        """Creates the engine's deduplicator for a collection.

        Args:
            tables: the tables.
            columns: first column of each feature in the pooled output.
            pooled: whether outputs are pooled.
            rank: this rank.
        """
        self.tables = tables
        self.replicas = Replicas(tables.placements, rank)
        self.groups = tables.groups
        self.row_bytes = np.array([4 * config.embedding_dim for config in tables.configs])
        group_of = {table: group for group, own in enumerate(self.groups) for table in own}
        lifecycles = [config.lifecycle for config in tables.configs]
        self._signal_kinds = [  # bit masks, in the engine's encoding, of the signals sent with each id
            0
            if lifecycle is None
            else lifecycle.counts_shows + 2 * lifecycle.needs_clicks + 4 * ("timestamp" in lifecycle.columns())
            for lifecycle in lifecycles
        ]
        of_features = [table for table, config in enumerate(tables.configs) for _ in range(config.num_features)]
        self._host = Deduplicator(
            [0 if config.hashed else config.num_embeddings for config in tables.configs],
            [placement.owner_rule for placement in tables.placements],
            [group_of[table] for table in range(len(tables.configs))],
            of_features,
            list(columns) if pooled else [],
            [tables.configs[table].pooling is Pooling.MEAN for table in of_features] if pooled else [],
            tables.world_size,
            self._signal_kinds,
        )
        self.words_per_id = self._host.signal_words
        self.timestamped = np.flatnonzero([kinds & 4 for kinds in self._signal_kinds])
        self.training_only = bool(self.words_per_id.any()) or self.replicas.any

    def run(self, batch: Batch, training: bool) -> UniqueBatch:
        """Finds the distinct ids of a batch.

        Args:
            batch: this rank's batch.
            training: whether to also collect id signals and sort the lookups by row. If False, a backward pass sorts
                them later.

        Raises:
            IndexError: an id is out of range of an index table, and the bounds check is FATAL.
            ValueError: the offsets do not fit the ids, or a training batch lacks clicks or timestamps that a table
                needs.
        """
        arrays = batch.values, batch.offsets, batch.feature_keys, batch.batch_size
        signals = batch.signals
        if training and any(self._signal_kinds):
            self._check_signals(signals)
        host_batch = self._host.run(
            *arrays, batch.weights is not None, training, training, signals.clicks, signals.timestamps
        )
        if host_batch.out_of_range:
            self._report_out_of_range(host_batch.out_of_range)
        sent_ids = SentIds(host_batch.counts, host_batch.ids, host_batch.signals)
        if training and self.replicas.any:
            sent_ids = self._repeat_replicated_ids(sent_ids)
        return UniqueBatch(batch, host_batch, sent_ids)

    def _repeat_replicated_ids(self, sent_ids: SentIds) -> SentIds:
        """Repeats ids of replicated tables for every rank, and returns the ids to send."""
        counts, tables = sent_ids.counts, range(len(self.tables.configs))
        ids = sent_ids.ids[self.replicas.replication_indices(counts, tables)]
        signal_words = sent_ids.signal_words
        if self.words_per_id.any():
            signal_words = signal_words[self.replicas.replication_indices(counts * self.words_per_id, tables)]
        return SentIds(self.replicas.counts_for_all(counts), ids, signal_words)

    def _check_signals(self, signals: IdSignalArrays) -> None:
        for config, kinds in zip(self.tables.configs, self._signal_kinds, strict=True):
            if kinds & 4 and signals.timestamps is None:
                raise ValueError(
                    f"table {config.name!r} evicts ids by their timestamps, and the batch has none: look up a "
                    "KeyedJaggedTensorWithTimestamp"
                )
            if kinds & 2 and signals.clicks is None:
                raise ValueError(
                    f"table {config.name!r} scores ids by clicks (beta is not 0), and the batch has none: give it "
                    "click labels, as docs/admission_eviction.md says"
                )

    def received_signals(
        self, counts: Int64Array, latest: Int64Array, ids: torch.Tensor, signal_words: torch.Tensor
    ) -> IdSignals:
        """Unpacks the id signals that all ranks sent with their ids.

        Args:
            counts: int64 `[W, T]`, number of ids received from each rank for each table.
            latest: int64 `[W, len(timestamped)]`, latest timestamp on each rank for each table in `timestamped`.
            ids: int64 `[n]`, the received ids.
            signal_words: int32, the received signals of these ids, packed.
        """
        arrays = self._host.received_signals(counts, ids.numpy(), signal_words.numpy())
        keys = None
        if len(self.timestamped):
            by_key = np.full(counts.shape, NEVER, np.int64)
            by_key[:, self.timestamped] = latest
            keys = torch.from_numpy(by_key.ravel())
        shows, clicks, stamps = (None if array is None else torch.from_numpy(array) for array in arrays)
        return IdSignals(shows, clicks, stamps, keys)

    def _report_out_of_range(self, out_of_range: Sequence[tuple[int, int, int]]) -> None:
        """Raises an error or warns, depending on the bounds check, for ids out of range, which are looked up as row 0.

        Only the rank whose batch contains such ids can report them.
        """
        texts = [
            f"table {self.tables.configs[table].name!r}: {count} ids are out of range (such as {example})"
            for table, count, example in out_of_range
        ]
        mode = self.tables.bounds_check
        if mode is BoundsCheckMode.FATAL:
            raise IndexError(
                f"{texts[0]}, allowed are 0 .. {self.tables.configs[out_of_range[0][0]].num_embeddings - 1}"
            )
        if mode is BoundsCheckMode.WARNING:
            for text in texts:
                warn(f"{text} and read row 0", InputWarning)


@dataclass(frozen=True)
class SentIds:
    """The ids that this rank sends to each rank.

    Attributes:
        counts: int64 `[W, T]`, number of ids by owner rank and table.
        ids: int64, ordered by owner rank, then by table.
        signal_words: int32, the signals of these ids, packed.
    """

    counts: Int64Array
    ids: Int64Array
    signal_words: np.ndarray


@dataclass(frozen=True)
class UniqueBatch:
    """A rank's batch and its distinct ids.

    Attributes:
        batch: the batch, not deduplicated.
        host: the engine's result: `ids` int64 `[U]`, ordered by owner rank, then by table; `repeats` int32 `[U]`,
            lookups of each; `counts` int64 `[W, T]`, number of ids by owner rank and table; `signals` int32.
        sent_ids: the ids to send; in training, ids of replicated tables are repeated for every rank.
    """

    batch: Batch
    host: HostBatch
    sent_ids: SentIds


class Segments:
    """The lookups of all tables of one embedding dim, as device tensors that the operators take as arguments.

    Attributes:
        features: indices of the features, in the order of the lookups.
        lookups: number of lookups of each feature.
        rows: U, the number of received rows.
        dim: D, the embedding dim of the rows.
        slots: int32 `[n]`, index of the received row of each lookup, ordered by feature.
        source: int64 `[n]`, position of each lookup in the batch's values; None if the lookups are all values in order.
        offsets: int64 `[F * B + 1]`, offsets of the bags; None for sequences.
    """

    def __init__(self, unique: UniqueBatch, group: int, constants: GroupConstants, transfers: Transfers) -> None:
        self._host, self._group, self._transfers, self.constants = unique.host, group, transfers, constants
        self.dim, self.features = constants.dim, constants.features
        self.rows = unique.host.rows(group)
        self.lookups = unique.host.feature_lookups(group)
        slots, offsets, source = self._upload_arrays(*unique.host.slots(group))
        assert slots is not None
        self.slots = slots
        self.offsets = None if offsets is None else offsets.view(torch.int64)
        self.source = None if source is None else source.view(torch.int64)

    def _upload_arrays(self, arena: Any, fields: Any) -> list[torch.Tensor | None]:
        (words,) = self._transfers.to_device(arena)
        return [None if field is None else words.narrow(0, *field) for field in fields]

    def update_arguments(self, weights: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Returns the lookups sorted by received row, as arguments of the update operators.

        The arguments are segment_offsets, grad_row, grad_source (None), grad_column, scale and hot_segments.
        """
        borders, grad_row, grad_column, scale, positions, hot = self._upload_arrays(*self._host.segments(self._group))
        scale = None if scale is None else scale.view(torch.float32)
        if weights is not None:
            assert positions is not None
            own = weights.detach().index_select(0, positions)
            scale = own if scale is None else own * scale
        hot = None if hot is None else hot.view(-1, HOT_SEGMENT_FIELDS)
        return borders, grad_row, None, grad_column, scale, hot


class GroupConstants:
    """Tensors that describe the tables of one embedding dim and are the same for every batch.

    Attributes:
        features: indices of the features that look up these tables.
        dim: D, the embedding dim.
        world_size: W, the number of ranks.
        columns: first column of each feature in the pooled output, int64.
        means: whether each feature is pooled by the mean, bool.
        coefficients: coefficients with which the operator `update_rows` adds 1 / divisor of each gradient by SGD, for
            the divisors 1 and W.
    """

    def __init__(
        self, tables: ShardedTables, group: Sequence[int], columns: Sequence[int], transfers: Transfers
    ) -> None:
        self.features = [feature for table in group for feature in tables.features(table)]
        self.dim, self.world_size = tables.configs[group[0]].embedding_dim, tables.world_size
        means = [tables.configs[table].pooling is Pooling.MEAN for table in group for _ in tables.features(table)]
        own = torch.tensor([columns[feature] for feature in self.features], dtype=torch.int64, device="cpu")
        self.columns, self.means = (each.to(transfers.device) for each in (own, torch.tensor(means, device="cpu")))
        self.coefficients = {
            divisor: torch.tensor(
                [[math.inf, -1 / divisor, *[0.0] * (COEFFICIENTS - 2)]], dtype=torch.float32, device="cpu"
            ).to(transfers.device)
            for divisor in (1, self.world_size)
        }
