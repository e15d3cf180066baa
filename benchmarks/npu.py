"""Bytes, balance, scalar instructions and a modelled time of every AscendC kernel, from counters."""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch

from rec_sdk_torch import emulate
from rec_sdk_torch.operators.devices.backends import parse_device
from rec_sdk_torch.tools.operator_cases import (
    BAG,
    Batch,
    Case,
    copy_cases,
    lookup_cases,
    swap_lookup_cases,
    update_cases,
)

from .ids import Distribution
from .npu_model import CHIPS, EmulatedCounters, Kernel, LeastCopies, total_bytes
from .npu_scalar import OPTIONS, ScalarUnits
from .runner import CannotRunError, Option, Row, Target, benchmark

TARGETS = [Target("bytes over least", "bytes over least", worst=1.15), Target("imbalance", "imbalance", worst=0.10)]


def calls(batch: Batch, dim: int, names: Iterable[str], every: bool = True) -> Iterator[Case]:
    """Yields calls of every operator with simple arguments; update_rows with each optimizer that occurs in `names`.

    With `every`, yields the calls of every dtype; otherwise only the calls in `names`.
    """
    dtypes = (torch.float32, torch.bfloat16)
    optimizers = dict.fromkeys(name.split()[1] for name in names if name.startswith("update_rows "))
    cases = (
        lookup_cases(batch, dim, dtypes, weighted=False),
        copy_cases(batch, dim),
        swap_lookup_cases(batch, dim, dtypes),
        update_cases(batch, dim, dtypes, optimizers),
    )
    yield from (case for case in itertools.chain(*cases) if every or case.name in names)


def least_copies(case: Case, batch: Batch) -> LeastCopies:
    """Returns the fewest copies of rows that a call needs.

    A copy has one gap, so it carries at most two rows. If a record has several parts, a copy carries only one record,
    because the parts go to separate places.
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

    `imbalance`: the bytes of the busiest core over the mean of all cores, minus 1, in the launch that moves the most
    bytes. `scalar`: the instructions of the busiest core's scalar unit, summed over all launches. `of bytes`: the
    modelled time over the time that the memory takes for the minimum bytes. `of floor`: the modelled time over the
    modelled minimum for the same launches, copies and bytes.
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


def _problem(options: argparse.Namespace) -> str | None:
    if options.lookups < BAG:
        return f"--lookups is {options.lookups}; pooled lookups need a bag of {BAG} at least"
    return None


@benchmark(
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
def npu(options: argparse.Namespace) -> Iterator[Row]:
    """Counts bytes, balance and scalar instructions of every AscendC kernel, and models its time.

    Bytes, balance and the scalar instructions of the busiest core are counted. Times are MODELLED, not measured. The
    exit status is 1 if a kernel misses a target: at most 1.15 times the minimum bytes, and no core with more than 1.1
    times the mean bytes of all cores. It is 2 without an emulated NPU, or if the kernels cannot be compiled to count
    their scalar instructions.
    """
    if not emulate.active():
        raise CannotRunError(f"benchmarks.npu counts what the emulated NPU does. {emulate.hint()}")
    device, counters = parse_device("npu"), EmulatedCounters()
    cores = counters.vector_cores()
    soc = os.environ.get("REC_SDK_EMULATED_SOC", "Ascend910B1")
    synchronize = torch.get_device_module(device).synchronize
    with tempfile.TemporaryDirectory() as folder:
        units = ScalarUnits(Path(folder), options.compiler, options.run, options.every)
        for distribution, dim in itertools.product(options.distributions, options.dims):
            slots = distribution.draw(np.random.default_rng(0), options.rows, options.lookups)
            batch, scalar = Batch.from_lookups(slots, options.rows), units.count(slots, options.rows, dim, cores)
            for case in calls(batch, dim, scalar, options.every):
                call = case.to(device)
                synchronize()
                counters.reset()
                call.call()
                synchronize()
                counts = scalar[call.name]
                kernels = [kernel.with_scalar(counts[kernel.name]) for kernel in counters.read()]
                row = figures(call, batch, kernels, cores, counts)
                key = {"table": f"emulated {soc}; times are MODELLED", "operator": call.name, "dim": dim}
                right = all(target.judge([row])["met"] for target in TARGETS)
                yield {**key, "ids": distribution.name, **row, "correct": right}
