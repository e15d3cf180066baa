"""Builds collections, their configs and optimizers for tests of all folders; see batches.py and training.py as well.

`apply(bags_collection(device, bag_config(...)), torch.optim.Adam)` returns a collection that can be trained.
`EACH_KIND` runs a test with both kinds of collection. embeddings.py does the same for a `TableBatchedEmbedding`,
without TorchRec.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
import torch
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor

import rec_sdk_torch as rst

Collection = TypeVar("Collection", bound=torch.nn.Module)


FIELDS: dict[str, Any] = {
    "num_embeddings": 40,
    "embedding_dim": 4,
    "initializer_type": rst.InitializerType.UNIFORM,  # the default initializer, which warns unless it is set explicitly
}


def bag_config(name: str = "t0", features: Sequence[str] = ("f0",), **fields: Any) -> rst.EmbCacheEmbeddingBagConfig:
    """Builds the config of a pooled hash table."""
    options = {**FIELDS, **fields}
    return rst.EmbCacheEmbeddingBagConfig(name=name, feature_names=list(features), **options)


def sequence_config(name: str = "t0", features: Sequence[str] = ("f0",), **fields: Any) -> rst.EmbCacheEmbeddingConfig:
    """Builds the config of a sequence hash table."""
    options = {**FIELDS, **fields}
    return rst.EmbCacheEmbeddingConfig(name=name, feature_names=list(features), **options)


def index_bag_config(name: str = "t0", features: Sequence[str] = ("f0",), **fields: Any) -> EmbeddingBagConfig:
    """Builds TorchRec's config of a pooled index table."""
    options = {"num_embeddings": 40, "embedding_dim": 4, **fields}
    return EmbeddingBagConfig(name=name, feature_names=list(features), **options)


def index_sequence_config(name: str = "t0", features: Sequence[str] = ("f0",), **fields: Any) -> EmbeddingConfig:
    """Builds TorchRec's config of a sequence index table."""
    options = {"num_embeddings": 40, "embedding_dim": 4, **fields}
    return EmbeddingConfig(name=name, feature_names=list(features), **options)


def capacity_config(name: str = "t0", features: Sequence[str] = ("f0",), **fields: Any) -> rst.HashEmbeddingBagConfig:
    """Builds the config of a pooled hash table with a maximum number of ids, stored completely on the device."""
    return rst.HashEmbeddingBagConfig(name=name, feature_names=list(features), **{**FIELDS, **fields})


def capacity_collection(device: torch.device | None, *configs: Any, **options: Any) -> rst.HashEmbeddingBagCollection:
    """Builds a collection of `configs`, or of one `capacity_config`; its seed is drawn from torch's generator."""
    return rst.HashEmbeddingBagCollection(list(configs) or [capacity_config()], device=device, **options)


def bags_collection(device: torch.device | None, *configs: Any, **options: Any) -> rst.EmbCacheEmbeddingBagCollection:
    """Builds a pooled collection of `configs`, or of one hash table "t0" with the feature "f0"; seed 0."""
    options = {"seed": 0, **options}
    return rst.EmbCacheEmbeddingBagCollection(tables=list(configs) or [bag_config()], device=device, **options)


def sequences_collection(device: torch.device | None, *configs: Any, **options: Any) -> rst.EmbCacheEmbeddingCollection:
    """Builds a sequence collection of `configs`, or of one hash table "t0" with the feature "f0"; seed 0."""
    options = {"seed": 0, **options}
    return rst.EmbCacheEmbeddingCollection(tables=list(configs) or [sequence_config()], device=device, **options)


@dataclass(frozen=True)
class Kind:
    """A kind of collection, pooled or sequence, as a parameter of tests.

    Attributes:
        collection: builds a collection.
        config: builds the config of a hash table.
        index: builds the config of an index table.
    """

    name: str
    collection: Callable[..., Any]
    config: Callable[..., Any]
    index: Callable[..., Any]

    def __str__(self) -> str:
        return self.name


POOLED = Kind("pooled", bags_collection, bag_config, index_bag_config)
SEQUENCE = Kind("sequence", sequences_collection, sequence_config, index_sequence_config)
EACH_KIND = pytest.mark.parametrize("kind", [POOLED, SEQUENCE], ids=str)


def apply(collection: Collection, optimizer: type = torch.optim.SGD, *, window: int = 1, **kwargs: Any) -> Collection:
    """Applies `optimizer` (default: SGD with lr 0.5) to every parameter; returns the collection.

    Args:
        collection: the module whose parameters are trained.
        optimizer: a class of torch or TorchRec.
        window: backward passes per update; more than one require a class `rec_sdk_torch.Accumulate*`.
        kwargs: keywords of the optimizer.
    """
    options = {"lr": 0.5, **kwargs}
    if window > 1:
        optimizer = getattr(rst, f"Accumulate{optimizer.__name__}")
        options |= {"use_accumulate": True, "accumulate_step": window}
    rst.apply_optimizer_in_backward(optimizer, collection.parameters(), options)
    return collection


class Model(torch.nn.Module):
    """A model with a collection (`tables`) and a dense layer (`dense`) on its pooled output or on the sequence f0."""

    def __init__(
        self,
        device: torch.device,
        *configs: Any,
        kind: Kind = POOLED,
        optimizer: type | None = torch.optim.SGD,
        **options: Any,
    ) -> None:
        super().__init__()
        self.pooled = kind is POOLED
        self.tables = kind.collection(device, *configs, **options)
        if optimizer is not None:
            apply(self.tables, optimizer)
        width = sum(config.embedding_dim for config in configs) if configs and kind is POOLED else 4
        self.dense = torch.nn.Linear(width, 1, device=device)
        with torch.no_grad():
            self.dense.weight.copy_(torch.linspace(-1.0, 1.0, width))
            self.dense.bias.zero_()

    def forward(self, batch: KeyedJaggedTensor) -> torch.Tensor:
        output = self.tables(batch)
        return self.dense((output if self.pooled else output["f0"]).values())
