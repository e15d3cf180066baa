"""Methods that collections and sharded collections share, in addition to `TableMethods`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingBagConfig, EmbeddingConfig

from ..optim.handles import Ranks, TableHandle, TableParameter
from ..optim.norms import GradientNorms, combined_norm, pending_norms
from ..tbe import TableBatchedEmbedding, TableMethods


class CollectionMethods(TableMethods):
    """Methods of collections and sharded collections.

    Attributes:
        embedding: the table-batched embedding that holds the rows; in a sharded collection, the rows of this rank.
        configs: configs of the unsharded tables, as the user passed them.
        names_by_table: output names of each table.
        handles_name: name of the submodule that contains the tables' handles.
    """

    embedding: TableBatchedEmbedding
    configs: Sequence[BaseEmbeddingConfig]
    names_by_table: list[list[str]]
    handles_name = "embeddings"
    _modules: dict[str, torch.nn.Module | None]
    _is_weighted = False

    # ---- properties of the tables

    def embedding_names_by_table(self) -> list[list[str]]:
        """Returns the output names of each table."""
        return self.names_by_table

    def is_weighted(self) -> bool:
        """Returns whether each bag is a sum weighted by per-sample weights."""
        return self._is_weighted

    def embedding_dim(self) -> int:
        """Returns the number of columns, which is the same for all tables.

        Raises:
            ValueError: the tables have different numbers of columns.
        """
        dims = sorted({config.embedding_dim for config in self.configs})
        if len(dims) > 1:
            raise ValueError(f"the tables have embedding dims {dims}, not one")
        return int(dims[0])

    def table_handles(self) -> dict[str, TableHandle]:
        """Returns the handles of the tables, by table name."""
        handles: Any = self._modules[self.handles_name]
        return dict(handles.items())

    def table_parameters(self) -> dict[str, TableParameter]:
        """Returns the parameters of the tables, by table name."""
        return {name: handle.weight for name, handle in self.table_handles().items()}

    def table_ids(self, table: str) -> torch.Tensor:
        """Returns a hash table's ids in the order of their first lookup, or an index table's row numbers; int64 `[n]`.

        For a sharded table, returns the ids that this rank owns.

        Raises:
            KeyError: there is no such table.
        """
        return self.table_handles()[self.embedding.layout.config(table).name].known_ids()

    # ---- optimizers

    def grad_norm(self, norm_type: float = 2.0, *, local: bool = False) -> GradientNorms:
        """Returns the gradient norm of each table and of all tables together; 0 for tables without a gradient.

        With `update="step"` these are norms of the pending gradients. With `update="backward"`, they are norms of the
        gradients of the last update, which `count_grad_norms()` must have enabled; see `counted_norms`. For sharded
        tables the norms cover the rows of all ranks, and all ranks must call this method. The host waits for the
        device.

        Args:
            norm_type: p of the p-norm; `float("inf")` returns the largest absolute value. With `update="backward"`, 2
                or infinity.
            local: whether the norms cover only the rows of this rank; other ranks need not call the method then.

        Raises:
            RuntimeError: with `update="backward"`, `count_grad_norms()` was not called.
            ValueError: with `update="backward"`, `norm_type` is neither 2 nor infinity.
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
        """Resets all tables: initial weights and optimizer states, no ids in hash tables, empty accumulation buffers.

        Initial weights are a function of seed, table name and id, so they are the same as before, except with an
        `init_fn`. Pending gradients are discarded. All ranks should call this method.

        Raises:
            RuntimeError: batches in flight use rows.
        """
        layout = self.embedding.layout
        if not layout.built:
            return  # the first use will draw the rows
        self.sync_optimizers()
        with self.exclusive():
            layout.discard_gradients()
            for table in layout.tables:
                self.embedding.view(table.name).reset()
            layout.fill(layout)

    def wait_for_plans(self) -> None:
        """Blocks until every prefetched batch that can be planned now is planned."""
        self.embedding.queue.wait()


class SequenceTables:
    """Methods of TorchRec's interface for sequence tables.

    Attributes:
        configs: configs of the tables.
    """

    configs: Sequence[BaseEmbeddingConfig]
    _need_indices: bool

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Returns the configs of the unsharded tables, as the user passed them."""
        return [config for config in self.configs if isinstance(config, EmbeddingConfig)]

    def need_indices(self) -> bool:
        """Returns whether the outputs contain the looked-up ids, as their weights."""
        return self._need_indices


class PooledTables:
    """Methods of TorchRec's interface for pooled tables.

    Attributes:
        configs: configs of the tables.
    """

    configs: Sequence[BaseEmbeddingConfig]

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Returns the configs of the unsharded tables, as the user passed them."""
        return [config for config in self.configs if isinstance(config, EmbeddingBagConfig)]
