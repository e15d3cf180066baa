"""The ranks that save or load together because they share the sharded tables of a model."""

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
    """The ranks that share a model's sharded tables; without sharded tables, only this process.

    Attributes:
        rank: this rank.
        size: number of ranks.
    """

    def __init__(self, owners: Sequence[TableOwner]) -> None:
        """Takes the process group from the sharded modules.

        Raises:
            ValueError: modules are sharded over process groups in which this process has different ranks or sizes.
        """
        exchanges = [owner.exchange for owner in owners if owner.exchange is not None]
        if len({(each.rank, each.world_size) for each in exchanges}) > 1:
            raise ValueError("collections of the model are sharded over different process groups: save each by itself")
        self._group = exchanges[0].ids if exchanges else None
        self.rank, self.size = (exchanges[0].rank, exchanges[0].world_size) if exchanges else (0, 1)

    def with_own_group(self) -> Participants:
        """Returns these ranks with a separate process group for saves (collective).

        A background save needs one, so that its messages do not mix with messages of training.
        """
        if self._group is None:
            return self
        participants = copy.copy(self)
        participants._group = host_group(self._group, "saves")
        return participants

    def gather(self, value: Any, what: str) -> list[Any]:
        """Gathers `value` from every rank (collective).

        Args:
            value: value to send; it is pickled.
            what: name of the value in errors.

        Returns:
            The values, by rank.

        Raises:
            RuntimeError: a rank has exited, or does not make this call within the process group's timeout.
        """
        if self._group is None:
            return [value]
        values = [None] * self.size
        with exchanging(what, self._group):
            dist.all_gather_object(values, value, group=self._group)
        return values

    def run_on_all(self, work: Callable[[], _Result], what: str) -> list[_Result]:
        """Runs `work` on every rank and gathers the results (collective).

        Args:
            work: function without arguments.
            what: name of the results in errors.

        Returns:
            The results, by rank.

        Raises:
            CheckpointError: another rank raised an error; the message names the rank.
            Exception: the error that `work` raised on this rank.
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
        """Runs `work` on rank 0 only, and returns its result on every rank (collective).

        Args:
            work: function without arguments.
            what: name of the result in errors.

        Raises:
            CheckpointError: `work` raised an error on rank 0; other ranks raise this.
            Exception: the error that `work` raised, on rank 0.
        """
        return cast("_Result", self.run_on_all(lambda: work() if self.rank == 0 else None, what)[0])
