"""The CUDA benchmark: `python -m benchmarks.cuda [--json FILE] [--plot FILE]`, from the repository root."""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from rec_sdk_torch.backends.devices import backend_for

from .ceilings import Ceilings, CeilingSizes
from .machine import describe, load_average, with_malloc_settings, write_json
from .options import parse_gpu
from .plot import draw_phases
from .pool import Need, Pool, draw_pool, free_memory, need_of_ours, shortage
from .pool_step import run_case
from .report import case_title, render_case, render_ceilings, render_gpu_targets, render_machine, render_pools
from .targets import compare_on_gpu
from .workload import Workload

Result = dict[str, Any]


class CannotRunError(Exception):
    """Says in one line why there is no run."""


def find_device(name: str) -> torch.device:
    """The device, ready for our operators.

    Raises:
        CannotRunError: there is none, or this build has no operators for it.
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


def _driver() -> str | None:
    try:
        found = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.split("\n")[0].strip()


def describe_device(device: torch.device) -> Result:
    """For report and JSON."""
    if device.type == "cpu":
        return {"type": "cpu", "name": None}
    properties = torch.cuda.get_device_properties(device)
    return {
        "type": device.type,
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "driver": _driver(),
        "cuda": torch.version.cuda,
    }


def _ceiling_sizes(options: argparse.Namespace) -> CeilingSizes:
    record = Workload(options.tables, options.dim, False, options.optimizers[0], options.lookups, 1).record_bytes
    return CeilingSizes(options.copy_mib << 20, options.host_rows, options.swap_rows, record, repeats=10)


class Run:
    """A run: says, prints and writes what it has after every part, so that a run cut off keeps it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._begin = time.perf_counter()
        self._device = find_device(options.device)
        self._pools = [self._draw(distribution) for distribution in options.distributions]
        self._results: Result = {"schema": 1, "options": vars(options)}
        self._results["machine"] = {**describe(), "device": describe_device(self._device)}
        self._grad = torch.empty(0)

    def _draw(self, distribution: Any) -> Pool:
        options = self._options
        id_range = options.tables if distribution.alpha else options.uniform_tables
        return draw_pool(distribution, id_range, options.lookups, options.batches, options.seed)

    def _cases(self) -> list[tuple[Pool, Workload, float]]:
        options = self._options
        return [
            (pool, pool.workload(options.dim, optimizer), ratio)
            for pool in self._pools
            for optimizer in options.optimizers
            for ratio in (options.ratios if pool.distribution.alpha else options.uniform_ratios)
        ]

    def _need(self, of: Pool) -> Need:
        needs = [need_of_ours(workload, pool, ratio) for pool, workload, ratio in self._cases() if pool is of]
        return Need(max(need.device for need in needs), max(need.host for need in needs))

    def _check_memory(self, sizes: CeilingSizes) -> None:
        free = free_memory(self._device)
        needs = {pool.distribution.name: self._need(pool) for pool in self._pools}
        for name, need in {"the ceilings": Need(*sizes.needs()), **needs}.items():
            problem = shortage(need, free)
            if problem:
                raise CannotRunError(f"{name}: {problem}; give fewer --batches, or smaller --ratios or --tables")

    def _describe_pool(self, pool: Pool) -> Result:
        need = self._need(pool)
        return {
            "distribution": pool.distribution.name,
            "tables": pool.id_range.count,
            "id_range": pool.id_range.rows,
            "batches": len(pool.ids),
            "lookups": pool.ids[0].numel(),
            "footprints": pool.footprints,
            "rows": pool.rows,
            "unique_rows": sum(pool.unique_rows) / len(pool.unique_rows),
            "device_bytes": need.device,
            "host_bytes": need.host,
        }

    def run(self) -> int:
        """Everything; 1 where a result differs.

        Raises:
            CannotRunError: there is too little memory.
        """
        results = self._results
        sizes = _ceiling_sizes(self._options)
        self._check_memory(sizes)
        print(render_machine(results["machine"]), flush=True)
        results["pools"] = [self._describe_pool(pool) for pool in self._pools]
        print(render_pools(results["pools"]), flush=True)
        results["ceilings"] = Ceilings(self._device, sizes).measure()
        print(f"\n{render_ceilings(results['ceilings'])}", flush=True)
        results["steps"] = []
        for pool, workload, ratio in self._cases():
            results["steps"].append(self._case(pool, workload, ratio))
            print(f"\n{render_case(results['steps'][-1], results['ceilings'])}", flush=True)
            self._write()
        print(f"\n{render_gpu_targets(results['targets'])}\ntook {results['seconds']:.0f} s", flush=True)
        if self._options.plot:
            problem = draw_phases(results, self._options.plot)
            if problem:
                print(problem)
        return 0 if all(_right(case) for case in results["steps"]) and _all_right(results["ceilings"]) else 1

    def _case(self, pool: Pool, workload: Workload, ratio: float) -> Result:
        options = self._options
        title = {"distribution": pool.distribution.name, "optimizer": workload.optimizer, "ratio": ratio}
        print(f"{case_title(title)} ...", file=sys.stderr, flush=True)
        gc.collect()  # the case before has cycles, which hold its memory
        if self._device.type != "cpu":
            torch.get_device_module(self._device).empty_cache()
        if len(self._grad) != workload.lookups:
            self._grad = workload.gradient(options.seed).to(self._device)
        return run_case(workload, pool, ratio, options.rivals, self._grad, options.seed)

    def _write(self) -> None:
        results = self._results
        results["targets"] = compare_on_gpu(results["steps"], results["machine"]["device"]["name"])
        results["load_average_at_end"] = load_average()
        results["seconds"] = time.perf_counter() - self._begin
        write_json(self._options.json, results)


def _right(case: Result) -> bool:
    flags = [*case.get("correct", {}).values()]
    if case.get("operators"):
        flags.append(case["operators"]["correct"])
    return all(all(flag.values()) for flag in flags)


def _all_right(ceilings: Sequence[Result]) -> bool:
    return all(ceiling["correct"] is not False for ceiling in ceilings)


def main(arguments: Sequence[str] | None = None) -> int:
    """1 when results differ, 2 where it cannot run."""
    options = parse_gpu(arguments)
    warnings.filterwarnings("ignore", message="Sparse invariant checks")
    try:
        return Run(options).run()
    except CannotRunError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    with_malloc_settings("benchmarks.cuda")
    sys.exit(main())
