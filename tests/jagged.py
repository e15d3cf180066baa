"""Batches, collections and training steps that tests of every room share: the first place to look for a helper.

`apply(bags_collection(device, bag_config(...)), torch.optim.Adam)` is a collection that trains; `train`, `train_step`
train it, `rows_of`, `state_of` and `same_bits` compare it, and `EACH_KIND` gives a test both kinds of collection. The
same for a `TableBatchedEmbedding`, without TorchRec, is in embeddings.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor, KeyedTensor

import rec_sdk_torch as rst

Bags = Mapping[str, Sequence[Sequence[int]]]
Collection = TypeVar("Collection", bound=torch.nn.Module)


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


def index_bag_config(name: str = "t0", features: Sequence[str] = ("f0",), **fields: Any) -> EmbeddingBagConfig:
    """A pooled index table: TorchRec's own config."""
    options = {"num_embeddings": 40, "embedding_dim": 4, **fields}
    return EmbeddingBagConfig(name=name, feature_names=list(features), **options)


def index_sequence_config(name: str = "t0", features: Sequence[str] = ("f0",), **fields: Any) -> EmbeddingConfig:
    """A sequence index table: TorchRec's own config."""
    options = {"num_embeddings": 40, "embedding_dim": 4, **fields}
    return EmbeddingConfig(name=name, feature_names=list(features), **options)


def capacity_config(name: str = "t0", features: Sequence[str] = ("f0",), **fields: Any) -> rst.HashEmbeddingBagConfig:
    """A pooled hash table of limited capacity, which is wholly on the device."""
    return rst.HashEmbeddingBagConfig(name=name, feature_names=list(features), **{**FIELDS, **fields})


def capacity_collection(device: torch.device | None, *configs: Any, **options: Any) -> rst.HashEmbeddingBagCollection:
    """A collection of `configs`, or of one `capacity_config`; torch's generator seeds it."""
    return rst.HashEmbeddingBagCollection(list(configs) or [capacity_config()], device=device, **options)


def bags_collection(device: torch.device | None, *configs: Any, **options: Any) -> rst.EmbCacheEmbeddingBagCollection:
    """A pooled collection of `configs`, or of one hash table "t0" with the feature "f0"; seed 0."""
    options = {"seed": 0, **options}
    return rst.EmbCacheEmbeddingBagCollection(tables=list(configs) or [bag_config()], device=device, **options)


def sequences_collection(device: torch.device | None, *configs: Any, **options: Any) -> rst.EmbCacheEmbeddingCollection:
    """As `bags_collection`, of sequence tables."""
    options = {"seed": 0, **options}
    return rst.EmbCacheEmbeddingCollection(tables=list(configs) or [sequence_config()], device=device, **options)


@dataclass(frozen=True)
class Kind:
    """A kind of collection, for tests that are about each.

    Attributes:
        collection: makes a collection.
        config: makes the config of a hash table.
        index: makes the config of an index table.
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
    """Applies `optimizer` (SGD with lr 0.5) to every parameter; returns the collection.

    Args:
        collection: the module whose parameters are trained.
        optimizer: a class of torch or TorchRec.
        window: backward passes of an update; more than one needs the class `rec_sdk_torch.Accumulate*`.
        kwargs: keywords of the optimizer.
    """
    options = {"lr": 0.5, **kwargs}
    if window > 1:
        optimizer = getattr(rst, f"Accumulate{optimizer.__name__}")
        options |= {"use_accumulate": True, "accumulate_step": window}
    rst.apply_optimizer_in_backward(optimizer, collection.parameters(), options)
    return collection


class Model(torch.nn.Module):
    """A collection, and a dense layer on its one output: `tables` and `dense`."""

    def __init__(
        self,
        device: torch.device,
        *configs: Any,
        kind: Kind = POOLED,
        optimizer: type = torch.optim.SGD,
        **options: Any,
    ) -> None:
        super().__init__()
        self.tables = apply(kind.collection(device, *configs, **options), optimizer)
        width = sum(config.embedding_dim for config in configs) if configs and kind is POOLED else 4
        torch.manual_seed(0)
        self.dense = torch.nn.Linear(width, 1, device=device)

    def forward(self, batch: KeyedJaggedTensor) -> torch.Tensor:
        return self.dense(torch.cat(output_parts(self.tables(batch))))


def output_parts(output: Any) -> list[torch.Tensor]:
    """The pooled output of a collection, or the values of each sequence."""
    return [output.values()] if isinstance(output, KeyedTensor) else [part.values() for part in output.values()]


def output_values(output: Any) -> torch.Tensor:
    """The output of a collection as one tensor on the host: `[B, total]`, or every value of the sequences, flat."""
    if isinstance(output, KeyedTensor):
        return output.values().cpu()
    return torch.cat([part.values().flatten() for part in output.values()]).cpu()


def train_step(
    collection: torch.nn.Module, batch: KeyedJaggedTensor, factor: float = 1.0, *, square: bool = False
) -> torch.Tensor:
    """One training step on `factor` times the sum of the outputs, or of their squares; the outputs."""
    output = output_values(collection(batch))
    (factor * (output.square() if square else output).sum()).backward()
    return output.detach()


def train(
    collection: torch.nn.Module, batches: Iterable[KeyedJaggedTensor], *, square: bool = False
) -> list[torch.Tensor]:
    """The outputs of a training step on each batch, see `train_step`."""
    return [train_step(collection, batch, square=square) for batch in batches]


def state_of(collection: Any) -> dict[str, Any]:
    """Rows of all tables and the states of their optimizer, as they are saved."""
    return {"rows": collection.state_dict(), "states": collection.fused_optimizer.state_dict()["state"]}


def rows_of(collection: torch.nn.Module, table: str = "t0") -> dict[int, torch.Tensor]:
    """A table's rows by id, as float32."""
    state = collection.state_dict()
    (key,) = [key for key in state if key.endswith(f".{table}.weight")]
    weight = state[key].float()
    ids = state.get(key.replace(".weight", ".ids"), torch.arange(len(weight)))
    return dict(zip(ids.tolist(), weight, strict=True))


def equal_rows(one: Mapping[int, torch.Tensor], other: Mapping[int, torch.Tensor]) -> bool:
    """Whether two tables, see `rows_of`, have the same ids with the same bits."""
    return one.keys() == other.keys() and all(torch.equal(row, other[i]) for i, row in one.items())


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
