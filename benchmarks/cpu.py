"""The CPU benchmark: `python -m benchmarks.cpu [--full] [--json FILE] [--plot FILE]`, from the repository root."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from .bounds import Machine
from .growth import run_growth
from .machine import describe, load_average, with_malloc_settings, write_json
from .options import parse
from .planning import PlanOptions, run_plans
from .plot import draw
from .policy import PolicyOptions, run_policies
from .report import case_name, render
from .step import StepBench, StepOptions
from .tables import NotAvailableError
from .targets import compare, torch_targets
from .workload import Workload, make_workload

Result = dict[str, Any]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _workloads(options: argparse.Namespace) -> Iterator[tuple[Workload, bool]]:
    """The product of the axes, as far as there is such a workload, and the samples; whether it is one of these."""
    for tables, dim, form, optimizer in itertools.product(
        options.tables, options.dims, options.forms, options.optimizers
    ):
        if not tables.criteo or form == "pooled":
            yield make_workload(tables, dim, form == "pooled", optimizer, options.lookups, options.bag), False
    for sample in options.samples:
        pooled, dim = sample.form == "pooled", options.dims[0]
        yield make_workload(sample.tables, dim, pooled, sample.optimizer, options.lookups, options.bag), True


def _steps(options: argparse.Namespace, machine: Machine) -> list[Result]:
    """Every case for one number of threads."""
    caches = tuple(c for c in options.cache if c < 1.0)
    chosen = StepOptions(tuple(options.rivals), caches, options.index, options.rounds, options.seed)
    found: list[tuple[Workload, Result]] = []
    for workload, sampled in _workloads(options):
        try:
            bench = StepBench(workload, replace(chosen, caches=(), index=False) if sampled else chosen)
        except NotAvailableError as error:
            _say(f"{workload.tables.name} D={workload.dim} {workload.optimizer}: {error}; left out")
            continue
        for distribution in options.distributions:
            case = bench.run(distribution, machine)
            _say(f"{case_name(case)}: {case['times']['collection']['min_ms']:.2f} ms")
            found.append((workload, case))
        del bench
    for workload, case in found:
        machine.add_bounds(case, workload)
    return [case for _, case in found]


def _run_steps(options: argparse.Namespace) -> tuple[list[Result], list[Result]]:
    cases, bounds = [], []
    for threads in options.threads:
        torch.set_num_threads(threads)
        machine = Machine(threads, options.buffer_mib << 20, repeats=5 if options.full else 3)
        cases += _steps(options, machine)
        bounds.append(machine.describe())
    return cases, bounds


def _run_plans(options: argparse.Namespace) -> list[Result]:
    threads = tuple(sorted({1, *options.threads}))
    rows = (options.plan_rows, options.large_rows)
    return run_plans(PlanOptions(options.plan_batch, *rows, options.rounds, options.seed, threads), _say)


def _run_policies(options: argparse.Namespace) -> list[Result]:
    batch = options.policy_batch or max(1, options.policy_rows // 16)
    policies = tuple(options.policies)
    sizes = PolicyOptions(options.policy_rows, 0.1, batch, 20, options.policy_steps, 1.05, policies, options.seed)
    return run_policies(replace(sizes, movielens=options.movielens))


def run(options: argparse.Namespace) -> Result:
    """All chosen sections, as what the JSON holds."""
    begin = time.perf_counter()
    results: Result = {"schema": 2, "mode": "full" if options.full else "quick", "options": vars(options)}
    results["machine"] = describe()
    sections, threads = options.sections, torch.get_num_threads()
    try:
        results["steps"], results["bounds"] = _run_steps(options) if "step" in sections else ([], [])
        torch.set_num_threads(1)
        results["plans"] = _run_plans(options) if "plan" in sections else []
        results["policies"] = _run_policies(options) if "policy" in sections else []
        growth = options.growth_rows if "growth" in sections else []
        lookups = options.lookups
        results["growth"] = run_growth(growth, lookups, options.rounds, 2 * lookups, options.seed, _say)
    finally:
        torch.set_num_threads(threads)
    # It is that of no core when steps were not measured at one thread: no target that depends on it was then either.
    bandwidth = next((bound["copy_bytes_per_second"] for bound in results["bounds"] if bound["threads"] == 1), 0.0)
    results["torch_targets"] = torch_targets(bandwidth)
    results["targets"] = compare(results["steps"], results["plans"], results["growth"], bandwidth)
    results["load_average_at_end"] = load_average()
    results["seconds"] = time.perf_counter() - begin
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs, prints, writes; 1 when a contender's results differ from the collection's."""
    options = parse(arguments)
    warnings.filterwarnings("ignore", message="Sparse invariant checks")
    results = run(options)
    print(render(results))
    write_json(options.json, results)
    if options.plot:
        draw(results, options.plot)
    return 0 if all(all(case["correct"].values()) for case in results["steps"]) else 1


if __name__ == "__main__":
    with_malloc_settings("benchmarks.cpu")
    sys.exit(main())
