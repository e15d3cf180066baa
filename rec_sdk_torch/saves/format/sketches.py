"""Sketches of ids that wait to be admitted, in saves. A sketch cannot be divided by ids, so a save says whose it is.

The file of a rank has four numbers that say which ids are at home there: the home of the table's ids and its block, as
`Placement.home` has them, the number of ranks, and the rank. Its state follows: its width, depth, bytes of
a cell and the lookups that it counted, then its cells.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from ...rules.sketch import MOST_DEPTH
from ..owners import Owner

NUMBERS = ("home", "block", "ranks", "rank", "width", "depth", "cell_bytes", "counted")
"""Names of the int64 numbers before the cells."""
_HEADER = 8 * len(NUMBERS)
_LEAST_HOME = -3
"""Homes below 0 are rules, as the engine's `ranks_of` has them; this one alone has a block."""
_MOST_COUNTED = 2**53


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


def sketch_problem(saved: np.ndarray, rank: int, ranks: int) -> str | None:
    """Describes what is wrong with the bytes of a sketch in the file of `rank` of a save of `ranks`; None: nothing."""
    if len(saved) < _HEADER:
        return f"{len(saved)} bytes, expected {_HEADER} or more"
    found = dict(zip(NUMBERS, saved[:_HEADER].view(np.int64).tolist(), strict=True))
    if (found["ranks"], found["rank"]) != (ranks, rank):
        return f"rank {found['rank']} of {found['ranks']}, expected {rank} of {ranks}"
    if not _LEAST_HOME <= found["home"] < ranks:
        return f"home {found['home']}, allowed are {_LEAST_HOME} .. {ranks - 1}"
    if found["block"] < 0 or (found["block"] > 0) != (found["home"] == _LEAST_HOME):
        return f"a block of {found['block']} ids with home {found['home']}"
    for name, allowed in (("cell_bytes", (1, 2, 4)), ("depth", range(1, MOST_DEPTH + 1))):
        if found[name] not in allowed:
            return f"{name} {found[name]}, allowed are {list(allowed)}"
    cells = len(saved) - _HEADER
    if found["width"] < 1 or found["width"] * found["depth"] * found["cell_bytes"] != cells:
        return f"width {found['width']}, depth {found['depth']} and cell_bytes {found['cell_bytes']} for {cells} bytes"
    if not 0 <= found["counted"] <= _MOST_COUNTED:
        return f"counted {found['counted']} lookups, allowed are 0 .. 2^53"
    return None


def _home(owner: Owner, table: str) -> np.ndarray:
    """The ids that are at home in this process: how they are divided, among how many, and which it is."""
    if owner.exchange is None:
        return np.array([0, 0, 1, 0], np.int64)
    return np.array([*owner.placements[table].home, owner.exchange.world_size, owner.exchange.rank], np.int64)
