"""All-to-all exchanges of one process group, with counters of messages and bytes."""

from __future__ import annotations

import math
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist

from ..tbe import Int64Array

Relayed: TypeAlias = Int64Array | None
"""Element counts that this rank forwards, int64 `[L, W / L]`: from each rank of its machine to each machine."""

COUNTERS = ("messages", "bytes_within", "bytes_between")


class Work(Protocol):
    """A running exchange, such as a `torch.distributed.Work`."""

    def wait(self) -> Any:
        """Blocks until the exchange has completed."""

    def is_completed(self) -> bool:
        """Returns whether the exchange has completed or failed."""


class FlatAllToAll:
    """Flat all-to-all exchanges: each rank sends directly to each other rank.

    All ranks must call its methods in one order.

    Attributes:
        group: the process group of all W ranks.
    """

    def __init__(self, group: dist.ProcessGroup, stats: dict[str, int], size: int = 1) -> None:
        """Creates the exchanges of a process group.

        Args:
            group: process group of W ranks.
            stats: dict whose counters of messages, bytes within a machine and bytes between machines are increased.
            size: number of ranks on a machine.
        """
        self.group, self._stats = group, stats
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        first = self._rank - self._rank % size
        self._machine = slice(first, first + size)

    def send(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        receive_counts: list[int] | None = None,
        send_counts: list[int] | None = None,
    ) -> Work:
        """Starts to send `send_counts[r]` elements to each rank r and to receive `receive_counts[r]` elements from it.

        Without counts every rank sends and receives equal shares of the tensors.
        """
        lengths = [len(sent) // self._ranks] * self._ranks if send_counts is None else send_counts
        own, here = lengths[self._rank], sum(lengths[self._machine])
        width = sent.element_size() * math.prod(sent.shape[1:])
        self._stats["messages"] += self._ranks - 1
        self._stats["bytes_within"] += (here - own) * width
        self._stats["bytes_between"] += (sum(lengths) - here) * width
        work: Work = dist.all_to_all_single(
            received, sent, receive_counts, send_counts, group=self.group, async_op=True
        )
        return work

    def exchange_counts(self, sent: torch.Tensor) -> tuple[Work, torch.Tensor, torch.Tensor | None]:
        """Starts to send row r of `sent`, int64 `[W, n]`, to rank r.

        Returns:
            (the work; the rows of all ranks, `[W, n]`; the rows that this rank forwards, `[L, W / L, n]`, here None)
        """
        received = torch.empty_like(sent)
        return self.send(received, sent), received, None

    def to_owners(
        self, sent: torch.Tensor, send_counts: list[int], receive_counts: list[int], relayed: Relayed
    ) -> tuple[Work, torch.Tensor]:
        """Starts to send ids or gradients to owner ranks: `send_counts[r]` elements to each rank r, ordered by rank.

        Returns:
            (the work; `receive_counts[r]` elements from each rank r, ordered by rank)
        """
        received = sent.new_empty((sum(receive_counts), *sent.shape[1:]))
        return self.send(received, sent, receive_counts, send_counts), received

    from_owners = to_owners  # a hierarchical all-to-all uses the reverse route for rows

    def all_reduce_max(self, numbers: torch.Tensor) -> Work:
        """Starts to replace each number by its maximum over all ranks."""
        work: Work = dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.group, async_op=True)
        return work

    def start_all_gather(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Work]:
        """Returns the tensors of all ranks, `[W, ...]`, and the work that fills them."""
        gathered = tensor.new_empty((self._ranks, *tensor.shape))
        return gathered, dist.all_gather(list(gathered.unbind()), tensor, group=self.group, async_op=True)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensors of all ranks, `[W, ...]`."""
        gathered, work = self.start_all_gather(tensor)
        work.wait()
        return gathered
