"""Communication between ranks that share tables: exchanges, consistency checks, and errors raised on all ranks."""

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
from .consistency import RankSettings, describe_by_rank, differences
from .hierarchical_all_to_all import HierarchicalAllToAll, HierarchicalGroups, hierarchical_groups
from .topology import LocalSize, RankLocation, machine_size

COUNTERS = ("lookups", "unique_ids", "id_bytes", "row_bytes", "grad_bytes", "bytes_with_duplicates")
"""Names of the counters of `ShardedCollection.exchange_stats`, except the message counters."""


@dataclass
class GroupState:
    """State shared by all collections of a process group. All ranks must start their exchanges in the same order.

    Attributes:
        names: names of the collections; the index is the collection's number.
        width: number of integers in a count message. All collections use the same width. Otherwise, if ranks called
            collections in different orders, messages of different widths would crash the process.
        gradients: running checksum of the gradient exchanges, which depends on their order.
    """

    names: list[str] = field(default_factory=list)
    width: int = 0
    gradients: int = 0


_group_states: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupState] = weakref.WeakKeyDictionary()


class StatusCheck(NamedTuple):
    """A running all-reduce that checks whether any rank set its flag, and whether all ranks have the same checksum.

    It starts in `Exchange.start_check` and ends in `Exchange.finish_check`.

    Attributes:
        activity: description of what this rank does.
        settings: settings that must be the same on all ranks; None if none are compared.
        status: int64 `[3]`: this rank's flag, the checksum and the negated checksum. The all-reduce replaces each by
            its maximum over all ranks.
        work: the all-reduce.
    """

    activity: str
    settings: RankSettings | None
    status: torch.Tensor
    work: Work


class Exchange:
    """The exchanges between the ranks that share the tables of a collection.

    Attributes:
        rank, world_size: this rank and the number of ranks.
        device: the device on which rows are exchanged.
        ids_all_to_all: all-to-all of tensors in host memory.
        rows_all_to_all: all-to-all of tensors on `device`.
        hierarchical: the process groups of a hierarchical all-to-all; empty if the all-to-all is flat.
        stats: this collection's counters of ids, bytes and messages.
        group_state: state shared with the other collections of the process group.
        number: index of this collection in `group_state.names`.
        batches: number of batches whose exchange has started.
    """

    ids_all_to_all: FlatAllToAll | HierarchicalAllToAll
    rows_all_to_all: FlatAllToAll | HierarchicalAllToAll

    def __init__(self, ids: dist.ProcessGroup, rows: dist.ProcessGroup, device: torch.device) -> None:
        """Creates the exchanges over two process groups of the same ranks.

        Args:
            ids: process group for tensors in host memory.
            rows: process group for tensors on `device`.
            device: the device on which rows are exchanged.
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
        """Process group for tensors in host memory."""
        return self.ids_all_to_all.group

    @property
    def rows(self) -> dist.ProcessGroup:
        """Process group for tensors on `device`."""
        return self.rows_all_to_all.group

    def after_fork(self, parent: int) -> None:
        """Makes every exchange raise in a forked process, which has the rank's sockets but none of its threads."""
        # The references stay, because the groups' destructors would wait for threads that a forked process lacks.
        self._parent_groups = self.ids_all_to_all, self.rows_all_to_all
        refusal = RaisingStub(
            f"process {os.getpid()} was forked from a rank, process {parent}, whose exchanges with other ranks it "
            "would spoil: it cannot use sharded tables. Start processes by spawn"
        )
        for name in ("ids_all_to_all", "rows_all_to_all", "wait"):
            setattr(self, name, refusal)

    def set_local_size(self, local_size: LocalSize) -> None:
        """Switches to hierarchical all-to-alls if there are several machines with several ranks each (collective).

        Raises:
            ValueError: the ranks cannot be divided into machines of `local_size` ranks; raised on all ranks.
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

    def connect(self) -> None:
        """Exchanges host tensors through shared memory from now on, between ranks of one machine (collective)."""
        self.ids_all_to_all.connect()
        if self.device.type == "cpu":
            self.rows_all_to_all.connect()

    def wait(self, what: str, *works: Work) -> None:
        """Waits for exchanges with other ranks; `what` names the exchanged data in error messages.

        Raises:
            RuntimeError: an exchange failed because a rank has exited or did not take part in time.
        """
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise self.lost_rank_error(what, error) from error

    def lost_rank_error(self, what: str, error: RuntimeError) -> RuntimeError:
        """Returns the error to raise if an exchange of `what` has failed with torch's `error`."""
        return lost_rank(what, self.rank, self.world_size, error)

    def gather(self, value: Any, what: str) -> list[Any]:
        """Gathers `value` from every rank (collective). `what` names it in error messages."""
        gathered: list[Any] = [None] * self.world_size
        with exchanging(what, self.ids):
            dist.all_gather_object(gathered, value, group=self.ids)
        return gathered

    def gather_numbers(self, numbers: Sequence[float], what: str) -> list[list[float]]:
        """Gathers `numbers` from every rank (collective); each rank passes the same count. `what` is used in errors."""
        own = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        with exchanging(what, self.ids):
            result: list[list[float]] = self.ids_all_to_all.all_gather(own).tolist()
        return result

    def register(self, name: str, read_settings: Callable[[], RankSettings]) -> None:
        """Registers a collection and checks that its settings are the same on all ranks (collective).

        Args:
            name: name of the collection for error messages.
            read_settings: returns the settings of this rank.

        Raises:
            ValueError: the settings differ between ranks.
            Exception: the error that `read_settings` raised on some rank; raised on all ranks.
        """
        settings, error = {}, None
        try:
            settings = read_settings()
        except Exception as raised:
            error = raised
        names = self.group_state.names
        gathered = self.gather((_pack_error(error), settings, len(names), name), "how tables are sharded")
        self._raise_first([packed for packed, *_ in gathered], error)
        differing = differences([settings for _, settings, *_ in gathered])
        name = gathered[0][-1]
        if differing:
            raise ValueError(f"{name} is not the same on all ranks, and has to be: {'; '.join(differing)}")
        self.number = max(known for _, _, known, _ in gathered)
        names += [name] * (self.number + 1 - len(names))

    def describe_activity(self, number: int, batch: int, training: bool) -> str:
        """Returns text for error messages: whether a rank trains or evaluates, which batch, and of which collection."""
        names = self.group_state.names
        name = names[number] if 0 <= number < len(names) else "something else"
        return f"{'trains' if training else 'evaluates'} batch {batch} of {name}"

    def start_check(
        self, flag: bool, activity: str, *values: object, settings: RankSettings | None = None
    ) -> StatusCheck:
        """Starts to check whether any rank's flag is set and whether all ranks do the same (collective).

        Args:
            flag: the flag of this rank.
            activity: description of what this rank does; must be the same on all ranks.
            values: further values that must be the same on all ranks.
            settings: settings that must be the same on all ranks.
        """
        checksum = zlib.crc32(repr((activity, settings, *values)).encode())
        # All ranks have the same checksum exactly if its maximum equals its minimum. max(-checksum) is -min(checksum).
        status = torch.tensor([int(flag), checksum, -checksum], device="cpu")
        return StatusCheck(activity, settings, status, self.ids_all_to_all.all_reduce_max(status))

    def finish_check(self, check: StatusCheck) -> bool:
        """Waits for a status check; returns whether `flag` was set on any rank.

        Raises:
            RuntimeError, ValueError: ranks do different things or have different settings; raised on all ranks.
        """
        self.wait(f"whether all go on (this rank {check.activity})", check.work)
        flag, greatest, least = check.status.tolist()
        if greatest != -least:
            self.raise_difference(check.activity, check.settings)
        return bool(flag)

    def record_gradients(self, batch: int, dim: int) -> None:
        """Adds an exchange of gradients with `dim` columns to the checksum that later status checks compare."""
        gradients = self.number, batch, dim
        self.group_state.gradients = zlib.crc32(repr(gradients).encode(), self.group_state.gradients)

    def any_failed(self, failed: bool) -> bool:
        """Returns whether `failed` is true on any rank (collective)."""
        activity = f"looks at gradients of {self.group_state.names[self.number]}"
        return self.finish_check(self.start_check(failed, activity, self.group_state.gradients))

    def check_same(self, activity: str, settings: RankSettings) -> None:
        """Checks that `settings` are the same on all ranks (collective).

        Raises:
            ValueError: the settings differ.
        """
        self.finish_check(self.start_check(False, activity, settings=settings))

    def raise_difference(self, activity: str, settings: RankSettings | None) -> NoReturn:
        """Raises an error that names what differs between ranks (collective). Called on all ranks after a failed check.

        Args:
            activity: description of what this rank does.
            settings: settings of this rank; None if the check compared gradient exchanges instead.
        """
        gathered = self.gather((activity, settings), "where they are")
        self.group_state.gradients = 0  # all ranks reset it, so that their checksums match again
        if len({each for each, _ in gathered}) > 1:
            raise self.out_of_step_error([each for each, _ in gathered])
        if settings is None:
            raise RuntimeError(
                "ranks have exchanged gradients of different collections or batches, and updated rows with them: all "
                "ranks have to call backward for the same collections in the same order. Start again from a save"
            )
        differing = differences([own for _, own in gathered]) or ["they have changed since this batch was exchanged"]
        raise ValueError(
            f"each rank {activity}, but settings are not the same on all ranks, and have to be: {'; '.join(differing)}"
        )

    def out_of_step_error(self, activities: Sequence[str]) -> RuntimeError:
        """Returns the error for ranks that run different exchanges; `activities` describes what each rank does."""
        by_rank = describe_by_rank(activities, "{ranks} {value}")
        return RuntimeError(
            f"ranks are not in step: {by_rank}. All ranks have to call the same "
            "collections in the same order, with the same batches of a prefetch, all in training or all in evaluation "
            "mode"
        )

    def raise_on_all_ranks(self, error: Exception | None) -> None:
        """Raises the error of the first rank that has one, on all ranks (collective)."""
        self._raise_first(self.gather(_pack_error(error), "errors"), error)

    def _raise_first(self, packed_errors: list[bytes | None], error: Exception | None) -> None:
        """Raises the error of the first rank that has one, if any; `error` is this rank's error, set as the cause."""
        for rank, packed in enumerate(packed_errors):
            if packed is not None:
                raised: Exception = pickle.loads(packed)
                raised.add_note(f"raised on rank {rank} of {self.world_size}, and so on all of them")
                raise raised from error


def _pack_error(error: Exception | None) -> bytes | None:
    if error is None:
        return None
    try:
        packed = pickle.dumps(error)
        pickle.loads(packed)
        return packed
    except Exception:
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
