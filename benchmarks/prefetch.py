"""Benchmark of training steps with prefetch(), by depth, for tables and dense layers on the CPU."""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import rec_sdk_torch
from rec_sdk_torch.tbe.step.prefetch_queue import MAX_DEPTH

from .contenders import Collection
from .ids import Distribution
from .runner import Option, Row, Target, benchmark, fraction
from .timing import best_of, no_collection
from .workload import LEARNING_RATE, OPTIMIZERS, TableSet, Workload, make_workload

DEPTH, CACHE = 2, 0.1
"""The depth that targets refer to, which is the default of `prefetch`; and the cache ratio of the second target."""
RESIDENT = 1.0


@dataclass
class Segment:
    """Consecutive steps at one depth.

    Attributes:
        seconds: mean seconds per step.
        planned: number of batches that were planned ahead before the first step.
        counters: `cache_stats` of the timed steps, including prefetched batches, which are counted when planned.
        losses: losses of every step, including the untimed steps.
        waited: share of the timed steps that the training thread spent on plans and swaps.
    """

    seconds: float
    planned: int
    counters: dict[str, int]
    losses: list[float]
    waited: float


class DenseModel(torch.nn.Module):
    """A collection of tables followed by three dense layers, the middle one `hidden` x `hidden`."""

    def __init__(self, collection: Collection, hidden: int, seed: int) -> None:
        super().__init__()
        self.tables = collection.module
        torch.manual_seed(seed)
        layers = [torch.nn.Linear(sum(collection.workload.dims), hidden), torch.nn.Linear(hidden, hidden)]
        self.dense = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU())
        self.dense.append(torch.nn.Linear(hidden, 1))

    def forward(self, batch: Any) -> torch.Tensor:
        """Computes the loss of a batch."""
        return self.loss(self.tables(batch).values())

    def loss(self, pooled: torch.Tensor) -> torch.Tensor:
        """Computes the loss for the tables' output, `[B, dims of all tables]`."""
        output: torch.Tensor = self.dense(pooled)
        return output.square().mean()


class Trainer:
    """A model with its optimizers, whose tables have one cache size."""

    def __init__(self, workload: Workload, cache: float, hidden: int, seed: int) -> None:
        self.cache = cache
        self.collection = Collection(workload, cache=cache, seed=seed)
        self.model = DenseModel(self.collection, hidden, seed)
        self._optimizer = torch.optim.SGD(self.model.dense.parameters(), lr=LEARNING_RATE)
        self._pooled = torch.zeros(workload.batch_size, sum(workload.dims), requires_grad=True)

    def fill(self) -> None:
        """Inserts all rows of every table in the order of their ids; as many as fit stay cached."""
        workload = self.collection.workload
        for first in range(0, max(workload.tables.sizes), workload.per_table):
            ids = torch.arange(first, first + workload.per_table)
            self.collection.fetch_rows(torch.stack([ids % rows for rows in workload.tables.sizes]))

    def dense_seconds(self, repeats: int) -> float:
        """Returns the seconds of the fastest forward, backward and update of the dense layers alone."""
        return best_of(lambda: self._train_dense(self.model.loss(self._pooled)), repeats)

    def _train_dense(self, loss: torch.Tensor) -> torch.Tensor:
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return loss.detach()

    def run(self, batches: Sequence[Any], depth: int, warm: int, steps: int) -> Segment:
        """Trains on the first `warm + steps` batches; the remaining ones keep the planning thread busy."""
        losses: list[torch.Tensor] = []
        begin, end, planned = 0.0, 0.0, 0
        self.collection.reset_counters()
        with no_collection():
            for step, batch in enumerate(rec_sdk_torch.prefetch(batches, self.model, depth)):
                if step == 0:
                    self.model.tables.wait_for_plans()
                    planned = self.collection.counters()["depth_reached"]
                elif step == warm:
                    self.collection.reset_counters()
                    begin = time.perf_counter()
                elif step == warm + steps:
                    end = time.perf_counter()
                    break
                losses.append(self._train_dense(self.model(batch)))
        counters = self.collection.counters()
        waited = counters["wait_us"] * 1e-6 / (end - begin)
        return Segment((end - begin) / steps, planned, counters, [float(loss) for loss in losses], waited)


def describe(segments: Sequence[Segment], lookups: int) -> Row:
    """Summarizes the segments of one cache at one depth."""
    fastest = min(segments, key=lambda segment: segment.seconds)
    seconds = [segment.seconds for segment in segments]
    counters = {name: sum(s.counters[name] for s in segments) for name in fastest.counters}
    counted = counters["lookups"] // lookups
    return {
        **{"ms": min(seconds) * 1e3, "median_ms": statistics.median(seconds) * 1e3, "rounds": len(seconds)},
        "wait_share": fastest.waited,
        "median_wait_share": statistics.median(segment.waited for segment in segments),
        "plan_ms": min(s.counters["plan_us"] / (s.counters["lookups"] // lookups) for s in segments) / 1e3,
        "depth_reached": max(segment.counters["depth_reached"] for segment in segments),
        "planned_at_start": min(segment.planned for segment in segments),
        "missed_rows_per_batch": counters["unique_misses"] / counted,
        **{"counted_batches": counted, "counters": counters},
    }


def _batches(trainer: Trainer, options: argparse.Namespace) -> Iterator[Any]:
    rng = np.random.default_rng(options.seed)
    while True:
        yield trainer.collection.inputs(trainer.collection.workload.draw(Distribution(options.alpha), rng))


def run_hidden(workload: Workload, options: argparse.Namespace, hidden: int) -> Iterator[Row]:
    """Measures every cache and depth, and compares each with the same depth when all rows are resident.

    The order of depths is drawn separately for each cache, so comparing the losses also compares different depths.
    """
    trainers = [Trainer(workload, cache, hidden, options.seed) for cache in dict.fromkeys([*options.cache, RESIDENT])]
    stream = _batches(trainers[0], options)
    for trainer in trainers:
        trainer.fill()
    for batch in itertools.islice(stream, options.settle):
        for trainer in trainers:
            trainer.collection.forward(batch)
    cases: dict[tuple[float, int], list[Segment]] = {}
    rng = np.random.default_rng(options.seed)
    dense, correct = float("inf"), True
    for _ in range(options.rounds):
        orders = {trainer.cache: rng.permutation(options.depths) for trainer in trainers}
        for place in range(len(options.depths)):
            # Every segment draws its own last batches, which are planned but never trained on.
            batches = list(itertools.islice(stream, options.warm + options.steps + max(options.depths) + 1))
            losses = []
            for index in rng.permutation(len(trainers)):
                trainer = trainers[index]
                depth = int(orders[trainer.cache][place])
                segment = trainer.run(batches, depth, options.warm, options.steps)
                cases.setdefault((trainer.cache, depth), []).append(segment)
                losses.append(segment.losses)
            correct &= all(other == losses[0] for other in losses)
        # Timing the dense layers also trains them. All models take the same steps, so that their weights stay equal.
        dense = min(dense, *(trainer.dense_seconds(3) for trainer in trainers))
    described = {key: describe(segments, workload.lookups) for key, segments in cases.items()}
    for cache, depth in itertools.product([trainer.cache for trainer in trainers], options.depths):
        case, resident = described[cache, depth], described[RESIDENT, depth]
        named = {"hidden": hidden, "dense_ms": dense * 1e3, "cache": cache, "depth": depth}
        hides = {"hides a plan": dense * 1e3 > case["plan_ms"]}
        ratios = {f"{name}_over_resident": case[name] / resident[name] for name in ("ms", "median_ms")}
        yield {**named, **case, **ratios, **hides, "correct": correct}


def depth(text: str) -> int:
    """Parses a depth of 0 to MAX_DEPTH (an argparse type)."""
    value = int(text)
    if not 0 <= value <= MAX_DEPTH:
        raise argparse.ArgumentTypeError(f"{text} is not allowed; 0 to {MAX_DEPTH} is")
    return value


@benchmark(
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
def prefetch(options: argparse.Namespace) -> Iterator[Row]:
    """Measures training steps of tables and dense layers with `prefetch`, by depth, on the CPU.

    Models with different caches train on the same batches, and the depths alternate. One thread trains and one plans,
    so two idle cores are needed. If losses differ between caches or depths, the row's `correct` is false.
    """
    workload = make_workload(options.tables, options.dim, True, options.optimizer, options.lookups, options.bag)
    for hidden in options.hidden:
        yield from run_hidden(workload, options, hidden)
