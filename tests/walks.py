"""Counts of the calls that a piece of work makes in the package."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import rec_sdk_torch as rst
from rec_sdk_torch import _engine

PACKAGE = str(Path(rst.__file__).parent) + os.sep
CACHE, STEP = "tbe/cache/device_cache.py", "tbe/step/step.py"


class Walk:
    """Counts what runs in the package while it is open, in all threads that were started after it was made.

    Attributes:
        calls: Python calls.
        entries: calls from another file, by file.
        classes: whose methods ran.
        engine: calls of the engine, by name.
        left_out: files and folders that do not count.
    """

    left_out: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.calls = 0
        self.entries: Counter[str] = Counter()
        self.classes: set[str] = set()
        self.engine: Counter[str] = Counter()
        self._open = False

    def profile(self, frame: Any, event: str, argument: object) -> None:
        if not self._open or event != "call" or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        path = frame.f_code.co_filename.removeprefix(PACKAGE)
        if path.startswith(self.left_out):
            return
        self.calls += 1
        if frame.f_back is None or frame.f_back.f_code.co_filename != frame.f_code.co_filename:
            self.entries[path] += 1
        outer = frame.f_code.co_qualname.split(".<locals>")[0]
        if "." in outer:
            self.classes.add(outer.rpartition(".")[0])

    def counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.engine[function.__name__] += self._open
            return function(*args, **kwargs)

        return call

    def count(self, work: Callable[[], object]) -> None:
        """Counts `work` alone."""
        self._open = True
        try:
            work()
        finally:
            self._open = False

    def check(self, *, calls: int, classes: int, cache: int, step: int) -> None:
        """Fails where there is more than this: calls, classes, entries into these two files."""
        assert self.calls <= calls, (self.calls, self.entries)
        assert len(self.classes) <= classes, sorted(self.classes)
        assert self.entries[CACHE] <= cache, self.entries
        assert self.entries[STEP] <= step, self.entries


@contextlib.contextmanager
def walking() -> Iterator[Walk]:
    """A walk in which all threads are counted that are started inside."""
    walk = Walk()
    with contextlib.ExitStack() as stack:
        for owner, names in (
            *((each, vars(each)) for each in (_engine.Engine, _engine.Tables, _engine.Saves, _engine.Lifecycle)),
            (_engine.Plan, ["release"]),
            (_engine, ["begin", "pass_plans"]),
        ):
            for name in list(names):
                if not name.startswith("_") and callable(getattr(owner, name)):
                    stack.enter_context(mock.patch.object(owner, name, walk.counted(getattr(owner, name))))
        threading.setprofile(walk.profile)
        sys.setprofile(walk.profile)
        try:
            yield walk
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
