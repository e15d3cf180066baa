"""A thread that runs jobs one after the other."""

from __future__ import annotations

import _thread
import contextlib
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

Job = Callable[[], object]


def _work(jobs: SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        with contextlib.suppress(Exception):
            job()
        del job  # and what it holds
    jobs.put(None)  # for another thread, which an interrupt in `run` may have left


def _stop(jobs: SimpleQueue[Job | None], threads: list[threading.Thread]) -> None:
    jobs.put(None)
    for thread in threads:
        if thread is not threading.current_thread() and thread.is_alive():
            thread.join()


class Worker:
    """Runs jobs in a thread of its own, which ends with this object, and before the interpreter does.

    A KeyboardInterrupt in a call leaves it usable; one in `ThreadPoolExecutor.submit` may hold that one's locks for
    ever. What a job raises is dropped.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._finalizer = weakref.finalize(self, _stop, self._jobs, self._threads)

    def run(self, job: Job) -> None:
        """Runs `job` after those before it."""
        if not any(thread.is_alive() for thread in self._threads):  # a forked process has none
            thread = threading.Thread(target=_work, args=(self._jobs,), name=self._name, daemon=True)
            self._threads[:] = [thread]
            thread.start()
        self._jobs.put(job)

    def wait(self) -> None:
        """Until the jobs that were given so far have run."""
        done = _thread.allocate_lock()
        done.acquire()
        self.run(done.release)
        done.acquire()
