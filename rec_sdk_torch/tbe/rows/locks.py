"""Locks of one embedding's tables, and the completion of updates and loads that an interrupt broke off."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Protocol

from ...runtime.exits import calls
from ...runtime.forks import Lock, RaisingStub, is_unlocked, notify_of_forks
from ..cache.device_cache import Group


class ResumableWork(Protocol):
    """Work that can be completed after an interrupt: another call of `run` skips the parts that are done.

    Attributes:
        started: whether `run` has changed anything.
    """

    @property
    def started(self) -> bool: ...

    def run(self) -> None: ...


class PlanQueue(Protocol):
    """A queue of batches that are planned ahead of their forwards.

    Attributes:
        idle: whether no batch is being planned.
    """

    idle: bool

    def drop(self) -> None: ...

    def after_fork(self) -> None: ...


class Reader(Protocol):
    """A forward whose backward pass needs the rows with the values that the forward read."""

    def keep_rows(self, groups: Sequence[Group]) -> None: ...


class Locks:
    """Locks that order the threads that use the tables of one embedding.

    Attributes:
        planning: held while a batch is planned for all groups, and during calls in which no plan may be made.
        launch: held while a step launches work on the device. A thread that needs both takes `planning` first.
        saving: held while a save is written. Not reentrant, since another thread than the one that took it releases it.
        store: the folder of host stores on disk; None if they are in memory.
        unfinished: work that an interrupt broke off; None if there is none.
        readers: by `id()`, the forwards whose backward pass needs the rows with the values that the forward read.
    """

    def __init__(self) -> None:
        self.planning: Lock = threading.RLock()
        self.launch: Lock = threading.RLock()
        self.saving: Lock = threading.Lock()
        self.store: str | None = None
        self.unfinished: ResumableWork | None = None
        self._running = threading.RLock()  # held while work runs, so that its own calls of `complete` do nothing
        self._ahead: weakref.ref[PlanQueue] | None = None
        self.readers: dict[int, weakref.ref[Reader]] = {}
        notify_of_forks(self)

    def register_queue(self, queue: PlanQueue) -> None:
        """Registers, by a weak reference, the queue whose plans `without_pending_plans` drops."""
        self._ahead = weakref.ref(queue)

    def after_fork(self, parent: int) -> None:
        """Makes the tables unusable in a process forked from `parent`, if they are on disk or another thread used them.

        Called by `runtime.forks` in the child process.
        """
        if isinstance(self.launch, RaisingStub):
            return
        ahead = None if self._ahead is None else self._ahead()
        reads_ahead = ahead is not None and not ahead.idle and not self.planning._is_owned()
        busy = reads_ahead or self.saving.locked() or not (is_unlocked(self.planning) and is_unlocked(self.launch))
        if ahead is not None:
            ahead.after_fork()
        if self.store is not None:
            why = (
                f", which has the rows in host_store {self.store!r}: only that one may train or read these tables. "
                "Save there and load here"
            )
        elif busy:
            why = (
                " while another thread worked on these tables, or saved them: locks and threads do not survive a fork. "
                "Fork when saves have ended, and under exclusive()"
            )
        else:
            return
        refusal = RaisingStub(
            f"process {os.getpid()} was forked from process {parent}{why}, or start processes by spawn"
        )
        self.planning = self.launch = self.saving = refusal

    def check_process(self) -> None:
        """Checks that this process may use the tables; for calls that take no lock.

        Raises:
            RuntimeError: the tables belong to the parent process.
        """
        if isinstance(self.launch, RaisingStub):
            raise RuntimeError(self.launch.message)

    # ---- whole tables

    @contextlib.contextmanager
    def without_pending_plans(self) -> Iterator[None]:
        """Holds both locks in a `with` block, after dropping the plans of batches whose forward has not started."""
        with calls, self.planning, self.launch:
            ahead = None if self._ahead is None else self._ahead()
            if ahead is not None:
                ahead.drop()
            yield

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Blocks planning, reads and updates in other threads: a `with` block has a consistent view of all tables."""
        with self.without_pending_plans():
            self.complete()
            yield

    # ---- interrupts

    def complete(self) -> None:
        """Completes work that an interrupt broke off. Every thread that has taken `launch` must call this first.

        Raises:
            RuntimeError: the work cannot be completed; the message gives the reason.
        """
        if self.unfinished is None or self._running._is_owned():  # type: ignore[attr-defined]
            return
        try:
            with self._running:
                self.unfinished.run()
        except Exception as error:
            raise RuntimeError(
                f"an earlier update or load was interrupted half-way, and cannot be completed: {error}"
            ) from error
        self.unfinished = None

    def catch_up(self) -> None:
        """Completes interrupted work under both locks; returns at once if there is none."""
        if self.unfinished is not None:
            with self.exclusive():
                pass

    def run_resumable(self, work: ResumableWork) -> None:
        """Runs `work`; if an interrupt breaks it off after it has changed something, `complete` will finish it."""
        self.unfinished = work
        try:
            with self._running:
                work.run()
        except BaseException:
            if not work.started:
                self.unfinished = None
            raise
        self.unfinished = None

    # ---- rows that backward passes need

    def add_reader(self, reader: Reader) -> None:
        """Registers a reader, which `keep_rows` notifies before the reader's rows change. Requires the launch lock."""
        self.readers = {key: ref for key, ref in self.readers.items() if ref() is not None}
        self.readers[id(reader)] = weakref.ref(reader)

    def keep_rows(self, groups: Sequence[Group]) -> None:
        """Lets the readers copy their rows in `groups`, which are about to change. Requires the launch lock."""
        for ref in self.readers.values():
            reader = ref()
            if reader is not None:
                reader.keep_rows(groups)
