"""Sharders of TorchRec's own collections. On devices without TorchRec kernels, tables of this package replace them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import BaseEmbeddingSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from ..modules.collection import CachedCollection
from ..modules.defaults import torchrec_configs_as_index
from ..modules.embedding_collections import EmbCacheEmbeddingBagCollection, EmbCacheEmbeddingCollection
from ..optim.in_backward import apply_optimizer_in_backward
from ..optim.optimizer_assignments import assignments_of
from ..runtime.host_groups import exchanging
from ..tbe import WEIGHT
from .collectives import Exchange
from .placement import Placement
from .sharder import TableSharder
from .topology import LocalSize

_TORCHREC_DEVICES = ("cpu", "cuda")
"""Device types on which TorchRec shards its collections itself."""


def configs_of(module: EmbeddingCollection | EmbeddingBagCollection) -> list[Any]:
    """Returns the configs of one of TorchRec's collections."""
    pooled = isinstance(module, EmbeddingBagCollection)
    return list(module.embedding_bag_configs() if pooled else module.embedding_configs())


def collection_like(
    module: EmbeddingCollection | EmbeddingBagCollection, tables: list[Any] | None = None, **options: Any
) -> CachedCollection:
    """Returns a collection of this package with the tables of `module`, one of TorchRec's collections.

    `tables` are configs to use instead of the module's own; `options` are arguments of the new collection.
    """
    tables = configs_of(module) if tables is None else tables
    if isinstance(module, EmbeddingBagCollection):
        return EmbCacheEmbeddingBagCollection(tables, is_weighted=module.is_weighted(), **options)
    return EmbCacheEmbeddingCollection(tables, need_indices=module.need_indices(), **options)


class _TorchRecSharder(TableSharder):
    """Sharder that delegates to TorchRec's on hosts and GPUs; on other devices, caches hold all rows of tables."""

    _torchrec_sharder: BaseEmbeddingSharder[Any]

    def __init__(self, cpu_env: ShardingEnv | None = None, *, local_size: LocalSize = None) -> None:
        """Creates a sharder; `cpu_env` and `local_size` are described at `TableSharder`."""
        super().__init__(cpu_env=cpu_env, local_size=local_size)

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Returns the sharding types of this package if torch_npu is loaded, else TorchRec's."""
        if hasattr(torch, "npu"):
            return super().sharding_types(compute_device_type)
        result: list[str] = self._torchrec_sharder.sharding_types(compute_device_type)
        return result

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Returns the compute kernels of this package if torch_npu is loaded, else TorchRec's."""
        if hasattr(torch, "npu"):
            return super().compute_kernels(sharding_type, compute_device_type)
        result: list[str] = self._torchrec_sharder.compute_kernels(sharding_type, compute_device_type)
        return result

    def shardable_parameters(self, module: Any) -> dict[str, torch.nn.Parameter]:
        """Returns the weight of each table, by table name."""
        result: dict[str, torch.nn.Parameter] = self._torchrec_sharder.shardable_parameters(module)
        return result

    def storage_usage(self, tensor: torch.Tensor, compute_device_type: str, compute_kernel: str) -> dict[str, int]:
        """Returns the storage usage that TorchRec's sharder computes."""
        result: dict[str, int] = self._torchrec_sharder.storage_usage(tensor, compute_device_type, compute_kernel)
        return result

    def shard(
        self,
        module: Any,
        params: Any,
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> Any:
        """Shards a collection with TorchRec's sharder on hosts and GPUs, else with `TableSharder.shard`.

        Raises the errors of the sharder that is used.
        """
        if device is None or device.type in _TORCHREC_DEVICES:
            return self._torchrec_sharder.shard(module, params, env, device, module_fqn)
        return super().shard(module, params, env, device, module_fqn)

    def _make_collection(self, module: Any, device: torch.device) -> CachedCollection:
        with torchrec_configs_as_index():
            collection = collection_like(module, device=device, cache=1.0)
        for table, weight in self.shardable_parameters(module).items():
            for cls, options in assignments_of(weight):
                apply_optimizer_in_backward(cls, [collection.table_parameters()[table]], options)
        return collection

    def _copy_rows(
        self, collection: CachedCollection, module: Any, placements: Sequence[Placement], exchange: Exchange
    ) -> None:
        """Copies weights. A replicated table gets rank 0's, as in DistributedDataParallel; others get each rank's."""
        for (table, weight), placement in zip(self.shardable_parameters(module).items(), placements, strict=True):
            if weight.device.type == "meta":
                continue
            rows = weight.detach().to("cpu")
            if placement.replicated:
                rows = rows.clone()
                with exchanging(f"the weights of table {table!r}", exchange.ids):
                    dist.broadcast(rows, dist.get_global_rank(exchange.ids, 0), group=exchange.ids)
            ids = torch.from_numpy(placement.local_ids(len(rows)))
            collection.embedding.view(table).write(ids, {WEIGHT: rows[ids]})


class TorchRecBagCollectionSharder(_TorchRecSharder):
    """Sharder of TorchRec's `EmbeddingBagCollection`."""

    _type = EmbeddingBagCollection
    _torchrec_sharder = EmbeddingBagCollectionSharder()


class TorchRecCollectionSharder(_TorchRecSharder):
    """Sharder of TorchRec's `EmbeddingCollection`."""

    _type = EmbeddingCollection
    _torchrec_sharder = EmbeddingCollectionSharder()
