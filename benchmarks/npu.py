"""Bytes, balance, scalar instructions and a modelled time of every AscendC kernel, from counters.

    python -m rec_sdk_torch.emulate -m benchmarks.npu

Counted: bytes, balance, scalar instructions of the busiest core. MODELLED, not measured: times. The exit status is 1
when a kernel misses a target: 1.15 times the least bytes, cores within 10% of each other; 2 without an emulated NPU, or
where the kernels cannot be compiled to count their scalar instructions.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch

from rec_sdk_torch import emulate
from rec_sdk_torch.operators.devices.backends import parse_device
from rec_sdk_torch.tools.operator_cases import BAG, Batch, Case, copies, lookups, swap_lookups, updates

from .ids import Distribution
from .npu_model import CHIPS, EmulatedCounters, Kernel, LeastCopies, total_bytes
from .npu_scalar import OPTIONS, ScalarUnits
from .runner import Benchmark, CannotRunError, Option, Row, Target

TARGETS = [Target("bytes over least", "bytes over least", worst=1.15), Target("imbalance", "imbalance", worst=0.10)]


def calls(batch: Batch, dim: int, names: Iterable[str]) -> Iterator[Case]:
    """Every operator with plain arguments, update_rows by the optimizers that are among the `names` of calls."""
    dtypes = (torch.float32, torch.bfloat16)
    yield from lookups(batch, dim, dtypes, weighted=False)
    yield from copies(batch, dim)
    yield from swap_lookups(batch, dim, dtypes)
    optimizers = dict.fromkeys(name.split()[1] for name in names if name.startswith("update_rows "))
    yield from updates(batch, dim, dtypes, optimizers)


def least_copies(case: Case, batch: Batch) -> LeastCopies:
    """The copies of rows that a call cannot do without.

    A copy has one gap, so it carries two rows at most; of records in several parts it carries one, because the parts go
    to places of their own.
    """
    lookups, rows = len(batch.slots), len(batch.unique)
    match case.operator:
        case "gather_rows":
            return LeastCopies(rows / 2, 0, rows)
        case "scatter_rows":
            return LeastCopies(0, rows / 2, rows)
        case "swap_rows":
            return LeastCopies(rows / 2, rows / 2, 2 * rows)
        case "swap_lookup_sequence" | "swap_lookup_pooled":
            swapped = len(case.arguments["slots"])
            return LeastCopies((swapped + lookups) / 2, swapped / 2, 2 * swapped + lookups)
        case "update_rows" | "accumulate_rows":
            one_part = case.layout is not None and all(elements == 1 for elements in case.layout.state_elements)
            records = rows / 2 if one_part else rows
            return LeastCopies(lookups / 2 + records, records, lookups + 2 * rows)
    return LeastCopies(lookups / 2, 0, lookups)


def figures(case: Case, batch: Batch, kernels: list[Kernel], cores: int, scalar: Mapping[str, list[int]]) -> Row:
    """Counts a call of an operator, and models its time on each chip.

    `imbalance`: bytes of the busiest core over the mean of all, less 1; of the launch that moves the most. `scalar`:
    instructions of the scalar unit of the busiest core, of all launches. `of bytes`: the modelled time
    over the time in which memory moves the least bytes; `of floor`: over the least time for launches, copies and bytes.
    """
    longest = max(kernels, key=lambda kernel: float(kernel.bytes.sum()))
    row: Row = {
        "bytes over least": total_bytes(kernels) / case.least_bytes,
        "imbalance": longest.imbalance(cores),
        "scalar": sum(max(counts) for counts in scalar.values()),
    }
    for chip in CHIPS:
        times = [kernel.seconds(chip) for kernel in kernels]
        modelled = sum(seconds for seconds, _ in times)
        floor = least_copies(case, batch).seconds(kernels, case.least_bytes, cores, chip)
        row |= {
            f"{chip.name} us": 1e6 * modelled,
            f"{chip.name} of bytes": modelled / chip.byte_seconds(case.least_bytes),
        }
        row |= {f"{chip.name} of floor": modelled / floor, f"{chip.name} bound by": max(times)[1]}
    return row


def run(options: argparse.Namespace) -> Iterator[Row]:
    """Runs every call once, on the emulated NPU, and for the scalar units in a program that is compiled to count.

    Raises:
        CannotRunError: there is no emulated NPU, or that program cannot be built or run.
    """
    if not emulate.active():
        raise CannotRunError(f"benchmarks.npu counts what the emulated NPU does. {emulate.hint()}")
    device = parse_device("npu")
    counters = EmulatedCounters()
    cores = counters.vector_cores()
    soc = os.environ.get("REC_SDK_EMULATED_SOC", "Ascend910B1")
    with tempfile.TemporaryDirectory() as folder:
        units = ScalarUnits(Path(folder), options.compiler, options.run)
        for distribution in options.distributions:
            slots = distribution.draw(np.random.default_rng(0), options.rows, options.lookups)
            batch = Batch.of(slots, options.rows)
            for dim in options.dims:
                scalar = units.count(slots, options.rows, dim, cores)
                for case in calls(batch, dim, scalar):
                    call = case.on(device)
                    torch.npu.synchronize()  # type: ignore[attr-defined]
                    counters.reset()
                    call.call()
                    torch.npu.synchronize()  # type: ignore[attr-defined]
                    counts = scalar[call.name]
                    kernels = [kernel.with_scalar(counts[kernel.name]) for kernel in counters.read()]
                    row = figures(call, batch, kernels, cores, counts)
                    key = {"table": f"emulated {soc}; times are MODELLED", "operator": call.name, "dim": dim}
                    yield {
                        **key,
                        "ids": distribution.name,
                        **row,
                        "correct": all(t.judge([row])["met"] for t in TARGETS),
                    }


def _problem(options: argparse.Namespace) -> str | None:
    if options.lookups < BAG:
        return f"--lookups is {options.lookups}; pooled lookups need a bag of {BAG} at least"
    return None


BENCHMARK = Benchmark(
    run,
    {
        "rows": Option(100_000, "of the table", quick=1000),
        "lookups": Option(65_536, "of the batch", quick=1000),
        "dims": Option([64, 128], quick=[64]),
        "distributions": Option(
            [Distribution(1.05), Distribution(0.0)], "uniform, or the exponent of a power law", kind=Distribution.parse
        ),
        **OPTIONS,
    },
    TARGETS,
    check=_problem,
    threads=None,
    malloc=False,
)

if __name__ == "__main__":
    BENCHMARK.start()
