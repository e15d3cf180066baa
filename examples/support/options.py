"""The command-line options that the examples share."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import torch

from support.clicks import SMALLEST_LOG
from support.environment import USAGE_ERROR, say
from support.errors import InputError, write_problem
from support.optimizers import TABLE_OPTIMIZERS
from support.report import Report


class Parser(argparse.ArgumentParser):
    """A parser that takes only unabbreviated options, shows the script's own help, and reports an error in one line."""

    def __init__(self, description: str | None, prog: str | None = None) -> None:
        """Creates a parser without options. Parsers of subcommands also have this class."""
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, description=description, formatter_class=layout, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Prints the error and ends the script."""
        say(f"{message}; --help lists the options")
        sys.exit(USAGE_ERROR)


def _integer(text: str, low: int, high: int | None = None) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < low or (high is not None and value > high):
        allowed = f"at least {low} is" if high is None else f"{low} to {high} are"
        raise argparse.ArgumentTypeError(f"{value} is not allowed; {allowed}")
    return value


def positive_int(text: str) -> int:
    """Converts the text of an option to an integer of at least 1."""
    return _integer(text, 1)


def log_size(text: str) -> int:
    """Converts the text of an option to a number of samples that can be split."""
    return _integer(text, SMALLEST_LOG)


def dimension(text: str) -> int:
    """Converts the text of an option to an embedding dimension that a table may have."""
    return _integer(text, 1, 4096)


def seed(text: str) -> int:
    """Converts the text of an option to a seed that torch accepts."""
    return _integer(text, 0, 2**63 - 1)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def positive_float(text: str) -> float:
    """Converts the text of an option to a number above 0."""
    value = _number(text)
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not allowed; it must be above 0")
    return value


def fraction(text: str) -> float:
    """Converts the text of an option to a number above 0 and at most 1."""
    value = _number(text)
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not allowed; it must be above 0 and at most 1")
    return value


def add_click_options(parser: argparse.ArgumentParser, samples: int, batch: str) -> None:
    """Adds options for generated clicks and a DLRM on them. `batch` is the help text of the batch size."""
    add = parser.add_argument
    add("--samples", type=log_size, default=samples, help="clicks to generate (default %(default)s)")
    add("--batch-size", type=positive_int, default=64, help=f"{batch} (default %(default)s)")
    add("--dim", type=dimension, default=16, help="embedding dimension (default %(default)s)")
    add("--lr", type=positive_float, default=0.001, help="of the dense part (default %(default)s)")
    add("--sparse-lr", type=positive_float, default=0.05, help="of the tables (default %(default)s)")
    add("--cache", type=fraction, default=0.1, help="share of the rows that are cached (default %(default)s)")
    add("--seed", type=seed, default=0, help="of data, weights and order (default %(default)s)")


def add_training_options(parser: argparse.ArgumentParser) -> None:
    """Adds options for the model, the optimizers, and the length and order of the training."""
    group = parser.add_argument_group("training")
    group.add_argument("--epochs", type=positive_int, help="default 3 with --movielens, else 1")
    group.add_argument("--steps", type=positive_int, metavar="N", help="stop after N steps, whatever --epochs says")
    group.add_argument("--batch-size", type=positive_int, default=64, help="of each process (default %(default)s)")
    group.add_argument("--dim", type=dimension, default=16, help="embedding dimension (default %(default)s)")
    group.add_argument(
        "--optimizer", choices=TABLE_OPTIMIZERS, default="adagrad", help="of the tables (default %(default)s)"
    )
    defaults = ", ".join(f"{name} {choice.default_lr}" for name, choice in TABLE_OPTIMIZERS.items())
    group.add_argument("--sparse-lr", type=positive_float, help=f"learning rate of the tables (default {defaults})")
    group.add_argument(
        "--lr", type=positive_float, default=0.001, help="of Adam on the dense part (default %(default)s)"
    )
    group.add_argument("--seed", type=seed, default=0, help="of data, weights and order (default %(default)s)")
    group.add_argument(
        "--threads",
        type=positive_int,
        default=1,
        help="CPU threads of torch (default %(default)s; more pay off for larger batches)",
    )
    group.add_argument(
        "--cache",
        type=fraction,
        default=0.1,
        metavar="FRACTION",
        help="share of a table's rows in the device cache; one batch always fits (default %(default)s)",
    )


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Adds options for the files to which results are written."""
    group = parser.add_argument_group("output")
    group.add_argument("--plot", type=Path, metavar="FILE", help="draw loss, validation AUC and cache hit rate")
    group.add_argument("--json", type=Path, metavar="FILE", help="write the results and the curves")


def _check_output(path: Path) -> None:
    """Refuses an output file that cannot be written, as far as can be checked in advance."""
    if path.is_dir() or not path.parent.is_dir():
        raise InputError(f"cannot write {path}: it is a folder, or its folder does not exist")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InputError(f"cannot write {path}: no permission")


def _check_picture(path: Path) -> None:
    if find_spec("matplotlib") is None:
        raise InputError(f"--plot needs matplotlib, which is not installed for {sys.executable}")
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.lower().removeprefix(".") not in kinds:
        raise InputError(f"cannot draw {path}: its name must end in one of {', '.join(f'.{kind}' for kind in kinds)}")


def prepare(options: argparse.Namespace) -> None:
    """Sets options that have no value yet, and checks the output files before the training starts."""
    for path in filter(None, (options.plot, options.json)):
        _check_output(path)
    if options.plot:
        _check_picture(options.plot)
    if options.epochs is None:
        # A long log is read once: in a second epoch the model would overfit its many rare ids.
        options.epochs = 3 if options.movielens else 1
    if options.sparse_lr is None:
        options.sparse_lr = TABLE_OPTIMIZERS[options.optimizer].default_lr
    torch.set_num_threads(options.threads)


def _write(path: Path | None, write: Callable[[Path], None]) -> None:
    if path:
        try:
            write(path)
        except OSError as error:
            raise write_problem(path, error) from error


def report(finished: Report, options: argparse.Namespace) -> None:
    """Prints the report, and writes the requested files."""
    finished.print()
    _write(options.json, finished.write_json)
    _write(options.plot, finished.draw)
