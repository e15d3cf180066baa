"""Saves and loads against numpy, which writes and reads the same bytes on the same disk; and deltas of some rows."""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch

from rec_sdk_torch import Saver
from rec_sdk_torch.tbe import TableBatchedEmbedding, TableConfig

from .runner import Benchmark, Option, Row
from .tables import make_table
from .timing import seconds_of

DIM = 64
SHARES = (0.001, 0.01, 0.1)
"""The shares of the rows that change before a delta."""


def _table(rows: int, filled: bool) -> TableBatchedEmbedding:
    """A hash table with Adagrad; `filled` with rows 0 to `rows`."""
    table = TableConfig("t", rows, DIM, track_changes=True)
    embedding = make_table(table, torch.optim.Adagrad, cache=max(1000, rows // 20), seed=1)
    view = embedding.view("t")
    for begin in range(0, rows if filled else 0, 1 << 16):
        ids = torch.arange(begin, min(begin + (1 << 16), rows))
        view.write(ids, {"weight": torch.rand(len(ids), DIM), "sum": torch.rand(len(ids), DIM)})
    return embedding


def _numpy_write(arrays: dict[str, np.ndarray], folder: Path) -> None:
    folder.mkdir()
    for name, array in arrays.items():
        with (folder / name).open("wb") as file:
            np.save(file, array)
            file.flush()
            os.fsync(file.fileno())


def _numpy_read(folder: Path) -> None:
    for file in folder.iterdir():
        np.load(file)


def _whole(source: TableBatchedEmbedding, rows: int, rounds: int, path: Path) -> Iterator[Row]:
    """Median seconds of full saves and loads, interleaved with numpy's, and how many times as fast as numpy."""
    target, saver, random = _table(rows, False), Saver(), np.random.default_rng(1)
    arrays: dict[str, np.ndarray] = {name: random.random((rows, DIM), np.float32) for name in ("weight", "sum")}
    arrays["ids"] = np.arange(rows)
    size = sum(array.nbytes for array in arrays.values())
    seconds: dict[str, list[float]] = {}
    for number in range(rounds):
        theirs, ours = path / f"numpy{number}", path / f"ours{number}"
        calls: dict[str, Callable[[], object]] = {
            "numpy write": partial(_numpy_write, arrays, theirs),
            "save": partial(saver.save, source, ours),
            "numpy read": partial(_numpy_read, theirs),
            "load": partial(saver.load, target, ours),
        }
        for name, call in calls.items():
            seconds.setdefault(name, []).append(seconds_of(call))
        shutil.rmtree(theirs)
        shutil.rmtree(ours)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, numpy in (("save", "numpy write"), ("load", "numpy read")):
        yield {
            **{"table": "whole tables", "what": name, "rows": rows, "bytes": size, "seconds": medians[name]},
            **{"numpy_seconds": medians[numpy], "speed_to_numpy": medians[numpy] / medians[name]},
        }


def _deltas(source: TableBatchedEmbedding, rows: int, path: Path) -> Iterator[Row]:
    """Seconds and bytes of deltas, and of a full save's seconds."""
    saver = Saver()
    whole = seconds_of(partial(saver.save, source, path))
    for share in SHARES:
        ids = torch.from_numpy(np.random.default_rng(2).choice(rows, max(1, int(rows * share)), replace=False))
        source.view("t").write(ids, {"weight": torch.rand(len(ids), DIM)})
        taken = seconds_of(partial(saver.save, source, path, incremental=True))
        latest = Path(saver.get_latest_load_path(path))
        size = sum(file.stat().st_size for file in latest.rglob("*.safetensors"))
        shown = {"table": "deltas", "share": share, "rows": len(ids), "bytes": size, "seconds": taken}
        yield {**shown, "of_a_full_save": taken / whole}


def run(options: argparse.Namespace) -> Iterator[Row]:
    """Full saves and loads, then deltas."""
    source = _table(options.rows, True)
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        yield from _whole(source, options.rows, options.rounds, Path(folder))
        yield from _deltas(source, options.rows, Path(folder) / "deltas")


BENCHMARK = Benchmark(
    run,
    {
        "rows": Option(1_000_000, quick=2000),
        "rounds": Option(5, quick=2),
        "path": Option(help="on the disk to measure"),
    },
    threads=None,
    malloc=False,
)

if __name__ == "__main__":
    BENCHMARK.start()
