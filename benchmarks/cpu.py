"""Steps, plans and cache policies on the CPU, compared with torch, FBGEMM and TorchRec."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from rec_sdk_torch._engine import cache_policies

from .bounds import CopyBound
from .ids import Distribution
from .planning import run_plans
from .policy import run_policies
from .rivals import RIVALS
from .runner import Option, Row, benchmark, fraction, say
from .step import StepBench
from .tables import NotAvailableError
from .targets import cpu_targets
from .workload import FORMS, OPTIMIZERS, TableSet, Workload, make_workload


@dataclass(frozen=True)
class Sample:
    """A single workload, measured in addition to all combinations of the options."""

    tables: TableSet
    form: str
    optimizer: str

    @classmethod
    def parse(cls, text: str) -> Sample:
        """Parses text such as `1x4m:sequence:adagrad`.

        Raises:
            argparse.ArgumentTypeError: the text has another form, or asks for a sequence from tables whose dims differ.
        """
        tables, form, optimizer, *rest = [*text.split(":"), "", ""]
        if form not in FORMS or optimizer not in OPTIMIZERS or any(rest):
            raise argparse.ArgumentTypeError(f"{text!r} is not TABLES:FORM:OPTIMIZER, such as 1x4m:sequence:adagrad")
        sample = cls(TableSet.parse(tables), form, optimizer)
        if sample.tables.criteo and form != "pooled":
            raise argparse.ArgumentTypeError(f"{text!r}: a sequence needs tables of one dim; criteo is pooled only")
        return sample

    @property
    def name(self) -> str:
        return f"{self.tables.name}:{self.form}:{self.optimizer}"


def workloads(options: argparse.Namespace) -> Iterator[tuple[Workload, argparse.Namespace]]:
    """Yields the valid combinations of the options and the samples, as workloads without caches and index tables."""
    for tables, dim, form, optimizer in itertools.product(
        options.tables, options.dims, options.forms, options.optimizers
    ):
        if not tables.criteo or form == "pooled":
            yield make_workload(tables, dim, form == "pooled", optimizer, options.lookups, options.bag), options
    alone = argparse.Namespace(**{**vars(options), "cache": [], "index": False})
    for sample in options.samples:
        pooled, dim = sample.form == "pooled", options.dims[0]
        yield make_workload(sample.tables, dim, pooled, sample.optimizer, options.lookups, options.bag), alone


def _steps(options: argparse.Namespace, threads: int) -> Iterator[Row]:
    """Yields the results of every case for one number of threads, after all cases and bounds are measured."""
    torch.set_num_threads(threads)
    bound = CopyBound(options.buffer_mib << 19, options.bound_repeats)
    found: list[tuple[Workload, Row]] = []
    for workload, chosen in workloads(options):
        try:
            bench = StepBench(workload, chosen)
        except NotAvailableError as error:
            say(f"{workload.tables.name} D={workload.dim} {workload.optimizer}: {error}; left out")
            continue
        for distribution in options.distributions:
            found.append((workload, {**bench.run(distribution), "threads": threads}))
            bound.observe()
            say(" ".join(str(found[-1][1][name]) for name in ("tables", "form", "optimizer", "distribution", "dim")))
        del bench
    yield {"table": "copy", "threads": threads, "copy_bytes_per_second": bound.bandwidth}
    for workload, case in found:
        yield {**case, **bound.over(case, workload)}


def _problem(options: argparse.Namespace) -> str | None:
    tables, samples = OPTIONS["tables"], OPTIONS["samples"]
    if all(options.tables is not each for each in (tables.default, tables.quick, tables.full)):
        options.samples = [] if options.samples in (samples.default, samples.full) else options.samples
    if "pooled" not in options.forms and any(tables.criteo for tables in options.tables):
        return "criteo has tables of several dims, which a sequence cannot have: add --forms pooled"
    return None


def _tables(*texts: str) -> list[TableSet]:
    return [TableSet.parse(text) for text in texts]


SECTIONS = ("step", "plan", "policy")
_SINGLE = Sample.parse("1x100k:sequence:sgd")
_SAMPLES = [_SINGLE, *map(Sample.parse, ("1x4m:sequence:adagrad", "criteo:pooled:adagrad"))]
_ALPHAS = [Distribution(alpha) for alpha in (1.05, 0.0)]
OPTIONS = {
    "sections": Option(list(SECTIONS), choices=SECTIONS),
    "tables": Option(
        _tables("4x100k"), "4x100k, criteo", _tables("2x500"), _tables("4x100k", "1x4m", "criteo"), TableSet.parse
    ),
    "samples": Option(
        _SAMPLES, "more workloads, of the first dim; none when --tables is given", [], [_SINGLE], Sample.parse
    ),
    "dims": Option([64], quick=[8], full=[32, 64, 128]),
    "optimizers": Option(list(OPTIMIZERS), choices=OPTIMIZERS),
    "distributions": Option(
        _ALPHAS,
        "uniform, or the exponent of a power law",
        full=[*_ALPHAS, *map(Distribution, (0.8, 1.2))],
        kind=Distribution.parse,
    ),
    "forms": Option(list(FORMS), "criteo is pooled only", choices=FORMS),
    "rivals": Option(["torch", "fbgemm", "torchrec"], choices=RIVALS),
    "cache": Option([0.1], "fractions of the rows beside all of them", quick=[0.5], kind=fraction),
    "index": Option(True, "the collection of index tables"),
    "rounds": Option(7, quick=2, full=21),
    "lookups": Option(65536, "per step; half from D = 128 on", quick=256),
    "bag": Option(16, "ids of a sample in a table", quick=4),
    "threads": Option([1], "each in turn"),
    "buffer_mib": Option(512, "memory that the bound is measured in", quick=4, full=1024),
    "bound_repeats": Option(3, "measurements of a bound", full=5),
    "plan_batch": Option(1_000_000, "ids", quick=2000),
    "plan_rows": Option(1_000_000, quick=4000),
    "large_rows": Option(0, "a second, larger table; 0: none", full=100_000_000, kind=int),
    "policy_rows": Option(250_000, quick=2000, full=1_000_000),
    "policy_batch": Option(0, "ids; 0: rows / 16", kind=int),
    "policy_steps": Option(40, "batches counted", quick=5),
    "policies": Option(list(cache_policies()), "of the engine"),
    "movielens": Option(help="folder of MovieLens-100K: its items in time order, as one more trace"),
    "seed": Option(0, kind=int),
}


@benchmark(OPTIONS, cpu_targets, check=_problem)
def cpu(options: argparse.Namespace) -> Iterator[Row]:
    """Measures steps, plans and cache policies on the CPU, compared with torch, FBGEMM and TorchRec.

    The default is D = 64, 4 tables of 100,000 rows, three samples, two distributions and 7 rounds, and takes under two
    minutes. --full takes most of an hour for each number of threads.
    """
    # The most skewed distribution comes first, because a contender whose small cache cannot hold a batch is left out of
    # all later distributions.
    options.distributions.sort(key=lambda distribution: -distribution.alpha)
    if "step" in options.sections:
        cases = list(itertools.chain.from_iterable(_steps(options, threads) for threads in options.threads))
        yield from cases
        reasons = [f"{name}: {reason}" for case in cases for name, reason in case.get("skipped", {}).items()]
        for reason in dict.fromkeys(reasons):
            yield {"table": "left out", "contender": reason, "cases": reasons.count(reason)}
    torch.set_num_threads(1)
    if "plan" in options.sections:
        yield from run_plans(options)
    if "policy" in options.sections:
        yield from run_policies(options)
