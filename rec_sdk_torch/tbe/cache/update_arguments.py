"""Scalar arguments of the update kernels on the device: optimizer coefficients and rounding seeds."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from .group_spec import Member
from .transfers import Transfers, Upload

_WEYL = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
"""Constants of SplitMix64: its increment, and the factors and shifts of its finalizer."""


def _splitmix64(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Hashes numbers with SplitMix64's finalizer.

    See Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014.
    """
    for shift, factor in zip(_SHIFTS, _FACTORS, strict=False):
        numbers = (numbers ^ (numbers >> shift)) * factor
    return numbers ^ (numbers >> _SHIFTS[2])


def rounding_seeds(seed: int, tables: Sequence[str], steps: Sequence[int]) -> npt.NDArray[np.int64]:
    """Returns the seed of each table's stochastic rounding in an update, int64 `[T]`.

    Each random number of the update depends on the table's seed, the row's id and the column.

    Args:
        seed: seed of the embedding; any int.
        tables: names of the tables; tables with different names get different random numbers.
        steps: the number of the update of each table.
    """
    names = [int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") for name in tables]
    hashes = _splitmix64(np.array(names, np.uint64) ^ np.uint64(seed & (2**64 - 1)))
    return _splitmix64(hashes + np.array(steps, np.uint64) * _WEYL).view(np.int64)


class UpdateArguments:
    """Optimizer coefficients and rounding seeds of one group, which are uploaded only when they have changed.

    Attributes:
        optimizers: the distinct optimizers of the tables.
    """

    def __init__(self, members: Sequence[Member], seed: int, transfers: Transfers) -> None:
        """Collects the distinct optimizers.

        Args:
            members: the tables of the group.
            seed: seed of the embedding.
            transfers: copies to the device.
        """
        table_optimizers = [member.optimizer for member in members if member.optimizer]
        self.optimizers = list({id(optimizer): optimizer for optimizer in table_optimizers}.values())
        self._keys = [id(optimizer) for optimizer in self.optimizers]
        ranks = {id(optimizer): rank for rank, optimizer in enumerate(self.optimizers)}
        self._optimizer_indices = [ranks[id(optimizer)] for optimizer in table_optimizers]
        self._names = [member.config.name for member in members]
        self._seed = seed
        self._transfers = transfers
        self._rows: list[Sequence[float]] = []
        self._steps: list[int] = []
        self._coefficients_upload: Upload | None = None
        self._seeds_upload: Upload | None = None

    def coefficients(self, rows: Mapping[int, Sequence[float]]) -> torch.Tensor:
        """Returns the coefficients of each table on the device, float32 `[T, 16]`.

        Args:
            rows: the 16 coefficients of each optimizer, by its `id()`.
        """
        current, upload = list(map(rows.__getitem__, self._keys)), self._coefficients_upload
        if current != self._rows or upload is None:
            upload = self._transfers.upload_arrays([np.array(current, np.float32)[self._optimizer_indices]])
            self._rows, self._coefficients_upload = current, upload
        return (upload.tensors if upload.event is None else upload.wait())[0]

    def seeds(self) -> torch.Tensor:
        """Returns the rounding seeds of the next update on the device, int64 `[T]`."""
        steps = [self.optimizers[index].step + 1 for index in self._optimizer_indices]
        if steps != self._steps or self._seeds_upload is None:
            seeds = rounding_seeds(self._seed, self._names, steps)
            self._steps, self._seeds_upload = steps, self._transfers.upload_arrays([seeds])
        return self._seeds_upload.wait()[0]
