"""The prefetch benchmark: `python -m benchmarks.prefetch [--quick] [--json FILE]`, from the repository root."""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rec_sdk_torch.tbe.step.prefetch_queue import MAX_DEPTH

from .machine import describe, load_average, with_malloc_settings, write_json
from .options import check_outputs, fill, fraction, positive_int
from .prefetch_step import RESIDENT, PrefetchOptions, run_prefetch
from .report import machine_lines, table, targets_table
from .targets import Target
from .workload import OPTIMIZERS, TableSet, make_workload

Result = dict[str, Any]

DEPTH = 2
"""The depth of the targets; the default of `prefetch`."""
WAIT_PERCENT = 5.0
CACHE, CACHE_RATIO = 0.1, 1.3

_SIZES = {
    "tables": TableSet(4, 400_000),
    "dim": 64,
    "lookups": 32_768,
    "hidden": [8, 512, 1024],
    "rounds": 9,
    "warm": 6,
    "steps": 20,
    "settle": 80,
}
_QUICK = {
    "tables": TableSet(2, 10_000),
    "dim": 8,
    "lookups": 512,
    "hidden": [8, 32],
    "rounds": 2,
    "warm": 2,
    "steps": 6,
    "settle": 10,
}


def depth(text: str) -> int:
    """An argparse type: 0 to MAX_DEPTH."""
    value = int(text)
    if not 0 <= value <= MAX_DEPTH:
        raise argparse.ArgumentTypeError(f"{text} is not allowed; 0 to {MAX_DEPTH} is")
    return value


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; those not given are those of the sizes, or of `--quick`."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.prefetch",
        description="Training steps of tables and dense layers behind prefetch(), by depth, on the CPU.",
        epilog="One thread trains and one plans: two idle cores are needed.",
        allow_abbrev=False,
    )
    parser.add_argument("--quick", action="store_true", help="small tables and few steps: tries the benchmark itself")
    parser.add_argument("--tables", type=TableSet.parse, metavar="TABLES", help="such as 4x400k")
    parser.add_argument("--dim", type=positive_int, metavar="D")
    parser.add_argument("--lookups", type=positive_int, help="per step, of all tables; half from D = 128 on")
    parser.add_argument("--bag", type=positive_int, default=8, help="ids of a sample in a table (default %(default)s)")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd", help="of the tables (default %(default)s)")
    parser.add_argument(
        "--alpha", type=float, default=1.05, help="exponent of the ids' power law (default %(default)s)"
    )
    parser.add_argument("--hidden", nargs="+", type=positive_int, help="widths of the dense layers")
    parser.add_argument(
        "--cache", nargs="+", type=fraction, default=[CACHE], help="fractions beside 100%% (default %(default)s)"
    )
    parser.add_argument("--depths", nargs="+", type=depth, default=[0, 1, 2, 4], help="default %(default)s")
    parser.add_argument("--rounds", type=positive_int, help="segments of every cache and depth")
    parser.add_argument("--warm", type=positive_int, help="steps of a segment before its clock starts")
    parser.add_argument("--steps", type=positive_int, help="of a segment, timed")
    parser.add_argument("--settle", type=positive_int, help="batches looked up before the first segment")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    options = parser.parse_args(arguments)
    check_outputs(parser, options.json)
    fill(options, _QUICK if options.quick else _SIZES)
    return options


def compare(cases: Sequence[Result]) -> list[Result]:
    """Both targets with what was reached; nothing was where losses differ."""
    there = [case for case in cases if case["depth"] == DEPTH and case["correct"]]
    hidden_plan = [case for case in there if case["dense_ms"] > case["plan_ms"]]
    cached = [case for case in there if case["cache"] == CACHE]

    def of(chosen: Sequence[Result], key: str, factor: float = 1.0) -> list[float]:
        return [factor * case[key] for case in chosen]

    what = f"wait at depth {DEPTH}, % of a step, dense layers longer than the plan"
    waits = of(hidden_plan, "wait_share", 100), of(hidden_plan, "median_wait_share", 100)
    ratios = of(cached, "over_resident"), of(cached, "medians_over_resident")
    name = f"cache of {CACHE:.0%} over all rows resident, depth {DEPTH}"
    targets = [
        Target(what, False, waits[0], worst=WAIT_PERCENT, of_medians=waits[1]),
        Target(name, False, ratios[0], worst=CACHE_RATIO, of_medians=ratios[1]),
    ]
    return [target.describe() for target in targets]


def run(options: argparse.Namespace) -> Result:
    """All cases at one thread of torch's, as what the JSON holds."""
    begin = time.perf_counter()
    workload = make_workload(options.tables, options.dim, True, options.optimizer, options.lookups, options.bag)
    caches = tuple(dict.fromkeys([*options.cache, RESIDENT]))
    depths = tuple(dict.fromkeys(options.depths))
    sizes = (options.alpha, options.rounds, options.warm, options.steps, options.settle, options.seed)
    chosen = PrefetchOptions(tuple(options.hidden), caches, depths, *sizes)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        results: Result = {"schema": 1, "mode": "quick" if options.quick else "full", "options": vars(options)}
        results |= {"machine": describe(), "workload": workload.describe()}
        results["cases"] = run_prefetch(workload, chosen, lambda text: print(text, file=sys.stderr, flush=True))
    finally:
        torch.set_num_threads(threads)
    results["targets"] = compare(results["cases"])
    results["load_average_at_end"] = load_average()
    results["seconds"] = time.perf_counter() - begin
    return results


def _cases(cases: Sequence[Result]) -> str:
    header = ["step, fastest round", "ms", "median ms", "wait", "median", "plan ms", "depth reached", "missed rows"]
    rows = [
        [
            f"hidden {case['hidden']} (dense {case['dense_ms']:.2f} ms), cache {case['cache']:.0%}, "
            f"depth {case['depth']}" + ("" if case["correct"] else " DIFFERS"),
            f"{case['time']['min_ms']:.2f}",
            f"{case['time']['median_ms']:.2f}",
            f"{case['wait_share']:.1%}",
            f"{case['median_wait_share']:.1%}",
            f"{case['plan_ms']:.2f}",
            f"{case['depth_reached']}",
            f"{case['missed_rows_per_batch']:,.0f}",
            f"{case['over_resident']:.2f} ({case['medians_over_resident']:.2f})",
        ]
        for case in cases
    ]
    return table([*header, "over resident (medians)"], rows)


def render(results: Result) -> str:
    """Everything a run found."""
    workload = results["workload"]
    shape = (
        f"{workload['tables']} D={workload['dim']} {workload['optimizer']}, {workload['lookups']:,} lookups a step in "
        f"bags of {workload['bag']}, power law {results['options']['alpha']:g}"
    )
    targets = targets_table(results["targets"], "target, a thread that trains and one that plans")
    end = f"took {results['seconds']:.0f} s, load average at the end {results['load_average_at_end'][0]}"
    return "\n\n".join([machine_lines(results["machine"]), shape, _cases(results["cases"]), targets, end])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs, prints, writes; 1 when losses differ between caches and depths."""
    options = parse(arguments)
    warnings.filterwarnings("ignore", message="Sparse invariant checks")
    results = run(options)
    print(render(results))
    write_json(options.json, results)
    return 0 if all(case["correct"] for case in results["cases"]) else 1


if __name__ == "__main__":
    with_malloc_settings("benchmarks.prefetch")
    sys.exit(main())
