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
from .feature_processed_sharder import FeatureProcessedSharder
from .sharder import TableSharder
from .topology import LocalSize
from .torchrec_sharders import TorchRecBagCollectionSharder, TorchRecCollectionSharder


class EmbCacheEmbeddingCollectionSharder(TableSharder):
    """Divides the tables of `EmbCacheEmbeddingCollection` among ranks, under `DistributedModelParallel`.

    Arguments are those of `TableSharder`. `get_default_hybrid_sharders` has one of each.

    Example:
        >>> from rec_sdk_torch import EmbCacheEmbeddingCollectionSharder
        >>> sharder = EmbCacheEmbeddingCollectionSharder(local_size="auto")
        >>> sharder.sharding_types("cpu")
        ['row_wise', 'table_wise', 'data_parallel']
    """

    _type = EmbCacheEmbeddingCollection


class EmbCacheEmbeddingBagCollectionSharder(TableSharder):
    """Divides the tables of `EmbCacheEmbeddingBagCollection` among ranks, under `DistributedModelParallel`.

    Arguments are those of `TableSharder`. `get_default_hybrid_sharders` has one of each.

    Example:
        >>> from rec_sdk_torch import EmbCacheEmbeddingBagCollectionSharder
        >>> sharder = EmbCacheEmbeddingBagCollectionSharder(local_size="auto")
        >>> sharder.sharding_types("cpu")
        ['row_wise', 'table_wise', 'data_parallel']
    """

    _type = EmbCacheEmbeddingBagCollection


class HashEmbeddingBagCollectionSharder(TableSharder):
    """Divides the tables of `HashEmbeddingBagCollection` among ranks, under `DistributedModelParallel`.

    Arguments are those of `TableSharder`. `get_default_hybrid_sharders` has one of each.

    Example:
        >>> from rec_sdk_torch import HashEmbeddingBagCollectionSharder
        >>> sharder = HashEmbeddingBagCollectionSharder(local_size="auto")
        >>> sharder.sharding_types("cpu")
        ['row_wise', 'table_wise', 'data_parallel']
    """

    _type = HashEmbeddingBagCollection


def get_default_hybrid_sharders(
    host_env: ShardingEnv | None = None, *, local_size: LocalSize = None
) -> list[ModuleSharder[Any]]:
    """Sharders of all collections of this package, and TorchRec's of its own, whose tables they put on NPUs too.

    Args:
        host_env: its process group exchanges ids, which are on the host; None: a gloo group of their own.
        local_size: see `TableSharder`; TorchRec's own tables on hosts and GPUs have no use for it.

    Returns:
        what `DistributedModelParallel(sharders=)` and TorchRec's planner take.

    Raises:
        TypeError: `local_size` is no number.

    Example:
        >>> from rec_sdk_torch import get_default_hybrid_sharders
        >>> [type(sharder).__name__ for sharder in get_default_hybrid_sharders()][:2]
        ['EmbCacheEmbeddingCollectionSharder', 'EmbCacheEmbeddingBagCollectionSharder']
    """
    ours = (
        EmbCacheEmbeddingCollectionSharder,
        EmbCacheEmbeddingBagCollectionSharder,
        HashEmbeddingBagCollectionSharder,
    )
    own = [sharder(cpu_env=host_env, local_size=local_size) for sharder in ours]
    around: list[Any] = [
        *(
            sharder(host_env, local_size=local_size)
            for sharder in (TorchRecBagCollectionSharder, TorchRecCollectionSharder)
        ),
        FeatureProcessedSharder(own),
    ]
    taken = {sharder.module_type for sharder in around}
    theirs = [sharder for sharder in get_default_sharders() if sharder.module_type not in taken]
    return [*own, *around, *theirs]
