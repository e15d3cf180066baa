"""Batches, tables and models that the module tests share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torchrec import KeyedJaggedTensor, KeyedTensor

import rec_sdk_torch as rst

Bags = Mapping[str, Sequence[Sequence[int]]]


def jagged(
    features: Bags, weights: Mapping[str, Sequence[Sequence[float]]] | None = None, dtype: torch.dtype = torch.int64
) -> KeyedJaggedTensor:
    """A batch of `features`: by key, the ids of each sample."""
    flat_weights = None
    if weights is not None:
        flat_weights = torch.tensor([w for bags in weights.values() for bag in bags for w in bag], dtype=torch.float32)
    return KeyedJaggedTensor(
        keys=list(features),
        values=torch.tensor([i for bags in features.values() for bag in bags for i in bag], dtype=dtype),
        lengths=torch.tensor([len(bag) for bags in features.values() for bag in bags], dtype=torch.int32),
        weights=flat_weights,
    )


def random_bags(
    rng: np.random.Generator, keys: Sequence[str], ids: int, batch_size: int = 5, longest: int = 4
) -> dict[str, list[list[int]]]:
    """Bags of up to `longest` ids below `ids`, empty ones among them."""
    return {
        key: [rng.integers(0, ids, rng.integers(0, longest + 1)).tolist() for _ in range(batch_size)] for key in keys
    }


def random_weights(rng: np.random.Generator, bags: Bags) -> dict[str, list[list[float]]]:
    """A normal weight for each id of `bags`."""
    return {key: [rng.normal(size=len(bag)).tolist() for bag in every] for key, every in bags.items()}


FIELDS: dict[str, Any] = {
    "num_embeddings": 40,
    "embedding_dim": 4,
    "initializer_type": rst.InitializerType.UNIFORM,  # the default, which warns where it is not given
}


def bag_config(name: str = "t0", features: Sequence[str] = ("f0",), **fields: Any) -> rst.EmbCacheEmbeddingBagConfig:
    """A pooled hash table."""
    options = {**FIELDS, **fields}
    return rst.EmbCacheEmbeddingBagConfig(name=name, feature_names=list(features), **options)


def sequence_config(name: str = "t0", features: Sequence[str] = ("f0",), **fields: Any) -> rst.EmbCacheEmbeddingConfig:
    """A sequence hash table."""
    options = {**FIELDS, **fields}
    return rst.EmbCacheEmbeddingConfig(name=name, feature_names=list(features), **options)


def bags_collection(device: torch.device | None, *configs: Any, **options: Any) -> rst.EmbCacheEmbeddingBagCollection:
    """A pooled collection of `configs`, or of one hash table "t0" with the feature "f0"; seed 0."""
    options = {"seed": 0, **options}
    return rst.EmbCacheEmbeddingBagCollection(tables=list(configs) or [bag_config()], device=device, **options)


def sequences_collection(device: torch.device | None, *configs: Any, **options: Any) -> rst.EmbCacheEmbeddingCollection:
    """As `bags_collection`, of sequence tables."""
    options = {"seed": 0, **options}
    return rst.EmbCacheEmbeddingCollection(tables=list(configs) or [sequence_config()], device=device, **options)


def apply(collection: torch.nn.Module, optimizer: type = torch.optim.SGD, **kwargs: Any) -> None:
    """Applies `optimizer` (SGD with lr 0.5) to every parameter."""
    options = {"lr": 0.5, **kwargs}
    rst.apply_optimizer_in_backward(optimizer, collection.parameters(), options)


def output_values(output: Any) -> torch.Tensor:
    """The output of a collection as one tensor on the host: `[B, total]`, or every value of the sequences, flat."""
    if isinstance(output, KeyedTensor):
        return output.values().cpu()
    return torch.cat([part.values().flatten() for part in output.values()]).cpu()


def train_step(collection: torch.nn.Module, batch: KeyedJaggedTensor, factor: float = 1.0) -> torch.Tensor:
    """One training step on `factor` times the sum of the outputs; the outputs."""
    output = output_values(collection(batch))
    (factor * output.sum()).backward()
    return output.detach()


def rows_of(collection: torch.nn.Module, table: str = "t0") -> dict[int, torch.Tensor]:
    """A table's rows by id, as float32."""
    state = collection.state_dict()
    (key,) = [key for key in state if key.endswith(f".{table}.weight")]
    weight = state[key].float()
    ids = state.get(key.replace(".weight", ".ids"), torch.arange(len(weight)))
    return dict(zip(ids.tolist(), weight, strict=True))


def read(collection: torch.nn.Module, batch: KeyedJaggedTensor) -> torch.Tensor:
    """The output in eval(); leaves the module in the mode it was in."""
    training = collection.training
    collection.eval()
    try:
        return output_values(collection(batch)).detach()
    finally:
        collection.train(training)


def numbered(count: int, start: int = 0) -> KeyedJaggedTensor:
    """One sample of the feature f0 with ids start, start + 1, ..."""
    return jagged({"f0": [list(range(start, start + count))]})


def single_ids(ids: Sequence[int], feature: str = "f0") -> KeyedJaggedTensor:
    """One id per sample, so that a pooled output is the rows themselves."""
    return jagged({feature: [[i] for i in ids]})


def assert_trains(collection: torch.nn.Module, ids: Sequence[int] = (3, 1, 3), lr: float = 0.5) -> None:
    """The model is sound: it reads its rows, and one SGD step moves each by lr times its lookups.

    For collections whose only feature is f0 of table t0.
    """
    batch = single_ids(ids)
    before = read(collection, batch)
    assert torch.equal(train_step(collection, batch).flatten(), before.flatten())
    after = read(collection, batch).reshape(len(ids), -1)
    count = Counter(ids)
    steps = torch.tensor([lr * count[i] for i in ids])
    torch.testing.assert_close(after, before.reshape(len(ids), -1) - steps[:, None], rtol=1e-6, atol=1e-6)


def same_bits(left: Mapping[str, Any], right: Mapping[str, Any]) -> Iterator[str]:
    """Names of the tensors in which two (nested) state dicts differ."""
    if left.keys() != right.keys():
        yield f"keys {sorted(left)} and {sorted(right)}"
        return
    for name, value in left.items():
        if isinstance(value, Mapping):
            yield from (f"{name}/{inner}" for inner in same_bits(value, right[name]))
        elif not torch.equal(value, right[name]):
            yield name
