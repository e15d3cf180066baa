"""Methods of collections and their shards, beside the methods of every module with tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingBagConfig, EmbeddingConfig

from ..optim.handles import Ranks, TableHandle, TableParameter
from ..optim.norms import GradientNorms, combined_norm, pending_norms
from ..tbe import TableBatchedEmbedding, TableMethods


class CollectionMethods(TableMethods):
    """Methods of collections, and of their shards.

    Attributes:
        embedding: has the rows; of a sharded collection, those of this rank.
        configs: of the whole tables, as given.
        names_by_table: of the outputs.
        handles_name: of the module that holds the tables' handles.
    """

    embedding: TableBatchedEmbedding
    configs: Sequence[BaseEmbeddingConfig]
    names_by_table: list[list[str]]
    handles_name = "embeddings"
    _modules: dict[str, torch.nn.Module | None]
    _is_weighted = False

    # ---- what the tables are

    def embedding_names_by_table(self) -> list[list[str]]:
        """Returns the output names of each table."""
        return self.names_by_table

    def is_weighted(self) -> bool:
        """Whether bags are sums weighted per sample."""
        return self._is_weighted

    def embedding_dim(self) -> int:
        """Returns D of the tables.

        Raises:
            ValueError: the tables have several.
        """
        dims = sorted({config.embedding_dim for config in self.configs})
        if len(dims) > 1:
            raise ValueError(f"the tables have embedding dims {dims}, not one")
        return int(dims[0])

    def table_handles(self) -> dict[str, TableHandle]:
        """Returns the handles of the tables by name."""
        handles: Any = self._modules[self.handles_name]
        return dict(handles.items())

    def table_parameters(self) -> dict[str, TableParameter]:
        """Returns the parameters of the tables by name."""
        return {name: handle.weight for name, handle in self.table_handles().items()}

    def table_ids(self, table: str) -> torch.Tensor:
        """Returns the ids of a hash table in order of arrival, or an index table's row numbers; int64 `[n]`.

        A sharded table has the ids of this rank.

        Raises:
            KeyError: there is no such table.
        """
        return self.table_handles()[self.embedding.layout.config(table).name].known_ids()

    # ---- optimizers

    def grad_norm(self, norm_type: float = 2.0, *, local: bool = False) -> GradientNorms:
        """Returns norms of gradients: of each table, and of all together. Tables without a gradient have 0.

        With `update="step"` the gradients that wait for `step()` count; with `update="backward"`, after
        `count_grad_norms()`, the gradients of the last update, see `counted_norms`. Where ranks have divided the
        tables, the rows of all ranks count, and all ranks have to call it. The host waits for the device.

        Args:
            norm_type: p of the norm; `float("inf")` gives the largest element. Updates count these two.
            local: of the rows of this rank alone, which no other rank has to ask for.

        Raises:
            RuntimeError: gradients are used up in the backward pass, and nothing counts their norms.
            ValueError: with `update="backward"`, another norm than 2 and infinity.
        """
        handles, at_step = self.table_parameters(), self.embedding.options.updates_at_step
        own = pending_norms(handles, norm_type) if at_step else self.counted_norms(norm_type)
        tables = {name: own[name] for name in handles}
        divided: dict[Ranks, list[str]] = {}
        for name, handle in handles.items():
            if handle.ranks is not None and not local:
                divided.setdefault(handle.ranks, []).append(name)
        for ranks, names in divided.items():
            of_ranks = ranks.gather_numbers([tables[name] for name in names], "norms of gradients")
            tables |= {name: combined_norm(each, norm_type) for name, *each in zip(names, *of_ranks, strict=True)}
        return GradientNorms(combined_norm(tables.values(), norm_type), tables)

    # ---- rows and batches

    def reset_parameters(self) -> None:
        """Draws all rows anew: weights and states are as at first, hash tables know no id, open windows are dropped.

        Weights depend on seed, table and id: they are those that the collection began with, but for an `init_fn`. All
        ranks should call it.

        Raises:
            RuntimeError: batches in flight use rows.
        """
        layout = self.embedding.layout
        if not layout.built:
            return  # no row was drawn yet
        self.sync_optimizers()
        with self.exclusive():
            layout.drop_windows()
            for table in layout.tables:
                self.embedding.view(table.name).reset()
            layout.fill(layout)

    def wait_for_plans(self) -> None:
        """Waits until the prefetched batches are planned, as far as they can be now."""
        self.embedding.queue.wait()


class SequenceTables:
    """TorchRec's names for what sequence tables are.

    Attributes:
        configs: of the tables.
    """

    configs: Sequence[BaseEmbeddingConfig]
    _need_indices: bool

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Returns the configs of sequence tables, as given: of whole tables."""
        return [config for config in self.configs if isinstance(config, EmbeddingConfig)]

    def need_indices(self) -> bool:
        """Whether outputs carry their ids as weights."""
        return self._need_indices


class PooledTables:
    """TorchRec's name for what pooled tables are.

    Attributes:
        configs: of the tables.
    """

    configs: Sequence[BaseEmbeddingConfig]

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Returns the configs of pooled tables, as given: of whole tables."""
        return [config for config in self.configs if isinstance(config, EmbeddingBagConfig)]
