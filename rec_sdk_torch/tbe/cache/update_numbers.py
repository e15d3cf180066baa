"""The numbers that an update of a group is given beside its batch, as they are on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ..config.rounding import rounding_seeds
from .group_spec import Member
from .transfers import Arrival, Transfers


class UpdateNumbers:
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
        self._sent: Arrival | None = None
        self._sent_seeds: Arrival | None = None

    def coefficients(self, rows: Mapping[int, Sequence[float]]) -> torch.Tensor:
        """Coefficients of every table, float32 `[T, 16]`, from those of each optimizer by its id."""
        own = list(map(rows.__getitem__, self._keys))
        if own != self._rows or self._sent is None:
            self._rows, self._sent = own, self._transfers.send_arrays([np.array(own, np.float32)[self._of_tables]])
        return (self._sent.tensors if self._sent.event is None else self._sent.wait())[0]

    def seeds(self) -> torch.Tensor:
        """Seeds of the next update's stochastic rounding, int64 `[T]`."""
        steps = [self.optimizers[index].step + 1 for index in self._of_tables]
        if steps != self._steps or self._sent_seeds is None:
            seeds = rounding_seeds(self._seed, self._names, steps)
            self._steps, self._sent_seeds = steps, self._transfers.send_arrays([seeds])
        return self._sent_seeds.wait()[0]
