"""The step benchmark: plan, lookup, backward and update of one batch, ours and the rivals turn by turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from rec_sdk_torch.tbe import CacheTooSmallError

from .bounds import Machine, step_bytes
from .contenders import PHASES, Contender, NotAvailableError, Ours
from .ids import Distribution
from .machine import free_memory
from .rivals import Rival, make_rival
from .timing import Samples, no_collection
from .workload import Workload

CHECKED_STEPS = 2
_FILL_BATCHES = 200
_MARGIN = 2 << 30


@dataclass(frozen=True)
class StepOptions:
    """How a case is run.

    Attributes:
        rivals: their names.
        caches: fractions of the rows that a cache beside the full one holds.
        index: also run ours with index tables, which need no id map.
        rounds: timed steps of every contender.
        seed: of ids, weights and gradients.
    """

    rivals: tuple[str, ...]
    caches: tuple[float, ...]
    index: bool
    rounds: int
    seed: int


class StepBench:
    """One set of tables, dim, form and optimizer, built once and run on several distributions."""

    def __init__(self, workload: Workload, options: StepOptions) -> None:
        """Builds ours and whatever rival there is memory for.

        Raises:
            NotAvailableError: ours itself cannot run.
        """
        self.workload = workload
        self.options = options
        self.skipped: dict[str, str] = {}
        self._budget = float(free_memory() - _MARGIN)
        self._reserve(workload.table_bytes)
        self.ours = Ours(workload, seed=options.seed)
        self.ours.fill()
        self.contenders: list[Contender] = [self.ours]
        for name in options.rivals:
            self._add(name, partial(make_rival, name, workload, options.seed))
        for cache in options.caches:
            self._add(f"ours@{cache:g}", partial(Ours, workload, cache=cache, seed=options.seed), 1 + cache)
        if options.index:
            self._add("ours-index", self._index)

    def _reserve(self, need: float) -> None:
        """Counts down what was free at the start: memory of a contender is only touched when it steps."""
        if need > self._budget:
            raise NotAvailableError(f"needs {need / 2**30:.1f} GiB, {max(0, self._budget) / 2**30:.1f} are free")
        self._budget -= need

    def _add(self, name: str, make: Callable[[], Contender], copies: float = 1.0) -> None:
        """Adds a contender that needs `copies` of the tables."""
        before = self._budget
        try:
            self._reserve(self.workload.table_bytes * copies)
            self.contenders.append(make())
        except NotAvailableError as error:
            self._budget = before
            self.skipped[name] = str(error)

    def _index(self) -> Ours:
        contender = Ours(self.workload, hashed=False, seed=self.options.seed)
        contender.fill()
        return contender

    def run(self, distribution: Distribution, machine: Machine) -> dict[str, Any]:
        """One case: checks results, then times. `machine` adds the bounds when the run is over."""
        rng = np.random.default_rng(self.options.seed)
        for contender in self.contenders:
            if isinstance(contender, Rival):
                contender.copy_from(self.ours)
        skipped = dict(self.skipped)
        self._fill_caches(distribution, skipped)
        correct = self._check(distribution, rng)
        samples, phases, counters = self._time(distribution, rng)
        machine.observe(self.workload)
        return self._case(distribution, machine.threads, _Measured(correct, skipped, samples, phases, counters))

    def _cached(self) -> Iterable[Ours]:
        return [c for c in self.contenders if isinstance(c, Ours) and c.cache < 1.0]

    def _fill_caches(self, distribution: Distribution, skipped: dict[str, str]) -> None:
        """Brings partial caches to the state in which every miss evicts; drops those a batch does not fit in.

        For good: they would be steps behind the others in the next distribution.
        """
        rng = np.random.default_rng(self.options.seed + 1)
        for contender in list(self._cached()):
            try:
                for _ in range(_FILL_BATCHES):
                    contender.look(self.workload.draw(distribution, rng))
                    if contender.embedding.cache_stats()["rows_out"]:
                        break
            except CacheTooSmallError as error:
                self.contenders.remove(contender)
                self.skipped[contender.name] = skipped[contender.name] = str(error)

    def _check(self, distribution: Distribution, rng: np.random.Generator) -> dict[str, bool]:
        """Steps everybody on the same batches and compares outputs and weights with ours."""
        correct = {contender.name: True for contender in self.contenders if contender is not self.ours}
        # Our outputs sum a bag's rows, and with them their rounding.
        tolerance = 2e-5 * (self.workload.bag**0.5 if self.workload.pooled else 1.0)
        for _ in range(CHECKED_STEPS):
            ids = self.workload.draw(distribution, rng)
            expected = self.ours.step(ids).detach()
            for contender in self.contenders[1:]:
                got = contender.output(contender.step(ids)).detach()
                correct[contender.name] &= torch.allclose(got, expected, rtol=1e-4, atol=tolerance)
        for table in range(self.workload.tables.count):
            touched = ids[table].unique()
            weights = self.ours.weights(table, touched)
            for contender in self.contenders[1:]:
                got = contender.weights(table, touched)
                correct[contender.name] &= torch.allclose(got, weights, rtol=1e-4, atol=2e-5)
        return correct

    def _time(
        self, distribution: Distribution, rng: np.random.Generator
    ) -> tuple[dict[str, Samples], dict[str, Samples], dict[str, dict[str, int]]]:
        samples = {contender.name: Samples() for contender in self.contenders}
        phases = {phase: Samples() for phase in (*PHASES, "other")}
        for contender in self.contenders:
            if isinstance(contender, Ours):
                contender.embedding.reset_cache_stats()
        with no_collection():
            for _ in range(self.options.rounds):
                ids = self.workload.draw(distribution, rng)
                self.ours.take_phases()
                # Drawn anew, because what ran before a contender has left the caches to it.
                for place in rng.permutation(len(self.contenders)):
                    contender = self.contenders[place]
                    begin = time.perf_counter()
                    output = contender.step(ids)
                    samples[contender.name].seconds.append(time.perf_counter() - begin)
                    del output
                spent = self.ours.take_phases()
                spent["other"] = samples["ours"].seconds[-1] - sum(spent.values())
                for phase, seconds in spent.items():
                    phases[phase].seconds.append(seconds)
        counters = {c.name: c.embedding.cache_stats() for c in self.contenders if isinstance(c, Ours)}
        return samples, phases, counters

    def _case(self, distribution: Distribution, threads: int, measured: _Measured) -> dict[str, Any]:
        counted = measured.counters["ours"]
        unique = counted["unique_rows"] / counted["batches"]
        ours = measured.samples["ours"]
        others = [name for name in measured.samples if name != "ours"]
        return {
            **self.workload.describe(),
            "distribution": distribution.name,
            "alpha": distribution.alpha,
            "threads": threads,
            "unique_rows": unique,
            "hit_rate": 1.0 - counted["unique_misses"] / counted["unique_rows"],
            "times": {name: sample.summary() for name, sample in measured.samples.items()},
            "correct": measured.correct,
            "skipped": measured.skipped,
            "ratios": {n: measured.samples[n].best / ours.best for n in others if measured.correct[n]},
            "ratios_of_medians": {n: measured.samples[n].median / ours.median for n in others if measured.correct[n]},
            "phases_ms": {phase: sample.median * 1e3 for phase, sample in measured.phases.items()},
            "bytes": dict(zip(("streams", "read", "written"), step_bytes(self.workload, unique), strict=True)),
            "counters": measured.counters,
        }


@dataclass(frozen=True)
class _Measured:
    correct: dict[str, bool]
    skipped: dict[str, str]
    samples: dict[str, Samples]
    phases: dict[str, Samples]
    counters: dict[str, dict[str, int]]
