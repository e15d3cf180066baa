"""Sharders that turn TorchRec's collections into cached tables with dynamicemb's options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import BaseEmbeddingSharder, EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingType
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, dtype_to_data_type
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from ...distributed.sharded import ShardedCollection
from ...distributed.sharded_batch import ShardedBatch
from ...distributed.sharder import TableSharder
from ...distributed.sharders import EmbCacheEmbeddingBagCollectionSharder, EmbCacheEmbeddingCollectionSharder
from ...distributed.torchrec_sharders import collection_like, configs_of
from ...modules.collection import CachedCollection
from ...modules.configs import EmbCacheEmbeddingBagConfig, EmbCacheEmbeddingConfig
from ...modules.defaults import torchrec_configs_as_index
from ...optim.in_backward import apply_optimizer_in_backward
from ...optim.optimizer_assignments import assignments_of
from .enums import HOMES
from .optimizers import check_arguments, torch_optimizer
from .options import DynamicEmbTableOptions, row_bytes
from .rules import check_options, initial_weights, table_lifecycle
from .scored import ScoredTables
from .scores import TableScores

_SHARDING_TYPES = [ShardingType.ROW_WISE.value, ShardingType.TABLE_WISE.value]


class CollectionTables(ScoredTables):
    """The dynamic tables of a sharded collection, as returned by `get_dynamic_emb_module`."""

    def __init__(self, sharded: ShardedCollection, options: Mapping[str, DynamicEmbTableOptions]) -> None:
        self._sharded = sharded
        self._scores = {name: TableScores(sharded, name, own) for name, own in options.items()}
        indices = {config.name: index for index, config in enumerate(sharded.tables.configs)}
        self._table_indices = {name: indices[name] for name in options}

    def _owned(self, name: str, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        return self._sharded.owns(name, ids)

    def record_scores(self, batch: ShardedBatch) -> None:
        """Records the scores of a training batch whose rows were just looked up."""
        ranks, tables = batch.counts.shape
        begins = batch.offsets.tolist()
        for name, table in self._table_indices.items():
            parts = [batch.values[begins[part] : begins[part + 1]] for part in range(table, ranks * tables, tables)]
            self._scores[name].record_scores(torch.cat(parts))


class _ShardedTables(ShardedCollection):
    """A sharded collection whose dynamic tables score their rows.

    Attributes:
        dynamic: the dynamic tables of the collection.
    """

    dynamic: CollectionTables
    _unsharded: type[torch.nn.Module]

    @property
    def unsharded_module_type(self) -> type[torch.nn.Module]:
        return self._unsharded

    def compute(self, ctx: ShardedBatch, dist_input: object) -> list[list[torch.Tensor]]:
        """Looks up a batch as any sharded collection does; for a training batch, then records the scores."""
        rows = super().compute(ctx, dist_input)
        if ctx.error is None and ctx.trains:
            self.dynamic.record_scores(ctx)
        return rows


class ShardedDynamicEmbeddingCollection(_ShardedTables):
    """Sharded sequence tables of TorchRec's `EmbeddingCollection`."""

    _unsharded = EmbeddingCollection


class ShardedDynamicEmbeddingBagCollection(_ShardedTables):
    """Sharded pooled tables of TorchRec's `EmbeddingBagCollection`."""

    _unsharded = EmbeddingBagCollection


class _SequenceSharder(EmbCacheEmbeddingCollectionSharder):
    _sharded = ShardedDynamicEmbeddingCollection


class _BagSharder(EmbCacheEmbeddingBagCollectionSharder):
    _sharded = ShardedDynamicEmbeddingBagCollection


def dynamic_options(params: Mapping[str, ParameterSharding]) -> dict[str, DynamicEmbTableOptions]:
    """Returns dynamicemb's options of each dynamic table in a sharding plan, by table name.

    Raises:
        ValueError: a dynamic table is not sharded row-wise.
    """
    found = {name: getattr(sharding, "dynamicemb_options", None) for name, sharding in params.items()}
    options = {name: own for name, own in found.items() if own is not None}
    for name in options:
        if params[name].sharding_type != ShardingType.ROW_WISE.value:
            raise ValueError(f"table {name!r}: it is dynamic and {params[name].sharding_type}, which must be row_wise")
    return options


def _table_config(table: BaseEmbeddingConfig, options: DynamicEmbTableOptions | None, world_size: int) -> Any:
    """Returns the config for this package's table: of a hash table if there are options, otherwise `table` itself."""
    if options is None:
        return table
    check_options(table.name, options)
    weights = initial_weights(table.name, options.initializer_args)
    pooled = hasattr(table, "pooling")
    data_type = table.data_type
    if options.embedding_dtype is not None:
        data_type = dtype_to_data_type(options.embedding_dtype)
    return (EmbCacheEmbeddingBagConfig if pooled else EmbCacheEmbeddingConfig)(
        name=table.name,
        num_embeddings=table.num_embeddings,
        embedding_dim=table.embedding_dim,
        feature_names=list(table.feature_names),
        data_type=data_type,
        weight_init_min=weights.get("init_min"),
        weight_init_max=weights.get("init_max"),
        init_fn=weights.get("init_fn"),
        admit_and_evict_config=table_lifecycle(table.name, options, world_size),
        **{key: weights[key] for key in ("initializer_type",) if key in weights},
        **({"pooling": table.pooling} if pooled else {}),
    )


def _cache_rows(options: Mapping[str, DynamicEmbTableOptions], optimizer: Any) -> dict[str, int] | None:
    """Returns the cache size in rows, on each rank, of tables with `local_hbm_for_values`; None if no table has it."""
    sizes = {}
    for name, own in options.items():
        if own.local_hbm_for_values and own.dim:
            size = row_bytes(own.dim, own.embedding_dtype or torch.float32, optimizer)
            sizes[name] = max(1, own.local_hbm_for_values // size)
    return sizes or None


def _apply_optimizers(module: torch.nn.Module, collection: CachedCollection, fused_params: Mapping[str, Any]) -> None:
    """Applies the optimizers set on TorchRec's parameters; tables without one get the optimizer of `fused_params`."""
    requested = {path.split(".")[1]: assignments_of(parameter) for path, parameter in module.named_parameters()}
    others = []
    for name, handle in collection.table_parameters().items():
        if requested.get(name):
            cls, keywords = requested[name][0]
            apply_optimizer_in_backward(cls, [handle], keywords)
        else:
            others.append(handle)
    if others:
        cls, keywords = torch_optimizer(check_arguments(fused_params))
        apply_optimizer_in_backward(cls, others, keywords)


class _DynamicSharder(BaseEmbeddingSharder[Any]):
    """Sharder of TorchRec's collections: tables with dynamicemb's options become hash tables, others index tables.

    Raises:
        NotImplementedError: an argument in `fused_params` is not supported, or codecs are passed.
    """

    _inner: type[TableSharder]
    """The sharder of this package's collection."""

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, Any] | None = None,
        *more: Any,
    ) -> None:
        if qcomm_codecs_registry:
            raise NotImplementedError(
                "qcomm_codecs_registry is not supported: rows are exchanged in float32, leave it None (which is what "
                "get_qcomm_codecs_registry gives for FP32)"
            )
        self._options = check_arguments(fused_params or {})
        super().__init__(fused_params, None, *more)

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Returns the supported sharding types: row-wise and table-wise."""
        return list(_SHARDING_TYPES)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Returns the supported compute kernels: only the fused kernel."""
        return [EmbeddingComputeKernel.FUSED.value]

    def shard(
        self,
        module: Any,
        params: Any,
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> Any:
        """Shards a collection (collective).

        Raises:
            ValueError, NotImplementedError: an option is invalid or unsupported; the message names table and option.
        """
        options = dynamic_options(params)
        tables = [_table_config(table, options.get(table.name), env.world_size) for table in configs_of(module)]
        with torchrec_configs_as_index():
            cache = _cache_rows(options, self._options["optimizer"])
            home = {name: HOMES[own.dist_type] for name, own in options.items()}
            collection = collection_like(module, tables, device="meta", cache=cache, home=home)
        _apply_optimizers(module, collection, self.fused_params or {})
        sharded = self._inner().shard(collection, params, env, device, module_fqn)
        assert isinstance(sharded, _ShardedTables)
        sharded.dynamic = CollectionTables(sharded, options)
        return sharded


class DynamicEmbeddingCollectionSharder(_DynamicSharder, EmbeddingCollectionSharder):
    """Sharder of TorchRec's `EmbeddingCollection`, see `_DynamicSharder`."""

    _inner = _SequenceSharder

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, Any] | None = None,
        use_index_dedup: bool = False,
    ) -> None:
        """Creates a sharder; `use_index_dedup` is accepted without effect, because ids are always deduplicated."""
        super().__init__(fused_params, qcomm_codecs_registry, use_index_dedup)


class DynamicEmbeddingBagCollectionSharder(_DynamicSharder, EmbeddingBagCollectionSharder):
    """Sharder of TorchRec's `EmbeddingBagCollection`, see `_DynamicSharder`."""

    _inner = _BagSharder

    def __init__(
        self, fused_params: dict[str, Any] | None = None, qcomm_codecs_registry: dict[str, Any] | None = None
    ) -> None:
        super().__init__(fused_params, qcomm_codecs_registry)
