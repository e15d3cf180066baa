"""Clocks, and functions that run contenders alternately or in separate processes."""

from __future__ import annotations

import gc
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch


@dataclass
class Samples:
    """Seconds of one measurement, one value per round."""

    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def best(self) -> float:
        return min(self.seconds)

    def over(self, other: Samples) -> float:
        """Returns the median over the rounds of the ratio of these seconds to the seconds of `other`."""
        return statistics.median(a / b for a, b in zip(self.seconds, other.seconds, strict=True))

    def summary(self) -> dict[str, float]:
        """Summarizes the samples for the JSON."""
        return {"median_ms": self.median * 1e3, "min_ms": self.best * 1e3, "rounds": len(self.seconds)}


class Clock:
    """A clock for work on a device: events of its current stream, or wall-clock time if the device is the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = None if device.type == "cpu" else torch.get_device_module(device)

    def mark(self) -> Any:
        """Returns a mark of the moment when all work queued so far is done."""
        if self._module is None:
            return time.perf_counter()
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def synchronize(self) -> None:
        """Blocks until all work queued on the device is done."""
        if self._module is not None:
            self._module.synchronize(self._device)

    def seconds(self, begin: Any, end: Any) -> float:
        """Returns the seconds between two marks; call `synchronize` after the second."""
        return float(end - begin if self._module is None else begin.elapsed_time(end) / 1e3)


def seconds_of(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Returns the seconds of a call; with `time.thread_time` only processor time of this thread counts."""
    begin = clock()
    call()
    return clock() - begin


def best_of(call: Callable[[], object], repeats: int) -> float:
    """Returns the shortest of `repeats` runs, in seconds."""
    return min(seconds_of(call) for _ in range(repeats))


def timed(call: Callable[[], object], clock: Callable[[], float] = time.thread_time) -> Callable[[], float]:
    """Returns a function that runs `call` and returns its seconds."""
    return partial(seconds_of, call, clock)


def take_turns(
    calls: Mapping[str, Callable[[], float]], rounds: int, warm: int = 3, repeats: int = 1
) -> dict[str, Samples]:
    """Runs every contender in each round, reversing their order every round; collects the seconds that they return.

    Args:
        calls: contenders by name; each returns its own seconds, as `timed` does.
        rounds: number of timed rounds.
        warm: number of untimed rounds before them.
        repeats: consecutive calls of a contender in each round.
    """
    samples = {name: Samples() for name in calls}
    with no_collection():
        for number in range(warm + rounds):
            for name in list(calls) if number % 2 else reversed(list(calls)):
                seconds = [calls[name]() for _ in range(repeats)]
                samples[name].seconds += seconds if number >= warm else []
            gc.collect(0)
    return samples


def in_processes(count: int, call: Callable[..., Any], *arguments: object) -> list[Any]:
    """Returns the results of `call(rank, *arguments)` for ranks below `count`, each in its own process."""
    with ProcessPoolExecutor(count, mp_context=CONTEXT) as pool:
        return [each.result() for each in [pool.submit(call, rank, *arguments) for rank in range(count)]]


CONTEXT: Any = multiprocessing.get_context("spawn")
"""The start method of the processes of `in_processes`."""


@contextmanager
def no_collection() -> Iterator[None]:
    """Disables Python's garbage collector within the block; a collection would be timed as one contender's work."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
