"""Training steps behind `prefetch`: models whose caches differ train on the same batches, at depths that take turns."""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import rec_sdk_torch

from .contenders import Collection
from .ids import Distribution
from .runner import Row
from .timing import best_of, no_collection
from .workload import LEARNING_RATE, Workload

RESIDENT = 1.0


@dataclass
class Segment:
    """Steps in a row at one depth.

    Attributes:
        seconds: of a step, on average.
        planned: batches that were planned ahead before its first step.
        counters: `cache_stats` of the timed steps. Batches are counted when they are planned, so with those ahead.
        losses: of every step, the untimed as well.
        waited: part of the timed steps that the training thread spent on plans and swaps.
    """

    seconds: float
    planned: int
    counters: dict[str, int]
    losses: list[float]
    waited: float


class DenseModel(torch.nn.Module):
    """A collection of tables and three dense layers behind it, the middle one `hidden` x `hidden`."""

    def __init__(self, collection: Collection, hidden: int, seed: int) -> None:
        super().__init__()
        self.tables = collection.module
        torch.manual_seed(seed)
        layers = [torch.nn.Linear(sum(collection.workload.dims), hidden), torch.nn.Linear(hidden, hidden)]
        self.dense = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU())
        self.dense.append(torch.nn.Linear(hidden, 1))

    def forward(self, batch: Any) -> torch.Tensor:
        """The loss of a batch."""
        return self.loss(self.tables(batch).values())

    def loss(self, pooled: torch.Tensor) -> torch.Tensor:
        """The loss for the tables' output, `[B, dims of all tables]`."""
        output: torch.Tensor = self.dense(pooled)
        return output.square().mean()


class Trainer:
    """A model with its optimizers, and one cache."""

    def __init__(self, workload: Workload, cache: float, hidden: int, seed: int) -> None:
        self.cache = cache
        self.collection = Collection(workload, cache=cache, seed=seed)
        self.model = DenseModel(self.collection, hidden, seed)
        self._optimizer = torch.optim.SGD(self.model.dense.parameters(), lr=LEARNING_RATE)
        self._pooled = torch.zeros(workload.batch_size, sum(workload.dims), requires_grad=True)

    def fill(self) -> None:
        """Gives every table all of its rows, in the order of their ids; as many as fit stay in the cache."""
        workload = self.collection.workload
        for first in range(0, max(workload.tables.sizes), workload.per_table):
            ids = torch.arange(first, first + workload.per_table)
            self.collection.look(torch.stack([ids % rows for rows in workload.tables.sizes]))

    def dense_seconds(self, repeats: int) -> float:
        """The fastest forward, backward and update of the dense layers alone."""
        return best_of(lambda: self._learn(self.model.loss(self._pooled)), repeats)

    def _learn(self, loss: torch.Tensor) -> torch.Tensor:
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return loss.detach()

    def run(self, batches: Sequence[Any], depth: int, warm: int, steps: int) -> Segment:
        """Trains on the first `warm + steps` batches; those behind them keep the planning thread busy."""
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
                losses.append(self._learn(self.model(batch)))
        counters = self.collection.counters()
        waited = counters["wait_us"] * 1e-6 / (end - begin)
        return Segment((end - begin) / steps, planned, counters, [float(loss) for loss in losses], waited)


@dataclass
class _Case:
    """Segments of one cache at one depth."""

    segments: list[Segment] = field(default_factory=list)

    @property
    def fastest(self) -> Segment:
        return min(self.segments, key=lambda segment: segment.seconds)

    def describe(self, workload: Workload) -> Row:
        fastest = self.fastest
        seconds = [segment.seconds for segment in self.segments]
        counters = {name: sum(s.counters[name] for s in self.segments) for name in fastest.counters}
        counted = counters["lookups"] // workload.lookups
        plan_us = [s.counters["plan_us"] / (s.counters["lookups"] // workload.lookups) for s in self.segments]
        return {
            **{"ms": min(seconds) * 1e3, "median_ms": statistics.median(seconds) * 1e3, "rounds": len(seconds)},
            "wait_share": fastest.waited,
            "median_wait_share": statistics.median(segment.waited for segment in self.segments),
            "plan_ms": min(plan_us) / 1e3,
            "depth_reached": max(segment.counters["depth_reached"] for segment in self.segments),
            "planned_at_start": min(segment.planned for segment in self.segments),
            "missed_rows_per_batch": counters["unique_misses"] / counted,
            **{"counted_batches": counted, "counters": counters},
        }


def _batches(trainer: Trainer, options: argparse.Namespace) -> Iterator[Any]:
    rng = np.random.default_rng(options.seed)
    while True:
        yield trainer.collection.inputs(trainer.collection.workload.draw(Distribution(options.alpha), rng))


def run_hidden(workload: Workload, options: argparse.Namespace, hidden: int) -> Iterator[Row]:
    """Every cache and depth, beside the same depth with all rows resident.

    Depths are permuted for each cache by itself, so that equal losses compare them, too.
    """
    trainers = [Trainer(workload, cache, hidden, options.seed) for cache in dict.fromkeys([*options.cache, RESIDENT])]
    stream = _batches(trainers[0], options)
    for trainer in trainers:
        trainer.fill()
    for batch in itertools.islice(stream, options.settle):
        for trainer in trainers:
            trainer.collection.forward(batch)
    cases = {(trainer.cache, depth): _Case() for trainer in trainers for depth in options.depths}
    rng = np.random.default_rng(options.seed)
    dense, correct = float("inf"), True
    for _ in range(options.rounds):
        orders = {trainer.cache: rng.permutation(options.depths) for trainer in trainers}
        for place in range(len(options.depths)):
            # The tail is drawn anew for every segment: it is planned, and never trained.
            batches = list(itertools.islice(stream, options.warm + options.steps + max(options.depths) + 1))
            losses = []
            for index in rng.permutation(len(trainers)):
                trainer = trainers[index]
                depth = int(orders[trainer.cache][place])
                segment = trainer.run(batches, depth, options.warm, options.steps)
                cases[trainer.cache, depth].segments.append(segment)
                losses.append(segment.losses)
            correct &= all(other == losses[0] for other in losses)
        # All have the weights of one model: a step of the dense layers alone changes them, so the others take the same.
        dense = min(dense, *(trainer.dense_seconds(3) for trainer in trainers))
    described = {key: case.describe(workload) for key, case in cases.items()}
    for (cache, depth), case in described.items():
        resident = described[RESIDENT, depth]
        named = {"hidden": hidden, "dense_ms": dense * 1e3, "cache": cache, "depth": depth}
        hides = {"hides a plan": dense * 1e3 > case["plan_ms"]}
        ratios = {f"{name}_over_resident": case[name] / resident[name] for name in ("ms", "median_ms")}
        yield {**named, **case, **ratios, **hides, "correct": correct}
