"""The sharders of all collections."""

from __future__ import annotations

from typing import Any

from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ModuleSharder, ShardingEnv

from ..modules.embedding_collections import (
    EmbCacheEmbeddingBagCollection,
    EmbCacheEmbeddingCollection,
    HashEmbeddingBagCollection,
)
from .plain_sharders import PlainBagCollectionSharder, PlainCollectionSharder
from .sharder import TableSharder


class EmbCacheEmbeddingCollectionSharder(TableSharder):
    """Shards `EmbCacheEmbeddingCollection`."""

    _type = EmbCacheEmbeddingCollection


class EmbCacheEmbeddingBagCollectionSharder(TableSharder):
    """Shards `EmbCacheEmbeddingBagCollection`."""

    _type = EmbCacheEmbeddingBagCollection


class HashEmbeddingBagCollectionSharder(TableSharder):
    """Shards `HashEmbeddingBagCollection`."""

    _type = HashEmbeddingBagCollection


def get_default_hybrid_sharders(host_env: ShardingEnv | None = None) -> list[ModuleSharder[Any]]:
    """Sharders of all collections of this package, and TorchRec's of its own, whose tables they put on NPUs too.

    Args:
        host_env: its process group exchanges ids, which are on the host; None: a gloo group of their own.
    """
    ours = (
        EmbCacheEmbeddingCollectionSharder,
        EmbCacheEmbeddingBagCollectionSharder,
        HashEmbeddingBagCollectionSharder,
    )
    plain = [PlainBagCollectionSharder(cpu_env=host_env), PlainCollectionSharder(cpu_env=host_env)]
    taken = {sharder.module_type for sharder in plain}
    theirs = [sharder for sharder in get_default_sharders() if sharder.module_type not in taken]
    return [*(sharder(cpu_env=host_env) for sharder in ours), *plain, *theirs]
