"""Batches whose keys have batch sizes of their own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torchrec import KeyedJaggedTensor


def variable_batch(
    rng: np.random.Generator, keys: Sequence[str], ids: int, weighted: bool = False, inverse: bool = True
) -> KeyedJaggedTensor:
    """One to five bags of each key, of up to three ids, for six samples that have each of them."""
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
    """The batch in which every sample has its bags itself."""
    names, inverse = batch.inverse_indices()
    values, lengths = [], []
    for key, bags in zip(names, inverse.tolist(), strict=True):
        jagged = batch[key]
        parts = jagged.values().split(jagged.lengths().tolist())
        values += [parts[bag] for bag in bags]
        lengths += [len(parts[bag]) for bag in bags]
    return KeyedJaggedTensor(keys=list(names), values=torch.cat(values), lengths=torch.tensor(lengths))
