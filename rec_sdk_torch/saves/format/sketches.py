"""Sketches of ids that wait to be admitted, in saves. A sketch cannot be divided by ids, so a save says whose it is.

The file of a rank has four numbers that say which ids are at home there: the home of the table's ids and its block, as
`Placement.owner_rule` has them, the number of ranks, and the rank. Its state follows: its width, depth, bytes of
a cell and the lookups that it counted, then its cells.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from ...rules.sketch import MOST_DEPTH
from ..owners import TableOwner

NUMBERS = ("home", "block", "ranks", "rank", "width", "depth", "cell_bytes", "counted")
"""Names of the int64 numbers before the cells."""
_HEADER = 8 * len(NUMBERS)
_MIN_HOME = -3
"""Homes below 0 are rules, as the engine's `owner_ranks` has them; this one alone has a block."""
_MAX_COUNTED = 2**53


def serialize_sketch(owner: TableOwner, table: str, state: torch.Tensor) -> torch.Tensor:
    """A state of `TableView.sketch`, uint8 `[n]`, as a save has it."""
    return torch.cat([torch.from_numpy(_ownership(owner, table).view(np.uint8)), state])


def relevant_sketches(owner: TableOwner, table: str, saved: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The states that the sketch of a table has to count as much as, of those that all ranks saved.

    Where one was of the very ids that are at home here, it is all that is needed. Otherwise an id of this home was
    counted in one of them, whichever it was.
    """
    home = torch.from_numpy(_ownership(owner, table).view(np.uint8))
    states = [(each[: len(home)], each[len(home) :]) for each in saved]
    own = [state for owner_header, state in states if torch.equal(owner_header, home)]
    return own or [state for _, state in states]


def sketch_problem(saved: np.ndarray, rank: int, ranks: int) -> str | None:
    """Describes what is wrong with the bytes of a sketch in the file of `rank` of a save of `ranks`; None: nothing."""
    if len(saved) < _HEADER:
        return f"{len(saved)} bytes, expected {_HEADER} or more"
    numbers = dict(zip(NUMBERS, saved[:_HEADER].view(np.int64).tolist(), strict=True))
    if (numbers["ranks"], numbers["rank"]) != (ranks, rank):
        return f"rank {numbers['rank']} of {numbers['ranks']}, expected {rank} of {ranks}"
    if not _MIN_HOME <= numbers["home"] < ranks:
        return f"home {numbers['home']}, allowed are {_MIN_HOME} .. {ranks - 1}"
    if numbers["block"] < 0 or (numbers["block"] > 0) != (numbers["home"] == _MIN_HOME):
        return f"a block of {numbers['block']} ids with home {numbers['home']}"
    for name, allowed in (("cell_bytes", (1, 2, 4)), ("depth", range(1, MOST_DEPTH + 1))):
        if numbers[name] not in allowed:
            return f"{name} {numbers[name]}, allowed are {list(allowed)}"
    cells = len(saved) - _HEADER
    width, depth, cell_bytes = (numbers[name] for name in ("width", "depth", "cell_bytes"))
    if width < 1 or width * depth * cell_bytes != cells:
        return f"width {width}, depth {depth} and cell_bytes {cell_bytes} for {cells} bytes"
    if not 0 <= numbers["counted"] <= _MAX_COUNTED:
        return f"counted {numbers['counted']} lookups, allowed are 0 .. 2^53"
    return None


def _ownership(owner: TableOwner, table: str) -> np.ndarray:
    """The ids that are at home in this process: how they are divided, among how many, and which it is."""
    if owner.exchange is None:
        return np.array([0, 0, 1, 0], np.int64)
    return np.array([*owner.placements[table].owner_rule, owner.exchange.world_size, owner.exchange.rank], np.int64)
