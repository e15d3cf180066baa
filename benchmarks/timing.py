"""Clocks."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Samples:
    """Seconds of one thing, round by round."""

    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def best(self) -> float:
        return min(self.seconds)

    def summary(self) -> dict[str, float]:
        """For the JSON."""
        return {"median_ms": self.median * 1e3, "min_ms": self.best * 1e3, "rounds": len(self.seconds)}


def seconds_of(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def best_of(call: Callable[[], object], repeats: int) -> float:
    """The shortest of `repeats` runs, in seconds."""
    return min(seconds_of(call) for _ in range(repeats))


@contextmanager
def no_collection() -> Iterator[None]:
    """Without Python's garbage collector, which would run in somebody's turn."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
