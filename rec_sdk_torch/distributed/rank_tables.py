"""The tables on a rank of a sharded collection, with the methods that the unsharded collection has for its tables."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torchrec.optim.keyed import KeyedOptimizer

from ..modules.collection_methods import CollectionMethods, PooledTables, SequenceTables
from ..tbe import EvictedRows, Int64Array, check_left
from .collectives import Exchange
from .dedup import Tables
from .local_shard import HomeTables


class RankTables(SequenceTables, PooledTables, CollectionMethods):
    """The part of a sharded collection that needs no other rank: methods are about the rows of this rank.

    `freeze`, `thaw`, `count_grad_norms` and, without `local`, `grad_norm` have to be called on all ranks; so should
    `reset_parameters` and `set_clocks`.

    Attributes:
        home: the rows of this rank.
        exchange: with the other ranks.
        tables: the whole tables, and where their rows are.
    """

    home: HomeTables
    exchange: Exchange
    tables: Tables

    def sync_optimizers(self) -> None:
        self.home.sync_optimizers()

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """The optimizer of this rank's rows, as the unsharded collection's."""
        return self.home.fused_optimizer

    def put_back(self, table: str, rows: EvictedRows, *, overwrite: bool = True) -> int:
        self.embedding.layout.config(table)  # which raises for a name that is unknown
        check_left(table, rows)
        mine = torch.from_numpy(self.at_home(table, rows.ids.detach().cpu().numpy()))
        return super().put_back(table, rows[mine], overwrite=overwrite)

    def at_home(self, table: str, ids: Int64Array) -> npt.NDArray[np.bool_]:
        """Returns which of `ids` have their rows on this rank, bool `[n]`."""
        place = [config.name for config in self.tables.configs].index(table)
        return self.tables.placements[place].owns(ids)

    def _title(self) -> str:
        return f"{type(self).__name__}, rank {self.exchange.rank}"
