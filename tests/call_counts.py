"""Counts the calls of the package's functions during a piece of work."""

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


class CallCounter:
    """Counter of calls in the package while it is active, in all threads that started after its creation.

    Attributes:
        calls: Python calls.
        entries: calls of functions of a file from other files, by file.
        classes: classes whose methods ran.
        engine: calls of the engine, by function name.
        left_out: files and folders whose calls are not counted.
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
        """Runs `work` and counts its calls."""
        self._open = True
        try:
            work()
        finally:
            self._open = False

    def check(self, *, calls: int, classes: int, cache: int, step: int) -> None:
        """Fails if there were more calls, classes, or entries into the files `CACHE` and `STEP` than the
        arguments allow.
        """
        assert self.calls <= calls, (self.calls, self.entries)
        assert len(self.classes) <= classes, sorted(self.classes)
        assert self.entries[CACHE] <= cache, self.entries
        assert self.entries[STEP] <= step, self.entries


@contextlib.contextmanager
def call_counter() -> Iterator[CallCounter]:
    """Creates a call counter that covers all threads started within the block."""
    walk = CallCounter()
    with contextlib.ExitStack() as stack:
        for owner, names in (
            *((each, vars(each)) for each in (_engine.Engine, _engine.Tables, _engine.Saves, _engine.Lifecycle)),
            (_engine.Plan, ["release"]),
            (_engine, ["start_plans", "apply_without_swap"]),
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
