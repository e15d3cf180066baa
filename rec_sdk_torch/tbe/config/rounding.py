"""Stochastic rounding of 16-bit weights: the seeds of tables, new ones for every update."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_WEYL = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)


def _mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finalizer (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014)."""
    for shift, factor in zip(_SHIFTS, _FACTORS, strict=False):
        numbers = (numbers ^ (numbers >> shift)) * factor
    return numbers ^ (numbers >> _SHIFTS[2])


def rounding_seeds(seed: int, tables: Sequence[str], steps: Sequence[int]) -> npt.NDArray[np.int64]:
    """Seeds that random numbers of an update depend on, beside a row's id and the column, `[T]`.

    Args:
        seed: of the embedding; any int.
        tables: names of the tables: two tables never round alike.
        steps: the number of the update, of each table.
    """
    names = [int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") for name in tables]
    of_tables = _mixed(np.array(names, np.uint64) ^ np.uint64(seed & (2**64 - 1)))
    return _mixed(of_tables + np.array(steps, np.uint64) * _WEYL).view(np.int64)
