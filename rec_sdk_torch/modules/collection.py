"""The part that all collections share: handles, optimizers, and batches from KeyedJaggedTensors."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.optim.fused import EmptyFusedOptimizer, FusedOptimizerModule
from torchrec.optim.keyed import KeyedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from ..formulas import spec_for
from ..optim.clipping import look_for_tables
from ..optim.fused import EmbCacheFusedOptimizer
from ..optim.handles import TableHandle, TableParameter, module_dict
from ..optim.norms import GradientNorms, gradient_norms
from ..optim.requests import share_options, table_optimizers
from ..runtime.eager import check_batch, eager
from ..sparse.jagged_tensor_with_timestamp import clicks_of, timestamps_of
from ..tbe import EvictedRows, TableBatchedEmbedding, TableOptimizer
from ..tbe.cache.batch import Batch, Int64Array, meta_error
from ..tbe.config.life import Seen
from ..tbe.options import Scaler
from ..tbe.rows.gradients import TableGradient, add_to_rows, take_gradients
from ..tbe.rows.state_dict import TablesModule, load_tables
from ..tbe.rows.table_view import fill_tables
from ..tbe.step.prefetch_queue import Prefetched
from .bags import Bags
from .configs import feature_names
from .data_parallel import keep_tables_out
from .html import tables_html
from .quantization import refuse_tables


class CachedCollection(FusedOptimizerModule, TablesModule):
    """Base of the collections: tables of one table-batched embedding, seen through KeyedJaggedTensors.

    Attributes:
        embedding: has the rows.
        configs: of the tables, as given.
        handles_name: of the module that holds the tables' handles.
        output_names: of the outputs, in order.
        feature_keys: the place in the batch of each feature of each table, int64 `[F]`; of the latest batch.
    """

    handles_name = "embeddings"
    _is_weighted = False
    embedding: TableBatchedEmbedding

    def __init__(
        self,
        configs: Sequence[BaseEmbeddingConfig],
        embedding: TableBatchedEmbedding,
        embedding_optimizer_cls: type | None,
    ) -> None:
        super().__init__()
        if embedding_optimizer_cls is not None:
            spec_for(embedding_optimizer_cls)
        self.configs = list(configs)
        # Not a submodule: its tables are those of the handles, and would be in a state dict twice.
        self.__dict__["embedding"] = embedding
        self._feature_names = [name for config in configs for name in feature_names(config)]
        self._names_by_table = self._embedding_names()
        self.output_names = [name for names in self._names_by_table for name in names]
        keep_tables_out()
        look_for_tables()
        refuse_tables()
        handles = {table.name: TableHandle(embedding, table, embedding_optimizer_cls) for table in embedding.tables}
        self.add_module(self.handles_name, module_dict(handles))
        lives = [table.life for table in embedding.tables if table.life is not None]
        self._needs_clicks = any(life.needs_clicks for life in lives)
        self._needs_timestamps = any("timestamp" in life.columns() for life in lives)
        self._needs_seen = self._needs_clicks or self._needs_timestamps
        self._seen_keys: list[str] | None = None
        self.feature_keys: Int64Array = np.empty(0, np.int64)
        self._table_optimizers: dict[str, TableOptimizer] = {}
        self._applied: list[list[type]] = []
        self._fused_optimizer: KeyedOptimizer | None = None

    def _embedding_names(self) -> list[list[str]]:
        """Output names by table: the feature's, or `feature@table` for one that several tables share."""
        count: dict[str, int] = {}
        for name in self._feature_names:
            count[name] = count.get(name, 0) + 1
        return [
            [name if count[name] == 1 else f"{name}@{config.name}" for name in feature_names(config)]
            for config in self.configs
        ]

    def embedding_names_by_table(self) -> list[list[str]]:
        """Output names of each table."""
        return self._names_by_table

    def is_weighted(self) -> bool:
        """Whether bags are sums weighted per sample."""
        return self._is_weighted

    def embedding_dim(self) -> int:
        """D of the tables.

        Raises:
            ValueError: the tables have several.
        """
        dims = sorted({config.embedding_dim for config in self.configs})
        if len(dims) > 1:
            raise ValueError(f"the tables have embedding dims {dims}, not one")
        return int(dims[0])

    def table_handles(self) -> dict[str, TableHandle]:
        """Returns the handles of the tables by name."""
        return dict(self._modules[self.handles_name].items())  # type: ignore[union-attr,operator]

    def table_parameters(self) -> dict[str, TableParameter]:
        """Returns the parameters of the tables by name."""
        return {name: handle.weight for name, handle in self.table_handles().items()}

    # ---- optimizers

    def sync_optimizers(self) -> None:
        """Hands the engine the optimizers that were applied to the handles since the last call."""
        if self._applied and sum(map(len, self._applied)) == len(self._applied):
            return
        handles = self.table_parameters()
        found = table_optimizers({n: h for n, h in handles.items() if n not in self._table_optimizers})
        for name, optimizer in self._table_optimizers.items():
            # Raises if the table was given a second, different optimizer meanwhile.
            table_optimizers({name: handles[name]})
            share_options(handles[name], optimizer)
        places = {table.name: index for index, table in enumerate(self.embedding.tables)}
        self.embedding.set_optimizers({places[name]: optimizer for name, optimizer in found.items()})
        self._table_optimizers.update(found)
        if found:
            self._fused_optimizer = None
        if len(self._table_optimizers) == len(handles):
            self._applied = [handle.__dict__["_optimizer_classes"] for handle in handles.values()]

    @property
    @eager
    def fused_optimizer(self) -> KeyedOptimizer:
        """The tables' optimizer as a TorchRec `KeyedOptimizer`; an empty one while none was applied."""
        self.sync_optimizers()
        if self._fused_optimizer is None:
            params = {
                f"{self.handles_name}.{name}.weight": handle
                for name, handle in self.table_parameters().items()
                if name in self._table_optimizers
            }
            if not params:
                return EmptyFusedOptimizer()
            self._fused_optimizer = EmbCacheFusedOptimizer(self.embedding, params, self._table_optimizers)
        return self._fused_optimizer

    def set_grad_scaler(self, scaler: Scaler | None) -> None:
        """Tells which `torch.amp.GradScaler` scales the losses, see `TableBatchedEmbedding.set_grad_scaler`."""
        self.embedding.set_grad_scaler(scaler)

    @property
    def skipped_updates(self) -> int:
        """Updates skipped because scaled gradients overflowed."""
        return self.embedding.skipped_updates

    def count_grad_norms(self, on: bool = True) -> None:
        """Lets updates count norms for `grad_norm`, or no more; see `TableBatchedEmbedding.count_grad_norms`."""
        self.embedding.count_grad_norms(on)

    @property
    def counts_grad_norms(self) -> bool:
        """Whether updates count norms for `grad_norm`."""
        return self.embedding.counts_grad_norms

    def grad_norm(self, norm_type: float = 2.0, *, local: bool = False) -> GradientNorms:
        """Norms of gradients: of each table, and of all together. Tables without a gradient have 0.

        With `update="step"` they are those of the gradients that wait for `step()`; with `update="backward"`, after
        `count_grad_norms()`, those of the last update, see `TableBatchedEmbedding.counted_norms`. Where ranks have
        divided the tables, the norms are those of the rows of all ranks, which all have to call it. The host waits for
        the device.

        Args:
            norm_type: p of the norm; `float("inf")` is that of the largest element. Updates count these two.
            local: of the rows of this rank alone, which no other rank has to ask for.

        Raises:
            RuntimeError: gradients are used up in the backward pass, and nothing counts their norms.
            ValueError: with `update="backward"`, another norm than 2 and infinity.
        """
        return gradient_norms(self.table_parameters(), self.embedding, norm_type, local)

    # ---- batches

    def _batch(self, features: KeyedJaggedTensor, weighted: bool) -> tuple[Bags, Batch]:
        """`features`, and as the planner reads it.

        Raises:
            ValueError: a feature that a table needs is missing, or weights are; lengths that do not fit the keys; a
                tensor on the meta device.
            TypeError: ids that are neither int32 nor int64.
            RuntimeError: a tracer's stand-in for a batch, or any in a function that torch.func transforms.
        """
        bags = self.checked_bags(features)
        features, weights = bags.features, None
        if weighted:
            weights = features.weights_or_none()
            if weights is None:
                raise ValueError("the collection is weighted (is_weighted=True), the batch has no weights")
            if weights.is_meta:
                raise meta_error("per-sample weights")
            weights = weights.to(device=self.embedding.device)
        if self.training and torch.is_grad_enabled():
            self.sync_optimizers()
        seen = self.id_signals(features) if self._needs_seen else None
        batch = self.embedding.queue.batch(
            features, features.values(), bags.offsets, bags.size, self.feature_keys, weights, seen=seen
        )
        return bags, batch

    def id_signals(self, features: KeyedJaggedTensor) -> Seen | None:
        """The facts about the ids of a training batch that the tables admit and evict by."""
        if not self._needs_seen or not self.training or not torch.is_grad_enabled():
            return None
        clicks = clicks_of(features) if self._needs_clicks else None
        return Seen(None, clicks, timestamps_of(features) if self._needs_timestamps else None)

    def checked_bags(self, features: KeyedJaggedTensor) -> Bags:
        """Returns the bags of a batch, and finds its features in it: `feature_keys`; for errors see `_batch`."""
        if type(features) is not KeyedJaggedTensor:
            features = maybe_td_to_kjt(features, None)
            if isinstance(features, dict) or not hasattr(features, "keys"):  # a tracer's stand-in has every attribute
                raise TypeError(f"a batch is a {type(features).__name__}, expected a KeyedJaggedTensor")
        keys = features.keys()
        if keys != self._seen_keys:
            self._match_keys(keys)
        check_batch(features.values())
        bags = Bags.of(features, len(keys))
        if bags.sizes is not None and self.embedding.pooled:
            bags.check_pooled()
        return bags

    def prefetch(self, features: KeyedJaggedTensor, *, depth: int | None = None) -> Prefetched:
        """Plans the batch of a training forward to come, and starts to bring its rows in; in another thread.

        The forward finds the plan by itself, whether it is given `features`, a copy, or the same ids on a device.
        Batches come in the order in which they were prefetched, and results are those without prefetching. Nothing is
        planned before the first training forward, nor in evaluation mode. The ids must not be written to before the
        forward. `rec_sdk_torch.prefetch` calls this for a whole model.

        Args:
            features: of the batch.
            depth: as of `rec_sdk_torch.prefetch`: the batch is planned beside so many others at the most.

        Raises:
            RuntimeError: 16 batches are prefetched already.
            ValueError: as in the forward.
        """
        bags = self.checked_bags(features)
        prefetched = Prefetched(
            bags.features.values(),
            bags.offsets,
            bags.size,
            self.feature_keys,
            self._is_weighted,
            source=bags.features,
            seen=self.id_signals(bags.features),
            depth=depth,
        )
        self.embedding.queue.add(prefetched)
        return prefetched

    def forget(self, prefetched: Prefetched | None = None) -> None:
        """Forgets a batch that was prefetched, or all of them when None: their forward will not come, or is over."""
        self.embedding.forget(prefetched)

    def wait_for_plans(self) -> None:
        """Waits until the prefetched batches are planned, as far as they can be now."""
        self.embedding.queue.wait()

    def _match_keys(self, keys: list[str]) -> None:
        place = {key: index for index, key in enumerate(keys)}
        missing = sorted(set(self._feature_names) - place.keys())
        if missing:
            tables = [c.name for c in self.configs if set(feature_names(c)) & set(missing)]
            raise ValueError(f"the batch lacks features {missing} that tables {tables} need; it has {keys}")
        self.feature_keys = np.array([place[name] for name in self._feature_names], np.int64)
        self._seen_keys = list(keys)

    def set_evict_step_interval(self, steps: int | None) -> None:
        """Training steps between evictions of ids, see `TableBatchedEmbedding.set_evict_step_interval`."""
        self.embedding.set_evict_step_interval(steps)

    def freeze(self, *tables: str) -> None:
        """Lets training only read some tables, or all if none is named, see `TableBatchedEmbedding.freeze`.

        `requires_grad_(False)` on a table's parameter does the same.
        """
        self.sync_optimizers()
        self.embedding.freeze(*tables)

    def thaw(self, *tables: str) -> None:
        """Ends `freeze`, see `TableBatchedEmbedding.thaw`."""
        self.embedding.thaw(*tables)

    def warm(self, table: str, ids: torch.Tensor) -> int:
        """Brings rows that will be hot to the device cache, hottest first, see `TableView.warm`; how many came.

        `Saver.load` does so by itself; after a `load_state_dict` it is not known which rows were hot.
        """
        self.sync_optimizers()
        return self.embedding.view(table).warm(ids)

    def evict(self, table: str) -> int:
        """Takes out the ids of a table that its rules choose now, see `TableView.evict`."""
        self.sync_optimizers()
        return self.embedding.view(table).evict()

    def take_evicted(self, table: str, at_most: int | None = None) -> EvictedRows:
        """Hands out rows that left a table with `keep_evicted`, each once, see `TableView.take_evicted`."""
        self.sync_optimizers()
        return self.embedding.view(table).take_evicted(at_most)

    def put_back(self, table: str, rows: EvictedRows, *, overwrite: bool = True) -> int:
        """Makes rows that left a table rows of it again, see `TableView.put_back`; how many."""
        self.sync_optimizers()
        return self.embedding.view(table).put_back(rows, overwrite=overwrite)

    def clocks(self, table: str) -> dict[str, int]:
        """Reads the clocks that a table's rules go by, see `TableView.clocks`."""
        self.sync_optimizers()
        return self.embedding.view(table).clocks()

    def set_clocks(self, table: str, clocks: Mapping[str, int]) -> None:
        """Corrects the clocks that a table's rules go by, see `TableView.set_clocks`."""
        self.sync_optimizers()
        self.embedding.view(table).set_clocks(clocks)

    # ---- rows

    def reset_parameters(self) -> None:
        """Draws all rows anew: weights and states are as at first, hash tables know no id, open windows are dropped.

        Weights depend on seed, table and id: they are those that the collection began with, but for an `init_fn`.

        Raises:
            RuntimeError: batches in flight use rows.
        """
        layout = self.embedding.layout
        if not layout.built:
            return  # no row was drawn yet
        self.sync_optimizers()
        with self.embedding.exclusive():
            layout.drop_windows()
            for table in layout.tables:
                self.embedding.view(table.name).begin_anew()
            self._fill_rows()

    def _fill_rows(self) -> None:
        """Fills index tables that have an `init_fn`."""
        fill_tables(self.embedding.layout)

    # ---- inspection

    @property
    def device(self) -> torch.device:
        """The compute device, where the cache lives."""
        return self.embedding.device

    @property
    def cache_sizes(self) -> dict[str, int]:
        """Rows of each table that the device cache holds."""
        self.sync_optimizers()
        return self.embedding.cache_sizes

    def cache_stats(self, table: str | None = None) -> dict[str, int]:
        """Exact counters, see `TableBatchedEmbedding.cache_stats`."""
        return self.embedding.cache_stats(table)

    def memory_report(self, table: str | None = None) -> dict[str, int]:
        """Bytes on device and host, see `TableBatchedEmbedding.memory_report`."""
        return self.embedding.memory_report(table)

    def reset_cache_stats(self) -> None:
        """Sets every counter of `cache_stats` to zero."""
        self.embedding.reset_cache_stats()

    def table_ids(self, table: str) -> torch.Tensor:
        """Ids of a hash table in order of arrival, or an index table's row numbers; int64 `[n]`."""
        return torch.from_numpy(self.embedding.table_ids(table))

    def take_gradients(self) -> dict[str, TableGradient]:
        """The gradients that tables with the optimizer SparseGradients have summed since the last call, by table.

        Raises:
            RuntimeError: no table has it.
        """
        return take_gradients(self.embedding.layout)

    def add_to_rows(self, table: str, ids: torch.Tensor, change: torch.Tensor) -> None:
        """Adds `change` `[n, D]` to the weights of the rows of `ids`, int64 `[n]`, each once.

        Raises:
            KeyError: an id is no row of the table, or there is no such table; nothing was changed.
            ValueError: shapes that do not fit, or an id that is there twice.
        """
        add_to_rows(self.embedding.layout, table, ids, change)

    def _repr_html_(self) -> str:
        """A line for each table, for notebooks."""
        return tables_html(type(self).__name__, self.embedding)

    # ---- what torch.nn.Module does to modules

    def exclusive(self) -> AbstractContextManager[None]:
        return self.embedding.exclusive()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.embedding._apply(fn)  # first: `.half()` is refused before a handle was converted
        return super()._apply(fn, recurse)

    def train(self, mode: bool = True) -> Any:
        """As any module's."""
        self.embedding.train(mode)
        return super().train(mode)

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
        lists = missing_keys, unexpected_keys, error_msgs
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)
        tables = f"{prefix}{self.handles_name}."
        prefixes = {table.name: f"{tables}{table.name}." for table in self.embedding.tables}
        load_tables(self.embedding.layout, state_dict, tables, prefixes, self._strict, *lists)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        own = {name: copy.copy(value) for name, value in self.__dict__.items() if name != "embedding"}
        twin.__dict__.update(own)
        embedding = twin.__dict__["embedding"] = copy.deepcopy(self.embedding, memo)
        handles = {name: handle.twin(embedding, memo) for name, handle in self.table_handles().items()}
        twin._modules[self.handles_name] = module_dict(handles)
        pairs = zip(embedding.tables, embedding.optimizers, strict=True)
        twin._table_optimizers = {table.name: optimizer for table, optimizer in pairs if optimizer is not None}
        twin._applied, twin._fused_optimizer = [], None
        return twin
