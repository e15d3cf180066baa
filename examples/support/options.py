"""The command-line options both examples have."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from support.errors import InputError
from support.optimizers import TABLE_OPTIMIZERS
from support.report import Report


def positive_int(text: str) -> int:
    """An argparse type: 1, 2, ..."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not allowed; at least 1 is")
    return value


def positive_float(text: str) -> float:
    """An argparse type: above 0."""
    value = float(text)
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not allowed; it must be above 0")
    return value


def fraction(text: str) -> float:
    """An argparse type: above 0, at most 1."""
    value = float(text)
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not allowed; it must be above 0 and at most 1")
    return value


def add_training_options(parser: argparse.ArgumentParser) -> None:
    """Model, optimizers, length and order of the training."""
    group = parser.add_argument_group("training")
    group.add_argument("--epochs", type=positive_int, help="default 3 with --movielens, else 1")
    group.add_argument("--steps", type=positive_int, metavar="N", help="stop after N steps, whatever --epochs says")
    group.add_argument("--batch-size", type=positive_int, default=64, help="default %(default)s")
    group.add_argument("--dim", type=positive_int, default=16, help="embedding dimension (default %(default)s)")
    group.add_argument(
        "--optimizer", choices=TABLE_OPTIMIZERS, default="adagrad", help="of the tables (default %(default)s)"
    )
    defaults = ", ".join(f"{name} {choice.default_lr}" for name, choice in TABLE_OPTIMIZERS.items())
    group.add_argument("--sparse-lr", type=positive_float, help=f"learning rate of the tables (default {defaults})")
    group.add_argument(
        "--lr", type=positive_float, default=0.001, help="of Adam on the dense part (default %(default)s)"
    )
    group.add_argument("--seed", type=int, default=0, help="of data, weights and order (default %(default)s)")
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
    """Where the results go besides the terminal."""
    group = parser.add_argument_group("output")
    group.add_argument("--plot", type=Path, metavar="FILE", help="draw loss, validation AUC and cache hit rate")
    group.add_argument("--json", type=Path, metavar="FILE", help="write the results and the curves")


def prepare(options: argparse.Namespace) -> None:
    """Settles what the options leave open, and refuses an output file before the training, not after it."""
    for path in filter(None, (options.plot, options.json)):
        if path.is_dir() or not path.parent.is_dir():
            raise InputError(f"cannot write {path}: it is a folder, or its folder does not exist")
    if options.epochs is None:
        # A long log is read once: its many rare ids would be learned by heart the second time.
        options.epochs = 3 if options.movielens else 1
    if options.sparse_lr is None:
        options.sparse_lr = TABLE_OPTIMIZERS[options.optimizer].default_lr
    torch.set_num_threads(options.threads)


def report(finished: Report, options: argparse.Namespace) -> None:
    """Prints the report, and writes the files asked for."""
    finished.print()
    if options.json:
        finished.write_json(options.json)
    if options.plot:
        finished.draw(options.plot)
