"""Training steps of tables and dense layers behind prefetch(), by depth, on the CPU.

One thread trains and one plans: two idle cores are needed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from rec_sdk_torch.tbe.step.prefetch_queue import MAX_DEPTH

from .prefetch_step import run_hidden
from .runner import Benchmark, Option, Row, Target, fraction
from .workload import OPTIMIZERS, TableSet, make_workload

DEPTH, CACHE = 2, 0.1
"""The depth of the targets, the default of `prefetch`; and the cache of the second one."""


def depth(text: str) -> int:
    """An argparse type: 0 to MAX_DEPTH."""
    value = int(text)
    if not 0 <= value <= MAX_DEPTH:
        raise argparse.ArgumentTypeError(f"{text} is not allowed; 0 to {MAX_DEPTH} is")
    return value


def run(options: argparse.Namespace) -> Iterator[Row]:
    """A row for each width, cache and depth. Losses that differ between caches or depths make it not correct."""
    workload = make_workload(options.tables, options.dim, True, options.optimizer, options.lookups, options.bag)
    for hidden in options.hidden:
        yield from run_hidden(workload, options, hidden)


BENCHMARK = Benchmark(
    run,
    {
        "tables": Option(TableSet(4, 400_000), "such as 4x400k", TableSet(2, 10_000), kind=TableSet.parse),
        "dim": Option(64, quick=8),
        "optimizer": Option("sgd", choices=OPTIMIZERS),
        "lookups": Option(32_768, "per step", quick=512),
        "bag": Option(8, "ids of a sample in a table"),
        "alpha": Option(1.05, "exponent of the ids' power law"),
        "hidden": Option([8, 512, 1024], "widths of the dense layers", quick=[8]),
        "cache": Option([CACHE], "fractions of the rows beside all of them", kind=fraction),
        "depths": Option([0, 1, 2, 4], kind=depth),
        "rounds": Option(9, "segments of every cache and depth", quick=2),
        "warm": Option(6, "steps of a segment before its clock starts", quick=2),
        "steps": Option(20, "of a segment, timed", quick=6),
        "settle": Option(80, "batches looked up before the first segment", quick=10),
        "seed": Option(0, kind=int),
    },
    [
        Target(
            f"wait at depth {DEPTH}, part of a step, dense layers longer than the plan",
            "wait_share",
            {"depth": DEPTH, "correct": True, "hides a plan": True},
            worst=0.05,
            of_medians="median_wait_share",
        ),
        Target(
            f"cache of {CACHE:.0%} over all rows resident, depth {DEPTH}",
            "ms_over_resident",
            {"depth": DEPTH, "correct": True, "cache": CACHE},
            worst=1.3,
            of_medians="median_ms_over_resident",
        ),
    ],
)

if __name__ == "__main__":
    BENCHMARK.start()
