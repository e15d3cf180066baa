"""Hashes of raw feature values to int64 ids.

A hash table takes any int64, so no vocabulary has to be built first: two runs, or two machines, compute the same id
without communication.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor


def hash_text(column: str, value: str) -> int:
    """Returns the id of a text value. It depends on the column, so equal texts in two columns have different ids."""
    digest = blake2b(f"{column}={value}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def hash_numbers(column: str, numbers: Tensor) -> Tensor:
    """Returns the ids, int64 [n], of a column's int64 [n] numbers.

    SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014) is a bijection: two numbers of
    a column never share an id.
    """
    salt = np.uint64(hash_text(column, "") & 0xFFFFFFFFFFFFFFFF)
    z = numbers.numpy().astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + salt
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return torch.from_numpy((z ^ (z >> np.uint64(31))).view(np.int64))
