"""The local shard of a sharded collection: the rows that one rank owns, in a table-batched embedding."""

from __future__ import annotations

import copy
import dataclasses
import functools
import numbers
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..modules.collection import CachedCollection
from ..optim.handles import TableHandle, module_dict
from ..tbe import (
    DIVIDED,
    WEIGHT,
    Batch,
    BatchHint,
    CacheOption,
    IdSignals,
    Layout,
    Pooling,
    Prefetched,
    TableBatchedEmbedding,
    TableConfig,
    TableView,
    draw_initial_weights,
    row_numbers,
    warn_of_rows,
)
from .collectives import Exchange
from .consistency import TrainingSettings
from .dedup import ShardedTables
from .full_state_dicts import gather_whole_table, has_whole_tables
from .placement import Placement
from .replicas import checksum, table_checksums


class ShardHandle(TableHandle):
    """Parameter handle of a table's shard on one rank; its state dict has the rank's rows in ascending order of ids.

    The keys are `ids` and `weight`. Ids are ids of the whole table. The shard of an index table contains all rows that
    the rank owns; the shard of a hash table contains only those that were looked up. A full state dict
    (`StateDictOptions`) contains whole tables, as in an unsharded collection.
    """

    sharded = True

    def extra_repr(self) -> str:
        return f"on this rank {super().extra_repr()}"

    def set_shard(self, rows: np.ndarray | None, exchange: Exchange | None) -> None:
        """Sets which rows this rank owns.

        Args:
            rows: ids of the rank's rows of an index table; None for a hash table.
            exchange: the exchanges with the ranks that own the other rows; None if every rank has all rows.
        """
        self._all_rows, self._exchange, self.weight.ranks = rows, exchange, exchange
        if rows is not None:  # torchrec.distributed.shard compares buffers, and an unsharded index table has no `ids`
            ids = self.ids
            del self.ids
            self.ids = ids

    def known_ids(self) -> torch.Tensor:
        """Returns the ids of this rank's rows, int64 `[n]`; of a hash table only those that were looked up."""
        return super().known_ids() if self._all_rows is None else torch.from_numpy(self._all_rows.copy())

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        full, ids = has_whole_tables(), self.known_ids().sort().values
        weight = self.embedding.view(self.table).read(ids, [WEIGHT]).parts[WEIGHT]
        if full and self._exchange is not None:
            ids, weight = gather_whole_table(self.table, ids, weight, self._exchange)
        elif not full:
            self.weight.mark_rank_rows([ids, weight])
        if self._all_rows is None or not full:
            destination[f"{prefix}ids"] = ids
        destination[f"{prefix}weight"] = weight


def _draw_index_tables(
    index_tables: Mapping[str, tuple[TableConfig, Placement]], drawn_here: dict[str, str], layout: Layout
) -> None:
    """Draws the initial rows of index tables that have an `init_fn`.

    Each rank draws the whole table, as a single process would, and keeps the rows that it owns.

    Args:
        index_tables: config of the whole table and its placement, by table name.
        drawn_here: receives checksums of the drawn rows of replicated tables, by description.
    """
    for table, placement in index_tables.values():
        if table.init_fn is not None:
            weight = draw_initial_weights(table, table.num_embeddings)
            ids = torch.from_numpy(placement.local_ids(table.num_embeddings))
            TableView(layout, table.name).write(ids, {WEIGHT: weight[ids]})
            if placement.replicated:
                drawn_here[f"rows that init_fn drew for table {table.name!r}"] = f"{checksum(weight):08x}"


class LocalShard(CachedCollection):
    """The rows of all tables of a collection that one rank owns.

    Each table has one feature for each rank that sends ids. All tables are hash tables here, because an id is not
    its row's number in the shard. Unless a table has an `init_fn`, an id's initial weights are the same on whichever
    rank owns it.

    Attributes:
        exchange: the exchanges with the other ranks.
        settings: the training settings that ranks compare.
    """

    def __init__(self, unsharded: CachedCollection, tables: ShardedTables, exchange: Exchange) -> None:
        source, world_size, placements = unsharded.embedding, exchange.world_size, tables.placements
        pairs = list(zip(source.tables, placements, strict=True))
        options = source.options
        hint = options.batch_hint
        if hint.multi_hot_sizes is None:
            hint = BatchHint(hint.batch_size, [table.num_features for table in source.tables], hint.world_size)
        embedding = TableBatchedEmbedding.from_options(
            [_local_config(table, placement, world_size) for table, placement in pairs],
            dataclasses.replace(
                options,
                cache=_local_cache_option(source, placements),
                batch_hint=hint,
                device=exchange.device,
                seed=exchange.gather(options.seed, "rank 0's seed")[0],
                host_store=options.host_store and os.path.join(options.host_store, f"rank{exchange.rank}"),
            ),
        )
        embedding.layout.padding_ids = None  # ranks remove padding ids before they send ids
        embedding.layout.replicated = frozenset(table.name for table, placement in pairs if placement.replicated)
        index_tables = {pair[0].name: pair for pair in pairs if not pair[0].hashed}
        embedding.layout.owned_ids = {
            name: functools.partial(placement.local_ids, table.num_embeddings)
            for name, (table, placement) in index_tables.items()
        }
        drawn: dict[str, str] = {}  # checksums of replicated tables, once their `init_fn` has drawn the rows
        draws = any(place.replicated and table.init_fn is not None for table, place in index_tables.values())
        embedding.layout.fill = functools.partial(_draw_index_tables, index_tables, drawn)
        embedding.guard.peers = exchange
        self.__dict__["handles_name"] = unsharded.handles_name
        super().__init__(unsharded.configs, embedding, None)
        self._tables = tables
        self.exchange, self.settings = exchange, TrainingSettings(embedding, drawn, draws and not source.layout.built)
        self._modules[self.handles_name] = module_dict(
            {name: self._shard_handle(handle) for name, handle in unsharded.table_handles().items()}
        )
        handles: dict[str, Any] = self.table_handles()
        for table, placement in pairs:
            rows = None if table.hashed else placement.local_ids(table.num_embeddings)
            handles[table.name].set_shard(rows, None if placement.replicated else exchange)
        # Received ids are ordered by rank, then table; the embedding's features are ordered by table, then rank.
        keys = np.arange(len(pairs))[:, None] + len(pairs) * np.arange(world_size)
        self._keys = keys.ravel()
        # Looked-up rows are ordered by table, then rank. Rows of one dim are sent ordered by rank, then table.
        self._send_orders = [
            [world_size * table + rank for rank in range(world_size) for table in group] for group in tables.groups
        ]
        self._copy_rows(source, placements, exchange)
        self.train(unsharded.training)

    def _shard_handle(self, old: TableHandle) -> ShardHandle:
        """Returns the handle of a table's shard, with the optimizer assignments of the whole table's handle."""
        handle = ShardHandle(self.embedding, self.embedding.view(old.table).config, None)
        old_weight = old.weight
        shape, dtype = (0, old_weight.shape[1]), old_weight.dtype
        weight = old_weight.with_data(torch.empty(shape, dtype=dtype, device=self.embedding.device))
        weight.sharded = True
        handle.replace_weight(weight)
        return handle

    def _copy_rows(self, source: TableBatchedEmbedding, placements: Sequence[Placement], exchange: Exchange) -> None:
        """Copies the rows that this rank owns from the unsharded collection, if that was used or loaded before.

        Raises:
            ValueError: the rows of a replicated table differ between ranks.
        """
        if source.layout.built:
            self._copy_built_rows(source, placements)
        copies = [each.name for each, placement in zip(source.tables, placements, strict=True) if placement.replicated]
        if copies:
            sums = {name: table_checksums(source.view(name)) if source.layout.built else {} for name in copies}
            exchange.check_same("takes over the rows of data_parallel tables", sums)

    def _copy_built_rows(self, source: TableBatchedEmbedding, placements: Sequence[Placement]) -> None:
        self.sync_optimizers()
        layout = self.embedding.layout
        draw, layout.fill = layout.fill, lambda layout: None
        try:
            _ = layout.groups  # builds the tables without drawing initial rows, which would be overwritten
        finally:
            layout.fill = draw
        for table, placement in zip(source.tables, placements, strict=True):

            def owned(ids: torch.Tensor, placement: Placement = placement) -> torch.Tensor:
                return torch.from_numpy(placement.owns(ids.numpy()))

            self.embedding.view(table.name).copy_shard(source.view(table.name), owned)

    def prefetch_received(
        self, values: torch.Tensor, offsets: torch.Tensor, signals: IdSignals | None, depth: int | None
    ) -> Prefetched:
        """Prefetches a batch of received ids, so that a later `look_up` finds its rows in the cache."""
        prefetched = Prefetched(values, offsets, 1, self._keys, False, source=values, signals=signals, depth=depth)
        self.embedding.queue.add(prefetched)
        return prefetched

    def look_up(
        self, values: torch.Tensor, offsets: torch.Tensor, signals: IdSignals | None
    ) -> list[list[torch.Tensor]]:
        """Looks up the ids that all ranks sent, ordered by rank, then by table.

        Args:
            values, offsets: ids and their offsets, int64 `[n]` and `[W * T + 1]`.
            signals: id signals from the sending ranks; None if there are none.

        Returns:
            For each embedding dim, the rows of each rank and table, float32 `[n, D]`, in the order of the ids.
        """
        if self.training and torch.is_grad_enabled():
            self.sync_optimizers()
        parts = self.embedding.lookup_features(Batch.from_tensors(values, offsets, 1, self._keys, signals=signals))
        return [list(map(parts.__getitem__, order)) for order in self._send_orders]

    def select_local_rows(self, state_dict: dict[str, Any], prefix: str) -> list[str]:
        """Reduces a state dict to the rows that this rank owns, in place.

        If a table has no ids in the state dict, row i is the row of id i. Such tables, and all tables of a full state
        dict, have the rows of all ranks; only this rank's rows are kept. Ids beyond an index table's size are dropped,
        with a warning.

        Returns:
            Problems: a description of each table that has ids of other ranks. Such a state dict must not be loaded.
        """
        problems, full, exchange = [], has_whole_tables(), self.exchange
        for config, placement in zip(self._tables.configs, self._tables.placements, strict=True):
            own = f"{prefix}{self.handles_name}.{config.name}."
            weight = state_dict.get(f"{own}weight")
            if full and not config.hashed and not len(state_dict.get(f"{own}ids", ())):
                state_dict.pop(f"{own}ids", None)  # torch added these empty ids from the handle's buffer
            ids, complete = state_dict.get(f"{own}ids", row_numbers(weight)), f"{own}ids" not in state_dict
            if not (isinstance(ids, torch.Tensor) and isinstance(weight, torch.Tensor) and len(weight) == len(ids)):
                continue  # `load_state_dict` will raise the error
            ids = ids.cpu()
            owned = torch.from_numpy(placement.owns(ids.numpy()))
            chosen = owned if complete or full else torch.ones_like(owned)
            if not config.hashed:
                fits, rows = ids < config.num_embeddings, config.num_embeddings
                if not bool(fits.all()) or (complete and len(ids) < rows):
                    warn_of_rows(config.name, len(ids) if complete else int(ids.max()) + 1, rows)
                chosen = chosen & fits
            state_dict[f"{own}ids"], state_dict[f"{own}weight"] = ids[chosen], weight[chosen.to(weight.device)]
            foreign = int((chosen & ~owned).sum())
            if foreign:
                problems.append(
                    f"table {config.name!r}: rank {exchange.rank} of {exchange.world_size} does not own {foreign} of "
                    "its ids: load the state dict that this rank saved, with as many ranks and the same home="
                )
        return problems

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.copy(self)


def _local_config(table: TableConfig, placement: Placement, world_size: int) -> TableConfig:
    """Returns the config of a table's shard on one rank: a hash table with one feature for each rank."""
    rows: dict[str, Any] = {name: placement.max_own_rows(n) for name, n in table.marked(DIVIDED).items() if n}
    return dataclasses.replace(
        table,
        num_features=world_size,
        pooling=Pooling.NONE,
        hashed=True,
        init_min=table.shard_init_range[0],
        init_max=table.shard_init_range[1],
        init_fn=table.init_fn if table.hashed else None,
        lifecycle=table.lifecycle and table.lifecycle.part(placement.local_bound),
        **rows,
    )


def _local_cache_option(source: TableBatchedEmbedding, placements: Sequence[Placement]) -> CacheOption:
    """Returns the cache option of one rank: at most as many rows of each table as the rank can own."""
    option = source.options.cache
    if not isinstance(option, (numbers.Integral, Mapping)) or isinstance(option, bool):
        return option
    sizes = {}
    for table, placement in zip(source.tables, placements, strict=True):
        size = option.get(table.name) if isinstance(option, Mapping) else int(option)
        if size is None:
            continue
        bounded = not table.hashed or table.capacity or not placement.share
        if isinstance(size, numbers.Integral) and bounded:
            size = min(int(size), placement.max_own_rows(table.num_embeddings))
        sizes[table.name] = size
    return sizes
