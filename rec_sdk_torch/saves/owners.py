"""Finds the modules of a model that hold embedding tables, and the rows of each table that this rank owns."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from ..tbe import Int64Array, TableBatchedEmbedding, TableConfig, TableMethods, TableView

if TYPE_CHECKING:
    from ..distributed.collectives import Exchange
    from ..distributed.placement import Placement

_WRAPPERS = {"module", "_dmp_wrapped_module", "_orig_mod"}
"""Components of module paths that wrappers of the model add."""


@dataclass(eq=False)
class TableOwner:
    """A module of the model that holds tables, with the placement of their rows.

    Attributes:
        path: path of the module in the model, without the names that wrappers add.
        embedding: the table-batched embedding with this rank's rows.
        configs: configs of the whole tables, by name.
        placements: placements of the tables that are sharded or replicated, by name.
        exchange: exchange with the other ranks; None for a module that is not sharded.
    """

    path: str
    embedding: TableBatchedEmbedding
    configs: dict[str, TableConfig]
    placements: dict[str, Placement] = field(default_factory=dict)
    exchange: Exchange | None = None

    def owned(self, table: str, ids: Int64Array) -> np.ndarray | slice:
        """Returns which of `ids` this rank owns: a mask `[n]`, or a full slice if it owns all of them."""
        return slice(None) if self.exchange is None else self.placements[table].owns(ids)

    def is_sharded(self, table: str) -> bool:
        """Returns whether the table's rows are divided among ranks, that is, neither local nor replicated."""
        return self.exchange is not None and not self.placements[table].replicated

    def writes_rows(self, table: str) -> bool:
        """Returns whether this rank writes rows of the table into a save; of a replicated table, only rank 0 does."""
        return self.exchange is None or self.exchange.rank == 0 or self.is_sharded(table)

    def check_replicas(self) -> None:
        """Checks that all ranks applied the same updates to replicated tables (collective).

        Only collections whose updates are applied by `step()` are checked.

        Raises:
            ValueError: the updates, and thus the rows, differ between ranks; raised on all ranks.
        """
        layout = self.embedding.layout
        if self.exchange is not None and layout.replicated and layout.options.updates_at_step:
            changes, compared = layout.pending_gradients.applied_checksums(), {}
            for name in sorted(layout.replicated):
                optimizer = layout.optimizer_of(name)
                compared[name] = {"step": repr(optimizer and optimizer.step), **changes.get(name, {})}
            self.exchange.check_same("saves", compared)

    def ids(self, view: TableView) -> Iterator[Int64Array]:
        """Yields the ids of all rows of a table that this rank owns, in chunks.

        The caller must hold `exclusive()` of the embedding until the iterator is exhausted.
        """
        config = self.configs[view.config.name]
        if config.hashed == view.config.hashed:
            yield from view.id_chunks()
            return
        rows = view.chunk_rows()  # as a hash table, the shard lists only ids that were looked up
        for begin in range(0, config.num_embeddings, rows):
            ids = np.arange(begin, min(begin + rows, config.num_embeddings), dtype=np.int64)
            yield ids[self.owned(config.name, ids)]

    def count(self, view: TableView) -> int:
        """Returns the number of rows of a table that this rank owns. The caller must hold `exclusive()`."""
        config = self.configs[view.config.name]
        if config.hashed == view.config.hashed:
            return view.row_count()
        return sum(len(ids) for ids in self.ids(view))


def _as_owner(path: str, module: torch.nn.Module) -> TableOwner | None:
    if isinstance(module, TableBatchedEmbedding):
        return TableOwner(path, module, {table.name: table for table in module.tables})
    # The classes are not imported here, which would import TorchRec: a model that uses them has imported them.
    sharded: Any = sys.modules.get("rec_sdk_torch.distributed.sharded")
    if sharded is not None and isinstance(module, sharded.ShardedCollection):
        tables = module.tables
        placements = {table.name: place for table, place in zip(tables.configs, tables.placements, strict=True)}
        configs = {table.name: table for table in tables.configs}
        return TableOwner(path, module.embedding, configs, placements, module.exchange)
    collection: Any = sys.modules.get("rec_sdk_torch.modules.collection")
    if collection is not None and isinstance(module, collection.CachedCollection):
        return TableOwner(path, module.embedding, {table.name: table for table in module.embedding.tables})
    return None


def table_owners(model: torch.nn.Module) -> list[TableOwner]:
    """Returns the modules of a model that hold tables, one for each embedding, and attaches the assigned optimizers.

    Raises:
        ValueError: `model` is not a module, or has no tables.
        RuntimeError: a table is on the meta device.
    """
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"module is {model!r}, expected a torch.nn.Module")
    found: dict[int, TableOwner] = {}
    for path, module in model.named_modules():
        plain = ".".join(part for part in path.split(".") if part not in _WRAPPERS)
        owner = _as_owner(plain, module)
        if owner is not None and id(owner.embedding) not in found:
            owner.embedding.layout.check_not_meta()
            cast(TableMethods, module).sync_optimizers()
            found[id(owner.embedding)] = owner
    if not found:
        raise ValueError(f"{type(model).__name__} has no embedding tables of rec_sdk_torch: nothing to save or load")
    return list(found.values())
