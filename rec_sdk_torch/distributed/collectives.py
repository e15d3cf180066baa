"""Exchanges between ranks: how many ids, the ids, their rows, and in the backward pass the rows' gradients."""

from __future__ import annotations

import contextlib
import os
import pickle
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torchrec.distributed.comm_ops import get_gradient_division

from ..runtime.host_groups import lost_rank
from ..tbe.cache.batch import Int64Array
from .alike import Told, by_rank, differences
from .levels import OneLevel, Relayed, Traffic, TwoLevels, Waited, Way
from .machines import LocalSize, Place, pair_of, ranks_of_machine
from .replicas import Route

COUNTERS = ("lookups", "unique_ids", "id_bytes", "row_bytes", "grad_bytes", "bytes_with_duplicates")
"""The counters' names beside those of `levels`, see `ShardedCollection.exchange_stats`."""


@dataclass
class Turns:
    """The exchanges of all collections of a process group, which come in one order on all ranks.

    Attributes:
        names: of the collections, by their numbers.
        width: of a message with numbers of ids. All collections have one, or another order of them ended the process.
        gradients: a checksum of the gradients that were exchanged, in their order.
    """

    names: list[str] = field(default_factory=list)
    width: int = 0
    gradients: int = 0

    def doing(self, number: int, batch: int, training: bool) -> str:
        """Says in words which batch of which collection a rank is at."""
        name = self.names[number] if 0 <= number < len(self.names) else "something else"
        return f"{'trains' if training else 'evaluates'} batch {batch} of {name}"


_turns: weakref.WeakKeyDictionary[dist.ProcessGroup, Turns] = weakref.WeakKeyDictionary()


class Exchange:
    """The ranks that share the tables of a collection.

    Attributes:
        rank, world_size: of the groups.
        device: of rows.
        stats: counters.
        turns: of this collection and others.
        number: of the collection among them.
        batches: whose exchange has begun.
    """

    def __init__(self, ids: dist.ProcessGroup, rows: dist.ProcessGroup, device: torch.device) -> None:
        """
        Args:
            ids: exchanges tensors in host memory.
            rows: exchanges tensors on `device`; of the same ranks.
        """
        self._ids, self._rows, self.device = ids, rows, device
        self.rank, self.world_size = dist.get_rank(ids), dist.get_world_size(ids)
        self.stats = dict.fromkeys(COUNTERS, 0)
        self._traffic = Traffic(self.stats)
        self._ids_way: Way = OneLevel(ids, self._traffic)
        self._rows_way: Way = OneLevel(rows, self._traffic)
        self._process = os.getpid()
        self.turns = _turns.setdefault(ids, Turns())
        self.number = self.batches = 0

    @property
    def ids(self) -> dist.ProcessGroup:
        """Exchanges tensors in host memory."""
        self._check_process()
        return self._ids

    @property
    def rows(self) -> dist.ProcessGroup:
        """Exchanges tensors on `device`."""
        self._check_process()
        return self._rows

    @property
    def of_ids(self) -> Way:
        """How tensors in host memory get to other ranks."""
        self._check_process()
        self._ids_way.push()
        return self._ids_way

    @property
    def of_rows(self) -> Way:
        """How tensors on `device` get to other ranks."""
        self._check_process()
        self._ids_way.push()
        return self._rows_way

    def divide(self, local_size: LocalSize) -> None:
        """Exchanges by two levels from now on, if there are several machines of several ranks. All must call it.

        Raises:
            ValueError: there is no such division, on all ranks.
        """
        if local_size is None:
            return
        size = ranks_of_machine(local_size, self.gather(Place.here(), "their places in machines"))
        if size in (1, self.world_size):
            self._ids_way, self._rows_way = (OneLevel(each, self._traffic, size) for each in (self._ids, self._rows))
            return
        # Rows and their gradients use both groups in both directions, so there all begin in one order, on all ranks.
        self._ids_way = TwoLevels(pair_of(self._ids, "ids", size, polled=True), self._traffic)
        self._rows_way = TwoLevels(pair_of(self._rows, "rows", size, polled=False), self._traffic)

    def settle(self) -> None:
        """Passes on what others wait for, of all exchanges that have begun: they need not wait until this rank does."""
        self._ids_way.settle()
        self._rows_way.settle()

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                f"process {os.getpid()} was forked from a rank, process {self._process}, whose exchanges with other "
                "ranks it would spoil: it cannot use sharded tables. Start processes by spawn"
            )

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Surrounds calls that wait for other ranks.

        Raises:
            RuntimeError: an exchange fails, since a rank has died or does not come; or this process is no rank.
        """
        self._check_process()
        self._ids_way.push()
        try:
            yield
        except RuntimeError as error:
            raise lost_rank(what, self.rank, self.world_size, error) from error

    def broadcast(self, number: int) -> int:
        """Rank 0's `number`, of 64 bits without sign."""
        tensor = torch.from_numpy(np.array([number], np.uint64).view(np.int64))
        with self.waiting("rank 0's seed"):
            dist.broadcast(tensor, dist.get_global_rank(self.ids, 0), group=self.ids)
        return int(tensor.numpy().view(np.uint64)[0])

    def gather(self, value: Any, what: str) -> list[Any]:
        """`value` of each rank, where `what` names it. All must call it."""
        every: list[Any] = [None] * self.world_size
        with self.waiting(what):
            dist.all_gather_object(every, value, group=self.ids)
        return every

    def tell(self, numbers: Sequence[float], what: str) -> list[list[float]]:
        """Each rank's `numbers`, as many on all of them; `what` names them. All must call it."""
        own = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        with self.waiting(what):
            result: list[list[float]] = self.of_ids.gather(own).tolist()
        return result

    def join(self, name: str, tell: Callable[[], Told]) -> None:
        """Takes a collection in; `tell` says which of its settings have to be the same on all ranks. All must call it.

        Raises:
            ValueError: it is not the same, or what `tell` raises on some rank: on all of them.
        """
        told, error = {}, None
        try:
            told = tell()
        except Exception as raised:
            error = raised
        names = self.turns.names
        every = self.gather((_packed(error), told, len(names), name), "how tables are sharded")
        self._raise_first([packed for packed, *_ in every], error)
        differing = differences([told for _, told, *_ in every])
        name = every[0][-1]
        if differing:
            raise ValueError(f"{name} is not the same on all ranks, and has to be: {'; '.join(differing)}")
        self.number = max(known for _, _, known, _ in every)
        names += [name] * (self.number + 1 - len(names))

    def widen(self, width: int) -> None:
        """Makes room in messages with numbers of ids, for `width` of them."""
        self.turns.width = max(self.turns.width, width)

    def send_counts(self, to_all: Int64Array, counts: Int64Array) -> tuple[Waited, torch.Tensor, torch.Tensor | None]:
        """Tells all ranks `to_all`, `[E]`, and each of them how many ids of each table it will get, int64 `[W, T]`.

        Returns:
            (work, int64 `[W, E + T]` of each rank, and what is behind it that other collections have need of, the same
            of what this rank passes on, int64 `[L, W / L, E + T]`, None where it passes nothing on)
        """
        table = np.zeros((self.world_size, self.turns.width), np.int64)
        table[:, : len(to_all)] = to_all
        table[:, len(to_all) : len(to_all) + counts.shape[1]] = counts
        return self.of_ids.table(torch.from_numpy(table))

    def send_each(
        self, values: npt.NDArray[Any], to: list[int], of: list[int], relayed: Relayed
    ) -> tuple[Waited, torch.Tensor]:
        """Sends each rank its ids, or what they take along; (work, those of all ranks)."""
        return self.of_ids.ask(torch.from_numpy(values), to, of, relayed)

    def vote(self, yes: bool, doing: str, *place: object, told: Told | None = None) -> Vote:
        """Asks all ranks whether any says yes, and whether all are at the same place: all must call it.

        Args:
            yes: of this rank.
            doing: what it is at.
            place: more that has to be the same on all ranks.
            told: settings that have to be.
        """
        return Vote(self, yes, doing, (doing, told, *place), told)

    def note_gradients(self, batch: int, dim: int) -> None:
        """Notes that gradients of rows with `dim` elements are exchanged now; later votes compare these notes."""
        turn = self.number, batch, dim
        self.turns.gradients = zlib.crc32(repr(turn).encode(), self.turns.gradients)

    def any_failed(self, failed: bool) -> bool:
        """Whether this or any other rank failed. All must call it."""
        doing = f"looks at gradients of {self.turns.names[self.number]}"
        return self.vote(failed, doing, self.turns.gradients).wait()

    def on_any(self, this: bool, doing: str) -> bool:
        """Whether `this` is true on any rank; `doing` says what this rank is at. All must call it."""
        return self.vote(this, doing).wait()

    def agree(self, doing: str, told: Told) -> None:
        """Sees to it that `told` is the same on all ranks. All must call it.

        Raises:
            ValueError: it is not.
        """
        self.vote(False, doing, told=told).wait()

    def raise_apart(self, doing: str, told: Told | None) -> NoReturn:
        """Raises an error that says in what the ranks differ. All must call it, and all have found that they differ.

        Args:
            doing: what this rank is at.
            told: its settings.
        """
        every = self.gather((doing, told), "where they are")
        self.turns.gradients = 0  # they count alike again
        if len({each for each, _ in every}) > 1:
            raise self.out_of_step([each for each, _ in every])
        if told is None:
            raise RuntimeError(
                "ranks have exchanged gradients of different collections or batches, and updated rows with them: all "
                "ranks have to call backward for the same collections in the same order. Start again from a save"
            )
        differing = differences([own for _, own in every]) or ["they have changed since this batch was exchanged"]
        raise ValueError(
            f"each rank {doing}, but settings are not the same on all ranks, and have to be: {'; '.join(differing)}"
        )

    def out_of_step(self, doing: Sequence[str]) -> RuntimeError:
        """The error where ranks are at different exchanges; `doing` is what each of them is at."""
        return RuntimeError(
            f"ranks are not in step: {by_rank(doing, '{ranks} {value}')}. All ranks have to call the same collections "
            "in the same order, with the same batches of a prefetch, all in training or all in evaluation mode"
        )

    def raise_together(self, error: Exception | None) -> None:
        """Raises the same error on all ranks: that of the first one that has one. All must call it."""
        self._raise_first(self.gather(_packed(error), "errors"), error)

    def _raise_first(self, every: list[bytes | None], error: Exception | None) -> None:
        """The first of the errors of all ranks, if there is one; `error` is this rank's."""
        for rank, packed in enumerate(every):
            if packed is not None:
                raised: Exception = pickle.loads(packed)
                raised.add_note(f"raised on rank {rank} of {self.world_size}, and so on all of them")
                raise raised from error


class Vote:
    """The answer is on its way."""

    def __init__(self, exchange: Exchange, yes: bool, doing: str, place: tuple[object, ...], told: Told | None) -> None:
        """See `Exchange.vote`."""
        self._exchange, self._doing, self._told = exchange, doing, told
        checksum = zlib.crc32(repr(place).encode())
        self._status = torch.tensor([int(yes), checksum, -checksum], device="cpu")
        self._work = exchange.of_ids.most(self._status)
        self._answer: bool | None = None

    def wait(self) -> bool:
        """Whether any rank said yes.

        Raises:
            RuntimeError, ValueError: ranks are not at the same place, or have other settings: on all of them.
        """
        if self._answer is None:
            with self._exchange.waiting(f"whether all go on (this rank {self._doing})"):
                self._work.wait()
            yes, most, least = self._status.tolist()
            if most != -least:
                self._exchange.raise_apart(self._doing, self._told)
            self._answer = bool(yes)
        return self._answer


def _packed(error: Exception | None) -> bytes | None:
    if error is None:
        return None
    try:
        packed = pickle.dumps(error)
        pickle.loads(packed)
        return packed
    except Exception:
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))


class SendRows(torch.autograd.Function):
    """Rows float32 `[n, D]` to the ranks that asked for them, and in the backward pass their gradients back.

    The result may be read once the work that it adds to `works` is waited for.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, exchange: Exchange, batch: int, route: Route, works: list[Any]
    ) -> torch.Tensor:
        sent = rows.contiguous() if route.kept is None else rows.index_select(0, route.kept)
        with exchange.waiting("rows"):
            work, received = exchange.of_rows.answer(sent, route.to, route.of, route.relayed)
        works.append(work)
        ctx.exchange, ctx.batch, ctx.route = exchange, batch, route
        return received

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        exchange, route = ctx.exchange, ctx.route
        if get_gradient_division() and exchange.world_size > 1:  # TorchRec's convention: losses are averaged over ranks
            grad = grad / exchange.world_size
        exchange.stats["grad_bytes"] += (sum(route.grads_to) - route.grads_to[exchange.rank]) * grad.shape[1] * 4
        exchange.note_gradients(ctx.batch, grad.shape[1])
        sent = grad.contiguous() if route.spread is None else grad.index_select(0, route.spread)
        with exchange.waiting("gradients"):
            work, result = exchange.of_rows.ask(sent, route.grads_to, route.grads_of, route.grads_relayed)
            work.wait()
        return result, None, None, None, None
