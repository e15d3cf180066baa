"""All-to-all exchanges of one process group; they count messages and bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from ..tbe import Int64Array
from .shared_memory import Array, Bytes, Channel, SharedMemoryWork, connect

Relayed: TypeAlias = Int64Array | None
"""Element counts that this rank forwards, int64 `[L, W / L]`: from each rank of its machine to each machine."""

ALL_TO_ALL, ALL_REDUCE, ALL_GATHER = 0, 1, 2
"""Kinds of exchanges through shared memory."""
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
        self._channel: Channel | None = None
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        first = self._rank - self._rank % size
        self._machine = slice(first, first + size)

    def connect(self) -> None:
        """Exchanges host tensors through shared memory from now on, where all ranks are on one machine (collective)."""
        self._channel = connect(self.group)

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
        self._count(lengths, sent.element_size() * math.prod(sent.shape[1:]))
        if self._channel is not None and sent.device.type == "cpu":
            incoming = [len(received) // self._ranks] * self._ranks if receive_counts is None else receive_counts
            pieces = [[part] for part in _split(sent, lengths)]
            return self._channel.start(ALL_TO_ALL, pieces, _memory_of(received, incoming))
        work: Work = dist.all_to_all_single(
            received, sent, receive_counts, send_counts, group=self.group, async_op=True
        )
        return work

    def _count(self, lengths: list[int], width: int) -> None:
        """Counts the messages of an exchange, which sends `lengths[r]` elements of `width` bytes to each rank r."""
        own, here = lengths[self._rank], sum(lengths[self._machine])
        self._stats["messages"] += self._ranks - 1
        self._stats["bytes_within"] += (here - own) * width
        self._stats["bytes_between"] += (sum(lengths) - here) * width

    def exchange_counts(
        self, sent: torch.Tensor, ids: torch.Tensor, id_counts: list[int]
    ) -> tuple[Work, torch.Tensor, torch.Tensor | None, Callable[[], torch.Tensor] | None]:
        """Starts to send row r of `sent`, int64 `[W, n]`, to rank r, and in shared memory also `id_counts[r]` of `ids`.

        Returns:
            (the work; the received rows, `[W, n]`; None, where a hierarchical all-to-all returns the rows that this
            rank forwards, `[L, W / L, n]`; a function that returns the received ids in order of their ranks after the
            work, or None if `to_owners` has to send the ids)
        """
        received = torch.empty_like(sent)
        if self._channel is None:
            return self.send(received, sent), received, None, None
        width, rank = sent.shape[1], self._rank
        self._count([width + count for count in id_counts], sent.element_size())
        pieces = [[row, part] for row, part in zip(sent.numpy(), _split(ids, id_counts), strict=True)]
        shared = self._channel.start(ALL_TO_ALL, pieces, None)
        work = CountsWork(shared, received, rank, torch.from_numpy(np.concatenate(pieces[rank])))
        return work, received, None, work.take_ids

    def to_owners(
        self, sent: torch.Tensor, send_counts: list[int], receive_counts: list[int], relayed: Relayed
    ) -> tuple[Work, torch.Tensor]:
        """Starts to send ids or gradients to owner ranks: `send_counts[r]` elements to each rank r, ordered by rank.

        Returns:
            (the work; `receive_counts[r]` elements from each rank r, ordered by rank)
        """
        received = sent.new_empty((sum(receive_counts), *sent.shape[1:]))
        return self.send(received, sent, receive_counts, send_counts), received

    def rows_from_owners(
        self, parts: Sequence[torch.Tensor], send_counts: list[int], receive_counts: list[int], relayed: Relayed
    ) -> tuple[Work, torch.Tensor]:
        """Starts to send rows back from owner ranks; see `to_owners`.

        Args:
            parts: the rows to send, float32 `[n, D]` each: as many parts for each rank, ordered by rank; or all rows as
                one part.
            send_counts, receive_counts, relayed: see `to_owners`.
        """
        first, count = parts[0], len(parts) // self._ranks
        if self._channel is None or first.device.type != "cpu" or not count:
            return self.to_owners(torch.cat(list(parts)), send_counts, receive_counts, relayed)
        self._count(send_counts, 4 * first.shape[1])
        received = first.new_empty((sum(receive_counts), first.shape[1]))
        arrays = [part.detach().numpy() for part in parts]
        pieces = [arrays[count * rank : count * (rank + 1)] for rank in range(self._ranks)]
        return self._channel.start(ALL_TO_ALL, pieces, _memory_of(received, receive_counts)), received

    def gradients_to_owners(
        self, sent: torch.Tensor, send_counts: list[int], receive_counts: list[int], relayed: Relayed
    ) -> list[torch.Tensor]:
        """Sends gradients to owner ranks; see `to_owners`. Returns the gradients from each rank, or of all together."""
        if self._channel is None or sent.device.type != "cpu":
            work, received = self.to_owners(sent, send_counts, receive_counts, relayed)
            work.wait()
            return [received]
        self._count(send_counts, 4 * sent.shape[1])
        shared = self._channel.start(ALL_TO_ALL, [[part] for part in _split(sent, send_counts)], None)
        shared.wait()
        blocks = [data.view(torch.float32).view(-1, sent.shape[1]) for data in shared.data.values()]
        blocks.insert(self._rank, sent.split(send_counts)[self._rank])
        if [len(block) for block in blocks] != receive_counts:
            raise RuntimeError("ranks have sent gradients of different batches")
        return blocks

    def all_reduce_max(self, numbers: torch.Tensor) -> Work:
        """Starts to replace each element of `numbers` by its maximum over all ranks, in place."""
        if self._channel is not None and numbers.device.type == "cpu":
            array, others = numbers.numpy(), np.empty((self._ranks, *numbers.shape), numbers.numpy().dtype)
            return self._channel.start(
                ALL_REDUCE,
                [[array]] * self._ranks,
                list(others.view(np.uint8)),
                lambda: others.max(axis=0, out=array),
            )
        work: Work = dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.group, async_op=True)
        return work

    def start_all_gather(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Work]:
        """Starts to gather a tensor from all ranks; returns the result, `[W, ...]`, and the work that fills it."""
        gathered = tensor.new_empty((self._ranks, *tensor.shape))
        if self._channel is not None and tensor.device.type == "cpu":
            pieces = [[tensor.contiguous().numpy()]] * self._ranks
            return gathered, self._channel.start(ALL_GATHER, pieces, _memory_of(gathered, [1] * self._ranks))
        return gathered, dist.all_gather(list(gathered.unbind()), tensor, group=self.group, async_op=True)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gathers a tensor from all ranks; returns them stacked, `[W, ...]`."""
        gathered, work = self.start_all_gather(tensor)
        work.wait()
        return gathered


class CountsWork:
    """A running exchange of counts and ids through shared memory."""

    def __init__(self, shared: SharedMemoryWork, received: torch.Tensor, rank: int, own: torch.Tensor) -> None:
        """Creates the work; `received` receives the counts, and `own` are counts and ids of this rank for itself."""
        self._shared, self._received, self._rank, self._parts = shared, received, rank, [own]
        self.is_completed = shared.is_completed

    def wait(self) -> None:
        """Blocks until the counts and ids of all ranks have arrived."""
        self._shared.wait()
        others = [data.view(torch.int64) for data in self._shared.data.values()]
        self._parts = [*others[: self._rank], *self._parts, *others[self._rank :]]
        self._shared.data.clear()
        width = self._received.shape[1]
        torch.stack([part[:width] for part in self._parts], out=self._received)

    def take_ids(self) -> torch.Tensor:
        """Returns the received ids, int64, in order of their ranks; call it once, after `wait`."""
        width, parts, self._parts = self._received.shape[1], self._parts, []
        return torch.cat([part[width:] for part in parts])


def _split(tensor: torch.Tensor, lengths: Sequence[int]) -> list[Array]:
    """Splits a host tensor into arrays of `lengths` elements along the first dimension, which share its memory."""
    array, parts, begin = tensor.detach().numpy(), [], 0
    for length in lengths:
        parts.append(array[begin : begin + length])
        begin += length
    return parts


def _memory_of(tensor: torch.Tensor, lengths: Sequence[int]) -> list[Bytes]:
    """Returns the memory of a contiguous host tensor, divided as by `_split`."""
    memory, parts, begin = tensor.detach().numpy().reshape(-1).view(np.uint8), [], 0
    width = tensor.element_size() * math.prod(tensor.shape[1:])
    for length in lengths:
        parts.append(memory[begin : begin + width * length])
        begin += width * length
    return parts
