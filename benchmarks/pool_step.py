"""A case of the CUDA benchmark: whole steps of our tables at one cache ratio, alternating with rivals' steps."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

import torch

from rec_sdk_torch.tbe import CacheTooSmallError

from .contenders import Contender
from .operators import need_of_operators, operator_bytes, part_seconds, time_operators
from .phases import PHASES, TimedOurs
from .pool import MemoryNeed, Pool, free_memory, need_of_ours, shortage
from .rivals import Place, Resident, make_contender, need_of
from .runner import Row
from .tables import NotAvailableError
from .timing import Clock, Samples, no_collection
from .workload import Workload

RTOL, ATOL = 1e-4, 2e-5
CHECKED = 2
"""The number of batches that all contenders train on, from the same weights, before the timed ones."""


@dataclass
class _Entrant:
    """A contender with its input for each batch, the results of its checks, and its times."""

    contender: Contender
    inputs: list[torch.Tensor]
    correct: dict[str, bool] = field(default_factory=dict)
    samples: dict[str, Samples] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.contender.name

    @property
    def ours(self) -> TimedOurs:
        """The contender; only valid if it uses our tables."""
        assert isinstance(self.contender, TimedOurs)
        return self.contender

    def add(self, figures: dict[str, float]) -> None:
        for name, seconds in figures.items():
            self.samples.setdefault(name, Samples()).seconds.append(seconds)


class StepCase:
    """A case: one optimizer and one cache ratio, on the batches of a pool."""

    def __init__(
        self, workload: Workload, pool: Pool, ratio: float, rivals: Iterable[str], grad: torch.Tensor, seed: int
    ) -> None:
        """Builds our contenders, and the rivals that fit into memory.

        Raises:
            NotAvailableError: our tables do not fit into memory.
            CacheTooSmallError: a batch does not fit in the cache.
        """
        self.workload, self.pool, self.ratio = workload, pool, ratio
        self._grad = grad
        self._clock = Clock(grad.device)
        self._place = Place(grad.device, seed, grad, ratio)
        self.skipped: dict[str, str] = {}
        self._need = need_of_ours(workload, pool, ratio)
        self._free = free_memory(grad.device)
        problem = shortage(self._need, self._free)
        if problem:
            raise NotAvailableError(problem)
        self.ours = TimedOurs(workload, ratio, seed=seed, device=grad.device, grad=grad)
        self._mine = _Entrant(self.ours, pool.ids)
        self._entrants = [self._mine]
        ours = self._need
        for name in rivals:
            self._add(name, need_of(name, workload, ours, ratio))
        self._fill()

    def _add(self, name: str, more: MemoryNeed) -> None:
        problem = shortage(self._need + more, self._free)
        if problem:
            self.skipped[name] = problem
            return
        try:
            contender = make_contender(name, self.workload, self._place)
        except NotAvailableError as error:
            self.skipped[name] = str(error)
            return
        self._need = self._need + more
        if isinstance(contender, Resident):
            self._entrants.append(_Entrant(contender, [contender.inputs(ranks) for ranks in self.pool.ranks]))
        else:
            self._entrants.append(_Entrant(contender, self.pool.ids))

    def _fill(self) -> None:
        """Looks up every batch once, which inserts all ids and brings the cache to its steady state."""
        for entrant in self._cached():
            for ids in entrant.inputs:
                entrant.contender.forward(ids)

    def _cached(self) -> list[_Entrant]:
        return [entrant for entrant in self._entrants if isinstance(entrant.contender, TimedOurs)]

    def run(self) -> Row:
        """Checks the contenders' results, then times their steps."""
        self._load_rivals()
        self._check()
        self._time_in_turn()
        counters = self._counters()
        self._time_in_a_row()
        return self._result(counters)

    # ---- correctness

    def _touched(self, table: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (ids, ranks) of a table's rows in the checked batches."""
        ids = torch.cat([batch[table] for batch in self.pool.ids[:CHECKED]])
        ranks = torch.cat([batch[table] for batch in self.pool.ranks[:CHECKED]])
        distinct, where = ranks.unique(return_inverse=True)
        of_rank = torch.empty_like(distinct)
        of_rank[where] = ids
        return of_rank, distinct

    def _load_rivals(self) -> None:
        residents = [e.contender for e in self._entrants if isinstance(e.contender, Resident)]
        for table in range(self.workload.tables.count if residents else 0):
            ids, ranks = self._touched(table)
            weights = self.ours.weights(table, ids)
            for resident in residents:
                resident.load(table, ranks, weights)

    def _check(self) -> None:
        """Trains all contenders on the same batches; the first outputs must be bit-identical, final weights close."""
        device = self._grad.device
        for step in range(CHECKED):
            expected = None
            for entrant in self._entrants:
                raw = entrant.contender.forward(entrant.inputs[step])
                got = entrant.contender.output(raw).detach()
                if expected is None:
                    expected = got.clone()
                elif step == 0:
                    entrant.correct["lookup"] = torch.equal(got, expected)
                del got
                entrant.contender.backward(raw)
        for table in range(self.workload.tables.count):
            ids, ranks = self._touched(table)
            our_weights = self.ours.weights(table, ids).to(device)
            for entrant in self._entrants[1:]:
                known = ids if isinstance(entrant.contender, TimedOurs) else ranks
                weights = entrant.contender.weights(table, known).to(device)
                near = torch.allclose(weights, our_weights, rtol=RTOL, atol=ATOL)
                entrant.correct["update"] = entrant.correct.get("update", True) and near

    # ---- times

    def _batches(self) -> Iterable[int]:
        """Returns the order of batches for one round over the pool, beginning with the batch after the checked ones."""
        size = len(self.pool.ids)
        return [(CHECKED + index) % size for index in range(size)]

    def _time_in_turn(self) -> None:
        """Times steps with synchronization around each, so that a step includes all work that it started."""
        for entrant in self._cached():
            entrant.ours.embedding.reset_cache_stats()
            entrant.ours.take_phases()
        with no_collection():
            for batch in self._batches():
                for entrant in self._entrants:
                    entrant.add(self._step(entrant, batch))

    def _step(self, entrant: _Entrant, batch: int) -> dict[str, float]:
        contender, clock = entrant.contender, self._clock
        clock.synchronize()
        start = time.perf_counter()
        begin = clock.mark()
        raw = contender.forward(entrant.inputs[batch])
        contender.backward(raw)
        end = clock.mark()
        clock.synchronize()
        figures = {"end to end": time.perf_counter() - start}
        if isinstance(contender, TimedOurs):
            phases = contender.take_phases()
            figures |= phases
            figures["plans ready"] = clock.seconds(begin, end) - phases["plan"]
            figures["other"] = clock.seconds(begin, end) - sum(phases[phase] for phase in PHASES)
        return figures

    def _time_in_a_row(self) -> None:
        """Times steps without synchronization, as in training: the host may run ahead of the device."""
        clock = self._clock
        for entrant in self._entrants:
            marks = []
            with no_collection():
                clock.synchronize()
                start = time.perf_counter()
                for batch in self._batches():
                    begin = clock.mark()
                    raw = entrant.contender.forward(entrant.inputs[batch])
                    middle = clock.mark()
                    entrant.contender.backward(raw)
                    del raw
                    marks.append((begin, middle, clock.mark()))
                clock.synchronize()
                entrant.samples["in a row"] = Samples([(time.perf_counter() - start) / len(marks)])
            entrant.samples |= {f"{name} in a row": sample for name, sample in part_seconds(clock, marks).items()}

    # ---- results

    def _counters(self) -> dict[str, dict[str, int]]:
        return {entrant.name: entrant.ours.embedding.cache_stats() for entrant in self._cached()}

    def operators(self) -> Row | None:
        """Times the operators alone; None if the cache lacks rows or the memory does not suffice for a second copy."""
        if self.ratio < 1.0 or shortage(self._need + need_of_operators(self.workload), self._free):
            return None
        return time_operators(self.workload, self.pool, self._grad.device)

    def _result(self, counters: dict[str, dict[str, int]]) -> Row:
        swap_counts = counters[self.ours.name]
        unique = swap_counts["unique_rows"] / swap_counts["batches"]
        correct = {entrant.name: entrant.correct for entrant in self._entrants[1:]}
        return {
            **{"distribution": self.pool.distribution.name, "optimizer": self.workload.optimizer, "ratio": self.ratio},
            **{"alpha": self.pool.distribution.alpha, "dim": self.workload.dim, "lookups": self.workload.lookups},
            **{"ours": self.ours.name, "slots": sum(self.ours.embedding.cache_sizes.values())},
            **{"record_bytes": self.workload.record_bytes, "unique_rows": unique},
            "hit_rate": 1.0 - swap_counts["unique_misses"] / swap_counts["unique_rows"],
            **{
                key: swap_counts[key] / swap_counts["batches"]
                for key in ("rows_in", "bytes_in", "rows_out", "bytes_out")
            },
            **{"workload": self.workload.describe(), "bytes": operator_bytes(self.workload, unique)},
            **{"counters": counters, "correct": correct, "skipped": self.skipped},
            "times": {
                entrant.name: {name: sample.summary() for name, sample in entrant.samples.items()}
                for entrant in self._entrants
            },
            "need": asdict(self._need),
        }


def run_case(workload: Workload, pool: Pool, ratio: float, rivals: Iterable[str], grad: torch.Tensor, seed: int) -> Row:
    """Runs a case, also the operators alone if every row is resident; `absent` is the reason if the case cannot run."""
    try:
        case = StepCase(workload, pool, ratio, rivals, grad, seed)
        result = case.run()
        result["operators"] = case.operators()
    except (CacheTooSmallError, NotAvailableError, MemoryError, torch.OutOfMemoryError) as error:
        key = {"distribution": pool.distribution.name, "optimizer": workload.optimizer, "ratio": ratio}
        return {**key, "ours": "ours", "absent": str(error)}
    return result
