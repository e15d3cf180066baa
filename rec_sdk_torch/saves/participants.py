"""The processes that save or load together: those that share the sharded tables of a model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch.distributed as dist

from ..runtime.host_groups import exchanging, host_group
from .format.errors import CheckpointError
from .owners import TableOwner

_Result = TypeVar("_Result")


class Participants:
    """The ranks of a model; one, without sharded tables.

    Attributes:
        rank, size: of this process, of all.
    """

    def __init__(self, owners: Sequence[TableOwner]) -> None:
        """
        Raises:
            ValueError: collections that are sharded over groups of other sizes.
        """
        exchanges = [owner.exchange for owner in owners if owner.exchange is not None]
        if len({(each.rank, each.world_size) for each in exchanges}) > 1:
            raise ValueError("collections of one model are sharded over groups of other ranks: save them one by one")
        self._group = exchanges[0].ids if exchanges else None
        self.rank, self.size = (exchanges[0].rank, exchanges[0].world_size) if exchanges else (0, 1)

    def with_own_group(self) -> Participants:
        """Returns the same ranks, in a process group that nothing else uses (collective)."""
        if self._group is None:
            return self
        participants = copy.copy(self)
        participants._group = host_group(self._group, "saves")
        return participants

    def gather(self, value: Any, what: str) -> list[Any]:
        """Returns `value` of each rank (collective). `what` names it in errors.

        Raises:
            RuntimeError: a rank has ended, or does not come within the process group's timeout.
        """
        if self._group is None:
            return [value]
        values = [None] * self.size
        with exchanging(what, self._group):
            dist.all_gather_object(values, value, group=self._group)
        return values

    def run_on_all(self, work: Callable[[], _Result], what: str) -> list[_Result]:
        """Returns the results of `work` on all ranks (collective); an error that one rank raises, all raise.

        `what` names the results in errors of the exchange.
        """
        result, error = None, None
        try:
            result = work()
        except Exception as raised:
            if self.size == 1:
                raise
            error = raised
        found = self.gather((result, None if error is None else f"{type(error).__name__}: {error}"), what)
        if error is not None:
            raise error
        for rank, (_, text) in enumerate(found):
            if text is not None:
                raise CheckpointError(f"rank {rank} of {self.size}: {text}")
        return [each for each, _ in found]

    def run_on_first(self, work: Callable[[], _Result], what: str) -> _Result:
        """Returns the result of `work` on rank 0, which alone does it (collective); `what` is as of `run_on_all`."""
        return cast("_Result", self.run_on_all(lambda: work() if self.rank == 0 else None, what)[0])
