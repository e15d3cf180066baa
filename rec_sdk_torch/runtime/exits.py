"""Stops threads at a safe point before the interpreter exits.

Python before 3.14 ends a daemon thread at exit when the thread next acquires the interpreter lock. In C++ code, such as
torch's after each operator, this aborts the process (`terminate called without an active exception`, status 134). Torch
also unregisters its operators at exit, while threads may still call them. Therefore, after the script's own `atexit`
functions have run, other threads finish their current calls of this package, and block forever at the next call. Then
the package's own threads are stopped and joined.
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

import torch  # noqa: F401  imported first: exit functions run in reverse order, so torch shuts down after `_end`

P = ParamSpec("P")
R = TypeVar("R")

CALL_TIMEOUT = 10.0
"""Seconds that the exit waits until another thread's running call of the package returns."""

NEXT_CALL_TIMEOUT = 2.0
"""Seconds after a thread's last call in which the exit waits for its next call, which blocks the thread."""


class CallingThread:
    """The state of a thread that has called this package.

    Attributes:
        depth: how many nested calls of this package the thread is in.
        last_exit: `time.monotonic()` when the thread left its last call or backward pass.
        parked: whether the thread is blocked forever, because the interpreter exits.
        own: whether this package started the thread.
    """

    __slots__ = ("depth", "last_exit", "own", "parked")

    def __init__(self) -> None:
        self.depth = 0
        self.last_exit = time.monotonic()
        self.parked = self.own = False

    def awaited(self, since: float) -> bool:
        """Returns whether the exit, which began to wait at the time `since`, must still wait for this thread."""
        if self.own or self.parked:
            return False
        now = time.monotonic()
        return now - since < CALL_TIMEOUT if self.depth else now - self.last_exit < NEXT_CALL_TIMEOUT


_callers: dict[int, CallingThread] = {}  # by thread id; the entry of an ended thread stays until its id is reused
_own: set[OwnThread] = set()
_ending_in: list[int] = []
"""The id of the thread that runs the exit, once it has started: only this thread may still call the package."""


def calling_thread() -> CallingThread:
    """Returns the state of the running thread."""
    number = _thread.get_ident()
    state = _callers.get(number)
    if state is None:
        state = _callers[number] = CallingThread()
    return state


def ending() -> bool:
    """Returns whether the interpreter is exiting, so that no thread may be started any more."""
    return bool(_ending_in)


def _park(thread: CallingThread) -> None:
    """Blocks the running thread forever if this is its outermost call and another thread runs the exit functions."""
    if thread.depth == 1 and not thread.own and _thread.get_ident() not in _ending_in:
        thread.parked = True
        lock = _thread.allocate_lock()
        lock.acquire()
        lock.acquire()  # blocks forever, with the interpreter lock released


class _Calls:
    """A context manager and decorator that marks a call of this package.

    A thread must not hold a lock when it begins its outermost call, since the call may block forever.
    """

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        # Not contextlib.ContextDecorator: with it, `warn` would name a line of contextlib instead of the user's line.
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            thread = _callers.get(_thread.get_ident()) or calling_thread()
            thread.depth += 1
            if _ending_in:
                _park(thread)
            try:
                return function(*args, **kwargs)
            finally:
                thread.depth -= 1
                thread.last_exit = time.monotonic()

        return call

    def __enter__(self) -> None:
        thread = _callers.get(_thread.get_ident()) or calling_thread()
        thread.depth += 1  # before the test of `_ending_in`: the exit sets `_ending_in` first and then reads `depth`
        if _ending_in:
            _park(thread)

    def __exit__(self, *error: object) -> None:
        thread = _callers.get(_thread.get_ident()) or calling_thread()
        thread.depth -= 1
        thread.last_exit = time.monotonic()


calls = _Calls()


class _StartEvent(threading.Event):
    """An event that a new thread sets. `wait` raises if the thread ended without setting it.

    Attributes:
        entry: the function that the thread runs. The interpreter holds a reference to it while the thread lives.
        other_references: the reference count of `entry` without the thread's reference.
    """

    def __init__(self, entry: Callable[[], object]) -> None:
        super().__init__()
        self.entry: Callable[[], object] | None = entry
        self.other_references = 0

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks until the event is set.

        Raises:
            MemoryError: the thread has ended, because it had no memory to start.
        """
        while not super().wait(0.05):
            if sys.getrefcount(self.entry) <= self.other_references and not self.is_set():
                raise MemoryError("a new thread had no memory to start")
        return True


class OwnThread(threading.Thread):
    """A thread of this package. It may call the package during the interpreter's exit, which stops and joins it."""

    def __init__(
        self, work: Callable[[], object], name: str | None = None, *, stop: Callable[[], object], daemon: bool = True
    ) -> None:
        """Creates the thread; `start` runs it.

        Args:
            work: the function that the thread runs.
            name: the name of the thread.
            stop: a function that makes `work` return soon; called when the interpreter exits.
            daemon: whether the exit may stop the thread. False: the interpreter waits until `work` has returned.
        """
        super().__init__(name=name, daemon=daemon)
        self._work = work
        self.stop = stop
        self._begun = threading.Event()
        _own.add(self)

    def start(self) -> None:
        """Starts the thread and returns once it is running.

        `threading.Thread.start` would wait forever for a thread that ended because it had no memory to start.

        Raises:
            MemoryError, RuntimeError: the thread cannot be started.
        """
        # This is a new object whose reference count shows whether the thread is alive; see `_StartEvent`.
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
    """Blocks other threads' calls, and ends the package's threads. Runs at exit, after all non-daemon threads ended."""
    _ending_in.append(_thread.get_ident())
    since = time.monotonic()
    while _awaited(since):
        time.sleep(0.001)
    threads = [thread for thread in list(_own) if thread.is_alive()]  # in a forked process, none of them is alive
    for thread in threads:
        thread.stop()
    for thread in threads:
        thread.join(CALL_TIMEOUT)


def _awaited(since: float) -> bool:
    alive = sys._current_frames().keys()
    others = [each for number, each in list(_callers.items()) if number in alive and number not in _ending_in]
    return any(each.awaited(since) for each in others)


# Creating a finalizer before `_end` is registered makes `_end` run before all weakref finalizers at exit.
# Some of these finalizers unregister torch's operators.
weakref.finalize(OwnThread, int).detach()
atexit.register(_end)
