"""The machines of the ranks of a process group."""

from __future__ import annotations

import itertools
import numbers
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch.distributed as dist

LocalSize: TypeAlias = int | Literal["auto"] | None
"""Ranks of a machine; "auto": as torchrun says; None: machines are not told apart."""

_VARIABLES = ("LOCAL_WORLD_SIZE", "LOCAL_RANK")
"""Variables that torchrun sets for each rank."""


def check_local_size(given: LocalSize) -> LocalSize:
    """`given` as an int, "auto" or None.

    Raises:
        ValueError: it is another text, or below 1.
        TypeError: no whole number.
    """
    if given is None or given == "auto":
        return given
    if isinstance(given, str):
        raise ValueError(f"local_size is {given!r}, allowed are a number of ranks, 'auto' and None")
    if isinstance(given, bool) or not isinstance(given, numbers.Integral):
        raise TypeError(f"local_size is {given!r}, expected the number of ranks of a machine, 'auto' or None")
    if given < 1:
        raise ValueError(f"local_size is {given}, expected at least 1 rank of a machine")
    return int(given)


@dataclass(frozen=True)
class RankLocation:
    """The location of a rank, as its environment has it.

    Attributes:
        local_size: ranks of its machine; None: it is not said.
        machine: the first rank there; None: it is not said.
    """

    local_size: int | None
    machine: int | None

    @classmethod
    def from_environment(cls) -> RankLocation:
        """The location of this rank."""
        size, rank = (os.environ.get(name, "") for name in _VARIABLES)
        known = rank.isdecimal() and dist.is_initialized()
        return cls(int(size) if size.isdecimal() else None, dist.get_rank() - int(rank) if known else None)


def machine_size(option: LocalSize, locations: Sequence[RankLocation]) -> int:
    """L, the ranks of a machine, from the locations of all ranks of a group; every rank finds the same.

    Raises:
        ValueError: machines that two levels cannot have.
    """
    world_size = len(locations)
    machines = [location.machine for location in locations]
    runs = [(machine, len(list(run))) for machine, run in itertools.groupby(machines)]
    if None not in machines and len({machine for machine, _ in runs}) < len(runs):
        raise ValueError(
            f"local_size={option!r}: the ranks of a machine are not side by side in the process group: those of its "
            f"ranks begin at ranks {machines}. Order the ranks by machine, or leave local_size out"
        )
    if option != "auto":
        assert option is not None
        if world_size % option:
            raise ValueError(f"local_size={option}: {world_size} ranks are not machines of {option} each")
        return option
    lacking = [
        rank for rank, location in enumerate(locations) if location.local_size is None or location.machine is None
    ]
    if lacking:
        raise ValueError(
            f"local_size='auto' reads {' and '.join(_VARIABLES)}, which torchrun sets; ranks {lacking} do not have "
            "them: give the number of ranks of a machine"
        )
    sizes = sorted({size for _, size in runs})
    if len(sizes) > 1:
        raise ValueError(
            f"local_size='auto': machines have {sizes} ranks of this process group, and two levels need as many of "
            "each: leave local_size out"
        )
    return sizes[0]
