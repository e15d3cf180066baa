"""The machines on which the ranks of a process group run."""

from __future__ import annotations

import itertools
import numbers
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch.distributed as dist

LocalSize: TypeAlias = int | Literal["auto"] | None
"""Number of ranks on a machine; "auto" reads torchrun's environment variables; None exchanges in one level."""

_VARIABLES = ("LOCAL_WORLD_SIZE", "LOCAL_RANK")
"""Environment variables that torchrun sets for each rank."""


def check_local_size(option: LocalSize) -> LocalSize:
    """Validates the option `local_size` and returns it as an int, "auto" or None.

    Raises:
        ValueError: the option is another string, or less than 1.
        TypeError: the option is neither a string nor an integer.
    """
    if option is None or option == "auto":
        return option
    if isinstance(option, str):
        raise ValueError(f"local_size is {option!r}, allowed are a number of ranks, 'auto' and None")
    if isinstance(option, bool) or not isinstance(option, numbers.Integral):
        raise TypeError(f"local_size is {option!r}, expected the number of ranks of a machine, 'auto' or None")
    if option < 1:
        raise ValueError(f"local_size is {option}, expected at least 1 rank of a machine")
    return int(option)


@dataclass(frozen=True)
class RankLocation:
    """The machine of a rank, as read from the rank's environment variables.

    Attributes:
        local_size: number of ranks on its machine; None if unknown.
        machine: the machine's first rank; None if unknown.
    """

    local_size: int | None
    machine: int | None

    @classmethod
    def from_environment(cls) -> RankLocation:
        """Returns the location of this rank, as far as torchrun's environment variables contain it."""
        size, rank = (os.environ.get(name, "") for name in _VARIABLES)
        known = rank.isdecimal() and dist.is_initialized()
        return cls(int(size) if size.isdecimal() else None, dist.get_rank() - int(rank) if known else None)


def machine_size(option: LocalSize, locations: Sequence[RankLocation]) -> int:
    """Returns L, the number of ranks on each machine. It is computed from the locations of all ranks, so all agree.

    Raises:
        ValueError: a hierarchical all-to-all is not possible on these machines.
    """
    world_size = len(locations)
    machines = [location.machine for location in locations]
    runs = [(machine, len(list(run))) for machine, run in itertools.groupby(machines)]
    if None not in machines and len({machine for machine, _ in runs}) < len(runs):
        raise ValueError(
            f"local_size={option!r}: the ranks of a machine are not side by side in the process group: the machines "
            f"of its ranks begin at ranks {machines}. Order the ranks by machine, or leave local_size out"
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
