"""Builds batches of ids (`KeyedJaggedTensor`) for tests of all folders; training.py trains on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torchrec import KeyedJaggedTensor

Bags = Mapping[str, Sequence[Sequence[int]]]


def jagged(
    features: Bags, weights: Mapping[str, Sequence[Sequence[float]]] | None = None, dtype: torch.dtype = torch.int64
) -> KeyedJaggedTensor:
    """Builds a batch from `features`: for each key, the ids of each sample."""
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
    """Draws `batch_size` bags for each key: up to `longest` ids below `ids`; some bags are empty."""
    return {
        key: [rng.integers(0, ids, rng.integers(0, longest + 1)).tolist() for _ in range(batch_size)] for key in keys
    }


def random_weights(rng: np.random.Generator, bags: Bags) -> dict[str, list[list[float]]]:
    """Draws a normally distributed weight for each id of `bags`."""
    return {key: [rng.normal(size=len(bag)).tolist() for bag in every] for key, every in bags.items()}


def numbered(count: int, start: int = 0) -> KeyedJaggedTensor:
    """Builds a batch with one sample of the feature f0, with ids start, start + 1, ..."""
    return jagged({"f0": [list(range(start, start + count))]})


def single_ids(ids: Sequence[int], feature: str = "f0") -> KeyedJaggedTensor:
    """Builds a batch with one id per sample, so that the pooled output consists of the rows themselves."""
    return jagged({feature: [[i] for i in ids]})


def variable_batch(
    rng: np.random.Generator, keys: Sequence[str], ids: int, weighted: bool = False, inverse: bool = True
) -> KeyedJaggedTensor:
    """Draws one to five bags for each key, with up to three ids each; six samples share them through inverse
    indices.
    """
    sizes = rng.integers(1, 6, len(keys)).tolist()
    lengths = rng.integers(0, 4, sum(sizes))
    count = int(lengths.sum())
    used = [np.concatenate([np.arange(size), rng.integers(0, size, 6 - size)]) for size in sizes]
    of_samples = np.stack([rng.permutation(bags) for bags in used])
    return KeyedJaggedTensor(
        keys=list(keys),
        values=torch.from_numpy(rng.integers(0, ids, count)),
        weights=torch.from_numpy(rng.random(count, np.float32)) if weighted else None,
        lengths=torch.from_numpy(lengths),
        stride_per_key_per_rank=[[size] for size in sizes],
        inverse_indices=(list(keys), torch.from_numpy(of_samples)) if inverse else None,
    )


def expanded(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Builds the equivalent batch in which every sample has bags of its own."""
    names, inverse = batch.inverse_indices()
    values, lengths = [], []
    for key, bags in zip(names, inverse.tolist(), strict=True):
        jagged = batch[key]
        parts = jagged.values().split(jagged.lengths().tolist())
        values += [parts[bag] for bag in bags]
        lengths += [len(parts[bag]) for bag in bags]
    return KeyedJaggedTensor(keys=list(names), values=torch.cat(values), lengths=torch.tensor(lengths))
