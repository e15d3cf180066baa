"""The processes that save or load together: those that share the sharded tables of a model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch.distributed as dist

from .._host_groups import host_group
from .errors import CheckpointError
from .owners import Owner

_Result = TypeVar("_Result")


class Team:
    """The ranks of a model; one, without sharded tables.

    Attributes:
        rank, size: of this process, of all.
    """

    def __init__(self, owners: Sequence[Owner]) -> None:
        """
        Raises:
            ValueError: collections that are sharded over groups of other sizes.
        """
        exchanges = [owner.exchange for owner in owners if owner.exchange is not None]
        if len({(each.rank, each.world_size) for each in exchanges}) > 1:
            raise ValueError("collections of one model are sharded over groups of other ranks: save them one by one")
        self._group = exchanges[0].ids if exchanges else None
        self.rank, self.size = (exchanges[0].rank, exchanges[0].world_size) if exchanges else (0, 1)

    def apart(self) -> Team:
        """The same ranks, in a process group that nothing else uses; all must call it."""
        if self._group is None:
            return self
        team = copy.copy(self)
        team._group = host_group(self._group, "saves")
        return team

    def gather(self, value: Any) -> list[Any]:
        """`value` of each rank; all must call it."""
        if self._group is None:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def together(self, work: Callable[[], _Result]) -> list[_Result]:
        """The results of `work` on all ranks. An error that one rank raises, all raise."""
        result, error = None, None
        try:
            result = work()
        except Exception as raised:
            if self.size == 1:
                raise
            error = raised
        found = self.gather((result, None if error is None else f"{type(error).__name__}: {error}"))
        if error is not None:
            raise error
        for rank, (_, text) in enumerate(found):
            if text is not None:
                raise CheckpointError(f"rank {rank} of {self.size}: {text}")
        return [each for each, _ in found]

    def first(self, work: Callable[[], _Result]) -> _Result:
        """The result of `work` on rank 0, which alone does it."""
        return cast("_Result", self.together(lambda: work() if self.rank == 0 else None)[0])
