"""Keeps a forked process from files and locks that it shares with its parent, or that threads of the parent held."""

from __future__ import annotations

import fcntl
import os
import weakref
from collections.abc import Callable
from typing import Any, NoReturn, Protocol, TypeAlias

Lock: TypeAlias = Any
"""A lock of `threading`, or `Refusal` in its place."""


class Forked(Protocol):
    """An object that has to know when it is in another process than the one that made it."""

    def forked(self, parent: int) -> None:
        """Called in the new process, before anything else runs there. `parent`: the process that it was forked from."""


class Refusal:
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


_watching: weakref.WeakSet[Forked] = weakref.WeakSet()
_process = os.getpid()


def watch(each: Forked) -> None:
    """`each.forked` will be called in every process that is forked from this one, while `each` lives."""
    _watching.add(each)


def free(lock: Lock) -> bool:
    """Whether no other thread holds `lock`."""
    if not lock.acquire(blocking=False):
        return False
    lock.release()
    return True


_descriptors: set[int] = set()


def keep_from_children(descriptor: int) -> Callable[[], None]:
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
    for each in list(_watching):
        each.forked(parent)


os.register_at_fork(after_in_child=_in_child)
