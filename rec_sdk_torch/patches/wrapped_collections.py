"""Patches TorchRec's modules that cannot wrap a collection of this package, to raise a clear error.

Their constructors and sharders read attributes that only TorchRec's own collections have.
"""

from __future__ import annotations

import functools
from typing import Any

from ..runtime.imports import after_import


def install() -> None:
    """Patches TorchRec's classes, now or as soon as their modules are imported."""
    after_import("torchrec.modules.mc_embedding_modules", _patch_managed_collision_to_refuse)
    after_import("torchrec.distributed.fp_embeddingbag", _refuse_torchrecs_sharder)


def _patch_managed_collision_to_refuse(module: Any) -> None:
    base = module.BaseManagedCollisionEmbeddingCollection
    construct = base.__init__

    @functools.wraps(construct)
    def checked(self: Any, embedding_module: Any, *args: Any, **kwargs: Any) -> None:
        if _is_ours(embedding_module):
            raise TypeError(
                f"{type(self).__name__} around {type(embedding_module).__name__}: its tables cannot reset rows that a "
                "managed collision module gives to other ids. Hash tables need none, they take any id: look the ids "
                "up in tables of EmbCacheEmbeddingConfig or EmbCacheEmbeddingBagConfig, with admit_and_evict_config"
            )
        construct(self, embedding_module, *args, **kwargs)

    base.__init__ = checked


def _refuse_torchrecs_sharder(module: Any) -> None:
    sharder = module.FeatureProcessedEmbeddingBagCollectionSharder
    parameters = sharder.shardable_parameters

    @functools.wraps(parameters)
    def checked(self: Any, module: Any) -> Any:
        inside = module._embedding_bag_collection
        if _is_ours(inside):
            raise ValueError(
                f"{type(module).__name__} around {type(inside).__name__}: TorchRec's {type(self).__name__} does not "
                "shard its tables, give DistributedModelParallel and the planner "
                "sharders=rec_sdk_torch.get_default_hybrid_sharders(host_env)"
            )
        return parameters(self, module)

    sharder.shardable_parameters = checked


def _is_ours(module: Any) -> bool:
    from ..modules.collection import CachedCollection

    return isinstance(module, CachedCollection)
