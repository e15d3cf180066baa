"""Worker threads: `Worker` runs jobs in order in one thread, `Pool` returns futures."""

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
"""Seconds between two attempts to allocate memory that ran out."""


def _run_jobs(jobs: SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        try:
            job()
        except Exception as error:
            if isinstance(job, _Task):  # there was no memory to run the call or to store its result
                job.fail(error)
        del job  # otherwise the job and the objects that it references would live until the next job
    jobs.put(None)  # ends a second thread, if an interrupt of `run` has left one


def _stop_threads(jobs: SimpleQueue[Job | None], threads: list[threading.Thread]) -> None:
    jobs.put(None)
    for thread in threads:
        if thread is not threading.current_thread() and thread.is_alive():
            thread.join()


class Worker:
    """A thread that runs jobs in order. It ends when this object is deleted, and before the interpreter exits.

    A KeyboardInterrupt in a method leaves the worker usable; in `ThreadPoolExecutor.submit`, it may leave a lock held
    forever. Errors of jobs are discarded. While the interpreter exits, `run` runs the job in the calling thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._finalizer = weakref.finalize(self, _stop_threads, self._jobs, self._threads)
        self._finalizer.atexit = False  # `OwnThread` ends the thread at exit

    def run(self, job: Job) -> None:
        """Queues `job`, which runs after all earlier jobs."""
        if ending():
            with contextlib.suppress(Exception):
                job()
            return
        if not any(thread.is_alive() for thread in self._threads):  # true at the first job and in a forked process
            work = functools.partial(_run_jobs, self._jobs)
            thread = OwnThread(work, self._name, stop=functools.partial(self._jobs.put, None))
            self._threads[:] = [thread]
            thread.start()
        self._jobs.put(job)

    def wait(self) -> None:
        """Blocks until all jobs queued so far have run."""
        done = _thread.allocate_lock()
        done.acquire()
        self.run(done.release)
        done.acquire()

    def end(self) -> None:
        """Ends the thread after all queued jobs have run, and joins it. No more jobs may be queued."""
        self._finalizer()


class Pool:
    """A thread pool. With one thread, calls run in the order of their submission.

    Unlike `ThreadPoolExecutor`, it accepts calls after the main thread has ended, when a save may still run in another
    thread or in an `atexit` function.
    """

    def __init__(self, name: str, threads: int = 1) -> None:
        self._workers = [Worker(name) for _ in range(threads)]
        self._next_worker = cycle(self._workers)

    def submit(
        self, function: Callable[_Params, _Result], *args: _Params.args, **kwargs: _Params.kwargs
    ) -> Future[_Result]:
        """Calls `function` in a thread; returns its future, whose `cancel` works until the call starts."""
        future: Future[_Result] = Future()
        next(self._next_worker).run(_Task(future, functools.partial(function, *args, **kwargs)))
        return future

    def map(self, function: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
        """Submits a call for every item; returns an iterator of the results in the order of `items`."""
        futures = [self.submit(function, item) for item in items]
        return (future.result() for future in futures)

    def end(self) -> None:
        """Ends all threads after their queued calls have run, and joins them."""
        for worker in self._workers:
            worker.end()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()


class _Task(Generic[_Result]):
    """A job that makes a call, and stores its result or error in a future."""

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
        """Stores `error` in the future, unless it is done.

        Retries while there is not enough memory: a thread that waits for the future would otherwise wait forever.
        """
        while True:
            try:
                self._future.set_exception(error)
            except InvalidStateError:
                return
            except MemoryError:
                time.sleep(_RETRY)
            else:
                return
