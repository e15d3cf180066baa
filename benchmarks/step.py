"""The step benchmark: forward, backward and update of one batch, with our tables and other libraries' tables."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from rec_sdk_torch._engine import available_memory
from rec_sdk_torch.tbe import CacheTooSmallError

from .bounds import step_bytes
from .contenders import Collection, Contender, Ours
from .ids import Distribution
from .rivals import Rival, make_rival
from .tables import NotAvailableError
from .targets import BEST, MEDIANS, STEP
from .timing import Samples, no_collection
from .workload import Workload

CHECKED_STEPS = 2
_FILL_BATCHES = 200
_MARGIN = 2 << 30
PHASES = ("forward", "backward", "step")
Timed = dict[str, dict[str, Samples]]
"""The samples of each phase of each contender."""


class StepBench:
    """One set of tables, dims, form and optimizer, built once and run on several distributions."""

    def __init__(self, workload: Workload, options: argparse.Namespace) -> None:
        """Builds the collection, and the other contenders that fit into memory.

        Args:
            options: `rivals`, `cache` (fractions of the rows), `index`, `rounds` and `seed`, as of the command.

        Raises:
            NotAvailableError: the collection itself cannot run.
        """
        self.workload = workload
        self.options = options
        self.skipped: dict[str, str] = {}
        self._budget = float(available_memory() - _MARGIN)
        self._reserve(workload.table_bytes)
        self.collection: Ours = self._filled(Collection)
        self.contenders: list[Contender] = [self.collection]
        self._add("ours", partial(self._filled, Ours))
        for name in options.rivals:
            self._add(name, partial(make_rival, name, workload, options.seed))
        for cache in [cache for cache in options.cache if cache < 1.0]:
            make = partial(Collection, workload, cache=cache, seed=options.seed)
            self._add(f"collection@{cache:g}", make, 1 + cache)
        if options.index:
            self._add("collection-index", partial(self._filled, Collection, hashed=False))

    def _filled(self, kind: type[Ours], **options: Any) -> Ours:
        contender = kind(self.workload, seed=self.options.seed, **options)
        contender.fill()
        return contender

    def _reserve(self, need: float) -> None:
        """Subtracts from the memory that was free at the start: a contender touches its memory only when it steps."""
        if need > self._budget:
            raise NotAvailableError(f"needs {need / 2**30:.1f} GiB, {max(0, self._budget) / 2**30:.1f} are free")
        self._budget -= need

    def _add(self, name: str, make: Callable[[], Contender], copies: float = 1.0) -> None:
        """Adds a contender whose memory use is `copies` times the size of the tables."""
        before = self._budget
        try:
            self._reserve(self.workload.table_bytes * copies)
            self.contenders.append(make())
        except NotAvailableError as error:
            self._budget = before
            self.skipped[name] = str(error)

    def run(self, distribution: Distribution) -> dict[str, Any]:
        """Times one case after checking that the contenders' results agree."""
        rng = np.random.default_rng(self.options.seed)
        self._copy_to_rivals()
        self._fill_caches(distribution)
        correct = self._check(distribution, rng)
        timed, unique = self._time(distribution, rng)
        return self._case(distribution, timed, unique, correct)

    def _ours(self) -> list[Ours]:
        return [contender for contender in self.contenders if isinstance(contender, Ours)]

    def _copy_to_rivals(self) -> None:
        tables = [contender.tables() for contender in self.contenders if isinstance(contender, Rival)]
        with torch.no_grad():
            for table, begin, rows in self.collection.chunks() if tables else ():
                for rival in tables:
                    rival[table][begin : begin + len(rows)].copy_(rows)

    def _fill_caches(self, distribution: Distribution) -> None:
        """Fills partial caches until every miss evicts a row; drops contenders whose cache cannot hold a batch.

        They stay dropped, because in the next distribution their weights would lack the updates of this one.
        """
        rng = np.random.default_rng(self.options.seed + 1)
        for contender in [ours for ours in self._ours() if ours.cache < 1.0]:
            try:
                for _ in range(_FILL_BATCHES):
                    contender.fetch_rows(self.workload.draw(distribution, rng))
                    if contender.counters()["rows_out"]:
                        break
            except CacheTooSmallError as error:
                self.contenders.remove(contender)
                self.skipped[contender.name] = str(error)

    def _check(self, distribution: Distribution, rng: np.random.Generator) -> dict[str, bool]:
        """Runs the same steps with all contenders, and compares outputs and weights with the collection's."""
        others = self.contenders[1:]
        correct = {contender.name: True for contender in others}
        # An output is the sum of a bag's rows, so it also sums the rows' rounding errors.
        tolerance = 2e-5 * (self.workload.bag**0.5 if self.workload.pooled else 1.0)
        for _ in range(CHECKED_STEPS):
            ids = self.workload.draw(distribution, rng)
            expected = self.collection.output(self.collection.step(ids)).detach()
            for contender in others:
                got = contender.output(contender.step(ids)).detach()
                correct[contender.name] &= torch.allclose(got, expected, rtol=1e-4, atol=tolerance)
        for table in range(self.workload.tables.count):
            touched = ids[table].unique()
            weights = self.collection.weights(table, touched)
            for contender in others:
                got = contender.weights(table, touched)
                correct[contender.name] &= torch.allclose(got, weights, rtol=1e-4, atol=2e-5)
        return correct

    def _time(self, distribution: Distribution, rng: np.random.Generator) -> tuple[Timed, list[float]]:
        """Times steps; returns the seconds, and the average number of distinct rows per batch of each table."""
        timed: Timed = {each.name: {phase: Samples() for phase in PHASES} for each in self.contenders}
        unique = np.zeros(self.workload.tables.count)
        for ours in self._ours():
            ours.reset_counters()
        with no_collection():
            for _ in range(self.options.rounds):
                ids = self.workload.draw(distribution, rng)
                unique += [len(part.unique()) for part in ids]
                batches = [contender.inputs(ids) for contender in self.contenders]
                # A new order each time, because the previous contender affects the processor's caches.
                for place in rng.permutation(len(self.contenders)):
                    contender, samples = self.contenders[place], timed[self.contenders[place].name]
                    begin = time.perf_counter()
                    raw = contender.forward(batches[place])
                    middle = time.perf_counter()
                    contender.backward(raw)
                    end = time.perf_counter()
                    for phase, seconds in zip(PHASES, (middle - begin, end - middle, end - begin), strict=True):
                        samples[phase].seconds.append(seconds)
        return timed, (unique / self.options.rounds).tolist()

    def _case(
        self, distribution: Distribution, timed: Timed, unique: list[float], correct: dict[str, bool]
    ) -> dict[str, Any]:
        counters = {contender.name: contender.counters() for contender in self._ours()}
        steps = {name: phases["step"] for name, phases in timed.items()}
        agree = [name for name, right in correct.items() if right]
        ratios = {name: steps[name].best / steps["collection"].best for name in agree}
        workload = self.workload.describe()
        return {
            "table": STEP,
            **{name: workload[name] for name in ("tables", "dim", "form", "optimizer")},
            "distribution": distribution.name,
            "collection": steps["collection"].best * 1e3,
            **{
                name: f"{steps[name].best * 1e3:.2f} " + (f"({ratios[name]:.2f}x)" if right else "DIFFERS")
                for name, right in correct.items()
            },
            **{
                f"{name} {phase}": timed[name][phase].best * 1e3
                for phase in PHASES[:2]
                for name in ("collection", "ours")
                if name in timed
            },
            "unique_rows": sum(unique),
            "hit_rate": 1.0 - counters["collection"]["unique_misses"] / counters["collection"]["unique_rows"],
            **{"workload": workload, "unique_rows_of_tables": unique},
            **{"correct": correct, "skipped": dict(self.skipped)},
            "times": {
                name: {phase: each.summary() for phase, each in phases.items()} for name, phases in timed.items()
            },
            BEST: ratios,
            MEDIANS: {name: steps[name].median / steps["collection"].median for name in agree},
            "bytes": dict(zip(("streams", "read", "written"), step_bytes(self.workload, unique), strict=True)),
            "counters": counters,
        }
