"""The plan benchmark: ids per second of the host planner alone, and the memory of its map and store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from rec_sdk_torch._engine import Engine, Initializer, TableSpec, available_memory, begin
from rec_sdk_torch.tbe.config.life import TableLife

from .ids import Distribution, Int64Array
from .machine import resident_memory
from .timing import Samples, no_collection, seconds_of

_FEATURES = np.zeros(1, np.int64)
BYTES_PER_ROW = 64
"""Bytes that an engine may take beside the record while every row is resident; only refuses what cannot fit."""


def make_engine(
    rows: int,
    slots: int,
    hashed: bool = True,
    expected: int = 0,
    life: TableLife | None = None,
) -> Engine:
    """One table of D = 1, with the records of a 16-byte row; `expected` ids, or `rows`, which come by `life`."""
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
        columns=life.columns() if life else [],
        life=life.of_engine(16) if life else None,
    )
    return Engine([table], 1, 0, [], [0], [], [], "lru")


class Planner:
    """An engine that is fed batches; the swap is done for it, against a cache that is never read."""

    def __init__(
        self, engine: Engine, life: TableLife | None = None, clock: Callable[[Callable[[], object]], float] = seconds_of
    ) -> None:
        self.engine = engine
        self._clock = clock
        self._life = life or TableLife()
        self._records = np.zeros((0, engine.record_bytes), np.uint8)

    def plan(self, ids: Int64Array) -> float:
        """Plans and swaps a batch; the seconds of plan and release, by the planner's clock."""
        offsets = np.array([0, len(ids)], np.int64)
        clicks = (ids % 8 == 0).astype(np.int32) if self._life.needs_clicks else None
        times = np.full(len(ids), self.engine.stats()["batches"], np.int64) if self._life.evict_age else None
        plans: list[Any] = []
        make = partial(self.engine.plan, clicks=clicks, timestamps=times)
        spent = self._clock(lambda: plans.append(make(ids, offsets, _FEATURES, 1)))
        plan = plans.pop()
        leaving, coming = plan.rows_out, plan.rows_in
        if max(leaving, coming) > len(self._records):
            self._records = np.zeros((max(leaving, coming), self.engine.record_bytes), np.uint8)
        if coming:
            self.engine.read_in(plan, self._records[:coming])
        begin([plan])
        self.engine.applied(plan)
        if leaving:
            self.engine.land(plan, self._records[:leaving])
        return spent + self._clock(plan.release)

    def fill(self, rows: int, batch: int) -> None:
        """Makes ids 0 .. rows resident."""
        for first in range(0, rows, batch):
            self.plan(np.arange(first, min(first + batch, rows), dtype=np.int64))


@dataclass(frozen=True)
class PlanOptions:
    """Sizes of the plan benchmark.

    Attributes:
        batch: ids of a batch.
        rows: of the small table.
        large_rows: of the large one; 0 leaves it out.
        rounds: timed batches of a case.
        seed: of the ids.
        threads: of torch; each plans the hits of the small tables.
    """

    batch: int
    rows: int
    large_rows: int
    rounds: int
    seed: int
    threads: tuple[int, ...] = (1,)


def _drawn(alpha: float, rows: int, options: PlanOptions) -> Iterator[Int64Array]:
    rng = np.random.default_rng(options.seed)
    while True:
        yield Distribution(alpha).draw(rng, rows, options.batch)


def _new(options: PlanOptions) -> Iterator[Int64Array]:
    begin = 0
    while True:
        # An odd factor makes every batch's ids new, and none of them the last one's neighbour.
        yield np.arange(begin, begin + options.batch, dtype=np.int64) * 0x9E3779B1
        begin += options.batch


def _time(
    name: str, planner: Planner, batches: Iterator[Int64Array], warm: int, options: PlanOptions
) -> dict[str, Any]:
    ours, unique = Samples(), Samples()
    for _ in range(warm):
        planner.plan(next(batches))
    planner.engine.reset_stats()
    with no_collection():
        for _ in range(options.rounds):
            ids = next(batches)
            ours.seconds.append(planner.plan(ids))
            tensor = torch.from_numpy(ids)
            unique.seconds.append(seconds_of(partial(torch.unique, tensor, return_inverse=True)))
    counters = planner.engine.stats()
    lookups = counters["lookups"] / counters["batches"]
    return {
        "case": name,
        "ids_per_second": lookups / ours.median,
        "slowest_batch_ms": max(ours.seconds) * 1e3,
        "torch_unique_ids_per_second": lookups / unique.median,
        "time": ours.summary(),
        "counters": counters,
    }


def _hits(
    options: PlanOptions, rows: int, hashed: bool, alphas: dict[str, float], threads: tuple[int, ...] = (1,)
) -> list[dict[str, Any]]:
    """All rows resident; memory is what the process grew by while they came."""
    kind = "hash" if hashed else "index"
    before = resident_memory()
    planner = Planner(make_engine(rows, rows, hashed))
    planner.fill(rows, options.batch)
    grown = resident_memory() - before
    results = []
    for count in threads:
        torch.set_num_threads(count)
        for label, alpha in alphas.items():
            name = f"{kind}, {rows:,} rows, {label}, {count} thread(s)"
            result = _time(name, planner, _drawn(alpha, rows, options), 1, options)
            case = {"kind": kind, "rows": rows, "alpha": alpha, "what": "hits", "threads": count}
            results.append({**result, **case})
    torch.set_num_threads(1)
    results[0]["memory"] = {**planner.engine.memory(), "process_growth_bytes": grown}
    return results


def _changes(options: PlanOptions) -> list[dict[str, Any]]:
    """New ids into a map of the right size and into one that must grow, and a cache too small for two batches."""
    total = options.batch * (options.rounds + 1)
    cases: list[tuple[str, str, Planner, Iterator[Int64Array], int]] = [
        ("insert", "new ids, map sized for them", Planner(make_engine(total, total)), _new(options), 1),
        ("growth", "new ids, map grows", Planner(make_engine(total, total, expected=1)), _new(options), 0),
    ]
    rows = options.batch * 4
    small = Planner(make_engine(rows, options.batch + options.batch // 4))
    cases.append(("eviction", f"uniform over {rows:,} rows, small cache", small, _drawn(0.0, rows, options), 6))
    results = []
    for what, name, planner, batches, warm in cases:
        result = _time(name, planner, batches, warm, options)
        results.append({**result, "kind": "hash", "rows": rows, "alpha": 0.0, "what": what, "threads": 1})
    results[-1]["store_memory"] = small.engine.memory()
    return results


RULES = {
    "POLICY_COUNT": TableLife(admit_threshold=2),
    "POLICY_SHOWCLICK": TableLife(admit_threshold=2, beta=1),
    "sketch_bytes": TableLife(admit_threshold=2, sketch_bytes=2**22),
    "admit_probability": TableLife(admit_probability=0.5),
    "evict_norm": TableLife(evict_norm=0.1, evict_step_interval=1000),
    "evict_idle_steps": TableLife(evict_idle_steps=1000, evict_step_interval=1000),
    "timestamps": TableLife(evict_age=1000, evict_step_interval=1000),
    "max_rows": TableLife(max_rows=2**30),
    "evict_share": TableLife(evict_share=0.1, evict_step_interval=1000),
    "POLICY_COUNT, max_rows": TableLife(admit_threshold=2, max_rows=2**30),
    "POLICY_SHOWCLICK, evict_share": TableLife(
        admit_threshold=2, beta=1, evict_share=0.1, score_decay=0.9, evict_step_interval=1000
    ),
    "score_half_life, max_rows": TableLife(score_half_life=100, max_rows=2**30),
}
"""The rules that `run_life` measures. None of them evicts there: an eviction is no part of a plan."""


def run_life(options: PlanOptions) -> list[dict[str, Any]]:
    """Plans with rules on and off, in turn: of rows that are all there, and with new ids in a tenth of lookups.

    By the time of the processor, on one thread: the ratio of the shortest plans.
    """
    results = []
    for rule, life in RULES.items():
        for name, fresh in (("hits", 0), ("a tenth of lookups new", options.batch // 10)):
            with_rule, without = _time_life(life, fresh, options)
            results.append(
                {
                    "case": f"{rule}, {name}",
                    "what": "life",
                    "kind": "hash",
                    "rows": options.rows,
                    "alpha": 1.05,
                    "threads": 1,
                    "ids_per_second": options.batch / with_rule.median,
                    "time": with_rule.summary(),
                    "without": without.summary(),
                    "ratio": with_rule.best / without.best,
                }
            )
    return results


def _time_life(life: TableLife, fresh: int, options: PlanOptions) -> tuple[Samples, Samples]:
    rng = np.random.default_rng(options.seed)
    clock = partial(seconds_of, clock=time.thread_time)
    on, off = (Planner(make_engine(options.rows, 2 * options.rows, life=rule), rule, clock) for rule in (life, None))
    for planner in (off, on, on):  # the second time admits the ids
        planner.fill(options.rows, options.batch)
    with_rule, without = Samples(), Samples()
    with no_collection():
        for number in range(options.rounds):
            ids = Distribution(1.05).draw(rng, options.rows, options.batch)
            ids[:fresh] = np.arange(fresh) * 0x9E3779B1 + options.rows * (number + 2)
            order = [(off, without), (on, with_rule)]
            for planner, samples in order if number % 2 else reversed(order):
                samples.seconds.append(planner.plan(ids))
    return with_rule, without


def large_table_problem(rows: int) -> str | None:
    """Why a table of `rows` cannot be planned for here; None if it can."""
    need, free = rows * BYTES_PER_ROW, available_memory()
    if need <= free:
        return None
    return f"{rows:,} rows need about {need / 2**30:.1f} GiB, {free / 2**30:.1f} are free"


def run_plans(options: PlanOptions, report: Callable[[str], None]) -> list[dict[str, Any]]:
    """All cases, at one thread but for hits; torch is left with one."""
    torch.set_num_threads(1)
    skewed = {"uniform": 0.0, "power law 1.05": 1.05}
    results = _hits(options, options.rows, True, skewed, options.threads)
    results += _hits(options, options.rows, False, skewed, options.threads)
    if options.large_rows:
        problem = large_table_problem(options.large_rows)
        if problem:
            report(f"plan: {problem}; left out")
        else:
            results += _hits(options, options.large_rows, True, skewed)
    return results + _changes(options)


if __name__ == "__main__":  # python -m benchmarks.planning: what admission and eviction cost
    torch.set_num_threads(1)
    for case in run_life(PlanOptions(batch=65536, rows=1_000_000, large_rows=0, rounds=41, seed=1)):
        print(f"{case['case']}: {case['ratio']:.2f} of the time without")
