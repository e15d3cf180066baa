"""The numbers that an update of a group is given beside its batch, as they are on the device."""

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


def _splitmix64(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
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
    of_tables = _splitmix64(np.array(names, np.uint64) ^ np.uint64(seed & (2**64 - 1)))
    return _splitmix64(of_tables + np.array(steps, np.uint64) * _WEYL).view(np.int64)


class UpdateArguments:
    """Coefficients of the optimizers, and seeds of stochastic rounding. They are sent when they are others than before.

    Attributes:
        optimizers: of the tables, each once.
    """

    def __init__(self, members: Sequence[Member], seed: int, transfers: Transfers) -> None:
        """
        Args:
            members: the tables of the group.
            seed: of the embedding.
            transfers: to the device.
        """
        of_tables = [member.optimizer for member in members if member.optimizer]
        self.optimizers = list({id(optimizer): optimizer for optimizer in of_tables}.values())
        self._keys = [id(optimizer) for optimizer in self.optimizers]
        ranks = {id(optimizer): rank for rank, optimizer in enumerate(self.optimizers)}
        self._of_tables = [ranks[id(optimizer)] for optimizer in of_tables]
        self._names = [member.config.name for member in members]
        self._seed = seed
        self._transfers = transfers
        self._rows: list[Sequence[float]] = []
        self._steps: list[int] = []
        self._sent: Upload | None = None
        self._sent_seeds: Upload | None = None

    def coefficients(self, rows: Mapping[int, Sequence[float]]) -> torch.Tensor:
        """Coefficients of every table, float32 `[T, 16]`, from those of each optimizer by its id."""
        own = list(map(rows.__getitem__, self._keys))
        if own != self._rows or self._sent is None:
            self._rows, self._sent = own, self._transfers.upload_arrays([np.array(own, np.float32)[self._of_tables]])
        return (self._sent.tensors if self._sent.event is None else self._sent.wait())[0]

    def seeds(self) -> torch.Tensor:
        """Seeds of the next update's stochastic rounding, int64 `[T]`."""
        steps = [self.optimizers[index].step + 1 for index in self._of_tables]
        if steps != self._steps or self._sent_seeds is None:
            seeds = rounding_seeds(self._seed, self._names, steps)
            self._steps, self._sent_seeds = steps, self._transfers.upload_arrays([seeds])
        return self._sent_seeds.wait()[0]
