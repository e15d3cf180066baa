"""Sharded collections: collections whose tables are divided among the ranks of a process group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torchrec.distributed.embedding_types import ShardedEmbeddingModule
from torchrec.distributed.types import Awaitable, LazyAwaitable
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.optim.keyed import KeyedOptimizer
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from ..modules.bags import Bags
from ..modules.collection import CachedCollection
from ..modules.collection_methods import CollectionMethods, PooledTables, SequenceTables
from ..modules.embedding_collections import EmbCacheEmbeddingCollection
from ..operators.devices.backends import backend_for
from ..runtime.eager import NotScripted, check_batch, eager
from ..tbe import (
    MAX_PREFETCHED,
    Batch,
    EvictedRows,
    Int64Array,
    PaddingIds,
    Transfers,
    check_evicted_rows,
    restore_padding_rows,
)
from .all_to_all import Work
from .collectives import Exchange
from .dedup import Deduplication, GroupConstants, Segments, ShardedTables
from .local_shard import LocalShard
from .output_dist import PoolBags, RepeatRows
from .placement import Placement
from .sharded_batch import HEADER, ShardedBatch, StageAwaitable


class OutputAwaitable(LazyAwaitable[Any]):
    """TorchRec awaitable for the output of a batch; its rows may still be on the way from other ranks."""

    def __init__(
        self, module: ShardedCollection, ctx: ShardedBatch, rows: list[torch.Tensor], works: list[Work]
    ) -> None:
        super().__init__()
        self._parts = module, ctx, rows, works

    @eager
    def _wait_impl(self) -> Any:
        module, ctx, rows, works = self._parts
        ctx.receive_rows(works)
        return module.make_output(ctx, rows)


class ShardedCollection(
    NotScripted,
    SequenceTables,
    PooledTables,
    CollectionMethods,
    ShardedEmbeddingModule[Any, Any, Any, ShardedBatch],
    FusedOptimizerModule,
):
    """A collection whose rows are divided among ranks; inputs and outputs are the same as in the unsharded collection.

    Methods that read or write tables access only the rows of this rank. All ranks must call `freeze`, `thaw` and
    `count_grad_norms`, and also `grad_norm` unless `local` is True. All ranks should call `reset_parameters` and
    `set_clocks`.

    Attributes:
        local_shard: the rows that this rank owns.
        exchange: the exchanges with the other ranks.
        tables: the whole tables and their placements.
    """

    local_shard: LocalShard

    def __init__(self, unsharded: CachedCollection, placements: list[Placement], exchange: Exchange) -> None:
        """Creates the sharded collection from an unsharded one.

        Args:
            unsharded: the unsharded collection, whose rows and optimizers are moved to the sharded one; it must not be
                used afterwards.
            placements: placement of each table.
            exchange: the exchanges with the ranks that have the same collection; it is already registered there.
        """
        super().__init__()
        self.exchange = exchange
        embedding = unsharded.embedding
        self.tables = ShardedTables(
            embedding.tables, placements, exchange.world_size, embedding.options.bounds_check_mode
        )
        self._pooled = embedding.pooled
        self.configs, self.names_by_table = unsharded.configs, unsharded.names_by_table
        self.handles_name = unsharded.handles_name
        self._is_weighted = unsharded.is_weighted()
        self._names = unsharded.output_names
        self._type = type(unsharded)
        self._dims = embedding.feature_dims
        self._columns = (np.cumsum(self._dims) - self._dims).tolist()
        self._padding_ids = PaddingIds.from_tables(embedding.tables)
        self._deduplication = Deduplication(self.tables, self._columns, self._pooled, exchange.rank)
        self._transfers = Transfers(exchange.device, backend_for(exchange.device))
        self._constants = [
            GroupConstants(self.tables, group, self._columns, self._transfers) for group in self._deduplication.groups
        ]
        self._pending: list[ShardedBatch] = []
        self._need_indices = isinstance(unsharded, EmbCacheEmbeddingCollection) and unsharded.need_indices()
        exchange.group_state.width = max(
            exchange.group_state.width, HEADER + len(self._deduplication.timestamped) + len(placements)
        )
        self.__dict__["local_shard"] = LocalShard(unsharded, self.tables, exchange)
        self.__dict__["embedding"] = self.local_shard.embedding
        self.add_module(self.handles_name, self.local_shard._modules[self.handles_name])
        self.train(unsharded.training)

    # ---- a batch

    def prefetch(self, features: Any, *args: Any, depth: int | None = None, **kwargs: Any) -> Any:
        """Starts to exchange the ids of a later batch; the batch is planned once the ids have been received.

        All ranks must call it for the same batches and run their forwards in the same order. `depth` is described at
        `CachedCollection.prefetch`. TorchRec's pipelines also call a method of this name, with the result of
        `input_dist`; such a call does nothing.
        """
        if not isinstance(features, KeyedJaggedTensor):
            return None
        ctx = self._start_exchange(features, depth)
        ctx.add_copy(features)
        self._pending.append(ctx)
        queue = self.embedding.queue
        limit = MAX_PREFETCHED if depth is None else depth + 1
        queue.max_queued = max(queue.max_queued, min(len(self._pending), limit))
        return ctx

    def prefetch_end_of_data(self) -> ShardedBatch:
        """Replaces the call of `prefetch` on a rank without further batches; then no rank trains this batch."""
        return self._start_exchange(None)

    def _start_exchange(self, features: KeyedJaggedTensor | None, depth: int | None = None) -> ShardedBatch:
        """Advances the pending batches, then starts another exchange; `features` is None at the end of the data."""
        for other in self._pending:
            other.advance()
        ctx = ShardedBatch(self.local_shard, self._deduplication, depth)
        self._send_counts(ctx, features)
        return ctx

    def forget(self, ctx: ShardedBatch) -> None:
        """Discards a prefetched batch whose forward has run or will not run."""
        if ctx in self._pending:
            self._pending.remove(ctx)
            ctx.discard()

    @eager
    def forward(self, features: KeyedJaggedTensor) -> LazyAwaitable[Any]:
        """Looks up a batch; returns an awaitable that receives the rows when its output is first used."""
        if isinstance(features, KeyedJaggedTensor):
            check_batch(features.values())  # must precede any exchange, which a tracer would record or break
        ctx = self._take_prefetched_dropping_earlier(features) if self._pending else None
        if ctx is None:
            ctx = self.create_context()
            self._send_counts(ctx, features)
            ctx.immediate = True
        ctx.receive_ids()
        result = self.compute_and_output_dist(ctx, ctx)
        if not ctx.immediate:
            for other in self._pending:
                other.advance()
        return result

    def _take_prefetched_dropping_earlier(self, features: KeyedJaggedTensor) -> ShardedBatch | None:
        """Returns a prefetched batch and removes it and all earlier ones from the pending batches; None if not found.

        A batch whose exchange began in another mode (training or evaluation) is exchanged again.
        """
        trains = bool(self.training) and torch.is_grad_enabled()
        matching = [(index, ctx) for index, ctx in enumerate(self._pending) if ctx.matches(features)]
        index, ctx = next(((index, ctx) for index, ctx in matching if ctx.training == trains), (-1, None))
        if ctx is not None:
            for skipped in self._pending[:index]:
                skipped.discard()
            self._pending = self._pending[index + 1 :]
        elif matching:
            # The mode has changed since the prefetch. If it did not change on all ranks, an exchange would hang.
            # This check raises an error first.
            _, other = matching[0]
            other.trains = trains
            other.start_check()
            other.finish_check()
        return ctx

    def create_context(self) -> ShardedBatch:
        """Returns the context of a new batch."""
        return ShardedBatch(self.local_shard, self._deduplication)

    def input_dist(self, ctx: ShardedBatch, features: KeyedJaggedTensor) -> Awaitable[Awaitable[ShardedBatch]]:
        """Starts the exchange of a batch. Waiting for the result raises the error of any rank on all ranks."""
        self._send_counts(ctx, features)
        return StageAwaitable(ctx.send_ids, StageAwaitable(ctx.receive_ids, ctx))

    def _send_counts(self, ctx: ShardedBatch, features: KeyedJaggedTensor | None) -> None:
        """Deduplicates a batch and starts to send its id counts; `features` is None at the end of this rank's data."""
        ctx.missing = features is None
        if features is not None:
            ctx.training = bool(self.training) and torch.is_grad_enabled()
            try:
                if ctx.training:
                    self.local_shard.sync_optimizers()
                ctx.settings = self.local_shard.settings.checksum(ctx.training)
                ctx.bags = self.local_shard.checked_bags(features)
                ctx.unique = self._deduplication.run(self._batch_without_padding(ctx.bags), ctx.training)
            except Exception as error:
                ctx.error = error
        ctx.send_counts()

    def _batch_without_padding(self, bags: Bags) -> Batch:
        """Returns the batch without padding ids."""
        if self._pooled and bags.sizes is not None:
            bags.check_pooled()
        shard, features, weights = self.local_shard, bags.features, None
        if self._is_weighted:
            weights = features.weights_or_none()
            if weights is None:
                raise ValueError("the collection is weighted (is_weighted=True), the batch has no weights")
            weights = weights.to(device=self.exchange.device)
        batch = Batch.from_tensors(
            features.values(), bags.offsets, bags.size, shard.feature_keys, weights, signals=shard.id_signals(features)
        )
        return batch if self._padding_ids is None else self._padding_ids.remove_from(batch)

    def compute(self, ctx: ShardedBatch, dist_input: object) -> list[list[torch.Tensor]]:
        """Looks up the rows that ranks requested; if this fails, returns zeros, and a later stage raises the error."""
        training_only = self._deduplication.training_only
        ctx.trains = bool(self.training) and torch.is_grad_enabled()
        try:
            if ctx.trains and not ctx.training and training_only:
                raise RuntimeError("a batch that was begun in evaluation mode is trained: its ids were not counted")
            return self.local_shard.look_up(ctx.values, ctx.offsets, ctx.signals)
        except Exception as error:
            ctx.error = error
        rows = []
        for group in self.tables.groups:
            sizes, dim = ctx.counts[:, group].ravel().tolist(), self.tables.configs[group[0]].embedding_dim
            rows.append([torch.zeros((size, dim), dtype=torch.float32, device=self.exchange.device) for size in sizes])
        return rows

    def output_dist(self, ctx: ShardedBatch, output: list[list[torch.Tensor]]) -> LazyAwaitable[Any]:
        """Starts to send the looked-up rows, and returns an awaitable of the output."""
        return OutputAwaitable(self, ctx, *ctx.send_rows(output))

    def make_output(self, ctx: ShardedBatch, rows: list[torch.Tensor]) -> Any:
        """Builds the output, as the unsharded collection returns it, from the received rows of each distinct id."""
        bags, unique = ctx.bags, ctx.unique
        assert bags is not None
        assert unique is not None
        batch = unique.batch
        segments = [Segments(unique, group, own, self._transfers) for group, own in enumerate(self._constants)]
        if not self._pooled:
            return self._sequences(bags, batch, segments, rows)
        weights: list[torch.Tensor | None] = [None] * len(segments)
        if batch.weights is not None:
            of_batch = batch.weights
            weights = [of_batch if s.source is None else of_batch.index_select(0, s.source) for s in segments]
        pooled = PoolBags.apply(segments, batch.batch_size, sum(self._dims), *rows, *weights)
        values = bags.expand(pooled, self._dims, self.local_shard.feature_keys.tolist())
        return KeyedTensor(self._names, self._dims, values)

    def _sequences(
        self, bags: Bags, batch: Batch, segments: list[Segments], rows: list[torch.Tensor]
    ) -> dict[str, JaggedTensor]:
        parts: dict[int, torch.Tensor] = {}
        for each, received in zip(segments, rows, strict=True):
            parts.update(zip(each.features, RepeatRows.apply(received, each), strict=True))
        ordered = restore_padding_rows([parts[feature] for feature in range(len(parts))], batch, joined=False)
        return bags.sequences(self._names, batch.original, ordered, self._need_indices)

    # ---- counters

    def exchange_stats(self) -> dict[str, int]:
        """Returns exact counters of the exchanges of this rank's batches, since the collection was sharded.

        `lookups` counts ids, and `unique_ids` counts distinct ids of each table and batch. `id_bytes`, `row_bytes` and
        `grad_bytes` are bytes exchanged with other ranks; `bytes_with_duplicates` is what the sum of these three would
        be without deduplication. `messages` counts the messages that this rank sent, including forwarded ones with
        `local_size`; `bytes_within` and `bytes_between` are their bytes within its machine and between machines.
        Without `local_size`, each rank counts as a machine.
        """
        return dict(self.exchange.stats)

    # ---- the tables of this rank

    def sync_optimizers(self) -> None:
        self.local_shard.sync_optimizers()

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """The fused optimizer of this rank's rows, with the same interface as for an unsharded collection."""
        return self.local_shard.fused_optimizer

    def put_back(self, table: str, rows: EvictedRows, *, overwrite: bool = True) -> int:
        self.embedding.layout.config(table)  # raises an error for an unknown table
        check_evicted_rows(table, rows)
        owned = torch.from_numpy(self.owns(table, rows.ids.detach().cpu().numpy()))
        return super().put_back(table, rows[owned], overwrite=overwrite)

    def owns(self, table: str, ids: Int64Array) -> npt.NDArray[np.bool_]:
        """Returns which of `ids` this rank owns, bool `[n]`."""
        index = [config.name for config in self.tables.configs].index(table)
        return self.tables.placements[index].owns(ids)

    def _title(self) -> str:
        return f"{type(self).__name__}, rank {self.exchange.rank}"

    # ---- methods of TorchRec's and torch's modules

    @property
    def shardings(self) -> dict[str, Any]:
        """TorchRec's shardings: none, because this module exchanges ids and rows itself."""
        return {}

    @property
    def unsharded_module_type(self) -> type[torch.nn.Module]:
        return self._type

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the state dict of this rank's rows: `ids` int64 `[n]` and `weight` `[n, D]` of each table."""
        return self.local_shard.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads rows of this rank that `state_dict` returned on the same rank with the same number of ranks.

        Raises:
            ValueError: the state dict has ids that other ranks own; nothing was loaded.
        """
        state_dict = dict(state_dict)
        for problem in self.local_shard.select_local_rows(state_dict, ""):
            raise ValueError(problem)
        return self.local_shard.load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Loads the state dict of a model that contains this collection, such as `DistributedModelParallel.module`."""
        problems = self.local_shard.select_local_rows(state_dict, prefix)
        error_msgs.extend(problems)
        if not problems:
            lists = missing_keys, unexpected_keys, error_msgs
            self.local_shard._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)

    def train(self, mode: bool = True) -> Any:
        self.local_shard.train(mode)
        return super().train(mode)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        probe = fn(torch.empty(0, device=self.exchange.device))
        if probe.device != self.exchange.device:
            raise RuntimeError(f"a sharded collection stays on {self.exchange.device}, it cannot go to {probe.device}")
        self.embedding._apply(fn)
        return super()._apply(fn, recurse)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError("a sharded collection cannot be copied: make a model anew, and load its state dict")
