"""Keeps threads from working while the interpreter ends.

Python before 3.14 ends a daemon thread where it next asks for the interpreter's lock. Where C++ asks for it, as torch
does after each operator, that ends the process: `terminate called without an active exception`, status 134. And torch
loses its operators at the exit, under threads that call them. So, when the interpreter has run what scripts have
registered with `atexit`, other threads finish the calls of this package that they are in, and each stays at its next
one, for good. Then the threads of this package end.
"""

from __future__ import annotations

import _thread
import atexit
import functools
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch  # noqa: F401  its devices end after `_end`, which is registered later

P = ParamSpec("P")
R = TypeVar("R")

CALL_TIMEOUT = 10.0
"""Seconds that the interpreter waits at its end for calls that threads are in."""

NEXT_CALL_TIMEOUT = 2.0
"""Seconds, from a thread's last call on, that the interpreter waits at its end for the next one, where it stays."""


class CallingThread:
    """A thread that has called this package.

    Attributes:
        depth: calls that it is in, one inside the other.
        left: when it left the last one, or had the backward pass of one; of `time.monotonic`.
        parked: it will not go on.
        own: it is a thread of this package.
    """

    __slots__ = ("depth", "last_exit", "own", "parked")

    def __init__(self) -> None:
        self.depth = 0
        self.last_exit = time.monotonic()
        self.parked = self.own = False

    def awaited(self, since: float) -> bool:
        """Whether the interpreter, which has waited for threads from `since` on, still waits for this one."""
        if self.own or self.parked:
            return False
        now = time.monotonic()
        return now - since < CALL_TIMEOUT if self.depth else now - self.last_exit < NEXT_CALL_TIMEOUT


_callers: dict[int, CallingThread] = {}  # by thread; an ended one stays until another thread has its number
_own: set[OwnThread] = set()
_ending_in: list[int] = []
"""The thread in which the interpreter ends, once it does: that one alone may call."""


def calling_thread() -> CallingThread:
    """The running thread."""
    number = _thread.get_ident()
    found = _callers.get(number)
    if found is None:
        found = _callers[number] = CallingThread()
    return found


def ending() -> bool:
    """Whether the interpreter ends: no thread may be started, and none is needed."""
    return bool(_ending_in)


def _park(here: CallingThread) -> None:
    """At the outermost call of another thread than the one in which the interpreter ends: does not return."""
    if here.depth == 1 and not here.own and _thread.get_ident() not in _ending_in:
        here.parked = True
        lock = _thread.allocate_lock()
        lock.acquire()
        lock.acquire()  # without the interpreter's lock, and for ever


class _Calls:
    """A call of this package: `with calls:` or `@calls`. The outermost one of a thread begins without a lock."""

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        # in this file, unlike that of contextlib.ContextDecorator, whose lines `warn` would take for the user's
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            here = _callers.get(_thread.get_ident()) or calling_thread()
            here.depth += 1
            if _ending_in:
                _park(here)
            try:
                return function(*args, **kwargs)
            finally:
                here.depth -= 1
                here.last_exit = time.monotonic()

        return call

    def __enter__(self) -> None:
        here = _callers.get(_thread.get_ident()) or calling_thread()
        here.depth += 1  # before the question: a thread that ends sees the one or the other
        if _ending_in:
            _park(here)

    def __exit__(self, *error: object) -> None:
        here = _callers.get(_thread.get_ident()) or calling_thread()
        here.depth -= 1
        here.last_exit = time.monotonic()


calls = _Calls()


class _StartEvent(threading.Event):
    """An event that a new thread sets. `wait` ends also if the thread has ended without setting it.

    Attributes:
        entry: the function that the thread runs, to which the interpreter has a reference as long as the thread lives.
        others: references to `entry` that are not the thread's.
    """

    def __init__(self, entry: Callable[[], object]) -> None:
        super().__init__()
        self.entry: Callable[[], object] | None = entry
        self.other_references = 0

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks until the event is set.

        Raises:
            MemoryError: the thread has ended: it had no memory to begin.
        """
        while not super().wait(0.05):
            if sys.getrefcount(self.entry) <= self.other_references and not self.is_set():
                raise MemoryError("a new thread had no memory to begin")
        return True


class OwnThread(threading.Thread):
    """A thread of this package: it may call when others may not any more, and ends before the interpreter does."""

    def __init__(
        self, work: Callable[[], object], name: str | None = None, *, stop: Callable[[], object], daemon: bool = True
    ) -> None:
        """
        Args:
            work: what it does.
            name: of the thread.
            stop: asks `work` to return soon. Called at the exit.
            daemon: False: the interpreter waits for it before it ends, as long as it takes.
        """
        super().__init__(name=name, daemon=daemon)
        self._work = work
        self.stop = stop
        self._begun = threading.Event()
        _own.add(self)

    def start(self) -> None:
        """Starts the thread, and returns when it works.

        `threading.Thread.start` waits forever for a thread that has ended for want of memory before it could begin.

        Raises:
            MemoryError, RuntimeError: no thread can be started; nothing of this one is left.
        """
        entry = functools.partial(super()._bootstrap)  # type: ignore[misc]
        self._bootstrap = entry
        self._started = started = _StartEvent(entry)
        self._begun = begun = _StartEvent(entry)
        started.other_references = begun.other_references = sys.getrefcount(entry)
        try:
            super().start()
            begun.wait()
        except Exception:
            with threading._active_limbo_lock:  # type: ignore[attr-defined]
                threading._limbo.pop(self, None)  # type: ignore[attr-defined]
            _own.discard(self)
            raise
        finally:
            del self._bootstrap
            started.entry = begun.entry = None

    def run(self) -> None:
        self._begun.set()
        calling_thread().own = True
        try:
            self._work()
        finally:
            del self._work
            _callers.pop(_thread.get_ident(), None)
            _own.discard(self)


def _end() -> None:
    """At the exit, when all threads that are no daemons have ended."""
    _ending_in.append(_thread.get_ident())
    since = time.monotonic()
    while _awaited(since):
        time.sleep(0.001)
    threads = [thread for thread in list(_own) if thread.is_alive()]  # a forked process has none
    for thread in threads:
        thread.stop()
    for thread in threads:
        thread.join(CALL_TIMEOUT)


def _awaited(since: float) -> bool:
    alive = sys._current_frames().keys()
    others = [each for number, each in list(_callers.items()) if number in alive and number not in _ending_in]
    return any(each.awaited(since) for each in others)


# The last that is registered runs first. Finalizers take torch's operators away; the first one registers them all.
weakref.finalize(OwnThread, int).detach()
atexit.register(_end)
