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
from .all_to_all import FlatAllToAll, Work
from .consistency import RankSettings, by_rank, differences
from .hierarchical_all_to_all import HierarchicalAllToAll, HierarchicalGroups, hierarchical_groups
from .topology import LocalSize, RankLocation, machine_size

COUNTERS = ("lookups", "unique_ids", "id_bytes", "row_bytes", "grad_bytes", "bytes_with_duplicates")
"""The counters' names beside those of messages, see `ShardedCollection.exchange_stats`."""


@dataclass
class GroupState:
    """The exchanges of all collections of a process group, which come in one order on all ranks.

    Attributes:
        names: of the collections, by their numbers.
        width: of a message with numbers of ids. All collections have one, or another order of them ended the process.
        gradients: a checksum of the gradients that were exchanged, in their order.
    """

    names: list[str] = field(default_factory=list)
    width: int = 0
    gradients: int = 0


_group_states: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupState] = weakref.WeakKeyDictionary()


class StatusCheck(NamedTuple):
    """A running all-reduce of a flag and a checksum, from `Exchange.start_check` to `Exchange.finish_check`.

    Attributes:
        activity: what this rank is at.
        settings: settings that have to be the same on all ranks.
        status: whether this rank says yes, a checksum of its place, the same negated; then the greatest of all ranks.
        work: that brings it.
    """

    activity: str
    settings: RankSettings | None
    status: torch.Tensor
    work: Work


class Exchange:
    """The ranks that share the tables of a collection.

    Attributes:
        rank, world_size: of the groups.
        device: of rows.
        ids_all_to_all: exchanges tensors in host memory.
        rows_all_to_all: exchanges tensors on `device`.
        hierarchical: groups whose exchanges have a second level; empty where there is one level.
        stats: counters.
        group_state: shared with the other collections of the process group.
        number: of the collection among them.
        batches: whose exchange has begun.
    """

    ids_all_to_all: FlatAllToAll | HierarchicalAllToAll
    rows_all_to_all: FlatAllToAll | HierarchicalAllToAll

    def __init__(self, ids: dist.ProcessGroup, rows: dist.ProcessGroup, device: torch.device) -> None:
        """
        Args:
            ids: exchanges tensors in host memory.
            rows: exchanges tensors on `device`; of the same ranks.
        """
        self.device = device
        self.rank, self.world_size = dist.get_rank(ids), dist.get_world_size(ids)
        self.stats = dict.fromkeys((*COUNTERS, *TRAFFIC), 0)
        self.ids_all_to_all, self.rows_all_to_all = FlatAllToAll(ids, self.stats), FlatAllToAll(rows, self.stats)
        self.hierarchical: tuple[HierarchicalGroups, ...] = ()
        self.group_state = _group_states.setdefault(ids, GroupState())
        self.number = self.batches = 0
        notify_of_forks(self)

    @property
    def ids(self) -> dist.ProcessGroup:
        """The process group that exchanges tensors in host memory."""
        return self.ids_all_to_all.group

    @property
    def rows(self) -> dist.ProcessGroup:
        """The process group that exchanges tensors on `device`."""
        return self.rows_all_to_all.group

    def after_fork(self, parent: int) -> None:
        """Lets every exchange raise in a forked process, which has the sockets of the rank and none of its threads."""
        # Kept: the destructors of the parent's groups would wait for threads that a forked process does not have.
        self._parent_groups = self.ids_all_to_all, self.rows_all_to_all
        refusal = RaisingStub(
            f"process {os.getpid()} was forked from a rank, process {parent}, whose exchanges with other ranks it "
            "would spoil: it cannot use sharded tables. Start processes by spawn"
        )
        for name in ("ids_all_to_all", "rows_all_to_all", "wait"):
            setattr(self, name, refusal)

    def set_local_size(self, local_size: LocalSize) -> None:
        """Exchanges by two levels from now on, if there are several machines of several ranks. All must call it.

        Raises:
            ValueError: there is no such division, on all ranks.
        """
        if local_size is None:
            return
        size = machine_size(local_size, self.gather(RankLocation.from_environment(), "their places in machines"))
        ids, rows = self.ids, self.rows
        if size in (1, self.world_size):
            self.ids_all_to_all, self.rows_all_to_all = (
                FlatAllToAll(ids, self.stats, size),
                FlatAllToAll(rows, self.stats, size),
            )
            return
        id_groups, row_groups = hierarchical_groups(ids, "ids", size), hierarchical_groups(rows, "rows", size)
        self.hierarchical = id_groups, row_groups
        self.ids_all_to_all = HierarchicalAllToAll(ids, self.stats, id_groups, id_groups)
        self.rows_all_to_all = HierarchicalAllToAll(rows, self.stats, row_groups, id_groups)

    def wait(self, what: str, *works: Work) -> None:
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

    def gather_numbers(self, numbers: Sequence[float], what: str) -> list[list[float]]:
        """Each rank's `numbers`, as many on all of them; `what` names them. All must call it."""
        own = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        with exchanging(what, self.ids):
            result: list[list[float]] = self.ids_all_to_all.all_gather(own).tolist()
        return result

    def register(self, name: str, read_settings: Callable[[], RankSettings]) -> None:
        """Registers a collection and checks that its settings are the same on all ranks (collective).

        Raises:
            ValueError: it is not the same, or what `read_settings` raises on some rank: on all of them.
        """
        settings, error = {}, None
        try:
            settings = read_settings()
        except Exception as raised:
            error = raised
        names = self.group_state.names
        every = self.gather((_packed(error), settings, len(names), name), "how tables are sharded")
        self._raise_first([packed for packed, *_ in every], error)
        differing = differences([settings for _, settings, *_ in every])
        name = every[0][-1]
        if differing:
            raise ValueError(f"{name} is not the same on all ranks, and has to be: {'; '.join(differing)}")
        self.number = max(known for _, _, known, _ in every)
        names += [name] * (self.number + 1 - len(names))

    def describe_activity(self, number: int, batch: int, training: bool) -> str:
        """Says in words which batch of which collection a rank is at."""
        names = self.group_state.names
        name = names[number] if 0 <= number < len(names) else "something else"
        return f"{'trains' if training else 'evaluates'} batch {batch} of {name}"

    def start_check(
        self, flag: bool, activity: str, *values: object, settings: RankSettings | None = None
    ) -> StatusCheck:
        """Starts to ask all ranks whether any says yes, and whether all are at the same place. All must call it.

        Args:
            yes: of this rank.
            activity: what it is at.
            place: more that has to be the same on all ranks.
            settings: settings that have to be.
        """
        checksum = zlib.crc32(repr((activity, settings, *values)).encode())
        status = torch.tensor([int(flag), checksum, -checksum], device="cpu")
        return StatusCheck(activity, settings, status, self.ids_all_to_all.all_reduce_max(status))

    def finish_check(self, check: StatusCheck) -> bool:
        """Returns whether any rank said yes.

        Raises:
            RuntimeError, ValueError: ranks are not at the same place, or have other settings: on all of them.
        """
        self.wait(f"whether all go on (this rank {check.activity})", check.work)
        flag, greatest, least = check.status.tolist()
        if greatest != -least:
            self.raise_difference(check.activity, check.settings)
        return bool(flag)

    def record_gradients(self, batch: int, dim: int) -> None:
        """Notes that gradients of rows with `dim` elements are exchanged now; later votes compare these notes."""
        gradients = self.number, batch, dim
        self.group_state.gradients = zlib.crc32(repr(gradients).encode(), self.group_state.gradients)

    def any_failed(self, failed: bool) -> bool:
        """Whether this or any other rank failed. All must call it."""
        activity = f"looks at gradients of {self.group_state.names[self.number]}"
        return self.finish_check(self.start_check(failed, activity, self.group_state.gradients))

    def check_same(self, activity: str, settings: RankSettings) -> None:
        """Sees to it that `settings` is the same on all ranks. All must call it.

        Raises:
            ValueError: it is not.
        """
        self.finish_check(self.start_check(False, activity, settings=settings))

    def raise_difference(self, activity: str, settings: RankSettings | None) -> NoReturn:
        """Raises an error that says in what the ranks differ. All must call it, and all have found that they differ.

        Args:
            activity: what this rank is at.
            settings: its settings.
        """
        every = self.gather((activity, settings), "where they are")
        self.group_state.gradients = 0  # they count alike again
        if len({each for each, _ in every}) > 1:
            raise self.out_of_step_error([each for each, _ in every])
        if settings is None:
            raise RuntimeError(
                "ranks have exchanged gradients of different collections or batches, and updated rows with them: all "
                "ranks have to call backward for the same collections in the same order. Start again from a save"
            )
        differing = differences([own for _, own in every]) or ["they have changed since this batch was exchanged"]
        raise ValueError(
            f"each rank {activity}, but settings are not the same on all ranks, and have to be: {'; '.join(differing)}"
        )

    def out_of_step_error(self, activities: Sequence[str]) -> RuntimeError:
        """The error where ranks are at different exchanges; `activity` is what each of them is at."""
        return RuntimeError(
            f"ranks are not in step: {by_rank(activities, '{ranks} {value}')}. All ranks have to call the same "
            "collections in the same order, with the same batches of a prefetch, all in training or all in evaluation "
            "mode"
        )

    def raise_on_all_ranks(self, error: Exception | None) -> None:
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
