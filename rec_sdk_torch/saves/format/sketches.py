"""Saves the sketches (approximate counters) that count ids before their admission.

A sketch counts hashed ids and cannot be split by id, so each rank's file records which ids the rank owned. The file
begins with four int64 numbers: the table's ownership rule and its block size, as in `Placement.owner_rule`, the number
of ranks, and the rank. The state follows: width, depth, bytes of a cell, counted lookups, then the cells.
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
"""The smallest ownership rule; rules are negative, as in the engine's `owner_ranks`. Only this one has a block size."""
_MAX_COUNTED = 2**53


def serialize_sketch(owner: TableOwner, table: str, state: torch.Tensor) -> torch.Tensor:
    """Returns the bytes to save for a sketch, uint8: the ownership numbers, then `state` from `TableView.sketch`."""
    return torch.cat([torch.from_numpy(_encoded_owner_rule(owner, table).view(np.uint8)), state])


def relevant_sketches(owner: TableOwner, table: str, saved: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Selects the saved states from which a table's sketch is restored.

    Restored counts must not be less than the counts in these states. If one state was counted for exactly the ids that
    this rank owns, only this state is returned. Otherwise all are returned, because each id of this rank was counted in
    one of them.

    Args:
        owner: module that holds the table.
        table: name of the table.
        saved: files of all ranks, uint8 `[n]` each.
    """
    home = torch.from_numpy(_encoded_owner_rule(owner, table).view(np.uint8))
    states = [(each[: len(home)], each[len(home) :]) for each in saved]
    own = [state for owner_header, state in states if torch.equal(owner_header, home)]
    return own or [state for _, state in states]


def sketch_problem(saved: np.ndarray, rank: int, ranks: int) -> str | None:
    """Returns a description of the fault in a sketch file of rank `rank` of `ranks` ranks, None if it is valid."""
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


def _encoded_owner_rule(owner: TableOwner, table: str) -> np.ndarray:
    """Returns the ownership numbers of a table, int64 `[4]`: rule, block size, number of ranks and this rank."""
    if owner.exchange is None:
        return np.array([0, 0, 1, 0], np.int64)
    return np.array([*owner.placements[table].owner_rule, owner.exchange.world_size, owner.exchange.rank], np.int64)
