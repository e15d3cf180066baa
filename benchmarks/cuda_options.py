"""The command line of the CUDA benchmark."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from .cuda_rivals import CUDA_RIVALS
from .cuda_workload import DIM, ID_RANGES, LOOKUPS
from .ids import Distribution
from .options import check_outputs, fraction, positive_int
from .workload import TableSet

_FULL = {
    "tables": ID_RANGES["power law"],
    "uniform_tables": ID_RANGES["uniform"],
    "dim": DIM,
    "lookups": LOOKUPS,
    "batches": 20,
    "copy_mib": 1024,
    "host_rows": 8_000_000,
    "swap_rows": 262_144,
}
_TINY = {
    "tables": TableSet(2, 5000),
    "uniform_tables": TableSet(2, 400),
    "dim": 8,
    "lookups": 200,
    "batches": 8,
    "copy_mib": 1,
    "host_rows": 5000,
    "swap_rows": 512,
}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; those not given are those of the scale."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cuda",
        description="Ceilings, operators and cached steps on a GPU, beside torch and FBGEMM.",
        allow_abbrev=False,
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the benchmark itself")
    parser.add_argument(
        "--scale", choices=("full", "tiny"), default="full", help="full: the shape of dynamicemb's TestCaching"
    )
    parser.add_argument("--distributions", nargs="+", type=Distribution.parse, metavar="A", help="default 1.05 uniform")
    parser.add_argument("--optimizers", nargs="+", choices=("adam", "sgd"), default=["adam", "sgd"])
    parser.add_argument(
        "--ratios", nargs="+", type=fraction, default=[1.0, 0.8, 0.5, 0.2], help="of cache to footprint"
    )
    parser.add_argument(
        "--uniform-ratios", nargs="+", type=fraction, default=[1.0], help="default 1.0; each more takes long"
    )
    parser.add_argument("--rivals", nargs="*", choices=CUDA_RIVALS, default=list(CUDA_RIVALS))
    parser.add_argument("--tables", type=TableSet.parse, metavar="COUNTxIDS", help="of power laws")
    parser.add_argument("--uniform-tables", type=TableSet.parse, metavar="COUNTxIDS")
    parser.add_argument("--dim", type=positive_int)
    parser.add_argument("--lookups", type=positive_int, help="per step, of all tables")
    parser.add_argument("--batches", type=positive_int, help="drawn, and timed rounds")
    parser.add_argument("--copy-mib", type=positive_int, help="of a measured copy")
    parser.add_argument("--host-rows", type=positive_int, help="that the host gathers from")
    parser.add_argument("--swap-rows", type=positive_int, help="of a measured gather or swap")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure, after every case")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the steps")
    options = parser.parse_args(arguments)
    check_outputs(parser, options.json, options.plot)
    options.distributions = options.distributions or [Distribution(1.05), Distribution(0.0)]
    for name, value in (_FULL if options.scale == "full" else _TINY).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options
