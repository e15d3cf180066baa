"""Sketches of ids that wait to be admitted, in saves. A sketch cannot be divided by ids, so a save says whose it is.

The file of a rank has the state of its sketch behind four numbers that say which ids are at home there.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from .owners import Owner


def saved_sketch(owner: Owner, table: str, state: torch.Tensor) -> torch.Tensor:
    """A state of `TableView.sketch`, uint8 `[n]`, as a save has it."""
    return torch.cat([torch.from_numpy(_home(owner, table).view(np.uint8)), state])


def sketches_of(owner: Owner, table: str, saved: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The states that the sketch of a table has to count as much as, of those that all ranks saved.

    Where one was of the very ids that are at home here, it is all that is needed. Otherwise an id of this home was
    counted in one of them, whichever it was.
    """
    home = torch.from_numpy(_home(owner, table).view(np.uint8))
    every = [(each[: len(home)], each[len(home) :]) for each in saved]
    own = [state for of, state in every if torch.equal(of, home)]
    return own or [state for _, state in every]


def _home(owner: Owner, table: str) -> np.ndarray:
    """The ids that are at home in this process: how they are divided, among how many, and which it is."""
    if owner.exchange is None:
        return np.array([0, 0, 1, 0], np.int64)
    return np.array([*owner.placements[table].home, owner.exchange.world_size, owner.exchange.rank], np.int64)
