"""Saves and loads against numpy, which writes and reads the same bytes on the same disk; and deltas of some rows.

python -m benchmarks.checkpoint [--rows N] [--rounds N] [--json FILE] [--path FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rec_sdk_torch import Saver
from rec_sdk_torch.tbe import TableBatchedEmbedding, TableConfig, TableOptimizer

from .machine import write_json
from .timing import seconds_of

DIM = 64
SHARES = (0.001, 0.01, 0.1)
"""The shares of the rows that change before a delta."""


def _table(rows: int, filled: bool) -> TableBatchedEmbedding:
    """A hash table with Adagrad; `filled` with rows 0 to `rows`."""
    optimizer = TableOptimizer.create(torch.optim.Adagrad, {"lr": 0.1})
    embedding = TableBatchedEmbedding(
        [TableConfig("t", rows, DIM, track_changes=True)], optimizer=optimizer, cache=max(1000, rows // 20), seed=1
    )
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


def run(rows: int, rounds: int, path: Path) -> dict[str, Any]:
    """Seconds of each, interleaved; medians, and ratios to numpy."""
    source, target, saver = _table(rows, True), _table(rows, False), Saver()
    random = np.random.default_rng(1)
    arrays: dict[str, np.ndarray] = {
        "ids": np.arange(rows),
        "weight": random.random((rows, DIM), np.float32),
        "sum": random.random((rows, DIM), np.float32),
    }
    size = sum(array.nbytes for array in arrays.values())
    seconds: dict[str, list[float]] = {name: [] for name in ("save", "load", "numpy_write", "numpy_read")}
    for number in range(rounds):
        theirs, ours = path / f"numpy{number}", path / f"ours{number}"
        seconds["numpy_write"].append(seconds_of(partial(_numpy_write, arrays, theirs)))
        seconds["save"].append(seconds_of(partial(saver.save, source, ours)))
        seconds["numpy_read"].append(seconds_of(partial(_numpy_read, theirs)))
        seconds["load"].append(seconds_of(partial(saver.load, target, ours)))
        shutil.rmtree(theirs)
        shutil.rmtree(ours)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "rows": rows,
        "bytes": size,
        "seconds": median,
        "save_speed_to_numpy": median["numpy_write"] / median["save"],
        "load_speed_to_numpy": median["numpy_read"] / median["load"],
        "deltas": _deltas(source, rows, saver, path / "deltas"),
    }


def _deltas(source: TableBatchedEmbedding, rows: int, saver: Saver, path: Path) -> list[dict[str, Any]]:
    whole = seconds_of(partial(saver.save, source, path))
    view, found = source.view("t"), []
    for share in SHARES:
        ids = torch.from_numpy(np.random.default_rng(2).choice(rows, max(1, int(rows * share)), replace=False))
        view.write(ids, {"weight": torch.rand(len(ids), DIM)})
        taken = seconds_of(partial(saver.save, source, path, incremental=True))
        latest = Path(saver.get_latest_load_path(path))
        size = sum(file.stat().st_size for file in latest.rglob("*.safetensors"))
        found.append(
            {"share": share, "rows": len(ids), "bytes": size, "seconds": taken, "of_a_full_save": taken / whole}
        )
    return found


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--path", type=Path, help="on the disk to measure; a temporary folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.path) as folder:
        result = run(args.rows, args.rounds, Path(folder))
    print(json.dumps(result, indent=1))
    write_json(args.json, result)


if __name__ == "__main__":
    main()
