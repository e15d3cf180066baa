"""The tables on a rank of a sharded collection, with the methods that the unsharded collection has for its tables."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.optim.keyed import KeyedOptimizer

from ..modules.html import tables_html
from ..optim.norms import GradientNorms
from ..tbe import EvictedRows
from ..tbe.options import Scaler
from ..tbe.rows.given import check_left
from ..tbe.rows.gradients import TableGradient
from .collectives import Exchange
from .dedup import Tables
from .local_shard import HomeTables


class RankTables:
    """The part of a sharded collection that needs no other rank.

    Attributes:
        home: the rows of this rank.
        exchange: with the other ranks.
        tables: the whole tables, and where their rows are.
    """

    home: HomeTables
    exchange: Exchange
    tables: Tables
    _is_weighted: bool
    _need_indices: bool

    # ---- what the tables are

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The configs of sequence tables, as given: of whole tables."""
        return [config for config in self.home.configs if isinstance(config, EmbeddingConfig)]

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The configs of pooled tables, as given: of whole tables."""
        return [config for config in self.home.configs if isinstance(config, EmbeddingBagConfig)]

    def embedding_names_by_table(self) -> list[list[str]]:
        """Output names of each table."""
        return self.home.embedding_names_by_table()

    def embedding_dim(self) -> int:
        """D of the tables.

        Raises:
            ValueError: the tables have several.
        """
        return self.home.embedding_dim()

    def is_weighted(self) -> bool:
        """Whether bags are sums weighted per sample."""
        return self._is_weighted

    def need_indices(self) -> bool:
        """Whether outputs carry their ids as weights."""
        return self._need_indices

    def table_ids(self, table: str) -> torch.Tensor:
        """Ids of a table on this rank: of a hash table in order of arrival, of an index table all rows; int64 `[n]`.

        Raises:
            KeyError: there is no such table.
        """
        return self.home.table_ids(table)

    def reset_parameters(self) -> None:
        """Draws all rows of this rank anew, see the unsharded collection's. All ranks should call it."""
        self.home.reset_parameters()

    # ---- figures

    @property
    def cache_sizes(self) -> dict[str, int]:
        """Rows of each table that this rank's device cache holds."""
        return self.home.cache_sizes

    def cache_stats(self, table: str | None = None) -> dict[str, int]:
        """Counts of this rank's tables, see `TableBatchedEmbedding.cache_stats`."""
        return self.home.cache_stats(table)

    def reset_cache_stats(self) -> None:
        """Sets every counter of `cache_stats` to zero."""
        self.home.reset_cache_stats()

    def memory_report(self, table: str | None = None) -> dict[str, int]:
        """Bytes of this rank's tables, see `TableBatchedEmbedding.memory_report`."""
        return self.home.memory_report(table)

    def _repr_html_(self) -> str:
        """A line for each table, for notebooks: its rows on this rank."""
        return tables_html(f"{type(self).__name__}, rank {self.exchange.rank}", self.home.embedding)

    # ---- tables that training only reads

    def freeze(self, *tables: str) -> None:
        """Lets training only read some tables, see the unsharded collection's. All ranks have to call it."""
        self.home.freeze(*tables)

    def thaw(self, *tables: str) -> None:
        """Ends `freeze`. All ranks have to call it."""
        self.home.thaw(*tables)

    # ---- the device cache

    def warm(self, table: str, ids: torch.Tensor) -> int:
        """Brings rows that are at home on this rank to its cache, see the unsharded collection's; how many came.

        Ranks may call it with the same `ids`: those of other ranks are passed over.
        """
        return self.home.warm(table, ids)

    # ---- eviction of ids

    def set_evict_step_interval(self, steps: int | None) -> None:
        """Training steps between evictions of ids, see `TableBatchedEmbedding.set_evict_step_interval`."""
        self.home.set_evict_step_interval(steps)

    def evict(self, table: str) -> int:
        """Takes out the ids of this rank that the table's rules choose now; how many those were."""
        return self.home.evict(table)

    def take_evicted(self, table: str, at_most: int | None = None) -> EvictedRows:
        """Hands out rows that left a table on this rank, each once, see `TableView.take_evicted`."""
        return self.home.take_evicted(table, at_most)

    def put_back(self, table: str, rows: EvictedRows, *, overwrite: bool = True) -> int:
        """Makes rows that left a table on any rank rows of it again, see `TableView.put_back`; how many on this rank.

        Ranks may call it with the same `rows`: those that are at home on other ranks are passed over.
        """
        config = self.home.embedding.view(table).config  # KeyError: there is no such table
        check_left(table, rows)
        placement = self.tables.placements[self.home.embedding.tables.index(config)]
        owners = placement.owner(rows.ids.detach().cpu().numpy())
        return self.home.put_back(table, rows[torch.from_numpy(owners == self.exchange.rank)], overwrite=overwrite)

    def clocks(self, table: str) -> dict[str, int]:
        """Reads the clocks of a table on this rank, see `TableView.clocks`."""
        return self.home.clocks(table)

    def set_clocks(self, table: str, clocks: Mapping[str, int]) -> None:
        """Corrects the clocks of a table on this rank, see `TableView.set_clocks`. All ranks should call it."""
        self.home.set_clocks(table, clocks)

    # ---- gradients that are handed out

    def take_gradients(self) -> dict[str, TableGradient]:
        """Gradients of this rank's rows, from the lookups of all ranks, see the unsharded collection's."""
        return self.home.take_gradients()

    def add_to_rows(self, table: str, ids: torch.Tensor, change: torch.Tensor) -> None:
        """Adds to rows that are at home on this rank, see the unsharded collection's."""
        self.home.add_to_rows(table, ids, change)

    # ---- optimizers

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """The optimizer of this rank's rows, as the unsharded collection's."""
        return self.home.fused_optimizer

    def set_grad_scaler(self, scaler: Scaler | None) -> None:
        """Tells which `torch.amp.GradScaler` scales the losses, see `TableBatchedEmbedding.set_grad_scaler`."""
        self.home.set_grad_scaler(scaler)

    def count_grad_norms(self, on: bool = True) -> None:
        """Lets updates count norms of gradients, see the unsharded collection's. All ranks have to call it."""
        self.home.count_grad_norms(on)

    @property
    def counts_grad_norms(self) -> bool:
        """Whether updates count norms of gradients."""
        return self.home.counts_grad_norms

    def grad_norm(self, norm_type: float = 2.0, *, local: bool = False) -> GradientNorms:
        """Norms of gradients over ranks, which all have to call it unless `local`; see the unsharded collection's."""
        return self.home.grad_norm(norm_type, local=local)

    @property
    def skipped_updates(self) -> int:
        """Updates skipped because scaled gradients overflowed, on some rank."""
        return self.home.skipped_updates

    def exclusive(self) -> AbstractContextManager[None]:
        """Keeps other threads of this rank from planning, reading or updating."""
        return self.home.exclusive()
