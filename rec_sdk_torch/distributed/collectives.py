"""The ranks that share tables: whether they are in step and alike, and errors of one rank that all raise."""

from __future__ import annotations

import os
import pickle
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from ..runtime.forks import RaisingStub, notify_of_forks
from ..runtime.host_groups import exchanging, lost_rank
from .all_to_all import COUNTERS as TRAFFIC
from .all_to_all import OneLevel, Waited
from .consistency import Told, by_rank, differences
from .hierarchical_all_to_all import Pair, TwoLevels, pair_of
from .topology import LocalSize, Place, ranks_of_machine

COUNTERS = ("lookups", "unique_ids", "id_bytes", "row_bytes", "grad_bytes", "bytes_with_duplicates")
"""The counters' names beside those of messages, see `ShardedCollection.exchange_stats`."""


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


_turns: weakref.WeakKeyDictionary[dist.ProcessGroup, Turns] = weakref.WeakKeyDictionary()


class Vote(NamedTuple):
    """A question to all ranks that is on its way: `Exchange.vote` asks it, `Exchange.answer` waits for the answer.

    Attributes:
        doing: what this rank is at.
        told: settings that have to be the same on all ranks.
        status: whether this rank says yes, a checksum of its place, the same negated; then the greatest of all ranks.
        work: that brings it.
    """

    doing: str
    told: Told | None
    status: torch.Tensor
    work: Waited


class Exchange:
    """The ranks that share the tables of a collection.

    Attributes:
        rank, world_size: of the groups.
        device: of rows.
        of_ids: exchanges tensors in host memory.
        of_rows: exchanges tensors on `device`.
        staged: groups whose exchanges have a second level; empty where there is one level.
        stats: counters.
        turns: of this collection and others.
        number: of the collection among them.
        batches: whose exchange has begun.
    """

    of_ids: OneLevel | TwoLevels
    of_rows: OneLevel | TwoLevels

    def __init__(self, ids: dist.ProcessGroup, rows: dist.ProcessGroup, device: torch.device) -> None:
        """
        Args:
            ids: exchanges tensors in host memory.
            rows: exchanges tensors on `device`; of the same ranks.
        """
        self.device = device
        self.rank, self.world_size = dist.get_rank(ids), dist.get_world_size(ids)
        self.stats = dict.fromkeys((*COUNTERS, *TRAFFIC), 0)
        self.of_ids, self.of_rows = OneLevel(ids, self.stats), OneLevel(rows, self.stats)
        self.staged: tuple[Pair, ...] = ()
        self.turns = _turns.setdefault(ids, Turns())
        self.number = self.batches = 0
        notify_of_forks(self)

    @property
    def ids(self) -> dist.ProcessGroup:
        """The process group that exchanges tensors in host memory."""
        return self.of_ids.group

    @property
    def rows(self) -> dist.ProcessGroup:
        """The process group that exchanges tensors on `device`."""
        return self.of_rows.group

    def after_fork(self, parent: int) -> None:
        """Lets every exchange raise in a forked process, which has the sockets of the rank and none of its threads."""
        self._of_parent = self.of_ids, self.of_rows  # the groups' destructors would wait for the threads
        refusal = RaisingStub(
            f"process {os.getpid()} was forked from a rank, process {parent}, whose exchanges with other ranks it "
            "would spoil: it cannot use sharded tables. Start processes by spawn"
        )
        for name in ("of_ids", "of_rows", "wait"):
            setattr(self, name, refusal)

    def divide(self, local_size: LocalSize) -> None:
        """Exchanges by two levels from now on, if there are several machines of several ranks. All must call it.

        Raises:
            ValueError: there is no such division, on all ranks.
        """
        if local_size is None:
            return
        size = ranks_of_machine(local_size, self.gather(Place.here(), "their places in machines"))
        ids, rows = self.ids, self.rows
        if size in (1, self.world_size):
            self.of_ids, self.of_rows = OneLevel(ids, self.stats, size), OneLevel(rows, self.stats, size)
            return
        self.staged = of_ids, of_rows = pair_of(ids, "ids", size), pair_of(rows, "rows", size)
        self.of_ids = TwoLevels(ids, self.stats, of_ids, of_ids)
        self.of_rows = TwoLevels(rows, self.stats, of_rows, of_ids)

    def wait(self, what: str, *works: Waited) -> None:
        """Waits for exchanges with other ranks.

        Raises:
            RuntimeError: an exchange fails, since a rank has died or does not come.
        """
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise self.lost(what, error) from error

    def lost(self, what: str, error: RuntimeError) -> RuntimeError:
        """Returns the error of an exchange of `what` that has failed with torch's `error`."""
        return lost_rank(what, self.rank, self.world_size, error)

    def gather(self, value: Any, what: str) -> list[Any]:
        """`value` of each rank, where `what` names it. All must call it."""
        every: list[Any] = [None] * self.world_size
        with exchanging(what, self.ids):
            dist.all_gather_object(every, value, group=self.ids)
        return every

    def tell(self, numbers: Sequence[float], what: str) -> list[list[float]]:
        """Each rank's `numbers`, as many on all of them; `what` names them. All must call it."""
        own = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        with exchanging(what, self.ids):
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

    def doing(self, number: int, batch: int, training: bool) -> str:
        """Says in words which batch of which collection a rank is at."""
        names = self.turns.names
        name = names[number] if 0 <= number < len(names) else "something else"
        return f"{'trains' if training else 'evaluates'} batch {batch} of {name}"

    def vote(self, yes: bool, doing: str, *place: object, told: Told | None = None) -> Vote:
        """Starts to ask all ranks whether any says yes, and whether all are at the same place. All must call it.

        Args:
            yes: of this rank.
            doing: what it is at.
            place: more that has to be the same on all ranks.
            told: settings that have to be.
        """
        checksum = zlib.crc32(repr((doing, told, *place)).encode())
        status = torch.tensor([int(yes), checksum, -checksum], device="cpu")
        return Vote(doing, told, status, self.of_ids.most(status))

    def answer(self, vote: Vote) -> bool:
        """Returns whether any rank said yes.

        Raises:
            RuntimeError, ValueError: ranks are not at the same place, or have other settings: on all of them.
        """
        self.wait(f"whether all go on (this rank {vote.doing})", vote.work)
        yes, most, least = vote.status.tolist()
        if most != -least:
            self.raise_apart(vote.doing, vote.told)
        return bool(yes)

    def note_gradients(self, batch: int, dim: int) -> None:
        """Notes that gradients of rows with `dim` elements are exchanged now; later votes compare these notes."""
        turn = self.number, batch, dim
        self.turns.gradients = zlib.crc32(repr(turn).encode(), self.turns.gradients)

    def any_failed(self, failed: bool) -> bool:
        """Whether this or any other rank failed. All must call it."""
        doing = f"looks at gradients of {self.turns.names[self.number]}"
        return self.answer(self.vote(failed, doing, self.turns.gradients))

    def agree(self, doing: str, told: Told) -> None:
        """Sees to it that `told` is the same on all ranks. All must call it.

        Raises:
            ValueError: it is not.
        """
        self.answer(self.vote(False, doing, told=told))

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


def _packed(error: Exception | None) -> bytes | None:
    if error is None:
        return None
    try:
        packed = pickle.dumps(error)
        pickle.loads(packed)
        return packed
    except Exception:
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
