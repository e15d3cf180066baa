"""Keeps forked processes from using files and locks that they share with their parent process."""

from __future__ import annotations

import fcntl
import os
import weakref
from collections.abc import Callable
from typing import Any, NoReturn, Protocol, TypeAlias

Lock: TypeAlias = Any
"""A lock of `threading`, or a `RaisingStub` in its place."""


class ForkAware(Protocol):
    """An object whose method `after_fork` is called in each forked process."""

    def after_fork(self, parent: int) -> None:
        """Adapts the object to a forked process, before other code runs there. `parent` is the parent's process id."""


class RaisingStub:
    """The stand-in for a lock or another object that a forked process must not use: any use raises RuntimeError."""

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
        return True  # True makes finalizers skip their clean-up: a forked process has nothing to clean up


_fork_aware: weakref.WeakSet[ForkAware] = weakref.WeakSet()
_process = os.getpid()


def notify_of_forks(aware: ForkAware) -> None:
    """Registers `aware`, by a weak reference: its `after_fork` is called in every process forked from this one."""
    _fork_aware.add(aware)


def is_unlocked(lock: Lock) -> bool:
    """Returns whether no other thread holds `lock`."""
    if not lock.acquire(blocking=False):
        return False
    lock.release()
    return True


_descriptors: set[int] = set()


def close_in_children(descriptor: int) -> Callable[[], None]:
    """Registers an open, locked file to be closed in forked processes, so that its lock stays with this process.

    Returns:
        A function that unlocks and closes the file. It does nothing in a forked process, where the descriptor's number
        may belong to another file.
    """
    _descriptors.add(descriptor)
    process = os.getpid()

    def close() -> None:
        if os.getpid() == process:
            _descriptors.discard(descriptor)
            # Explicit: closing does not unlock the file while a new child process still has the descriptor.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
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
