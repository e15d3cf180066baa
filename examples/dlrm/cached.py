"""The embedding tables of the DLRM, in host memory with a device cache."""

from __future__ import annotations

import torch
from support.clicks import ClickData
from torchrec.modules.embedding_configs import DataType

from rec_sdk_torch import EmbCacheEmbeddingBagCollection, EmbCacheEmbeddingBagConfig, InitializerType

WEIGHTS = {"fp32": DataType.FP32, "fp16": DataType.FP16, "bf16": DataType.BF16}
"""Data types of the tables' weights. With 16 bits, updates are rounded at random, so that small ones are not lost."""


def cached_tables(
    data: ClickData,
    batch_size: int,
    share: float,
    dim: int,
    seed: int,
    device: torch.device | None = None,
    weights: str = "fp32",
    keeps_changes: bool = False,
) -> EmbCacheEmbeddingBagCollection:
    """Creates one table per feature, configured as for an EmbeddingBagCollection, and the tables' device cache.

    The cache holds the fraction `share` of a table's rows, but at least as many rows as a batch can have. With
    `keeps_changes`, tables can be saved as deltas.
    """
    vocabularies = data.vocabularies()
    return EmbCacheEmbeddingBagCollection(
        tables=[
            EmbCacheEmbeddingBagConfig(
                name=name,
                feature_names=[name],
                num_embeddings=max(1, ids.numel()),  # the expected number of ids; any int64 is a valid id
                embedding_dim=dim,
                data_type=WEIGHTS[weights],
                initializer_type=InitializerType.TRUNCATED_NORMAL,
                weight_init_stddev=0.05,
                is_incremental=keeps_changes,
            )
            for name, ids in vocabularies.items()
        ],
        batch_size=batch_size,
        multi_hot_sizes=[max(1, data.longest(name)) for name in vocabularies],
        cache=share,
        seed=seed,
        device=device,
        stochastic_rounding=weights != "fp32",
    )
