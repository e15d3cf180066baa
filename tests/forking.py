"""Runs functions in forked processes, as `multiprocessing` and DataLoaders do."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator

import torch

SECONDS = 60
"""The time limit of a child process, after which it is killed."""


class Child:
    """A forked process."""

    def __init__(self, pid: int, output: int) -> None:
        self._pid, self._output = pid, output

    def result(self) -> str:
        """Waits until the process ends; returns the result of `work` as text, or the type and message of its
        exception.
        """
        with open(self._output) as output:
            text = output.read()
        _, status = os.waitpid(self._pid, 0)
        assert status == 0, f"the child ended with status {status} (14: it hung)"
        return text

    def kill(self) -> None:
        """Kills the process and waits for its end."""
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._output)


def fork(work: Callable[[], object]) -> Child:
    """Starts `work` in a newly forked process; returns the process."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return Child(pid, reader)
    os.close(reader)
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(SECONDS)
        torch.set_num_threads(1)  # the parent's threads do not exist in the child, so torch must not use them
        try:
            text = str(work())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode())
    finally:
        os._exit(0)


@contextlib.contextmanager
def sleeping_child() -> Iterator[None]:
    """Forks a process that does nothing, like an idle DataLoader worker, until the end of the block."""
    reader, writer = os.pipe()

    def sleep() -> None:
        os.close(writer)
        os.read(reader, 1)

    child = fork(sleep)
    os.close(reader)
    try:
        yield
    finally:
        os.close(writer)
        child.result()
