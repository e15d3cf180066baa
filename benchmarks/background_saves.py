"""Measures how long training waits during saves in the background, against a memory copy of the rows that changed.

python -m benchmarks.background_saves [--rows N] [--rounds N] [--json FILE] [--path FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rec_sdk_torch import Saver
from rec_sdk_torch.tbe import TableBatchedEmbedding, TableConfig, TableOptimizer

from .machine import describe, with_malloc_settings, write_json
from .timing import no_collection

DIM = 64
SHARES = (0.001, 0.01, 0.1)
"""The shares of the rows that change between two deltas."""


@dataclass(frozen=True)
class Seconds:
    """Seconds of the clock, and of the processor for this thread."""

    wall: float
    cpu: float


def timed(call: Callable[[], object]) -> Seconds:
    wall, cpu = time.perf_counter(), time.thread_time()
    call()
    return Seconds(time.perf_counter() - wall, time.thread_time() - cpu)


def medians(samples: list[Seconds]) -> dict[str, float]:
    """Milliseconds; the longest too."""
    return {
        "wall_ms": 1e3 * statistics.median(each.wall for each in samples),
        "cpu_ms": 1e3 * statistics.median(each.cpu for each in samples),
        "longest_wall_ms": 1e3 * max(each.wall for each in samples),
        "longest_cpu_ms": 1e3 * max(each.cpu for each in samples),
    }


class Training:
    """A hash or index table with Adagrad, all of whose rows are there, and batches of uniform ids."""

    def __init__(self, rows: int, lookups: int, cache: float, hashed: bool) -> None:
        optimizer = TableOptimizer.create(torch.optim.Adagrad, {"lr": 0.1})
        table = TableConfig("t", rows, DIM, hashed=hashed, track_changes=True)
        self.rows, self.lookups = rows, lookups
        self.embedding = TableBatchedEmbedding(
            [table], optimizer=optimizer, cache=max(2 * lookups, int(cache * rows)), seed=1
        )
        self._random = np.random.default_rng(1)
        self.update(np.arange(rows))

    def update(self, ids: np.ndarray) -> None:
        """Changes these rows."""
        for begin in range(0, len(ids), self.lookups):
            some = torch.from_numpy(ids[begin : begin + self.lookups])
            out = self.embedding(some, torch.tensor([0, len(some)]))
            out.backward(torch.ones_like(out))

    def change(self, count: int) -> None:
        """Changes so many rows, anywhere in the table."""
        self.update(self._random.choice(self.rows, count, replace=False))

    def step(self) -> Seconds:
        some = self._random.integers(0, self.rows, self.lookups)
        return timed(lambda: self.update(some))

    @property
    def record_bytes(self) -> int:
        return int(self.embedding.layout.find_table("t")[0].layout.bytes)


class Copy:
    """A memory copy of so many records from one array to another, both in use before."""

    def __init__(self, rows: int, record_bytes: int) -> None:
        self._source = np.ones((rows, record_bytes), np.uint8)
        self._target = np.zeros_like(self._source)

    def __call__(self) -> None:
        np.copyto(self._target, self._source)


def ask(training: Training, saver: Saver, folder: Path, incremental: bool) -> tuple[Seconds, Future[str]]:
    """Asks for a save: the seconds that the asking thread waits, and the save.

    Not among it: rows that the latest step took out of the cache go to the store, which the next step would do.
    """
    with training.embedding.exclusive():
        for group in training.embedding.groups:
            group.swap.settle()
    wall, cpu = time.perf_counter(), time.thread_time()
    writing = saver.save(training.embedding, folder, incremental=incremental, background=True)
    return Seconds(time.perf_counter() - wall, time.thread_time() - cpu), writing


def delays(training: Training, saver: Saver, folder: Path, share: float | None, rounds: int) -> dict[str, Any]:
    """The time until a save returns. `share` of the rows change before a delta; None: a full save."""
    count = training.rows if share is None else max(1, int(training.rows * share))
    copy = Copy(count, training.record_bytes)
    asked: list[Seconds] = []
    copied: list[Seconds] = []
    for _ in range(rounds):
        if share is not None:
            training.change(count)
        with no_collection():
            seconds, writing = ask(training, saver, folder, share is not None)
        asked.append(seconds)
        writing.result()
        copied.append(timed(copy))
    asking, copying = medians(asked), medians(copied)
    return {
        "save": "full" if share is None else f"delta of {share:g}",
        "rows": count,
        "asking": asking,
        "copy": copying,
        "asking_to_copy": asking["cpu_ms"] / copying["cpu_ms"],
        "asking_to_copy_wall": asking["wall_ms"] / copying["wall_ms"],
    }


def write_with_numpy(records: np.ndarray, path: Path) -> None:
    """The bytes of `records` to a file, a megabyte at a time, and to the disk."""
    rows = max(1, (1 << 20) // records.shape[1])
    with path.open("wb") as file:
        for begin in range(0, len(records), rows):
            records[begin : begin + rows].tofile(file)
        file.flush()
        os.fsync(file.fileno())


def steps_beside(training: Training, saver: Saver, folder: Path, rounds: int) -> dict[str, Any]:
    """Steps while a full save is written, while numpy writes as many bytes in a thread, and beside nothing, in turn."""
    during: list[Seconds] = []
    beside_numpy: list[Seconds] = []
    without: list[Seconds] = []
    seconds: list[float] = []
    records = np.ones((training.rows, training.record_bytes), np.uint8)
    for _ in range(rounds):
        begin = time.perf_counter()
        future = saver.save(training.embedding, folder, background=True)
        count = 0
        while not future.done():
            during.append(training.step())
            count += 1
        seconds.append(time.perf_counter() - begin)
        without += [training.step() for _ in range(max(count, 20))]
        writer = threading.Thread(target=write_with_numpy, args=(records, folder / "numpy"))
        writer.start()
        while writer.is_alive():
            beside_numpy.append(training.step())
    with_save, with_numpy, plain = medians(during), medians(beside_numpy), medians(without)
    extra = sum(each.cpu for each in during) / rounds - plain["cpu_ms"] / 1e3 * len(during) / rounds
    copy = Copy(training.rows, training.record_bytes)
    copied = medians([timed(copy) for _ in range(rounds)])
    return {
        "seconds_of_a_save": statistics.median(seconds),
        "steps_during_a_save": len(during) / rounds,
        "during": with_save,
        "beside_numpy": with_numpy,
        "without": plain,
        "during_to_without": with_save["cpu_ms"] / plain["cpu_ms"],
        "during_to_without_wall": with_save["wall_ms"] / plain["wall_ms"],
        "during_to_beside_numpy": with_save["cpu_ms"] / with_numpy["cpu_ms"],
        "during_to_beside_numpy_wall": with_save["wall_ms"] / with_numpy["wall_ms"],
        "extra_cpu_ms_of_a_save": 1e3 * extra,
        "copy_of_all_rows": copied,
    }


def main() -> None:
    with_malloc_settings("benchmarks.background_saves")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--lookups", type=int, default=16_384, help="of a step")
    parser.add_argument("--cache", type=float, default=0.2, help="part of the rows on the device")
    parser.add_argument("--index", action="store_true", help="an index table instead of a hash table")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--path", type=Path, help="on the disk to save to; a temporary folder")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    training, saver = Training(options.rows, options.lookups, options.cache, not options.index), Saver()
    result: dict[str, Any] = {"machine": describe(), "options": {k: str(v) for k, v in vars(options).items()}}
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        path = Path(folder)
        saver.save(training.embedding, path)
        result["asking"] = []
        for share in (*SHARES, None):
            result["asking"].append(delays(training, saver, path, share, options.rounds))
            print(json.dumps(result["asking"][-1]), flush=True)
        result["steps"] = steps_beside(training, saver, path / "steps", max(1, options.rounds // 2))
        print(json.dumps(result["steps"]), flush=True)
    write_json(options.json, result)


if __name__ == "__main__":
    main()
