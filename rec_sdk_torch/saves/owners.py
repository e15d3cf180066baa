"""The tables of a model, wherever in it they are, and which of their rows this process has."""

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
"""Names in the path of a module that are there because something wraps the model."""


@dataclass(eq=False)
class TableOwner:
    """A table-batched embedding of a model.

    Attributes:
        path: of its module in the model, without wrappers.
        embedding: this process's rows.
        configs: of the whole tables, by name.
        placements: by name, of tables that are divided among ranks.
        exchange: with those ranks.
    """

    path: str
    embedding: TableBatchedEmbedding
    configs: dict[str, TableConfig]
    placements: dict[str, Placement] = field(default_factory=dict)
    exchange: Exchange | None = None

    def owned(self, table: str, ids: Int64Array) -> np.ndarray | slice:
        """Which of `ids` are at home in this process."""
        return slice(None) if self.exchange is None else self.placements[table].owns(ids)

    def is_sharded(self, table: str) -> bool:
        """Whether each rank has rows that no other has."""
        return self.exchange is not None and not self.placements[table].replicated

    def writes_rows(self, table: str) -> bool:
        """Whether this process writes rows of the table into a save: those that all ranks have, the first one does."""
        return self.exchange is None or self.exchange.rank == 0 or self.is_sharded(table)

    def check_replicas(self) -> None:
        """Compares the updates of tables that all ranks have, where `step()` makes them; all ranks must call it.

        Raises:
            ValueError: ranks have made other updates, so that their rows differ: on all of them.
        """
        layout = self.embedding.layout
        if self.exchange is not None and layout.replicated and layout.options.updates_at_step:
            changes, compared = layout.pending_gradients.applied_checksums(), {}
            for name in sorted(layout.replicated):
                optimizer = layout.optimizer_of(name)
                compared[name] = {"step": repr(optimizer and optimizer.step), **changes.get(name, {})}
            self.exchange.check_same("saves", compared)

    def ids(self, view: TableView) -> Iterator[Int64Array]:
        """Ids of all rows of a table that are at home here, some at a time; hold `exclusive()` meanwhile."""
        config = self.configs[view.config.name]
        if config.hashed == view.config.hashed:
            yield from view.id_chunks()
            return
        rows = view.chunk_rows()  # of an index table whose part is a hash table, which knows those it has met
        for begin in range(0, config.num_embeddings, rows):
            ids = np.arange(begin, min(begin + rows, config.num_embeddings), dtype=np.int64)
            yield ids[self.owned(config.name, ids)]

    def count(self, view: TableView) -> int:
        """How many `ids` gives."""
        config = self.configs[view.config.name]
        if config.hashed == view.config.hashed:
            return view.count()
        return sum(len(ids) for ids in self.ids(view))


def _as_owner(path: str, module: torch.nn.Module) -> TableOwner | None:
    if isinstance(module, TableBatchedEmbedding):
        return TableOwner(path, module, {table.name: table for table in module.tables})
    # A model can have what needs TorchRec only where these are imported.
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
    """The embeddings in a model, each once, with the optimizers that were applied.

    Raises:
        ValueError: no module, as of Rec SDK, or a model without tables.
        RuntimeError: tables on the meta device.
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
