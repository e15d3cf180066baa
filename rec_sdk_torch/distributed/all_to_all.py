"""All-to-all exchanges of one process group; they count messages and bytes."""

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

    All ranks must call the methods in the same order.

    Attributes:
        group: the process group of all W ranks.
    """

    def __init__(self, group: dist.ProcessGroup, stats: dict[str, int], size: int = 1) -> None:
        """Creates the all-to-all of a process group.

        Args:
            group: process group of W ranks.
            stats: dict of counters; each exchange increases those named in `COUNTERS`.
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

        Without counts, each tensor is divided into equal parts, one for every rank.
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
            (the work; the received rows, `[W, n]`; None, where a hierarchical all-to-all returns the rows that this
            rank forwards, `[L, W / L, n]`)
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

    from_owners = to_owners  # only a hierarchical all-to-all sends rows by another route

    def all_reduce_max(self, numbers: torch.Tensor) -> Work:
        """Starts to replace each element of `numbers` by its maximum over all ranks, in place."""
        work: Work = dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.group, async_op=True)
        return work

    def start_all_gather(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Work]:
        """Starts to gather a tensor from all ranks; returns the result, `[W, ...]`, and the work that fills it."""
        gathered = tensor.new_empty((self._ranks, *tensor.shape))
        return gathered, dist.all_gather(list(gathered.unbind()), tensor, group=self.group, async_op=True)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gathers a tensor from all ranks; returns them stacked, `[W, ...]`."""
        gathered, work = self.start_all_gather(tensor)
        work.wait()
        return gathered
