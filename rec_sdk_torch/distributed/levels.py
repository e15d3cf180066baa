"""All-to-alls of a process group: directly, or by two levels, within machines and between them.

W ranks are in machines of L: rank r has the place r % L in machine r // L. By two levels a block for another rank goes
first to the rank of its own machine with that place, then, together with those of the whole machine, to the other one.
Answers go back over the same ranks. A rank so sends L - 1 and W / L - 1 messages in place of W - 1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from ..tbe.cache.batch import Int64Array

Relayed: TypeAlias = Int64Array | None
"""The elements that this rank passes on, int64 `[L, W / L]`: of each rank of its machine for each machine."""

COUNTERS = ("messages", "bytes_within", "bytes_between")


class Traffic:
    """Counts the messages that this rank sends in all-to-alls, and their bytes within and between machines."""

    def __init__(self, stats: dict[str, int]) -> None:
        """`stats`: takes the counters."""
        self._stats = stats
        stats |= dict.fromkeys(COUNTERS, 0)

    def add(self, group: dist.ProcessGroup, sent: torch.Tensor, to: Sequence[int] | None, size: int) -> None:
        """An exchange of `group`, whose ranks are in machines of `size`; `to`: elements for each; None: as many."""
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        first = rank - rank % size
        lengths = [len(sent) // ranks] * ranks if to is None else to
        own, here = lengths[rank], sum(lengths[first : first + size])
        width = sent.element_size() * int(np.prod(sent.shape[1:], dtype=np.int64))
        self._stats["messages"] += ranks - 1
        self._stats["bytes_within"] += (here - own) * width
        self._stats["bytes_between"] += (sum(lengths) - here) * width


class Waited(Protocol):
    """An exchange on its way."""

    def wait(self) -> Any:
        """Waits until it has arrived."""

    def is_completed(self) -> bool:
        """Whether it has arrived, or failed."""


class Way(Protocol):
    """How tensors get from each rank to each other. All ranks have to call its methods in one order."""

    def table(self, sent: torch.Tensor) -> tuple[Waited, torch.Tensor, torch.Tensor | None]:
        """Sends each rank its row of int64 `[W, n]`; (work, those of all ranks, `[L, W / L, n]` that are passed on)."""

    def ask(self, sent: torch.Tensor, to: list[int], of: list[int], relayed: Relayed) -> tuple[Waited, torch.Tensor]:
        """Sends each rank `to` elements, rank by rank; (work, those of all ranks)."""

    def answer(self, sent: torch.Tensor, to: list[int], of: list[int], relayed: Relayed) -> tuple[Waited, torch.Tensor]:
        """The same for answers to `ask`; `relayed`: of the questions."""

    def most(self, numbers: torch.Tensor) -> Waited:
        """Replaces each number by the greatest of all ranks."""

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """The tensors of all ranks, `[W, ...]`."""

    def push(self) -> None:
        """Begins second levels that need not wait."""

    def settle(self) -> None:
        """Begins all second levels: other ranks need not wait until this one waits."""


class OneLevel:
    """Each rank sends to each other."""

    def __init__(self, group: dist.ProcessGroup, traffic: Traffic, size: int = 1) -> None:
        """`size`: ranks of a machine."""
        self._group, self._traffic, self._size = group, traffic, size

    def table(self, sent: torch.Tensor) -> tuple[Waited, torch.Tensor, torch.Tensor | None]:
        received = torch.empty_like(sent)
        return self._exchange(received, sent, None, None), received, None

    def ask(self, sent: torch.Tensor, to: list[int], of: list[int], relayed: Relayed) -> tuple[Waited, torch.Tensor]:
        received = sent.new_empty((sum(of), *sent.shape[1:]))
        return self._exchange(received, sent, of, to), received

    def answer(self, sent: torch.Tensor, to: list[int], of: list[int], relayed: Relayed) -> tuple[Waited, torch.Tensor]:
        return self.ask(sent, to, of, relayed)

    def most(self, numbers: torch.Tensor) -> Waited:
        work: Waited = dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._group, async_op=True)
        return work

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        every, work = _gathered(self._group, own)
        work.wait()
        return every

    def push(self) -> None:
        """There is one level."""

    def settle(self) -> None:
        """There is one level."""

    def _exchange(
        self, received: torch.Tensor, sent: torch.Tensor, of: list[int] | None, to: list[int] | None
    ) -> Waited:
        self._traffic.add(self._group, sent, to, self._size)
        work: Waited = dist.all_to_all_single(received, sent, of, to, group=self._group, async_op=True)
        return work


@dataclass(eq=False)
class Pair:
    """The groups of two levels that a rank is in, for one use.

    Attributes:
        size: L, ranks of a machine.
        machines: M.
        within: the ranks of this machine.
        between: the ranks of one place in their machines.
        waiting: exchanges whose second level has not begun, in the order in which it will.
        polled: whether second levels may begin at any time, since each level has one group of its own.
    """

    size: int
    machines: int
    within: dist.ProcessGroup
    between: dist.ProcessGroup
    polled: bool
    waiting: deque[Staged] = field(default_factory=deque)


class TwoLevels:
    """Within a machine, and between machines the ranks of one place."""

    def __init__(self, pair: Pair, traffic: Traffic) -> None:
        """`pair`: of all collections of a process group."""
        self._pair, self._traffic = pair, traffic

    def table(self, sent: torch.Tensor) -> tuple[Waited, torch.Tensor, torch.Tensor | None]:
        size, machines, width = self._pair.size, self._pair.machines, sent.shape[1]
        by_place = sent.view(machines, size, width).transpose(0, 1).contiguous()
        relayed, received = torch.empty_like(by_place), torch.empty_like(sent)
        first = self._within(relayed, by_place, None, None)

        def second() -> Waited:
            passed_on = relayed.transpose(0, 1).contiguous()
            return self._between(received.view(machines, size, width), passed_on, None, None)

        return self._begin(first, second), received, relayed

    def ask(self, sent: torch.Tensor, to: list[int], of: list[int], relayed: Relayed) -> tuple[Waited, torch.Tensor]:
        assert relayed is not None
        for_ranks, of_ranks = self._by_machine(to), self._by_machine(of)
        by_place = _transposed(sent, for_ranks)
        passed_on = sent.new_empty((int(relayed.sum()), *sent.shape[1:]))
        first = self._within(passed_on, by_place, relayed.sum(axis=1).tolist(), for_ranks.sum(axis=0).tolist())
        received = sent.new_empty((sum(of), *sent.shape[1:]))

        def second() -> Waited:
            by_machine = _transposed(passed_on, relayed)
            sizes = of_ranks.sum(axis=1).tolist(), relayed.sum(axis=0).tolist()
            return self._between(received, by_machine, *sizes)

        return self._begin(first, second), received

    def answer(self, sent: torch.Tensor, to: list[int], of: list[int], relayed: Relayed) -> tuple[Waited, torch.Tensor]:
        assert relayed is not None
        for_ranks, of_ranks = self._by_machine(to), self._by_machine(of)
        passed_on = sent.new_empty((int(relayed.sum()), *sent.shape[1:]))
        first = self._between(passed_on, sent, relayed.sum(axis=0).tolist(), for_ranks.sum(axis=1).tolist())
        received = sent.new_empty((sum(of), *sent.shape[1:]))
        result, by_place = received.detach(), torch.empty_like(received)

        def second() -> Waited:
            by_rank = _transposed(passed_on, relayed.T)
            sizes = of_ranks.sum(axis=0).tolist(), relayed.sum(axis=1).tolist()
            return self._within(by_place, by_rank, *sizes)

        return self._begin(first, second, lambda: _transpose_into(result, by_place, of_ranks.T)), received

    def most(self, numbers: torch.Tensor) -> Waited:
        def greatest(group: dist.ProcessGroup) -> Waited:
            work: Waited = dist.all_reduce(numbers, dist.ReduceOp.MAX, group=group, async_op=True)
            return work

        return self._begin(greatest(self._pair.within), lambda: greatest(self._pair.between))

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        machine, first = _gathered(self._pair.within, own)
        found: list[torch.Tensor] = []

        def second() -> Waited:
            every, work = _gathered(self._pair.between, machine)
            found.append(every)
            return work

        self._begin(first, second).wait()
        return found[0].flatten(0, 1)

    def push(self) -> None:
        waiting = self._pair.waiting
        while self._pair.polled and waiting and waiting[0].first.is_completed():
            waiting.popleft().go_on()

    def settle(self) -> None:
        waiting = self._pair.waiting
        while waiting:
            waiting.popleft().go_on()

    def _begin(self, first: Waited, second: Callable[[], Waited], end: Callable[[], None] | None = None) -> Staged:
        staged = Staged(self._pair, first, second, end)
        self._pair.waiting.append(staged)
        return staged

    def _by_machine(self, of_ranks: list[int]) -> Int64Array:
        """Numbers of each rank, int64 `[W / L, L]`."""
        return np.array(of_ranks, np.int64).reshape(self._pair.machines, self._pair.size)

    def _within(self, received: torch.Tensor, sent: torch.Tensor, of: list[int] | None, to: list[int] | None) -> Waited:
        self._traffic.add(self._pair.within, sent, to, self._pair.size)
        work: Waited = dist.all_to_all_single(received, sent, of, to, group=self._pair.within, async_op=True)
        return work

    def _between(
        self, received: torch.Tensor, sent: torch.Tensor, of: list[int] | None, to: list[int] | None
    ) -> Waited:
        self._traffic.add(self._pair.between, sent, to, 1)
        work: Waited = dist.all_to_all_single(received, sent, of, to, group=self._pair.between, async_op=True)
        return work


class Staged:
    """An exchange whose second level begins once its first is through, and once those before it have begun theirs.

    Attributes:
        first: the work of the first level.
    """

    def __init__(
        self, pair: Pair, first: Waited, second: Callable[[], Waited], end: Callable[[], None] | None = None
    ) -> None:
        """
        Args:
            pair: on whose groups it is.
            first: the work of the first level.
            second: begins the second level.
            end: to be done when that is through.
        """
        self.first = first
        self._pair, self._begin, self._end = pair, second, end
        self._second: Waited | None = None
        self._error: RuntimeError | None = None

    def go_on(self) -> None:
        """Waits for the first level and begins the second; an error is kept for `wait` of this exchange."""
        try:
            self.first.wait()
            self._second = self._begin()
        except RuntimeError as error:
            self._error = error

    def is_completed(self) -> bool:
        """Whether the second level is through."""
        return self._error is not None or (self._second is not None and self._second.is_completed())

    def wait(self) -> None:
        """Waits until both levels are through.

        Raises:
            RuntimeError: a rank has ended, or does not come.
        """
        while self._second is None and self._error is None:
            self._pair.waiting.popleft().go_on()
        if self._error is not None:
            raise self._error
        assert self._second is not None
        self._second.wait()
        if self._end is not None:
            self._end()


def _gathered(group: dist.ProcessGroup, own: torch.Tensor) -> tuple[torch.Tensor, Waited]:
    """(the tensors of all ranks of a group, in one, and the work that brings them)."""
    every = own.new_empty((dist.get_world_size(group), *own.shape))
    return every, dist.all_gather(list(every.unbind()), own, group=group, async_op=True)


def _blocks(tensor: torch.Tensor, lengths: Int64Array) -> list[torch.Tensor]:
    """The blocks of a tensor that has them by the rows of `lengths`, `[n, m]`, by its columns."""
    parts = tensor.split(lengths.ravel().tolist())
    rows, columns = lengths.shape
    return [parts[columns * row + column] for column in range(columns) for row in range(rows)]


def _transposed(tensor: torch.Tensor, lengths: Int64Array) -> torch.Tensor:
    """The same in a new tensor."""
    return torch.cat(_blocks(tensor, lengths))


def _transpose_into(result: torch.Tensor, tensor: torch.Tensor, lengths: Int64Array) -> None:
    """The same, into `result`."""
    with torch.no_grad():
        torch.cat(_blocks(tensor, lengths), out=result)
