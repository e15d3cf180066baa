"""Bytes, balance, scalar instructions and a modelled time of every AscendC kernel, from counters.

    python -m rec_sdk_torch.emulate -m benchmarks.npu

The exit status is 1 when a kernel misses a target: 1.15 times the least bytes, cores within 10% of each other; 2
without an emulated NPU, or where the kernels cannot be compiled to count their scalar instructions.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from rec_sdk_torch import emulate
from rec_sdk_torch.backends.devices import parse_device
from rec_sdk_torch.operator_cases import BAG, Batch, Case, copies, lookups, swap_lookups, updates

from .ids import Distribution
from .machine import write_json
from .npu_model import CHIPS, EmulatedCounters, LeastCopies, total_bytes
from .npu_scalar import CountingError, ScalarUnits, add_options
from .options import check_outputs, positive_int

TARGET_BYTES = 1.15
TARGET_IMBALANCE = 0.10


@dataclass(frozen=True)
class Figure:
    """One call of an operator.

    Attributes:
        operator, dim, distribution: what was called.
        bytes_over_least: bytes moved over the least.
        imbalance: bytes of the busiest core over the mean of all, less 1; of the launch that moves the most.
        scalar: instructions of the scalar unit of the busiest core, of all its launches.
        least_us: of its least bytes at the bandwidth of the memory, by chip.
        modelled_us: of all its launches, by chip.
        floor_us: the least in the model that its launches, copies and bytes allow, by chip.
        bound_by: of the longest launch, by chip.
    """

    operator: str
    dim: int
    distribution: str
    bytes_over_least: float
    imbalance: float
    scalar: int
    least_us: dict[str, float]
    modelled_us: dict[str, float]
    floor_us: dict[str, float]
    bound_by: dict[str, str]

    def over_floor(self, chip: str) -> float:
        """The modelled time over the floor."""
        return self.modelled_us[chip] / self.floor_us[chip]

    @property
    def good(self) -> bool:
        """Whether it meets both targets."""
        return self.bytes_over_least <= TARGET_BYTES and self.imbalance <= TARGET_IMBALANCE


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


def measure(options: argparse.Namespace, folder: Path) -> list[Figure]:
    """Runs every call once, on the emulated NPU, and for the scalar units in a program built in `folder`.

    Raises:
        CountingError: that program cannot be built or run.
    """
    device = parse_device("npu")
    counters = EmulatedCounters()
    cores = counters.vector_cores()
    figures = []
    units = ScalarUnits(folder, options.compiler, options.run)
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
                instructions = scalar[call.name]
                kernels = [kernel.with_scalar(instructions[kernel.name]) for kernel in counters.read()]
                longest = max(kernels, key=lambda kernel: float(kernel.bytes.sum()))
                times = {chip.name: [kernel.seconds(chip) for kernel in kernels] for chip in CHIPS}
                figures.append(
                    Figure(
                        call.name,
                        dim,
                        distribution.name,
                        total_bytes(kernels) / call.least_bytes,
                        longest.imbalance(cores),
                        sum(max(counts) for counts in instructions.values()),
                        {chip.name: 1e6 * chip.byte_seconds(call.least_bytes) for chip in CHIPS},
                        {name: 1e6 * sum(seconds for seconds, _ in each) for name, each in times.items()},
                        {
                            chip.name: 1e6 * least_copies(call, batch).seconds(kernels, call.least_bytes, cores, chip)
                            for chip in CHIPS
                        },
                        {name: max(each)[1] for name, each in times.items()},
                    )
                )
    return figures


def report(figures: Sequence[Figure], options: argparse.Namespace) -> str:
    """A table for people."""
    soc = os.environ.get("REC_SDK_EMULATED_SOC", "Ascend910B1")
    lines = [
        f"{options.lookups} lookups of {options.rows} rows, emulated {soc}. Counted: bytes, balance, scalar "
        "instructions of the busiest core. "
        "MODELLED, not measured: times.",
        f"{'operator':<37}{'D':>5}  {'ids':<16}{'bytes':>7}{'imbalance':>11}{'scalar':>10}"
        + "".join(f"{chip.name + ' us':>10} {'of bytes':>8} {'of floor':>8} {'bound':<7}" for chip in CHIPS),
    ]
    for f in figures:
        times = "".join(
            f"{f.modelled_us[name]:>10.1f} {f.modelled_us[name] / f.least_us[name]:>8.2f} {f.over_floor(name):>8.2f} "
            f"{f.bound_by[name]:<7}"
            for name in (chip.name for chip in CHIPS)
        )
        miss = "" if f.good else "  <- misses a target"
        counted = f"{f.bytes_over_least:>7.3f}{f.imbalance:>10.1%}{f.scalar:>10,} "
        lines.append(f"{f.operator:<37}{f.dim:>5}  {f.distribution:<16}{counted}{times}{miss}")
    return "\n".join(lines)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m rec_sdk_torch.emulate -m benchmarks.npu", description=__doc__)
    parser.add_argument("--rows", type=positive_int, default=100_000, help="rows of the table (default: %(default)s)")
    parser.add_argument(
        "--lookups", type=positive_int, default=65_536, help="lookups of the batch (default: %(default)s)"
    )
    parser.add_argument(
        "--dims", type=positive_int, nargs="+", default=[64, 128], help="embedding dims (default: 64 128)"
    )
    parser.add_argument(
        "--distributions",
        type=Distribution.parse,
        nargs="+",
        metavar="A",
        default=[Distribution(1.05), Distribution(0.0)],
        help="uniform, or a power law's exponent (default: 1.05 uniform)",
    )
    add_options(parser)
    parser.add_argument("--json", type=Path, help="results for programs")
    options = parser.parse_args(arguments)
    if options.lookups < BAG:
        parser.error(f"--lookups is {options.lookups}; pooled lookups need a bag of {BAG} at least")
    check_outputs(parser, options.json)
    return options


def main(arguments: Sequence[str]) -> int:
    """Runs the benchmark; the exit status."""
    options = parse(arguments)
    if not emulate.active():
        print(f"benchmarks.npu counts what the emulated NPU does. {emulate.hint()}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        try:
            figures = measure(options, Path(folder))
        except CountingError as error:
            print(f"benchmarks.npu: {error}", file=sys.stderr)
            return 2
    print(report(figures, options))
    write_json(options.json, figures)
    return 0 if all(figure.good for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
