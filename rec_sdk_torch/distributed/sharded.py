"""Collections whose tables are divided among the ranks of a process group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from torchrec.distributed.embedding_types import KJTList, ShardedEmbeddingModule
from torchrec.distributed.types import Awaitable, LazyAwaitable
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from ..modules.bags import Bags
from ..modules.collection import CachedCollection
from ..modules.embedding_collections import EmbCacheEmbeddingCollection
from ..operators.devices.backends import backend_for
from ..runtime.eager import NotScripted, check_batch, eager
from ..tbe.cache.batch import Batch
from ..tbe.cache.padding_ids import PaddingIds, with_zeros
from ..tbe.cache.transfers import Transfers
from ..tbe.rows.state_dict import row_numbers, warn_of_rows
from ..tbe.step.prefetch_queue import MAX_COMING, Prefetched
from .alike import TrainingSettings
from .collectives import Exchange, SendRows, Vote
from .dedup import Deduplication, GroupConstants, Segments, Tables, UniqueBatch
from .full_state_dicts import has_whole_tables
from .input_dist import HEADER, Asked, CountsAwaitable, RanksEndedError, ShardedContext
from .local_shard import HomeTables
from .output_dist import PoolBags, Repeat
from .placement import Placement
from .rank_tables import RankTables


class OutputAwaitable(LazyAwaitable[Any]):
    """The rows are on their way."""

    def __init__(
        self, module: ShardedCollection, ctx: ShardedContext, rows: list[torch.Tensor], works: list[Any], failed: Vote
    ):
        super().__init__()
        self._parts = module, ctx, rows, works, failed

    @eager
    def _wait_impl(self) -> Any:
        module, ctx, rows, works, failed = self._parts
        if failed.wait():
            module.exchange.raise_together(ctx.error)
        with module.exchange.waiting("rows"):
            for work in works:
                work.wait()
        return module.output(ctx, rows)


class Coming:
    """A batch that will come: its ids are on their way while others are trained."""

    def __init__(self, module: ShardedCollection, features: KeyedJaggedTensor | None, depth: int | None = None) -> None:
        """`features`: None tells the other ranks that there is none. `depth`: as of `CachedCollection.prefetch`."""
        self.module, self._depth = module, depth
        self.ctx = module.create_context()
        self._known = [] if features is None else [features]
        self.ctx.ended = features is None
        self._counts = module.input_dist(self.ctx, features)
        self._ids: Awaitable[Asked] | None = None
        self._announced: Prefetched | None = None
        self._error: Exception | None = None

    def also(self, features: KeyedJaggedTensor, values: torch.Tensor) -> None:
        """The batch may come as `features`, a copy of it."""
        self._known.append(features)

    def is_of(self, features: KeyedJaggedTensor) -> bool:
        """Whether it is this batch. Ids are not compared: all ranks must come to the same answer."""
        return any(features is known for known in self._known)

    def advance(self) -> None:
        """The next of its stages: ids are sent, then those that arrived are planned. All ranks call it in one order."""
        try:
            if self._error is not None:
                return
            if self._ids is None:
                self._ids = self._counts.wait()
            elif self._announced is None:
                asked = self._ids.wait()
                self._announced = self.module.home.announce(asked.values, asked.offsets, asked.seen, self._depth)
        except Exception as error:  # its forward raises it
            self._error = error

    def ended(self) -> bool:
        """Whether some rank has no such batch: then there is none. Waits for the ranks, which all call it."""
        if self._ids is None:
            self.advance()
        if self.ctx.ended and not isinstance(self._error, RanksEndedError):
            assert self._error is not None
            raise self._error  # of a batch, its forward does
        return isinstance(self._error, RanksEndedError)

    def take(self) -> Asked:
        """The ids that this rank is asked for."""
        if self._ids is None:
            self.advance()
        if self._error is not None:
            raise self._error
        assert self._ids is not None
        asked: Asked = self._ids.wait()
        return asked

    def end(self) -> None:
        """Forgets the batch: its forward will not come, or is over."""
        if self._announced is not None:
            self.module.home.forget(self._announced)


class ShardedCollection(
    NotScripted, RankTables, ShardedEmbeddingModule[Any, Any, Any, ShardedContext], FusedOptimizerModule
):
    """A collection whose rows live on many ranks; it takes and gives what the unsharded one does.

    Attributes:
        home: the rows of this rank.
        exchange: with the other ranks.
        tables: the whole tables, and where their rows are.
    """

    def __init__(self, origin: CachedCollection, placements: list[Placement], exchange: Exchange) -> None:
        """
        Args:
            origin: the unsharded collection, which gives its rows and requests, and is of no use after.
            placements: of its tables.
            exchange: with the ranks that have the same collection, and have joined with it.
        """
        super().__init__()
        self.exchange = exchange
        embedding = origin.embedding
        self.tables = Tables(embedding.tables, placements, exchange.world_size, embedding.options.bounds_check_mode)
        self._pooled = embedding.pooled
        self.configs, self.names_by_table = origin.configs, origin.names_by_table
        self.handles_name = origin.handles_name
        self._is_weighted = origin.is_weighted()
        self._names = origin.output_names
        self._type = type(origin)
        self._dims = embedding.feature_dims
        self._columns = (np.cumsum(self._dims) - self._dims).tolist()
        self._padding_ids = PaddingIds.of(embedding.tables)
        self._deduplication = Deduplication(self.tables, self._columns, self._pooled, exchange.rank)
        self._transfers = Transfers(exchange.device, backend_for(exchange.device))
        self._constants = [
            GroupConstants(self.tables, group, self._columns, self._transfers) for group in self._deduplication.groups
        ]
        self._row_bytes = np.array([4 * config.embedding_dim for config in self.tables.configs])
        self._coming: list[Coming] = []
        self._need_indices = isinstance(origin, EmbCacheEmbeddingCollection) and origin.need_indices()
        exchange.widen(HEADER + len(self._deduplication.dated) + len(placements))
        self.__dict__["home"] = HomeTables(origin, placements, exchange)
        self.__dict__["embedding"] = self.home.embedding
        self._settings = TrainingSettings(self.embedding, self.home.drawn)
        self.add_module(self.handles_name, self.home._modules[self.handles_name])
        self.train(origin.training)

    # ---- a batch

    def prefetch(self, features: Any, *args: Any, depth: int | None = None, **kwargs: Any) -> Any:
        """Starts the exchange of a batch that will come, and plans it once its ids are here.

        All ranks must call it for the same batches, and come to their forwards in the same order. TorchRec's pipelines
        with a stage of this name call it with what `input_dist` gave, which needs no more. `depth` is as of
        `CachedCollection.prefetch`.
        """
        if not isinstance(features, KeyedJaggedTensor):
            return None
        for other in self._coming:
            other.advance()
        coming = Coming(self, features, depth)
        self._coming.append(coming)
        queue = self.embedding.queue
        queue.expected = max(queue.expected, min(len(self._coming), MAX_COMING if depth is None else depth + 1))
        return coming

    def prefetch_end(self) -> Coming:
        """Takes the place of `prefetch` on a rank that has no batch any more: then the others have none either."""
        for other in self._coming:
            other.advance()
        return Coming(self, None)

    def forget(self, coming: Coming) -> None:
        """Forgets a batch that was prefetched: its forward will not come, or is over."""
        if coming in self._coming:
            self._coming.remove(coming)
            coming.end()

    @eager
    def forward(self, features: KeyedJaggedTensor) -> LazyAwaitable[Any]:
        """Looks up a batch as the unsharded collection does; the result arrives when it is first used."""
        if isinstance(features, KeyedJaggedTensor):
            check_batch(features.values())  # before any exchange, which a tracer would note or break
        place = self._place_of(features)
        if place is None:
            ctx = self.create_context()
            asked = self.input_dist(ctx, features).wait().wait()
            ctx.at_once = True
            return self.compute_and_output_dist(ctx, asked)
        for skipped in self._coming[:place]:
            skipped.end()
        coming, self._coming = self._coming[place], self._coming[place + 1 :]
        result = self.compute_and_output_dist(coming.ctx, coming.take())
        for other in self._coming:
            other.advance()
        return result

    def _place_of(self, features: KeyedJaggedTensor) -> int | None:
        """Which of the batches that will come this one is, begun in the same mode; None: none of them."""
        trains = self._trains()
        found = [place for place, coming in enumerate(self._coming) if coming.is_of(features)]
        place = next((place for place in found if self._coming[place].ctx.training == trains), None)
        if found and place is None:  # the mode has changed: on all ranks, or some would wait for a forward of it
            self._vote(self._coming[found[0]].ctx).wait()
        return place

    def _vote(self, ctx: ShardedContext) -> Vote:
        """Whether any rank's batch has failed; all have to be at the same one, in the same mode."""
        doing = self.exchange.turns.doing(self.exchange.number, ctx.batch, self._trains())
        return self.exchange.vote(ctx.error is not None, doing, self.exchange.turns.gradients)

    def _trains(self) -> bool:
        return bool(self.training) and torch.is_grad_enabled()

    def create_context(self) -> ShardedContext:
        return ShardedContext()

    def input_dist(self, ctx: ShardedContext, features: KeyedJaggedTensor | None) -> Awaitable[Awaitable[Asked]]:
        """Asks each rank for the ids that are at home there, each once. Errors are raised by all ranks, when waited.

        None asks for nothing: the context says that this rank's data has ended.
        """
        if features is None:
            return CountsAwaitable(self.exchange, ctx, self._deduplication, self._settings)
        ctx.training = self._trains()
        try:
            if ctx.training:
                self.home.sync_optimizers()
                self.home.settle_drawn()
                ctx.settings = self._settings.checksum()
            else:
                ctx.settings = self._settings.checksum_of_changes()
            ctx.bags = self.home.checked_bags(features)
            if self._pooled:
                ctx.bags.check_pooled()
            keys, weights = self.home.feature_keys, None
            if self._is_weighted:
                weights = ctx.bags.features.weights_or_none()
                if weights is None:
                    raise ValueError("the collection is weighted (is_weighted=True), the batch has no weights")
                weights = weights.to(device=self.exchange.device)
            values, seen = ctx.bags.features.values(), self.home.id_signals(ctx.bags.features)
            batch = Batch.from_tensors(values, ctx.bags.offsets, ctx.bags.size, keys, weights, seen=seen)
            if self._padding_ids is not None:
                batch = self._padding_ids.without(batch)
            ctx.asked = self._deduplication.run(batch, ctx.training)
            ctx.asked.warn()
        except Exception as error:
            ctx.error = error
        return CountsAwaitable(self.exchange, ctx, self._deduplication, self._settings)

    def compute(self, ctx: ShardedContext, dist_input: Asked | KJTList) -> tuple[Asked, list[torch.Tensor]]:
        """Rows that the ranks asked for; of a batch that fails, zeros, which `output_dist` tells the others."""
        asked = cast(Asked, dist_input.features[0] if isinstance(dist_input, KJTList) else dist_input)
        try:
            of_training = self._deduplication.words.any() or self._deduplication.replicas
            if self._trains() and not ctx.training and of_training:
                raise RuntimeError("a batch that was begun in evaluation mode is trained: its ids were not counted")
            return asked, self.home.rows_of(self.home.batch_of(asked.values, asked.offsets, asked.seen), self.tables)
        except Exception as error:
            ctx.error = error
        shapes = [
            (int(asked.counts[:, group].sum()), self.tables.configs[group[0]].embedding_dim)
            for group in self.tables.same_dim()
        ]
        return asked, [torch.zeros(shape, dtype=torch.float32, device=self.exchange.device) for shape in shapes]

    def output_dist(self, ctx: ShardedContext, output: tuple[Asked, list[torch.Tensor]]) -> LazyAwaitable[Any]:
        asked, rows = output
        assert ctx.asked is not None
        failed = self._vote(ctx)
        # Between its ids and its rows this rank may have exchanged others, in another order than the others have: rows
        # of one batch that meet those of another are garbage, or the end of the process.
        if not ctx.at_once and failed.wait():
            self.exchange.raise_together(ctx.error)
        works: list[Any] = []
        received = []
        for group, part in zip(self.tables.same_dim(), rows, strict=True):
            counts = ctx.asked.host.counts, asked.counts, asked.relayed
            route = self._deduplication.replicas.route(*counts, group, ctx.training, self.exchange.device)
            received.append(SendRows.apply(part, self.exchange, ctx.batch, route, works))
        self.exchange.settle()
        self._count(ctx, ctx.asked)
        return OutputAwaitable(self, ctx, received, works, failed)

    def output(self, ctx: ShardedContext, rows: list[torch.Tensor]) -> Any:
        """The output of the unsharded collection, from rows of each distinct id."""
        assert ctx.asked is not None
        assert ctx.bags is not None
        size = ctx.asked.batch.batch_size
        segments = [
            Segments(ctx.asked, group, constants, self._transfers) for group, constants in enumerate(self._constants)
        ]
        if not self._pooled:
            return self._sequences(ctx.bags, ctx.asked.batch, segments, rows)
        weights = ctx.asked.batch.weights
        of_dims = [_chosen(weights, each.source) for each in segments]
        pooled = PoolBags.apply(segments, size, sum(self._dims), *rows, *of_dims)
        values = ctx.bags.expand(pooled, self._dims, self.home.feature_keys.tolist())
        return KeyedTensor(self._names, self._dims, values)

    def _sequences(
        self, bags: Bags, batch: Batch, segments: list[Segments], rows: list[torch.Tensor]
    ) -> dict[str, JaggedTensor]:
        parts: dict[int, torch.Tensor] = {}
        for each, received in zip(segments, rows, strict=True):
            parts.update(zip(each.features, Repeat.apply(received, each), strict=True))
        ordered = with_zeros([parts[feature] for feature in range(len(parts))], batch, joined=False)
        given = batch.whole
        return bags.sequences(self._names, given, ordered, self._need_indices)

    # ---- figures

    def _count(self, ctx: ShardedContext, asked: UniqueBatch) -> None:
        stats, rank, host = self.exchange.stats, self.exchange.rank, asked.host
        unique, lookups = host.counts, host.lookups
        away = unique.sum(axis=0) - unique[rank]
        stats["lookups"] += int(lookups.sum())
        stats["unique_ids"] += int(unique.sum())
        words = self._deduplication.words if ctx.training else 0
        told = asked.questions.counts
        stats["id_bytes"] += int(((told.sum(axis=0) - told[rank]) * (8 + 4 * words)).sum())
        stats["row_bytes"] += int((away * self._row_bytes).sum())
        training = 2 if self._trains() else 1
        every = lookups.sum(axis=0) - lookups[rank]
        stats["bytes_with_duplicates"] += int((every * (8 + self._row_bytes * training)).sum())

    def exchange_stats(self) -> dict[str, int]:
        """Exact counters since the start: of this rank's batches.

        `lookups`, `unique_ids` (distinct ones of each table and batch), and bytes to and from other ranks: `id_bytes`,
        `row_bytes`, `grad_bytes`; `bytes_with_duplicates` is what these three would be if each lookup sent its id.
        `messages` are those that this rank sent in all-to-alls, also for others, where there are two levels;
        `bytes_within` and `bytes_between` are their bytes, within its machine and to others. Where no `local_size` was
        given, each rank is a machine.
        """
        return dict(self.exchange.stats)

    # ---- what TorchRec and torch ask of modules

    @property
    def shardings(self) -> dict[str, Any]:
        """None of TorchRec's: the exchange is this module's own."""
        return {}

    @property
    def unsharded_module_type(self) -> type[torch.nn.Module]:
        return self._type

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """This rank's rows of each table: `ids` int64 `[n]` and `weight` `[n, D]`."""
        return self.home.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Rows of this rank, as `state_dict` gave them on the same rank of as many.

        Raises:
            ValueError: ids that are at home on other ranks; nothing was loaded.
        """
        state_dict = dict(state_dict)
        self._take_home(state_dict, "")
        for problem in self._foreign(state_dict, ""):
            raise ValueError(problem)
        return self.home.load_state_dict(state_dict, strict, assign)

    def _take_home(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Selects this rank's rows of tables that come without ids, whose rows are those from 0 on, or in a full dict.

        Ids that an index table of another size had are left out, with a warning.
        """
        full = has_whole_tables()
        for config, placement in zip(self.tables.configs, self.tables.placements, strict=True):
            own = f"{prefix}{self.handles_name}.{config.name}."
            weight = state_dict.get(f"{own}weight")
            if full and not config.hashed and not len(state_dict.get(f"{own}ids", ())):
                state_dict.pop(f"{own}ids", None)  # torch fills in the handle's, which has none
            ids = state_dict.get(f"{own}ids", row_numbers(weight))
            if not (isinstance(ids, torch.Tensor) and isinstance(weight, torch.Tensor) and len(weight) == len(ids)):
                continue  # the load of the table says so
            chosen, whole = torch.ones_like(ids, dtype=torch.bool), f"{own}ids" not in state_dict
            if whole or full:
                chosen = torch.from_numpy(placement.owner(ids.cpu().numpy()) == self.exchange.rank)
            if not config.hashed:
                fits, rows = ids < config.num_embeddings, config.num_embeddings
                if not bool(fits.all()) or (whole and len(ids) < rows):
                    warn_of_rows(config.name, len(ids) if whole else int(ids.max()) + 1, rows)
                chosen &= fits
            state_dict[f"{own}ids"], state_dict[f"{own}weight"] = ids[chosen], weight[chosen.to(weight.device)]

    def _foreign(self, state_dict: Mapping[str, Any], prefix: str) -> list[str]:
        """Says what is wrong with the ids of a state dict: those that are at home on other ranks."""
        problems = []
        names = [config.name for config in self.tables.configs]
        for name, placement in zip(names, self.tables.placements, strict=True):
            ids = state_dict.get(f"{prefix}{self.handles_name}.{name}.ids")
            if not isinstance(ids, torch.Tensor):  # the load of the table says so
                continue
            foreign = int((placement.owner(ids.cpu().numpy()) != self.exchange.rank).sum())
            if foreign:
                problems.append(
                    f"table {name!r}: {foreign} of its ids are not at home on rank {self.exchange.rank} of "
                    f"{self.exchange.world_size}: load what the same rank of as many saved, with the same home="
                )
        return problems

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
        """Loads the state dict of a model around this collection, such as `DistributedModelParallel.module`."""
        self._take_home(state_dict, prefix)
        problems = self._foreign(state_dict, prefix)
        error_msgs.extend(problems)
        if not problems:
            lists = missing_keys, unexpected_keys, error_msgs
            self.home._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)

    def train(self, mode: bool = True) -> Any:
        self.home.train(mode)
        return super().train(mode)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        probe = fn(torch.empty(0, device=self.exchange.device))
        if probe.device != self.exchange.device:
            raise RuntimeError(f"a sharded collection stays on {self.exchange.device}, it cannot go to {probe.device}")
        self.embedding._apply(fn)
        return super()._apply(fn, recurse)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError("a sharded collection cannot be copied: make a model anew, and load its state dict")


def _chosen(values: torch.Tensor | None, source: torch.Tensor | None) -> torch.Tensor | None:
    """`values` of lookups, which all are there when `source` is None."""
    return values if values is None or source is None else values.index_select(0, source)
