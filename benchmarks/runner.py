"""Runs every benchmark: options, report, targets and JSON. A benchmark is a function that yields result rows.

A row is a line of the report. Its "table" names the table in which it is shown. Values that are strings, numbers or
booleans are columns; lists and dicts appear in the JSON only. A row whose "correct" contains False sets the exit status
1.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

import torch

from .machine import describe, load_average, with_malloc_settings

Row = dict[str, Any]
Results = dict[str, Any]
Run = Callable[[argparse.Namespace], Iterable[Row]]


class CannotRunError(Exception):
    """Raised when a benchmark cannot run; the message gives the reason in one line."""


# ---- options


def positive_int(text: str) -> int:
    """Parses a positive integer (an argparse type)."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not allowed; at least 1 is")
    return value


def fraction(text: str) -> float:
    """Parses a number above 0 and at most 1 (an argparse type)."""
    value = float(text)
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not allowed; it must be above 0 and at most 1")
    return value


@dataclass(frozen=True)
class Option:
    """A command-line option: a switch if the default is a boolean, several values if it is a list.

    Attributes:
        quick: value with --quick, a short run that tests the benchmark itself; None means the default.
        full: value with --full; None means the default.
        kind: argparse type; None means the default's type (integers must be positive), or a path if the default is
            None.
    """

    default: Any = None
    help: str = ""
    quick: Any = None
    full: Any = None
    kind: Callable[[str], Any] | None = None
    choices: Sequence[str] | None = None

    def add_to(self, parser: argparse.ArgumentParser, name: str) -> None:
        """Adds the option to the parser, without a default; `Benchmark.parse` fills in the default of the mode."""
        flag, shown = f"--{name.replace('_', '-')}", f"{self.help} (default {_shown(self.default)})".strip()
        if isinstance(self.default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, help=self.help)
            return
        several = isinstance(self.default, list)
        first = next(iter(self.default), 1) if several else self.default
        kind = self.kind or (positive_int if isinstance(first, int) else type(first) if first is not None else Path)
        more: dict[str, Any] = {"nargs": "*"} if several else {}
        if self.choices is None or len(self.choices) > MOST_CHOICES:
            more["metavar"] = name.upper()
        parser.add_argument(flag, type=kind, choices=self.choices, help=shown.replace("%", "%%"), **more)


MOST_CHOICES = 6
"""The largest number of choices that --help lists."""


def _shown(value: Any) -> str:
    """Formats a default as it would be typed on the command line."""
    if isinstance(value, list):
        return " ".join(map(_shown, value)) or "none"
    return str(getattr(value, "name", value))


# ---- targets

Column = str | Callable[[Row], float | None]
"""The name of a column, or a function of a row that returns None if the row has no such value."""


def values_of(column: Column, rows: Iterable[Row]) -> list[float]:
    """Returns the column's values, skipping rows without a value."""
    found = (row.get(column) if isinstance(column, str) else column(row) for row in rows)
    return [value for value in found if value is not None and not math.isnan(value)]


@dataclass(frozen=True)
class Target:
    """A bound on a column.

    Attributes:
        where: values of other columns that select the rows.
        median: bound on the median of the values.
        worst: bound on each value.
        at_least: whether the bounds are minimums; otherwise maximums.
        of_medians: the column with the same values computed from medians of rounds instead of the fastest; its median
            is shown.
    """

    name: str
    column: Column
    where: Mapping[str, Any] = field(default_factory=dict)
    median: float | None = None
    worst: float | None = None
    at_least: bool = False
    of_medians: Column | None = None

    def judge(self, rows: Sequence[Row]) -> Row:
        """Compares the rows with the bounds; `met` is None if no value was measured, or there is no bound."""
        chosen = [row for row in rows if all(row.get(name) == value for name, value in self.where.items())]
        values = values_of(self.column, chosen)
        medians = values_of(self.of_medians, chosen) if self.of_medians else []
        median = statistics.median(values) if values else None
        worst = (min if self.at_least else max)(values, default=None)
        judged = [(a, b) for a, b in ((median, self.median), (worst, self.worst)) if a is not None and b is not None]
        met = all(reached >= bound if self.at_least else reached <= bound for reached, bound in judged)
        return {
            "target": f"{self.name}, {'at least' if self.at_least else 'at most'}",
            **{"wanted median": self.median, "median": median, "wanted worst": self.worst, "worst": worst},
            "rows": len(values),
            "met": met if judged else None,
            "median of medians": statistics.median(medians) if medians else None,
        }


# ---- report


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return "-" if value is None else "" if isinstance(value, dict | list) else str(value)


def _columns(rows: Sequence[Row]) -> list[str]:
    """Lists the columns that a table shows."""
    names = dict.fromkeys(name for row in rows for name in row if name != "table")
    hidden = (dict, list, type(None))
    return [name for name in names if not all(isinstance(row.get(name), hidden) for row in rows)]


def table(rows: Sequence[Row], title: str = "") -> str:
    """Formats a table, texts aligned left and numbers right; dicts and lists are left out."""
    names = _columns(rows)
    lines = [[f"{title}: {name}" if title and name == names[0] else name for name in names]]
    lines += [[_cell(row.get(name)) for name in names] for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(names))]
    texts = [any(isinstance(row.get(name), str) for row in rows) for name in names]
    shown = [
        "  ".join(
            cell.ljust(width) if text else cell.rjust(width)
            for cell, width, text in zip(line, widths, texts, strict=True)
        ).rstrip()
        for line in lines
    ]
    return "\n".join([shown[0], "  ".join("-" * width for width in widths), *shown[1:]])


def tables(rows: Sequence[Row]) -> str:
    """Formats every table of the rows, in the order of their first rows."""
    titles = dict.fromkeys(row.get("table", "") for row in rows)
    return "\n\n".join(table([row for row in rows if row.get("table", "") == title], title) for title in titles)


def machine_lines(machine: Row) -> str:
    """Describes the machine, with a note if it was busy."""
    load = machine["load_average"][0]
    busy = "\nOther processes were running: take these figures as rough." if load > machine["cores"] / 2 else ""
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB, isa {machine['isa']}, "
        f"load {load}\n{', '.join(machine['caches'])}{busy}"
    )


def say(text: str) -> None:
    """Prints progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def _plain(value: object) -> object:
    """Converts option values, such as table sets, distributions and paths, to values that JSON can store."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return value.name if isinstance(value, Path) else str(value)


def _is_correct(row: Row) -> bool:
    """Returns whether all results of the row agree."""
    flags = [row.get("correct", True)]
    while flags:
        flag = flags.pop()
        if isinstance(flag, dict):
            flags += flag.values()
        elif flag is False:
            return False
    return True


# ---- a benchmark


@dataclass(frozen=True)
class Benchmark:
    """A command `python -m benchmarks NAME`. NAME is the name of `run`, whose docstring --help shows.

    Attributes:
        run: a function of the options that yields rows.
        targets: the targets that are judged at the end, or a function of all rows that returns them.
        threads: number of torch's threads; None leaves it unchanged.
        malloc: whether to restart with glibc's malloc set to keep freed blocks.
        check: a function that returns what is wrong with the options, or None.
    """

    run: Run
    options: Mapping[str, Option]
    targets: Sequence[Target] | Callable[[Sequence[Row]], Sequence[Target]] = ()
    threads: int | None = 1
    malloc: bool = True
    check: Callable[[argparse.Namespace], str | None] = lambda options: None

    @property
    def name(self) -> str:
        """The last word of the command."""
        return str(getattr(self.run, "__name__", "benchmark"))

    def parse(self, arguments: Sequence[str] | None = None) -> argparse.Namespace:
        """Parses the command line; the default of an absent option depends on the mode (normal, --quick or --full)."""
        parser = argparse.ArgumentParser(
            prog=f"python -m benchmarks {self.name}",
            description=inspect.getdoc(self.run),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        modes = parser.add_mutually_exclusive_group()
        modes.add_argument("--quick", dest="mode", action="store_const", const="quick", help="try the benchmark itself")
        if any(option.full is not None for option in self.options.values()):
            modes.add_argument("--full", dest="mode", action="store_const", const="full", help="every workload")
        for name, option in self.options.items():
            option.add_to(parser, name)
        parser.add_argument("--json", type=Path, metavar="FILE")
        options = parser.parse_args(arguments)
        path = options.json
        if path and (path.is_dir() or not path.parent.is_dir()):
            parser.error(f"cannot write {path}: it is a folder, or its folder does not exist")
        for name, option in self.options.items():
            if getattr(options, name) is None:
                value = getattr(option, options.mode) if options.mode else None
                setattr(options, name, option.default if value is None else value)
        problem = self.check(options)
        if problem:
            parser.error(problem)
        return options

    def _results(self, options: argparse.Namespace) -> Iterator[Results]:
        """Yields the results so far, at the start and after each row."""
        begin = time.perf_counter()
        head = {"schema": 3, "benchmark": self.name, "options": vars(options), "machine": describe()}
        rows: list[Row] = []
        for row in itertools.chain([None], self.run(options)):
            if row is not None:
                rows.append(row)
                say(", ".join(f"{name} {_cell(row[name])}" for name in _columns([row])))
            targets = self.targets(rows) if callable(self.targets) else self.targets
            yield {
                **head,
                "rows": rows,
                "targets": [target.judge(rows) for target in targets],
                "load_average_at_end": load_average(),
                "seconds": time.perf_counter() - begin,
            }

    def measure(self, options: argparse.Namespace) -> Results:
        """Runs the benchmark, and writes the JSON after each row, so that an interrupted run keeps its results."""
        threads, results = torch.get_num_threads(), Results()
        torch.set_num_threads(self.threads or threads)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Sparse invariant checks")
                for results in self._results(options):
                    if options.json:
                        options.json.write_text(json.dumps(results, indent=1, default=_plain) + "\n")
        finally:
            torch.set_num_threads(threads)
        return results

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Runs the benchmark and prints the report; returns 1 if results differ, 2 if it cannot run, otherwise 0."""
        options = self.parse(arguments)
        try:
            results = self.measure(options)
        except CannotRunError as error:
            say(str(error))
            return 2
        parts = [machine_lines(results["machine"]), tables(results["rows"])]
        if results["targets"]:
            parts.append(table(results["targets"]))
        print("\n\n".join(parts), f"took {results['seconds']:.0f} s", sep="\n\n", flush=True)
        return 0 if all(map(_is_correct, results["rows"])) else 1

    def start(self, arguments: Sequence[str]) -> None:
        """Runs the benchmark as a program: sets malloc by a restart if needed, and exits with the status of `main`."""
        if self.malloc:
            with_malloc_settings(["-m", "benchmarks", self.name, *arguments])
        sys.exit(self.main(arguments))


def benchmark(
    options: Mapping[str, Option],
    targets: Sequence[Target] | Callable[[Sequence[Row]], Sequence[Target]] = (),
    **settings: Any,
) -> Callable[[Run], Benchmark]:
    """Makes a decorator for a benchmark's function, which yields rows; `settings` are attributes of `Benchmark`."""
    return lambda run: Benchmark(run, options, targets, **settings)
