"""Sharder of TorchRec's FeatureProcessedEmbeddingBagCollection that contains a collection of this package."""

from __future__ import annotations

from typing import Any

import torch
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from .sharder import TableSharder


class FeatureProcessedSharder(FeatureProcessedEmbeddingBagCollectionSharder):
    """Sharder that shards the collection inside the module; the feature processors are trained as dense parameters.

    If the collection inside is one of TorchRec's, this sharder behaves as TorchRec's. For each module, a planner calls
    `shardable_parameters` before `sharding_types` and `compute_kernels`; these two methods rely on that order.
    """

    def __init__(self, sharders: list[TableSharder]) -> None:
        """Creates a sharder that delegates to the element of `sharders` for the class of the collection inside."""
        super().__init__()
        self._sharders = {sharder.module_type: sharder for sharder in sharders}
        self._planned: TableSharder | None = None

    def shardable_parameters(self, module: FeatureProcessedEmbeddingBagCollection) -> dict[str, torch.nn.Parameter]:
        """Returns the weight of each table, by table name."""
        self._planned = self._sharders.get(type(module._embedding_bag_collection))
        if self._planned is None:
            theirs: dict[str, torch.nn.Parameter] = super().shardable_parameters(module)
            return theirs
        return self._planned.shardable_parameters(module._embedding_bag_collection)

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Returns the sharding types of the collection in the module last passed to `shardable_parameters`."""
        sharder: Any = super() if self._planned is None else self._planned
        types: list[str] = sharder.sharding_types(compute_device_type)
        return types

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Returns the compute kernels of the collection in the module last passed to `shardable_parameters`."""
        sharder: Any = super() if self._planned is None else self._planned
        kernels: list[str] = sharder.compute_kernels(sharding_type, compute_device_type)
        return kernels

    def shard(
        self,
        module: FeatureProcessedEmbeddingBagCollection,
        params: Any,
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> Any:
        """Returns `module`; if the collection inside is one of this package's, it is replaced by a sharded collection.

        Raises the errors of the sharder of the collection inside.
        """
        sharder = self._sharders.get(type(module._embedding_bag_collection))
        if sharder is None:
            return super().shard(module, params, env, device, module_fqn)
        name = "_embedding_bag_collection"
        path = name if not module_fqn else f"{module_fqn}.{name}"
        setattr(module, name, sharder.shard(module._embedding_bag_collection, params, env, device, path))
        return module
