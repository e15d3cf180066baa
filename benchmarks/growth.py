"""Whether a step slows down as its table grows: small tables and one of 100 million rows, D = 8, a small cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from rec_sdk_torch._engine import available_memory
from rec_sdk_torch.tbe import CacheTooSmallError

from .contenders import Ours
from .ids import Distribution
from .machine import resident_memory
from .planning import BYTES_PER_ROW
from .timing import Samples, no_collection, seconds_of
from .workload import TableSet, make_workload

DIM = 8


def run_growth(
    sizes: list[int], lookups: int, rounds: int, cache_rows: int, seed: int, report: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Builds a table of each size row by row, so that its store holds all of them, and trains it."""
    results = []
    for rows in sizes:
        need, free = rows * (BYTES_PER_ROW + 4 * DIM), available_memory()
        if need > free:
            report(f"growth: {rows:,} rows need about {need / 2**30:.1f} GiB, {free / 2**30:.1f} are free; left out")
            continue
        try:
            results.append(_run(rows, lookups, rounds, cache_rows, seed))
        except CacheTooSmallError as error:
            report(f"growth: {rows:,} rows left out: {error}")
    return results


def _run(rows: int, lookups: int, rounds: int, cache_rows: int, seed: int) -> dict[str, Any]:
    workload = make_workload(TableSet(1, rows), DIM, False, "sgd", lookups, 16)
    before = resident_memory()
    ours = Ours(workload, cache=min(1.0, cache_rows / rows), seed=seed)
    built = seconds_of(partial(_build, ours, rows))
    grown = resident_memory() - before
    rng = np.random.default_rng(seed)
    samples = Samples()
    ours.reset_counters()
    with no_collection():
        for _ in range(rounds):
            ids = workload.draw(Distribution(1.05), rng)
            samples.seconds.append(seconds_of(partial(ours.step, ids)))
    return {
        "rows": rows,
        "dim": DIM,
        "lookups": workload.lookups,
        "record_bytes": workload.record_bytes,
        "build_seconds": built,
        "time": samples.summary(),
        "memory": {**_memory(ours), "process_growth_bytes": grown},
        "counters": ours.counters(),
    }


def _build(ours: Ours, rows: int) -> None:
    chunk = ours.workload.lookups
    for begin in range(0, rows, chunk):
        ids = torch.arange(begin, min(begin + chunk, rows))
        ours.module(ids, torch.tensor([0, len(ids)]))


def _memory(ours: Ours) -> dict[str, int]:
    """Bytes of the planner's map and store, which no public name tells."""
    (group,) = ours.module.groups
    found: dict[str, int] = group.engine.memory()
    return found
