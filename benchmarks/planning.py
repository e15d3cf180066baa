"""Benchmark of the host planner alone: ids per second, memory use, and the cost of admission and eviction."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from rec_sdk_torch._engine import Engine, Initializer, TableSpec, available_memory, start_plans
from rec_sdk_torch.rules import Age, Count, Idle, Norm, Probability, Rows, Score, Share, ShowClick, Sketch
from rec_sdk_torch.tbe.config.lifecycle import TableLifecycle

from .ids import Distribution, Int64Array
from .machine import resident_memory
from .runner import Option, Row, Target, benchmark, say
from .timing import Samples, seconds_of, take_turns

_FEATURES = np.zeros(1, np.int64)
BYTES_PER_ROW = 64
"""An estimate of an engine's bytes for a resident row besides its record, to refuse runs that cannot fit."""


def make_engine(
    rows: int,
    slots: int,
    hashed: bool = True,
    expected: int = 0,
    lifecycle: TableLifecycle | None = None,
) -> Engine:
    """Builds an engine with one table of D = 1 and records of a 16-byte row.

    `expected` is the table's `num_embeddings`, by default `rows`; `lifecycle` has the rules that admit and evict ids.
    """
    table = TableSpec(
        name="t",
        hashed=hashed,
        num_embeddings=expected or rows,
        slots=slots,
        capacity=0,
        initializer=Initializer("uniform", 0.0, 1.0, 0.0, 1.0),
        seed=0,
        state_init=[],
        bounds_check="fatal",
        columns=lifecycle.columns() if lifecycle else [],
        lifecycle=lifecycle.to_engine(16) if lifecycle else None,
    )
    return Engine([table], 1, 0, [], [0], [], [], "lru")


class Planner:
    """An engine that plans batches and swaps rows; a host buffer that is never read stands for the cache."""

    def __init__(
        self, engine: Engine, lifecycle: TableLifecycle | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.engine = engine
        self._clock = clock
        self._lifecycle = lifecycle or TableLifecycle()
        self._records = np.zeros((0, engine.record_bytes), np.uint8)

    def plan(self, ids: Int64Array) -> float:
        """Plans and swaps a batch; returns the seconds of planning and releasing the plan, by the planner's clock."""
        offsets = np.array([0, len(ids)], np.int64)
        clicks = (ids % 8 == 0).astype(np.int32) if self._lifecycle.needs_clicks else None
        times = (
            np.full(len(ids), self.engine.tables.stats()["batches"], np.int64) if self._lifecycle.rule(Age) else None
        )
        plans: list[Any] = []
        make = partial(self.engine.plan, clicks=clicks, timestamps=times)
        spent = seconds_of(lambda: plans.append(make(ids, offsets, _FEATURES, 1)), self._clock)
        plan = plans.pop()
        leaving, coming = plan.rows_out, plan.rows_in
        if max(leaving, coming) > len(self._records):
            self._records = np.zeros((max(leaving, coming), self.engine.record_bytes), np.uint8)
        if coming:
            self.engine.read_in(plan, self._records[:coming])
        start_plans([plan])
        self.engine.applied(plan)
        if leaving:
            self.engine.complete_write_back(plan, self._records[:leaving])
        return spent + seconds_of(plan.release, self._clock)

    def next_plan(self, batches: Iterator[Int64Array]) -> Callable[[], float]:
        """Returns a function that plans the next batch."""
        return lambda: self.plan(next(batches))

    def fill(self, rows: int, batch: int) -> None:
        """Makes the rows of ids 0 to `rows` - 1 resident."""
        for first in range(0, rows, batch):
            self.plan(np.arange(first, min(first + batch, rows), dtype=np.int64))


def shortage_of(rows: int) -> str | None:
    """Returns why a table of `rows` cannot be planned here; None if it can."""
    need, free = rows * BYTES_PER_ROW, available_memory()
    if need <= free:
        return None
    return f"{rows:,} rows need about {need / 2**30:.1f} GiB, {free / 2**30:.1f} are free; left out"


def power_law_batches(alpha: float, rows: int, options: argparse.Namespace) -> Iterator[Int64Array]:
    """Yields batches of power-law ids."""
    rng = np.random.default_rng(options.seed)
    while True:
        yield Distribution(alpha).draw(rng, rows, options.plan_batch)


def _new_ids(options: argparse.Namespace) -> Iterator[Int64Array]:
    """Yields batches of new ids: consecutive multiples of a large odd number."""
    for first in itertools.count(step=options.plan_batch):
        yield np.arange(first, first + options.plan_batch, dtype=np.int64) * 0x9E3779B1


def _plans(key: Row, planner: Planner, batches: Iterator[Int64Array], warm: int, rounds: int) -> Row:
    """Times plans of `rounds` batches, compared with torch.unique of the same ids."""
    for _ in range(warm):
        planner.plan(next(batches))
    planner.engine.tables.reset_stats()
    ours, unique = itertools.tee(itertools.islice(batches, rounds))
    calls = {
        "ours": planner.next_plan(ours),
        "unique": lambda: seconds_of(partial(torch.unique, torch.from_numpy(next(unique)), return_inverse=True)),
    }
    samples = take_turns(calls, rounds, warm=0)
    counters = planner.engine.tables.stats()
    lookups = counters["lookups"] / counters["batches"]
    return {
        "table": "plan",
        **key,
        "M ids/s": lookups / samples["ours"].median / 1e6,
        "torch.unique": lookups / samples["unique"].median / 1e6,
        "slowest_batch_ms": max(samples["ours"].seconds) * 1e3,
        **{name: counters[name] for name in ("new_rows", "rows_out")},
        "counters": counters,
    }


def _hits(options: argparse.Namespace, kind: str, rows: int, threads: list[int]) -> Iterator[Row]:
    """Times plans whose rows are all resident. The memory is the growth of the process during their insertion."""
    before = resident_memory()
    planner = Planner(make_engine(rows, rows, kind == "hash"))
    planner.fill(rows, options.plan_batch)
    memory, alone = planner.engine.tables.memory(), dict[float, float]()
    figures = {"map_bytes_per_row": memory["id_map_bytes"] / rows} if kind == "hash" else {}
    figures["process_bytes_per_row"] = (resident_memory() - before) / rows
    for count, alpha in itertools.product(threads, (0.0, 1.05)):
        torch.set_num_threads(count)
        key = {"what": "hits", "kind": kind, "rows": rows, "ids": Distribution(alpha).name, "threads": count}
        row = _plans(key, planner, power_law_batches(alpha, rows, options), 1, options.rounds)
        alone.setdefault(alpha, row["M ids/s"])
        over = {"two threads over one": row["M ids/s"] / alone[alpha]} if count == 2 else {}
        yield {**row, **figures, **over, "memory": memory}
        figures = {}
    torch.set_num_threads(1)


def _changes(options: argparse.Namespace) -> Iterator[Row]:
    """Times plans that insert new ids, with an id map of the right size or one that must grow, and plans that evict."""
    batch, total = options.plan_batch, options.plan_batch * (options.rounds + 1)
    rows = 4 * batch
    cases = {
        "insert": (make_engine(total, total), _new_ids(options), 1),
        "growth": (make_engine(total, total, expected=1), _new_ids(options), 0),
        "eviction": (make_engine(rows, batch + batch // 4), power_law_batches(0.0, rows, options), 6),
    }
    for what, (engine, batches, warm) in cases.items():
        key = {"what": what, "kind": "hash", "rows": rows if what == "eviction" else total, "threads": 1}
        yield _plans(key, Planner(engine), batches, warm, options.rounds)


def run_plans(options: argparse.Namespace) -> Iterator[Row]:
    """Times all cases with one thread, hits also with several threads. Afterwards torch has one thread."""
    torch.set_num_threads(1)
    threads = sorted({1, *options.threads})
    for kind in ("hash", "index"):
        yield from _hits(options, kind, options.plan_rows, threads)
    problem = shortage_of(options.large_rows)
    if problem:
        say(f"plan: {problem}")
    elif options.large_rows:
        yield from _hits(options, "hash", options.large_rows, [1])
    yield from _changes(options)


# ---- admission and eviction

RULES = {
    "POLICY_COUNT": TableLifecycle(admission=Count(2)),
    "POLICY_SHOWCLICK": TableLifecycle(admission=ShowClick(2, beta=1)),
    "sketch_bytes": TableLifecycle(admission=Sketch(2, bytes=2**22)),
    "admit_probability": TableLifecycle(admission=Probability(0.5)),
    "evict_norm": TableLifecycle(eviction=Norm(0.1), every=1000),
    "evict_idle_steps": TableLifecycle(eviction=Idle(1000), every=1000),
    "timestamps": TableLifecycle(eviction=Age(1000), every=1000),
    "max_rows": TableLifecycle(bound=Rows(2**30)),
    "evict_share": TableLifecycle(eviction=Share(0.1), every=1000),
    "POLICY_COUNT, max_rows": TableLifecycle(admission=Count(2), bound=Rows(2**30)),
    "POLICY_SHOWCLICK, evict_share": TableLifecycle(
        admission=ShowClick(2, beta=1), eviction=Share(0.1), every=1000, score=Score(beta=1, decay=0.9)
    ),
    "score_half_life, max_rows": TableLifecycle(bound=Rows(2**30), score=Score(half_life=100)),
}
"""The lifecycle rules that `planning` measures. None evicts in the runs, since eviction is not part of a plan."""


def _time_lifecycle(lifecycle: TableLifecycle, fresh: int, options: argparse.Namespace) -> dict[str, Samples]:
    """Times plans with a rule and plans without, alternating; `fresh` ids of each batch are new."""
    rows = options.plan_rows

    def batches() -> Iterator[Int64Array]:
        for number, ids in enumerate(power_law_batches(1.05, rows, options)):
            ids[:fresh] = np.arange(fresh) * 0x9E3779B1 + rows * (number + 2)
            yield ids

    calls: dict[str, Callable[[], float]] = {}
    for name, rule in (("off", None), ("on", lifecycle)):
        planner = Planner(make_engine(rows, 2 * rows, lifecycle=rule), rule, time.thread_time)
        for _ in range(2 if rule else 1):  # the second plan admits the ids
            planner.fill(rows, options.plan_batch)
        calls[name] = planner.next_plan(batches())
    return take_turns(calls, options.rounds, warm=0)


@benchmark(
    {
        "plan_batch": Option(65536, "ids", quick=500),
        "plan_rows": Option(1_000_000, quick=1000),
        "rounds": Option(41, quick=2),
        "seed": Option(1, kind=int),
    },
    [
        Target(f"plans with a rule of {kind} over those without", "ratio", {"kind": kind}, worst=worst)
        for kind, worst in (("admission", 1.3), ("eviction", 1.4))
    ],
    malloc=False,
)
def planning(options: argparse.Namespace) -> Iterator[Row]:
    """Times plans with and without a rule of admission or eviction, for known ids and with a tenth of new ids.

    Plans with and without a rule alternate. Times are processor times of one thread. `ratio` is the shortest plan with
    the rule divided by the shortest plan without it.
    """
    for rule, lifecycle in RULES.items():
        row: Row = {"rule": rule, "kind": "admission" if lifecycle.admits and "," not in rule else "eviction"}
        for name, fresh in (("all known", 0), ("a tenth new", options.plan_batch // 10)):
            samples = _time_lifecycle(lifecycle, fresh, options)
            rate = options.plan_batch / samples["on"].median / 1e6
            yield {**row, "lookups": name, "M ids/s": rate, "ratio": samples["on"].best / samples["off"].best}
