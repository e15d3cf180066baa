"""The command lines of the benchmarks on the CPU and on a GPU."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rec_sdk_torch._engine import cache_policies

from .ids import Distribution
from .pool import DIM, ID_RANGES, LOOKUPS
from .rivals import POOL_RIVALS, RIVALS
from .workload import OPTIMIZERS, TableSet


@dataclass(frozen=True)
class Sample:
    """One workload beside the product of the axes."""

    tables: TableSet
    form: str
    optimizer: str

    @classmethod
    def parse(cls, text: str) -> Sample:
        """From `1x4m:sequence:adagrad`.

        Raises:
            argparse.ArgumentTypeError: another form, or a sequence of tables whose dims differ.
        """
        tables, form, optimizer, *rest = [*text.split(":"), "", ""]
        if form not in FORMS or optimizer not in OPTIMIZERS or any(rest):
            raise argparse.ArgumentTypeError(f"{text!r} is not TABLES:FORM:OPTIMIZER, such as 1x4m:sequence:adagrad")
        sample = cls(TableSet.parse(tables), form, optimizer)
        if sample.tables.criteo and form != "pooled":
            raise argparse.ArgumentTypeError(f"{text!r}: a sequence needs tables of one dim; criteo is pooled only")
        return sample


FORMS = ("sequence", "pooled")
SECTIONS = ("step", "plan", "policy", "growth")
_FULL = {
    "tables": [TableSet.parse(text) for text in ("4x100k", "1x4m", "criteo")],
    "samples": [Sample.parse("1x100k:sequence:sgd")],
    "dims": [32, 64, 128],
    "optimizers": list(OPTIMIZERS),
    "distributions": [Distribution(a) for a in (0.8, 1.05, 1.2, 0.0)],
    "forms": list(FORMS),
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
    "samples": [Sample.parse(s) for s in ("1x100k:sequence:sgd", "1x4m:sequence:adagrad", "criteo:pooled:adagrad")],
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
    group.add_argument("--tables", nargs="+", type=TableSet.parse, metavar="TABLES", help="such as 4x100k 1x4m criteo")
    group.add_argument(
        "--samples",
        nargs="*",
        type=Sample.parse,
        metavar="TABLES:FORM:OPTIMIZER",
        help="more workloads, of the first dim, without caches and index tables; none when --tables is given",
    )
    group.add_argument("--dims", nargs="+", type=positive_int, metavar="D")
    group.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS)
    group.add_argument(
        "--distributions", nargs="+", type=Distribution.parse, metavar="A", help="uniform, or a power law's exponent"
    )
    group.add_argument("--forms", nargs="+", choices=FORMS, help="criteo is pooled only")
    group.add_argument("--rivals", nargs="*", choices=RIVALS)
    group.add_argument(
        "--cache", nargs="*", type=fraction, default=[0.1], help="fractions beside 100%% (default %(default)s)"
    )
    group.add_argument(
        "--no-index", dest="index", action="store_false", help="leave out the collection of index tables"
    )
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
    group.add_argument("--policies", nargs="+", default=cache_policies(), help="of the engine (default %(default)s)")
    group.add_argument("--movielens", type=Path, metavar="DIR", help="its items in time order, as one more trace")
    group.add_argument("--growth-rows", nargs="*", type=positive_int)


def check_outputs(parser: argparse.ArgumentParser, *paths: Path | None) -> None:
    """Ends the program now, rather than after its run, where a file cannot be written."""
    for path in filter(None, paths):
        if path.is_dir() or not path.parent.is_dir():
            parser.error(f"cannot write {path}: it is a folder, or its folder does not exist")


def fill(options: argparse.Namespace, sizes: Mapping[str, object]) -> None:
    """Sets the options that were not given."""
    for name, value in sizes.items():
        if getattr(options, name) is None:
            setattr(options, name, value)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; those not given are those of quick or full mode."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu",
        description="Steps, plans and cache policies on the CPU, beside torch, FBGEMM and TorchRec.",
        epilog="Without --full: D = 64, 4x100k and three samples, two distributions, 7 rounds; under two minutes.",
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
    if options.tables and options.samples is None:
        options.samples = []
    fill(options, _FULL if options.full else _QUICK)
    if "pooled" not in options.forms and any(tables.criteo for tables in options.tables):
        parser.error("criteo has tables of several dims, which a sequence cannot have: add --forms pooled")
    # The most skewed first: a small cache that a batch does not fit in stays out from then on.
    options.distributions.sort(key=lambda distribution: -distribution.alpha)
    return options


# ---- on a GPU

_GPU_FULL = {
    "tables": ID_RANGES["power law"],
    "uniform_tables": ID_RANGES["uniform"],
    "dim": DIM,
    "lookups": LOOKUPS,
    "batches": 20,
    "copy_mib": 1024,
    "host_rows": 8_000_000,
    "swap_rows": 262_144,
}
_GPU_TINY = {
    "tables": TableSet(2, 5000),
    "uniform_tables": TableSet(2, 400),
    "dim": 8,
    "lookups": 200,
    "batches": 8,
    "copy_mib": 1,
    "host_rows": 5000,
    "swap_rows": 512,
}


def parse_gpu(arguments: Sequence[str] | None = None) -> argparse.Namespace:
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
    parser.add_argument("--rivals", nargs="*", choices=POOL_RIVALS, default=list(POOL_RIVALS))
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
    fill(options, _GPU_FULL if options.scale == "full" else _GPU_TINY)
    return options
