"""All-to-alls of one process group, whose messages and bytes are counted."""

from __future__ import annotations

import math
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist

from ..tbe import Int64Array

Relayed: TypeAlias = Int64Array | None
"""The elements that this rank passes on, int64 `[L, W / L]`: of each rank of its machine for each machine."""

COUNTERS = ("messages", "bytes_within", "bytes_between")


class Work(Protocol):
    """An exchange on its way."""

    def wait(self) -> Any:
        """Blocks until it has arrived."""

    def is_completed(self) -> bool:
        """Returns whether it has arrived, or failed."""


class FlatAllToAll:
    """Sends tensors from each rank to each other. All ranks have to call its methods in one order.

    Attributes:
        group: the process group of all ranks.
    """

    def __init__(self, group: dist.ProcessGroup, stats: dict[str, int], size: int = 1) -> None:
        """
        Args:
            group: of W ranks.
            stats: takes the counters of messages, and of bytes within machines and between them.
            size: ranks of a machine.
        """
        self.group, self._stats = group, stats
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        first = self._rank - self._rank % size
        self._machine = slice(first, first + size)

    def send(
        self, received: torch.Tensor, sent: torch.Tensor, of: list[int] | None = None, to: list[int] | None = None
    ) -> Work:
        """Starts to send `to` elements to each rank, and to receive `of` from each; as many of each without them."""
        lengths = [len(sent) // self._ranks] * self._ranks if to is None else to
        own, here = lengths[self._rank], sum(lengths[self._machine])
        width = sent.element_size() * math.prod(sent.shape[1:])
        self._stats["messages"] += self._ranks - 1
        self._stats["bytes_within"] += (here - own) * width
        self._stats["bytes_between"] += (sum(lengths) - here) * width
        work: Work = dist.all_to_all_single(received, sent, of, to, group=self.group, async_op=True)
        return work

    def exchange_counts(self, sent: torch.Tensor) -> tuple[Work, torch.Tensor, torch.Tensor | None]:
        """Sends each rank its row of int64 `[W, n]`; (work, rows of all ranks, `[L, W / L, n]` that are passed on)."""
        received = torch.empty_like(sent)
        return self.send(received, sent), received, None

    def to_owners(
        self, sent: torch.Tensor, to: list[int], of: list[int], relayed: Relayed
    ) -> tuple[Work, torch.Tensor]:
        """Sends each rank `to` elements, rank by rank; (work, `of` elements of each rank)."""
        received = sent.new_empty((sum(of), *sent.shape[1:]))
        return self.send(received, sent, of, to), received

    from_owners = to_owners  # by two levels, answers take the way back

    def all_reduce_max(self, numbers: torch.Tensor) -> Work:
        """Replaces each number by the greatest of all ranks."""
        work: Work = dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.group, async_op=True)
        return work

    def start_all_gather(self, own: torch.Tensor) -> tuple[torch.Tensor, Work]:
        """Returns the tensors of all ranks, in one, and the work that brings them."""
        every = own.new_empty((self._ranks, *own.shape))
        return every, dist.all_gather(list(every.unbind()), own, group=self.group, async_op=True)

    def all_gather(self, own: torch.Tensor) -> torch.Tensor:
        """Returns the tensors of all ranks, `[W, ...]`."""
        every, work = self.start_all_gather(own)
        work.wait()
        return every
