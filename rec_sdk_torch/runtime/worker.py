"""A thread that runs jobs one after the other."""

from __future__ import annotations

import _thread
import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, InvalidStateError
from itertools import cycle
from queue import SimpleQueue
from typing import Generic, ParamSpec, TypeVar

from .exits import OwnThread, ending

Job = Callable[[], object]

_Item = TypeVar("_Item")
_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")

_RETRY = 0.01
"""Seconds until memory that was not there may be."""


def _work(jobs: SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        try:
            job()
        except Exception as error:
            if isinstance(job, _Task):  # there was no memory to run it, or for its result
                job.fail(error)
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
    ever. An error that a job raises is dropped. While the interpreter ends, a job runs in the thread that gives it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._finalizer = weakref.finalize(self, _stop, self._jobs, self._threads)
        self._finalizer.atexit = False  # `OwnThread` sees to that

    def run(self, job: Job) -> None:
        """Runs `job` after those before it."""
        if ending():
            with contextlib.suppress(Exception):
                job()
            return
        if not any(thread.is_alive() for thread in self._threads):  # a forked process has none
            work = functools.partial(_work, self._jobs)
            thread = OwnThread(work, self._name, stop=functools.partial(self._jobs.put, None))
            self._threads[:] = [thread]
            thread.start()
        self._jobs.put(job)

    def wait(self) -> None:
        """Waits until the jobs that were given so far have run."""
        done = _thread.allocate_lock()
        done.acquire()
        self.run(done.release)
        done.acquire()

    def end(self) -> None:
        """Returns when the jobs that were given have run and the thread has ended. No more may be given."""
        self._finalizer()


class Pool:
    """Runs calls in threads of its own, in the order in which they were given where it has one thread.

    `ThreadPoolExecutor` takes no call once the main thread has ended, when a save still runs in another thread, or an
    `atexit` function saves.
    """

    def __init__(self, name: str, threads: int = 1) -> None:
        self._workers = [Worker(name) for _ in range(threads)]
        self._next_worker = cycle(self._workers)

    def submit(
        self, function: Callable[_Params, _Result], *args: _Params.args, **kwargs: _Params.kwargs
    ) -> Future[_Result]:
        """Calls it in a thread. `Future.cancel` keeps a call from it that has not begun."""
        future: Future[_Result] = Future()
        next(self._next_worker).run(_Task(future, functools.partial(function, *args, **kwargs)))
        return future

    def map(self, function: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
        """Results in the order of `items`, whose calls have all been given."""
        futures = [self.submit(function, item) for item in items]
        return (future.result() for future in futures)

    def end(self) -> None:
        """As `Worker.end`."""
        for worker in self._workers:
            worker.end()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()


class _Task(Generic[_Result]):
    """A job that gives the result of a call, or its error, to a future."""

    def __init__(self, future: Future[_Result], call: Callable[[], _Result]) -> None:
        self._future = future
        self._call = call

    def __call__(self) -> None:
        if not self._future.set_running_or_notify_cancel():
            return
        try:
            result = self._call()
        except BaseException as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(result)

    def fail(self, error: Exception) -> None:
        """Gives `error` to the future, unless that has a result: no thread may wait for it forever."""
        while True:
            try:
                self._future.set_exception(error)
            except InvalidStateError:
                return
            except MemoryError:
                time.sleep(_RETRY)
            else:
                return
