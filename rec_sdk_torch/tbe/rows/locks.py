"""Locks of the tables of one embedding, and the work on them that an interrupt can break off."""

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
    """Work that an interrupt can break off: `run` begins again from the start, and does nothing twice.

    Attributes:
        started: whether anything has changed.
    """

    @property
    def started(self) -> bool: ...

    def run(self) -> None: ...


class PlansAhead(Protocol):
    """The queue of batches that are planned before their forward.

    Attributes:
        idle: nothing is planned now.
    """

    idle: bool

    def drop(self) -> None: ...

    def after_fork(self) -> None: ...


class Reader(Protocol):
    """A forward that will need its rows as it has read them."""

    def keep_rows(self, groups: Sequence[Group]) -> None: ...


class Locks:
    """The order of the threads that work on the tables of one embedding.

    Attributes:
        planning: held while a batch is planned for all groups, and while no plan may be made.
        launch: held while the device is given work of a step. Taken after `planning` where both are.
        saving: held while a save is written, which ends in another thread than it began in.
        store: the folder of rows that are on disk.
        unfinished: work that an interrupt broke off.
        readers: forwards that will need their rows as they have read them, by their id().
    """

    def __init__(self) -> None:
        self.planning: Lock = threading.RLock()
        self.launch: Lock = threading.RLock()
        self.saving: Lock = threading.Lock()
        self.store: str | None = None
        self.unfinished: ResumableWork | None = None
        self._running = threading.RLock()  # held while unfinished work runs: it calls what completes it
        self._ahead: weakref.ref[PlansAhead] | None = None
        self.readers: dict[int, weakref.ref[Reader]] = {}
        notify_of_forks(self)

    def plan_ahead(self, queue: PlansAhead) -> None:
        """Makes `queue` the one whose plans are dropped when both locks are taken; it is not kept alive."""
        self._ahead = weakref.ref(queue)

    def after_fork(self, parent: int) -> None:
        """In a process that was forked from `parent`: rows on disk stay with it, and what another thread began too."""
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
        """Refuses calls that take no lock, where one that takes a lock would be refused.

        Raises:
            RuntimeError: this process must not use the tables.
        """
        if isinstance(self.launch, RaisingStub):
            raise RuntimeError(self.launch.message)

    # ---- whole tables

    @contextlib.contextmanager
    def without_pending_plans(self) -> Iterator[None]:
        """Both locks, and no plan but those of batches whose forward has begun."""
        with calls, self.planning, self.launch:
            ahead = None if self._ahead is None else self._ahead()
            if ahead is not None:
                ahead.drop()
            yield

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keeps other threads from planning, reading or updating: what is seen inside is one moment of all tables."""
        with self.without_pending_plans():
            self.complete()
            yield

    # ---- interrupts

    def complete(self) -> None:
        """Completes what an interrupt broke off. To be called first by the thread that takes `launch`.

        Raises:
            RuntimeError: it cannot be completed; the message says why.
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
        """`complete`, with all that it may need; costs nothing when there is nothing to do."""
        if self.unfinished is not None:
            with self.exclusive():
                pass

    def run_resumable(self, work: ResumableWork) -> None:
        """Does `work` as a whole: once it has begun, the next call of `complete` does what an interrupt left."""
        self.unfinished = work
        try:
            with self._running:
                work.run()
        except BaseException:
            if not work.started:
                self.unfinished = None
            raise
        self.unfinished = None

    # ---- rows that forwards will need

    def watch(self, reader: Reader) -> None:
        """Lets `reader` keep its rows before they change, while it is in `readers`. Under the launch lock."""
        self.readers = {key: ref for key, ref in self.readers.items() if ref() is not None}
        self.readers[id(reader)] = weakref.ref(reader)

    def keep_rows(self, groups: Sequence[Group]) -> None:
        """Lets readers keep rows of these groups, which are about to change. Under the launch lock."""
        for ref in self.readers.values():
            reader = ref()
            if reader is not None:
                reader.keep_rows(groups)
