"""Hierarchical (two-level) all-to-all exchanges: within machines, then between machines.

W ranks are on machines of L ranks each: rank r has the local rank r % L on machine r // L. A block of data
for another rank is first sent within the sender's machine, to the rank with the destination's local rank. That rank
forwards the block to the destination's machine, in one message with the blocks of all ranks of its own machine. Rows
travel back over the same ranks. So a rank sends L - 1 messages within its machine and W / L - 1 to other machines,
instead of W - 1 in total.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from ..runtime.host_groups import spans_world, timeout_of
from ..tbe import Int64Array
from .all_to_all import FlatAllToAll, Relayed, Work


@dataclass(eq=False)
class HierarchicalGroups:
    """The two process groups of this rank for one use (ids or rows), and the exchanges that await their second level.

    Attributes:
        size: L, the number of ranks on a machine.
        machines: M, the number of machines.
        within: the process group of this rank's machine.
        between: the process group of the ranks that have this rank's local rank, one on each machine.
        pending: exchanges whose second level has not started, in the order in which their second levels will start.
    """

    size: int
    machines: int
    within: dist.ProcessGroup
    between: dist.ProcessGroup
    pending: deque[TwoStageWork] = field(default_factory=deque)

    def poll(self) -> None:
        """Starts the second level of each pending exchange, in order, until one has not completed its first level."""
        while self.pending and self.pending[0].first.is_completed():
            self.pending.popleft().start_second()

    def start_all(self) -> None:
        """Starts the second level of all pending exchanges, so that other ranks need not wait for a later call."""
        while self.pending:
            self.pending.popleft().start_second()


_known_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, int], HierarchicalGroups]] = (
    weakref.WeakKeyDictionary()
)


def hierarchical_groups(group: dist.ProcessGroup, use: str, size: int) -> HierarchicalGroups:
    """Returns the process groups of both levels for one `use` of `group` (collective).

    The groups have the backend of `group` and are created at the first call for each use and size.

    Args:
        group: process group of W ranks.
        use: name of the use, such as "ids".
        size: L, a divisor of W.

    Raises:
        ValueError: the ranks of `group` are not in ascending order.
    """
    known = _known_groups.setdefault(group, {})
    if (use, size) not in known:
        ranks = dist.get_process_group_ranks(group)
        if ranks != sorted(ranks):
            raise ValueError(
                f"a hierarchical all-to-all needs a process group with ranks in ascending order, got {ranks}"
            )
        count = len(ranks) // size
        machines = [ranks[size * machine : size * (machine + 1)] for machine in range(count)]
        within = _new_group(group, machines)
        between = _new_group(group, [list(same) for same in zip(*machines, strict=True)])
        known[use, size] = HierarchicalGroups(size, count, within, between)
    return known[use, size]


def _new_group(group: dist.ProcessGroup, parts: Sequence[list[int]]) -> dist.ProcessGroup:
    """Creates a process group for each part of `group`, and returns the process group that contains this rank."""
    timeout, backend, whole = timeout_of(group), dist.get_backend_config(group), spans_world(group)
    own: dist.ProcessGroup | None = None
    for part in parts:  # torch numbers subgroups of the world, so every rank must create each subgroup
        if whole or dist.get_rank() in part:
            made = dist.new_group(part, timeout, backend, use_local_synchronization=not whole)
            own = made if dist.get_rank() in part else own
    assert own is not None
    return own


class HierarchicalAllToAll:
    """All-to-all exchanges in two levels, with the interface of `FlatAllToAll`."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        stats: dict[str, int],
        groups: HierarchicalGroups,
        ids_groups: HierarchicalGroups,
    ) -> None:
        """Creates the all-to-all of a process group.

        Args:
            group: process group of all ranks.
            stats: see `FlatAllToAll`.
            groups: the process groups of both levels, shared by all collections of `group`.
            ids_groups: the process groups for ids. Second levels of ids may start at any time, because ids use `within`
                only in the first level and `between` only in the second. Rows and gradients use either group first,
                so their second levels must start in the same order on all ranks.
        """
        self.group, self.groups, self.ids_groups = group, groups, ids_groups
        self._within, self._between = (
            FlatAllToAll(groups.within, stats, groups.size),
            FlatAllToAll(groups.between, stats),
        )

    def connect(self) -> None:
        """Exchanges host tensors through shared memory where ranks are on one machine; see `FlatAllToAll.connect`."""
        self._within.connect()
        self._between.connect()

    def exchange_counts(
        self, sent: torch.Tensor, ids: torch.Tensor, id_counts: list[int]
    ) -> tuple[Work, torch.Tensor, torch.Tensor | None, Callable[[], torch.Tensor] | None]:
        """Starts to send row r of `sent`, int64 `[W, n]`, to rank r; see `FlatAllToAll.exchange_counts`."""
        size, machines, width = self.groups.size, self.groups.machines, sent.shape[1]
        by_local_rank = sent.view(machines, size, width).transpose(0, 1).contiguous()
        relayed, received = torch.empty_like(by_local_rank), torch.empty_like(sent)
        first = self._within.send(relayed, by_local_rank)

        def second() -> Work:
            forwarded = relayed.transpose(0, 1).contiguous()
            return self._between.send(received.view(machines, size, width), forwarded)

        return self._start(first, second), received, relayed, None

    def to_owners(
        self, sent: torch.Tensor, send_counts: list[int], receive_counts: list[int], relayed: Relayed
    ) -> tuple[Work, torch.Tensor]:
        """Starts to send ids or gradients to owner ranks, within the machine first; see `FlatAllToAll.to_owners`."""
        assert relayed is not None
        send_matrix, receive_matrix = self._by_machine(send_counts), self._by_machine(receive_counts)
        by_local_rank = _transposed(sent, send_matrix)
        forwarded = sent.new_empty((int(relayed.sum()), *sent.shape[1:]))
        first = self._within.send(
            forwarded, by_local_rank, relayed.sum(axis=1).tolist(), send_matrix.sum(axis=0).tolist()
        )
        received = sent.new_empty((sum(receive_counts), *sent.shape[1:]))

        def second() -> Work:
            sizes = receive_matrix.sum(axis=1).tolist(), relayed.sum(axis=0).tolist()
            return self._between.send(received, _transposed(forwarded, relayed), *sizes)

        return self._start(first, second), received

    def gradients_to_owners(
        self, sent: torch.Tensor, send_counts: list[int], receive_counts: list[int], relayed: Relayed
    ) -> list[torch.Tensor]:
        """Sends gradients to owner ranks; see `FlatAllToAll.gradients_to_owners`."""
        work, received = self.to_owners(sent, send_counts, receive_counts, relayed)
        work.wait()
        return [received]

    def rows_from_owners(
        self, parts: Sequence[torch.Tensor], send_counts: list[int], receive_counts: list[int], relayed: Relayed
    ) -> tuple[Work, torch.Tensor]:
        """Starts to send rows back from owner ranks, between machines first, so that both levels mirror `to_owners`."""
        assert relayed is not None
        sent = torch.cat(list(parts))
        send_matrix, receive_matrix = self._by_machine(send_counts), self._by_machine(receive_counts)
        forwarded = sent.new_empty((int(relayed.sum()), *sent.shape[1:]))
        first = self._between.send(forwarded, sent, relayed.sum(axis=0).tolist(), send_matrix.sum(axis=1).tolist())
        received = sent.new_empty((sum(receive_counts), *sent.shape[1:]))
        result, by_local_rank = received.detach(), torch.empty_like(received)

        def second() -> Work:
            sizes = receive_matrix.sum(axis=0).tolist(), relayed.sum(axis=1).tolist()
            return self._within.send(by_local_rank, _transposed(forwarded, relayed.T), *sizes)

        def end() -> None:
            with torch.no_grad():
                torch.cat(_blocks(by_local_rank, receive_matrix.T), out=result)

        return self._start(first, second, end), received

    def all_reduce_max(self, numbers: torch.Tensor) -> Work:
        """Starts to replace each element of `numbers` by its maximum over all ranks, in place."""
        return self._start(self._within.all_reduce_max(numbers), lambda: self._between.all_reduce_max(numbers))

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gathers a tensor from all ranks; returns them stacked, `[W, ...]`."""
        machine, first = self._within.start_all_gather(tensor)
        gathered_by_machine: list[torch.Tensor] = []

        def second() -> Work:
            gathered, work = self._between.start_all_gather(machine)
            gathered_by_machine.append(gathered)
            return work

        self._start(first, second).wait()
        return gathered_by_machine[0].flatten(0, 1)

    def _start(self, first: Work, second: Callable[[], Work], end: Callable[[], None] | None = None) -> TwoStageWork:
        self.ids_groups.poll()  # exchanges of ids have no thread; each new exchange moves them on
        staged = TwoStageWork(self, first, second, end)
        self.groups.pending.append(staged)
        return staged

    def _by_machine(self, counts: list[int]) -> Int64Array:
        """Returns the counts of the W ranks as int64 `[W / L, L]`, by machine and local rank."""
        return np.array(counts, np.int64).reshape(self.groups.machines, self.groups.size)


class TwoStageWork:
    """An exchange in two levels.

    The second level starts after the first has completed and after the second levels of earlier exchanges have started.

    Attributes:
        first: the work of the first level.
    """

    def __init__(
        self, all_to_all: HierarchicalAllToAll, first: Work, second: Callable[[], Work], end: Callable[[], None] | None
    ) -> None:
        """Creates the work of an exchange whose first level has started.

        Args:
            all_to_all: the hierarchical all-to-all that runs this exchange.
            first: the work of the first level.
            second: function that starts the second level and returns its work.
            end: function that is called after the second level; None for none.
        """
        self.first = first
        self._all_to_all, self._start, self._end = all_to_all, second, end
        self._second: Work | None = None
        self._error: RuntimeError | None = None

    def start_second(self) -> None:
        """Waits for the first level and starts the second; if this fails, `wait` raises the error."""
        try:
            self.first.wait()
            self._second = self._start()
        except RuntimeError as error:
            self._error = error

    def is_completed(self) -> bool:
        """Returns whether the second level has completed or an error occurred."""
        return self._error is not None or (self._second is not None and self._second.is_completed())

    def wait(self) -> None:
        """Blocks until both levels have completed.

        Raises:
            RuntimeError: a rank has exited or did not take part in time.
        """
        self._all_to_all.ids_groups.poll()
        while self._second is None and self._error is None:
            self._all_to_all.groups.pending.popleft().start_second()
        if self._error is not None:
            raise self._error
        assert self._second is not None
        self._second.wait()
        if self._end is not None:
            self._end()


def _blocks(tensor: torch.Tensor, lengths: Int64Array) -> list[torch.Tensor]:
    """Splits a tensor into blocks of `lengths`, `[n, m]` in row order, and returns the blocks in column order."""
    parts = tensor.split(lengths.ravel().tolist())
    rows, columns = lengths.shape
    return [parts[columns * row + column] for column in range(columns) for row in range(rows)]


def _transposed(tensor: torch.Tensor, lengths: Int64Array) -> torch.Tensor:
    """Returns the tensor with its blocks reordered from row order to column order of `lengths`; see `_blocks`."""
    return torch.cat(_blocks(tensor, lengths))
