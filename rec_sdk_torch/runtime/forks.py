"""Keeps a forked process from files and locks that it shares with its parent, or that threads of the parent held."""

from __future__ import annotations

import fcntl
import os
import weakref
from collections.abc import Callable
from typing import Any, NoReturn, Protocol, TypeAlias

Lock: TypeAlias = Any
"""A lock of `threading`, or `RaisingStub` in its place."""


class ForkAware(Protocol):
    """An object that has to know when it is in another process than the one that made it."""

    def after_fork(self, parent: int) -> None:
        """Called in the new process, before anything else runs there. `parent`: the process that it was forked from."""


class RaisingStub:
    """Stands for a lock or another object that this process must not use: using it raises, and says why."""

    def __init__(self, message: str) -> None:
        self.message = message

    def __enter__(self) -> NoReturn:
        raise RuntimeError(self.message)

    def __exit__(self, *error: object) -> None: ...

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError(self.message)

    def __call__(self, *args: object) -> NoReturn:
        raise RuntimeError(self.message)

    def _is_owned(self) -> bool:
        return True  # a finalizer that would tidy up does not: there is nothing to tidy


_fork_aware: weakref.WeakSet[ForkAware] = weakref.WeakSet()
_process = os.getpid()


def notify_of_forks(aware: ForkAware) -> None:
    """`aware.after_fork` will be called in every process that is forked from this one, while `aware` lives."""
    _fork_aware.add(aware)


def is_unlocked(lock: Lock) -> bool:
    """Whether no other thread holds `lock`."""
    if not lock.acquire(blocking=False):
        return False
    lock.release()
    return True


_descriptors: set[int] = set()


def close_in_children(descriptor: int) -> Callable[[], None]:
    """Keeps the open file `descriptor`, and the lock on it, from forked processes.

    Returns:
        Unlocks and closes it; does nothing in a forked process, where the number may be another file's.
    """
    _descriptors.add(descriptor)
    process = os.getpid()

    def close() -> None:
        if os.getpid() == process:
            _descriptors.discard(descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process forked just now may not have closed it yet
            os.close(descriptor)

    return close


def _in_child() -> None:
    global _process
    parent, _process = _process, os.getpid()
    while _descriptors:
        os.close(_descriptors.pop())
    for aware in list(_fork_aware):
        aware.after_fork(parent)


os.register_at_fork(after_in_child=_in_child)
