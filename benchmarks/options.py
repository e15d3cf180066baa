"""The command line of the CPU benchmark."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from .ids import Distribution
from .rivals import RIVALS
from .workload import OPTIMIZERS, TableSet

SECTIONS = ("step", "plan", "policy", "growth")
_FULL = {
    "tables": [TableSet.parse("4x100k"), TableSet.parse("1x4m")],
    "sample_tables": [],
    "dims": [32, 64, 128],
    "optimizers": list(OPTIMIZERS),
    "distributions": [Distribution(a) for a in (0.8, 1.05, 1.2, 0.0)],
    "forms": ["sequence", "pooled"],
    "rivals": ["torch", "fbgemm", "torchrec"],
    "rounds": 21,
    "plan_rows": 1_000_000,
    "large_rows": 100_000_000,
    "policy_rows": 1_000_000,
    "growth_rows": [1_000_000, 10_000_000, 100_000_000],
    "sections": list(SECTIONS),
    "buffer_mib": 1024,
}
_QUICK = {
    **_FULL,
    "tables": [TableSet.parse("4x100k")],
    "sample_tables": [TableSet.parse("1x4m")],
    "dims": [64],
    "distributions": [Distribution(1.05), Distribution(0.0)],
    "rounds": 7,
    "large_rows": 0,
    "policy_rows": 250_000,
    "growth_rows": [],
    "sections": ["step", "plan", "policy"],
    "buffer_mib": 512,
}


def fraction(text: str) -> float:
    """An argparse type: above 0, at most 1."""
    value = float(text)
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not allowed; it must be above 0 and at most 1")
    return value


def positive_int(text: str) -> int:
    """An argparse type: 1, 2, ..."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not allowed; at least 1 is")
    return value


def _add_step_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("step")
    group.add_argument("--tables", nargs="+", type=TableSet.parse, metavar="COUNTxROWS", help="such as 4x100k 1x4m")
    group.add_argument(
        "--sample-tables",
        nargs="*",
        type=TableSet.parse,
        metavar="COUNTxROWS",
        help="only one form and optimizer of these",
    )
    group.add_argument("--dims", nargs="+", type=positive_int, metavar="D")
    group.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS)
    group.add_argument(
        "--distributions", nargs="+", type=Distribution.parse, metavar="A", help="uniform, or a power law's exponent"
    )
    group.add_argument("--forms", nargs="+", choices=("sequence", "pooled"))
    group.add_argument("--rivals", nargs="*", choices=RIVALS)
    group.add_argument(
        "--cache", nargs="*", type=fraction, default=[0.1], help="fractions beside 100%% (default %(default)s)"
    )
    group.add_argument("--no-index", dest="index", action="store_false", help="leave out ours with index tables")
    group.add_argument("--rounds", type=positive_int)
    group.add_argument("--lookups", type=positive_int, default=65536, help="per step; half from D = 128 on")
    group.add_argument("--bag", type=positive_int, default=16, help="ids of a sample in a table (default %(default)s)")
    group.add_argument("--threads", nargs="+", type=positive_int, default=[1], help="each in turn (default 1)")
    group.add_argument("--buffer-mib", type=positive_int, help="memory that the bounds are measured in")


def _add_other_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("plan, policy, growth")
    group.add_argument("--plan-batch", type=positive_int, default=1_000_000, help="ids (default %(default)s)")
    group.add_argument("--plan-rows", type=positive_int)
    group.add_argument("--large-rows", type=int, help="a second, larger table; 0 for none")
    group.add_argument("--policy-rows", type=positive_int)
    group.add_argument("--policy-batch", type=positive_int, help="ids (default rows / 16)")
    group.add_argument("--policy-steps", type=positive_int, default=40, help="batches counted (default %(default)s)")
    group.add_argument("--policies", nargs="+", default=["lru"], help="of the engine (default %(default)s)")
    group.add_argument("--growth-rows", nargs="*", type=positive_int)


def check_outputs(parser: argparse.ArgumentParser, *paths: Path | None) -> None:
    """Ends the program now, rather than after its run, where a file cannot be written."""
    for path in filter(None, paths):
        if path.is_dir() or not path.parent.is_dir():
            parser.error(f"cannot write {path}: it is a folder, or its folder does not exist")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; those not given are those of quick or full mode."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu",
        description="Steps, plans and cache policies on the CPU, beside torch, FBGEMM and TorchRec.",
        epilog="Without --full: D = 64, 4x100k and one case of 1x4m, two distributions, 7 rounds; under two minutes.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--full", action="store_true", help="every workload, 21 rounds; most of an hour per thread count"
    )
    parser.add_argument("--sections", nargs="+", choices=SECTIONS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw ratios and bounds")
    _add_step_options(parser)
    _add_other_options(parser)
    options = parser.parse_args(arguments)
    check_outputs(parser, options.json, options.plot)
    if options.tables and options.sample_tables is None:
        options.sample_tables = []
    for name, value in (_FULL if options.full else _QUICK).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    # The most skewed first: a small cache that a batch does not fit in stays out from then on.
    options.distributions.sort(key=lambda distribution: -distribution.alpha)
    return options
