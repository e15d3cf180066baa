"""The embedding tables of the DLRM, in host memory with a device cache."""

from __future__ import annotations

import torch
from support.clicks import ClickData
from support.tables import TableSize, table_size
from torchrec.modules.embedding_configs import DataType

from rec_sdk_torch import EmbCacheEmbeddingBagCollection, EmbCacheEmbeddingBagConfig, InitializerType


def table_sizes(data: ClickData, fraction: float, batch_size: int) -> dict[str, TableSize]:
    """One table per feature, with a row for each of its ids."""
    sizes = {}
    for name, ids in data.vocabularies().items():
        rows = max(1, ids.numel())
        sizes[name] = table_size(rows, fraction, batch_size * max(1, data.longest(name)))
    return sizes


WEIGHTS = {"fp32": DataType.FP32, "fp16": DataType.FP16, "bf16": DataType.BF16}
"""Data types of the tables' weights; those of 16 bits are rounded at random, so that small updates are not lost."""


def cached_tables(
    sizes: dict[str, TableSize], dim: int, seed: int, device: torch.device | None = None, weights: str = "fp32"
) -> EmbCacheEmbeddingBagCollection:
    """The tables, configured like those of an EmbeddingBagCollection, and the size and device of their cache."""
    return EmbCacheEmbeddingBagCollection(
        tables=[
            EmbCacheEmbeddingBagConfig(
                name=name,
                feature_names=[name],
                num_embeddings=size.rows,  # how many ids to expect; any int64 is welcome
                embedding_dim=dim,
                data_type=WEIGHTS[weights],
                initializer_type=InitializerType.TRUNCATED_NORMAL,
                weight_init_stddev=0.05,
            )
            for name, size in sizes.items()
        ],
        cache={name: size.cache_rows for name, size in sizes.items()},
        seed=seed,
        device=device,
        stochastic_rounding=weights != "fp32",
    )
