"""Sharders of the collections of this package, and the default list of sharders."""

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
    """Sharder of `EmbCacheEmbeddingCollection` under `DistributedModelParallel`.

    Arguments are described at `TableSharder`. `get_default_hybrid_sharders` returns one of each class.

    Example:
        >>> from rec_sdk_torch import EmbCacheEmbeddingCollectionSharder
        >>> sharder = EmbCacheEmbeddingCollectionSharder(local_size="auto")
        >>> sharder.sharding_types("cpu")
        ['row_wise', 'table_wise', 'data_parallel']
    """

    _type = EmbCacheEmbeddingCollection


class EmbCacheEmbeddingBagCollectionSharder(TableSharder):
    """Sharder of `EmbCacheEmbeddingBagCollection` under `DistributedModelParallel`.

    Arguments are described at `TableSharder`. `get_default_hybrid_sharders` returns one of each class.

    Example:
        >>> from rec_sdk_torch import EmbCacheEmbeddingBagCollectionSharder
        >>> sharder = EmbCacheEmbeddingBagCollectionSharder(local_size="auto")
        >>> sharder.sharding_types("cpu")
        ['row_wise', 'table_wise', 'data_parallel']
    """

    _type = EmbCacheEmbeddingBagCollection


class HashEmbeddingBagCollectionSharder(TableSharder):
    """Sharder of `HashEmbeddingBagCollection` under `DistributedModelParallel`.

    Arguments are described at `TableSharder`. `get_default_hybrid_sharders` returns one of each class.

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
    """Returns sharders for collections of this package and of TorchRec; with them, TorchRec's tables can be on NPUs.

    Args:
        host_env: sharding environment whose process group exchanges ids in host memory; None creates a gloo group.
        local_size: see `TableSharder`; ignored for TorchRec's collections on hosts and GPUs.

    Returns:
        List for `DistributedModelParallel(sharders=)` and TorchRec's planner.

    Raises:
        TypeError: `local_size` is not a number.

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
