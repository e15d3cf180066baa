"""Base class of the collections: table parameters, optimizers, and batches from KeyedJaggedTensors."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.optim.fused import EmptyFusedOptimizer, FusedOptimizerModule
from torchrec.optim.keyed import KeyedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from ..formulas import spec_for
from ..optim.clipping import wrap_clipping
from ..optim.fused import EmbCacheFusedOptimizer
from ..optim.handles import TableHandle, module_dict
from ..optim.optimizer_assignments import share_options, table_optimizers
from ..runtime.eager import check_batch, eager
from ..sparse.jagged_tensor_with_timestamp import clicks_of, timestamps_of
from ..tbe import (
    Batch,
    IdSignals,
    Int64Array,
    Prefetched,
    TableBatchedEmbedding,
    TableOptimizer,
    TablesModule,
    load_tables,
    meta_error,
)
from .bags import Bags
from .collection_methods import CollectionMethods
from .configs import feature_names
from .data_parallel import exclude_tables
from .quantization import refuse_quantization


class CachedCollection(CollectionMethods, FusedOptimizerModule, TablesModule):
    """Base class of the collections: the tables of one table-batched embedding, looked up by KeyedJaggedTensors.

    Attributes:
        output_names: names of the outputs, in order.
        feature_keys: for each feature of each table, the index of its key in the latest batch, int64 `[F]`.
    """

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
        # Not a submodule: the handles save the tables already, so a state dict would contain the tables twice.
        self.__dict__["embedding"] = embedding
        self._feature_names = [name for config in configs for name in feature_names(config)]
        self.names_by_table = self._embedding_names()
        self.output_names = [name for names in self.names_by_table for name in names]
        exclude_tables()
        wrap_clipping()
        refuse_quantization()
        handles = {table.name: TableHandle(embedding, table, embedding_optimizer_cls) for table in embedding.tables}
        self.add_module(self.handles_name, module_dict(handles))
        lifecycles = [table.lifecycle for table in embedding.tables if table.lifecycle is not None]
        self._needs_clicks = any(lifecycle.needs_clicks for lifecycle in lifecycles)
        self._needs_timestamps = any("timestamp" in lifecycle.columns() for lifecycle in lifecycles)
        self._needs_signals = self._needs_clicks or self._needs_timestamps
        self._matched_keys: list[str] | None = None
        self.feature_keys: Int64Array = np.empty(0, np.int64)
        self._table_optimizers: dict[str, TableOptimizer] = {}
        self._applied_classes: list[list[type]] = []
        self._fused_optimizer: KeyedOptimizer | None = None

    def _embedding_names(self) -> list[list[str]]:
        """Returns each table's output names: the feature's name, or `feature@table` for a feature that tables share."""
        count: dict[str, int] = {}
        for name in self._feature_names:
            count[name] = count.get(name, 0) + 1
        return [
            [name if count[name] == 1 else f"{name}@{config.name}" for name in feature_names(config)]
            for config in self.configs
        ]

    # ---- optimizers

    def sync_optimizers(self) -> None:
        if self._applied_classes and sum(map(len, self._applied_classes)) == len(self._applied_classes):
            return
        handles = self.table_parameters()
        new = table_optimizers({n: h for n, h in handles.items() if n not in self._table_optimizers})
        for name, optimizer in self._table_optimizers.items():
            # This raises if a different optimizer was applied to the table in the meantime.
            table_optimizers({name: handles[name]})
            share_options(handles[name], optimizer)
        indices = {table.name: index for index, table in enumerate(self.embedding.tables)}
        self.embedding.set_optimizers({indices[name]: optimizer for name, optimizer in new.items()})
        self._table_optimizers.update(new)
        if new:
            self._fused_optimizer = None
        if len(self._table_optimizers) == len(handles):
            self._applied_classes = [handle.__dict__["_optimizer_classes"] for handle in handles.values()]

    @property
    @eager
    def fused_optimizer(self) -> KeyedOptimizer:
        """The optimizer of the tables as a TorchRec `KeyedOptimizer`, which is empty until an optimizer is applied."""
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

    # ---- batches

    def _make_batch(self, features: KeyedJaggedTensor, weighted: bool) -> tuple[Bags, Batch]:
        """Returns the bags of `features` and the batch for the planner.

        Raises:
            ValueError: a table's feature or the weights are missing; the number of lengths does not match the keys; or
                a tensor is on the meta device.
            TypeError: ids are neither int32 nor int64.
            RuntimeError: the batch is a tracer's proxy, or the call is inside a function transformed by torch.func.
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
        signals = self.id_signals(features) if self._needs_signals else None
        batch = self.embedding.queue.batch(
            features, features.values(), bags.offsets, bags.size, self.feature_keys, weights, signals=signals
        )
        return bags, batch

    def id_signals(self, features: KeyedJaggedTensor) -> IdSignals | None:
        """Returns a training batch's clicks and timestamps for admission and eviction; None if no table needs them."""
        if not self._needs_signals or not self.training or not torch.is_grad_enabled():
            return None
        clicks = clicks_of(features) if self._needs_clicks else None
        return IdSignals(None, clicks, timestamps_of(features) if self._needs_timestamps else None)

    def checked_bags(self, features: KeyedJaggedTensor) -> Bags:
        """Returns the bags of a batch and updates `feature_keys`; raises the errors that `_make_batch` lists."""
        if type(features) is not KeyedJaggedTensor:
            features = maybe_td_to_kjt(features, None)
            # A tracer's proxy passes this test, because it has every attribute; `check_batch` rejects it.
            if isinstance(features, dict) or not hasattr(features, "keys"):
                raise TypeError(f"a batch is a {type(features).__name__}, expected a KeyedJaggedTensor")
        keys = features.keys()
        if keys != self._matched_keys:
            self._match_keys(keys)
        check_batch(features.values())
        bags = Bags.of(features, len(keys))
        if bags.sizes is not None and self.embedding.pooled:
            bags.check_pooled()
        return bags

    def prefetch(self, features: KeyedJaggedTensor, *, depth: int | None = None) -> Prefetched:
        """Plans the batch of a later training forward and starts to fetch its missing rows, in another thread.

        The forward finds the plan by itself if it gets `features`, a copy, or the same ids on a device. Forwards must
        run in the order of the `prefetch` calls; results are the same as without prefetching. Nothing is planned before
        the first training forward, nor in evaluation mode. The caller must not modify the ids before the forward.
        `rec_sdk_torch.prefetch` calls this method for every collection of a model.

        Args:
            features: the batch.
            depth: maximum number of other batches that are planned together with this one; see
                `rec_sdk_torch.prefetch`.

        Raises:
            RuntimeError: 16 batches are already prefetched.
            ValueError: the batch is invalid, as in the forward.
        """
        bags = self.checked_bags(features)
        prefetched = Prefetched(
            bags.features.values(),
            bags.offsets,
            bags.size,
            self.feature_keys,
            self._is_weighted,
            source=bags.features,
            signals=self.id_signals(bags.features),
            depth=depth,
        )
        self.embedding.queue.add(prefetched)
        return prefetched

    def forget(self, prefetched: Prefetched | None = None) -> None:
        """Discards a prefetched batch whose forward has run or will not run; with None, discards all of them."""
        self.embedding.forget(prefetched)

    def _match_keys(self, keys: list[str]) -> None:
        index_of = {key: index for index, key in enumerate(keys)}
        missing = sorted(set(self._feature_names) - index_of.keys())
        if missing:
            tables = [c.name for c in self.configs if set(feature_names(c)) & set(missing)]
            raise ValueError(f"the batch lacks features {missing} that tables {tables} need; it has {keys}")
        self.feature_keys = np.array([index_of[name] for name in self._feature_names], np.int64)
        self._matched_keys = list(keys)

    # ---- methods of torch.nn.Module

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.embedding._apply(fn)  # first: it rejects `.half()` before a handle is converted
        return super()._apply(fn, recurse)

    def train(self, mode: bool = True) -> Any:
        """Sets training or evaluation mode of the collection and its tables."""
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
        handles = {name: handle.copy_for(embedding, memo) for name, handle in self.table_handles().items()}
        twin._modules[self.handles_name] = module_dict(handles)
        pairs = zip(embedding.tables, embedding.optimizers, strict=True)
        twin._table_optimizers = {table.name: optimizer for table, optimizer in pairs if optimizer is not None}
        twin._applied_classes, twin._fused_optimizer = [], None
        return twin
