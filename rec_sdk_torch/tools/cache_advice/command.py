"""Recommends a cache size for each table, and a cache policy, from the ids that a run looked up.

TRACE is a file with the ids in the order in which they were looked up. An .npz or .safetensors file has an array of
integers for each table. Its shape is [samples] or [samples, ids], or it is flat and the file also has an array
"<table>_offsets" [samples + 1]. A .parquet file has a column of integers or of lists of integers for each table.

The engine's cache policies are simulated at each cache size. The counts of misses are exact if each batch is trained
before the next one is planned. The time of swaps (copies into and out of the cache) is modelled from a bandwidth. The
model ignores that prefetching can hide part of this time.

The output lists the simulated cache sizes of each table, and a line with cache= to paste into a program. Without
--memory, each table gets the smallest size whose miss rate is at most --misses. With --memory, the tables get the sizes
that save most time within this memory.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...runtime.command import CommandParser, complain
from ...runtime.lazy import torch_npu_problem
from ...runtime.settings import parse_bytes

if TYPE_CHECKING:
    from .advice import Progress
    from .costs import Bandwidth
    from .traces import TableTrace

PROGRAM = "python -m rec_sdk_torch.cache_advice"
EXAMPLE = f"""
python -c "import numpy; numpy.savez('trace.npz', t_item=numpy.random.zipf(1.2, 10**6) % 10**5)"
{PROGRAM} trace.npz --batch 4096 --dim 64 --optimizer Adam
{PROGRAM} trace.npz --memory 64MiB --device cuda --plot misses.png
"""


def _parser() -> CommandParser:
    parser = CommandParser(prog=PROGRAM, description=__doc__, example=EXAMPLE)
    parser.add_argument("trace", type=Path, metavar="TRACE", help="an .npz, .safetensors or .parquet file")
    parser.add_argument("--table", action="append", help="a table to simulate; may be repeated; default: all")
    parser.add_argument("--batch", type=int, default=4096, help="samples per batch (default: %(default)s)")
    parser.add_argument("--dim", type=int, default=64, help="weights per row (default: %(default)s)")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float32", help="of the weights")
    parser.add_argument(
        "--optimizer", default="Adagrad", help="class whose states are part of a row (default: %(default)s)"
    )
    parser.add_argument(
        "--sizes", help="comma-separated: fractions of the distinct ids up to 1, or rows; default: 12 steps"
    )
    parser.add_argument("--policies", help="comma-separated; default: all policies")
    parser.add_argument(
        "--ahead", type=int, default=2, help="batches that look_ahead sees in advance, as with prefetch(depth=2)"
    )
    parser.add_argument(
        "--misses", type=float, default=0.05, help="fraction of known rows that may miss (default: 0.05)"
    )
    parser.add_argument("--memory", help="device memory for all tables, such as 2GiB; replaces --misses")
    parser.add_argument(
        "--device", default="cpu", help="device whose copies are measured: cpu, cuda or npu (default: cpu)"
    )
    parser.add_argument(
        "--bandwidth", help="bandwidth of copies per second, such as 10GB or 10 (GB); replaces the measurement"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="PNG", help="write a plot of the miss rates to this file; needs matplotlib"
    )
    return parser


def _parse_checked(parser: CommandParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments, and checks those that can be checked without importing torch."""
    options = parser.parse_args(arguments)
    for name, least in (("batch", 1), ("dim", 1), ("ahead", 0)):
        if getattr(options, name) < least:
            parser.error(f"--{name} is {getattr(options, name)}, it must be at least {least}")
    if not 0 <= options.misses <= 1:
        parser.error(f"--misses is {options.misses:g}, it must be from 0 to 1")
    try:
        options.bandwidth = _bytes_per_second(options.bandwidth) if options.bandwidth is not None else None
    except ValueError as error:
        parser.error(str(error))
    try:
        options.sizes = [float(each) for each in options.sizes.split(",")] if options.sizes else []
    except ValueError:
        parser.error(f"--sizes is {options.sizes!r}, expected numbers with commas between them")
    if any(not 0 < each < float("inf") for each in options.sizes):
        parser.error(f"--sizes is {options.sizes}, each must be above 0")
    return options


def _bytes_per_second(text: str) -> float:
    """Parses `--bandwidth`, a size with a unit or a number of GB (per second); returns bytes per second."""
    try:
        speed = 1e9 * float(text)
    except ValueError:
        return parse_bytes(text.removesuffix("/s"), "--bandwidth")
    if not 0 < speed < float("inf"):
        raise ValueError(f"--bandwidth is {text[:40]}, it must be above 0 and finite")
    return speed


def _record_bytes(options: argparse.Namespace) -> int:
    import torch

    from ...tbe import TableConfig, TableOptimizer, record_layout

    found = getattr(torch.optim, options.optimizer, None)
    if not isinstance(found, type):
        try:
            import torchrec.optim
        except ImportError:
            raise ValueError(f"--optimizer is {options.optimizer!r}, torch.optim has no such class") from None
        found = getattr(torchrec.optim, options.optimizer, None)
    if not isinstance(found, type):
        raise ValueError(f"--optimizer is {options.optimizer!r}, torch.optim and torchrec.optim have no such class")
    table = TableConfig("t", 1, options.dim, weight_dtype=getattr(torch, options.dtype))
    return record_layout(table, TableOptimizer.create(found, {"lr": 0.1}, "--optimizer")).bytes


def _policies(options: argparse.Namespace) -> list[str]:
    from ..._engine import cache_policies
    from ...tbe import EmbeddingOptions

    known, default = cache_policies(), EmbeddingOptions.cache_policy
    wanted = options.policies.split(",") if options.policies else sorted(known, key=lambda name: name != default)
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ValueError(f"--policies: no {unknown}, only {known}")
    return list(dict.fromkeys(wanted))


def _bandwidth(options: argparse.Namespace) -> Bandwidth:
    from ...operators.devices.backends import parse_device
    from .costs import Bandwidth, measure_bandwidth

    if options.bandwidth is not None:
        return Bandwidth(options.bandwidth, options.bandwidth, "set by --bandwidth")
    return measure_bandwidth(parse_device(options.device))


def _traces(options: argparse.Namespace) -> dict[str, TableTrace]:
    from .traces import read_traces

    traces = read_traces(options.trace)
    unknown = sorted(set(options.table or ()) - set(traces))
    if unknown:
        raise ValueError(f"--table: {options.trace} has no {unknown}, only {sorted(traces)}")
    return {name: trace for name, trace in traces.items() if not options.table or name in options.table}


def _progress_bar(table: str) -> Progress:
    """Returns a progress bar; it shows nothing if stderr is not a terminal or tqdm is not installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return iter
    return functools.partial(tqdm, desc=table, unit="cache", leave=False, disable=None)


def _advise(options: argparse.Namespace) -> None:
    from .advice import choose_cache, simulate_table
    from .report import draw_miss_rates, report_lines
    from .simulation import MAX_AHEAD

    if options.ahead > MAX_AHEAD:
        raise ValueError(f"--ahead is {options.ahead}, it must be at most {MAX_AHEAD}")
    memory = parse_bytes(options.memory, "--memory") if options.memory else None
    policies, record_bytes = _policies(options), _record_bytes(options)
    traces, bandwidth = _traces(options), _bandwidth(options)

    tables = [
        simulate_table(
            name, trace, options.batch, options.sizes, policies, options.ahead, record_bytes, _progress_bar(name)
        )
        for name, trace in traces.items()
    ]
    print("\n".join(report_lines(tables, bandwidth)))
    advice = choose_cache(tables, bandwidth, options.misses, memory)
    if advice.policy == "look_ahead":
        print(f"look_ahead sees {options.ahead} batches in advance: use rec_sdk_torch.prefetch(depth={options.ahead}).")
    print(f"Modelled time of a batch's swaps with this cache, all tables: {1e3 * advice.seconds:.3f} ms.")
    rows = {table.name: table.sizes[advice.size_indices[table.name]] for table in tables}
    print(f"cache={rows!r}, cache_policy={advice.policy!r}")  # can be pasted as arguments of a collection
    if options.plot:
        draw_miss_rates(tables, options.plot)
        print(f"drawn: {options.plot}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the recommendation and returns the exit status: 1 if the trace or the device cannot be used."""
    options = _parse_checked(_parser(), arguments)
    try:
        _advise(options)
    except BrokenPipeError:
        raise
    except (ValueError, TypeError, ImportError, NotImplementedError, OSError, MemoryError, RuntimeError) as error:
        complain(PROGRAM, torch_npu_problem(error) or error)
        return 1
    return 0
