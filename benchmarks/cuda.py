"""Ceilings, operators and cached steps on a GPU, compared with torch and FBGEMM."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterator

import torch

from rec_sdk_torch.operators.devices.backends import backend_for

from .ceilings import Ceilings, needs, rate
from .ids import Distribution
from .phases import PHASES
from .pool import DIM, ID_RANGES, LOOKUPS, MemoryNeed, Pool, draw_pool, free_memory, need_of_ours, shortage
from .pool_step import run_case
from .rivals import POOL_RIVALS
from .runner import CannotRunError, Option, Row, benchmark, fraction, say
from .targets import GPU_TARGETS, PUBLISHED, STEP
from .workload import TableSet, Workload


def find_device(name: str) -> torch.device:
    """Returns the device, ready for our operators.

    Raises:
        CannotRunError: there is no such device, or this build has no operators for it.
    """
    if name == "cpu":
        return torch.device("cpu")
    if torch.version.cuda is None:
        raise CannotRunError(f"--device cuda: torch {torch.__version__} is a build without CUDA")
    if not torch.cuda.is_available():
        raise CannotRunError("--device cuda: torch finds no GPU")
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        backend_for(device)
    except (ImportError, NotImplementedError, ValueError) as error:
        raise CannotRunError(f"--device cuda: {str(error).splitlines()[0]}") from error
    return device


def describe_device(device: torch.device) -> Row:
    """Returns the description of the device for the first line of the report."""
    row: Row = {"table": "device", "type": device.type, "name": "the host: nothing here says anything about a GPU"}
    if device.type == "cpu":
        return row
    properties = torch.cuda.get_device_properties(device)
    return {
        **{**row, "name": properties.name, "capability": f"{properties.major}.{properties.minor}"},
        **{"memory_bytes": properties.total_memory, "multiprocessors": properties.multi_processor_count},
        **{"cuda": torch.version.cuda, "torch": torch.__version__},
    }


def _pools(options: argparse.Namespace) -> list[Pool]:
    ranges = {True: options.tables, False: options.uniform_tables}
    return [
        draw_pool(each, ranges[each.alpha > 0], options.lookups, options.batches, options.seed)
        for each in options.distributions
    ]


def _cases(options: argparse.Namespace, pool: Pool) -> list[tuple[Workload, float]]:
    return [
        (pool.workload(options.dim, optimizer), ratio)
        for optimizer in options.optimizers
        for ratio in (options.ratios if pool.distribution.alpha else options.uniform_ratios)
    ]


def _need(options: argparse.Namespace, pool: Pool) -> MemoryNeed:
    """Returns the memory that the largest case needs."""
    found = [need_of_ours(workload, pool, ratio) for workload, ratio in _cases(options, pool)]
    return MemoryNeed(max(need.device for need in found), max(need.host for need in found))


def _describe_pool(pool: Pool, need: MemoryNeed) -> Row:
    return {
        **{"table": "pools of batches", "distribution": pool.distribution.name, "tables": pool.id_range.count},
        **{"id_range": pool.id_range.rows, "batches": len(pool.ids), "lookups": pool.ids[0].numel()},
        **{"footprint": sum(pool.footprints), "footprints": pool.footprints, "rows": pool.rows},
        "unique_rows": sum(pool.unique_rows) / len(pool.unique_rows),
        **{"device_bytes": need.device, "host_bytes": need.host},
    }


def case_rows(case: Row, ceilings: list[Row], device_name: str | None) -> Iterator[Row]:
    """Yields the report rows of a case: the contenders' steps, then operators with bounds and published figures."""
    title = f"{case['distribution']}, {case['optimizer']}, cache of {case['ratio']:g}"
    if "absent" in case:
        yield {"table": "left out", "case": title, "what": case["ours"], "reason": case["absent"]}
        return
    yield from (
        {"table": "left out", "case": title, "what": name, "reason": why} for name, why in case["skipped"].items()
    )
    shape = (case["optimizer"], case["alpha"], case["ratio"], case["dim"], case["lookups"])
    published = shape == ("adam", 1.05, 1.0, DIM, LOOKUPS)
    medians = {
        name: {phase: each["median_ms"] for phase, each in times.items()} for name, times in case["times"].items()
    }
    right = all(flag for flags in case["correct"].values() for flag in flags.values())
    figures: Row = {"plans ready": medians[case["ours"]]["plans ready"]}
    duplex, moved = rate(ceilings, "duplex"), case["bytes_in"] + case["bytes_out"]
    if case["operators"]:
        figures |= {name: each["median_ms"] for name, each in case["operators"].items()}
    if duplex and moved:
        figures["bytes at the duplex copy, ms"] = moved / duplex * 1e3
    key = {"published shape": published and right and device_name is not None}
    yield {"table": STEP, "case": title, **case, **figures, **key}
    for name, times in medians.items():
        shown = {phase: times.get(phase) for phase in (*PHASES, "other", "plans ready", "end to end", "in a row")}
        agrees = all(case["correct"].get(name, {}).values())
        yield {"table": "ms a step, median", "case": title, "contender": name, **shown, "correct": agrees}
    if case["operators"]:
        for name, lookup, update in operator_lines(case, medians, rate(ceilings, "device copy"), published):
            row = {"table": "operators and rivals in a row, ms", "case": title, "contender": name}
            yield {**row, "lookup": lookup, "update": update, "together": lookup + update}


def operator_lines(
    case: Row, medians: dict[str, dict[str, float]], copy: float | None, published: bool
) -> Iterator[tuple[str, float, float]]:
    """Yields (name, lookup in ms, update in ms) of the operators, of their bounds and of the rivals."""
    yield "ours, operators, plans ready", *(case["operators"][name]["median_ms"] for name in ("lookup", "update"))
    if copy:
        yield "their bytes at the speed of a copy", *(case["bytes"][name] / copy * 1e3 for name in ("lookup", "update"))
    for name, times in medians.items():
        if name in case["correct"] and not name.startswith("collection"):
            yield name, times["lookup in a row"], times["update in a row"]
    if published:
        yield from ((f"published: {name}, H100, not measured", first, second) for name, first, second in PUBLISHED)


def _range(text: str, quick: str, name: str) -> Option:
    return Option(ID_RANGES[name], text, TableSet.parse(quick), kind=TableSet.parse)


@benchmark(
    {
        "device": Option("cuda", choices=("cuda", "cpu"), kind=str),
        "distributions": Option([Distribution(1.05), Distribution(0.0)], kind=Distribution.parse),
        "optimizers": Option(["adam", "sgd"], choices=("adam", "sgd")),
        "ratios": Option([1.0, 0.8, 0.5, 0.2], "of cache to footprint", kind=fraction),
        "uniform_ratios": Option([1.0], "each more takes long", kind=fraction),
        "rivals": Option(list(POOL_RIVALS), choices=POOL_RIVALS),
        "tables": _range("COUNTxIDS of power laws", "2x5000", "power law"),
        "uniform_tables": _range("COUNTxIDS", "2x400", "uniform"),
        "dim": Option(DIM, quick=8),
        "lookups": Option(LOOKUPS, "per step, of all tables", quick=200),
        "batches": Option(20, "drawn, and timed rounds", quick=8),
        "copy_mib": Option(1024, "of a measured copy", quick=1),
        "host_rows": Option(8_000_000, "that the host gathers from", quick=5000),
        "swap_rows": Option(262_144, "of a measured gather or swap", quick=512),
        "seed": Option(0, kind=int),
    },
    GPU_TARGETS,
    threads=None,
)
def cuda(options: argparse.Namespace) -> Iterator[Row]:
    """Measures ceilings, operators and cached steps on a GPU, compared with torch and FBGEMM.

    The workload has the shape of dynamicemb's TestCaching. The exit status is 1 if results differ, and 2 if the
    benchmark cannot run. --device cpu tests the benchmark itself.
    """
    device = find_device(options.device)
    pools = _pools(options)
    record = Workload(options.tables, options.dim, False, options.optimizers[0], options.lookups, 1).record_bytes
    wanted = {"the ceilings": MemoryNeed(*needs(options, record))}
    wanted |= {pool.distribution.name: _need(options, pool) for pool in pools}
    for name, need in wanted.items():
        problem = shortage(need, free_memory(device))
        if problem:
            raise CannotRunError(f"{name}: {problem}; give fewer --batches, or smaller --ratios or --tables")
    described = describe_device(device)
    yield described
    yield from (_describe_pool(pool, wanted[pool.distribution.name]) for pool in pools)
    ceilings = Ceilings(device, options, record).measure()
    yield from ceilings
    grad = torch.empty(0)
    for pool in pools:
        for workload, ratio in _cases(options, pool):
            say(f"{pool.distribution.name}, {workload.optimizer}, cache of {ratio:g} ...")
            gc.collect()  # reference cycles keep the memory of the previous case
            if device.type != "cpu":
                torch.get_device_module(device).empty_cache()
            if len(grad) != workload.lookups:
                grad = workload.gradient(options.seed).to(device)
            case = run_case(workload, pool, ratio, options.rivals, grad, options.seed)
            yield from case_rows(case, ceilings, None if device.type == "cpu" else described["name"])


if __name__ == "__main__":
    cuda.start(sys.argv[1:])
