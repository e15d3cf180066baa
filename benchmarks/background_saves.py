"""How long training waits during saves in the background, against a memory copy of the rows that changed."""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rec_sdk_torch import Saver
from rec_sdk_torch.tbe import TableConfig

from .runner import Benchmark, Option, Row, Target
from .tables import make_table
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


def summary(samples: list[Seconds], name: str) -> dict[str, float]:
    """Milliseconds: medians, and the longest."""
    found: dict[str, float] = {}
    for clock in ("cpu", "wall"):
        seconds = [getattr(each, clock) for each in samples]
        found |= {f"{name} {clock}_ms": 1e3 * statistics.median(seconds), f"longest {clock}_ms": 1e3 * max(seconds)}
    return found


class Training:
    """A hash or index table with Adagrad, all of whose rows are there, and batches of uniform ids."""

    def __init__(self, rows: int, lookups: int, cache: float, hashed: bool) -> None:
        table = TableConfig("t", rows, DIM, hashed=hashed, track_changes=True)
        self.rows, self.lookups = rows, lookups
        size = max(2 * lookups, int(cache * rows))
        self.embedding = make_table(table, torch.optim.Adagrad, cache=size, seed=1)
        self._random = np.random.default_rng(1)
        self.update(np.arange(rows))
        self.record_bytes = int(self.embedding.layout.find_table("t")[0].layout.bytes)

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

    def copy(self, rows: int) -> Callable[[], None]:
        """A memory copy of so many records from one array to another, both in use before."""
        source = np.ones((rows, self.record_bytes), np.uint8)
        return partial(np.copyto, np.zeros_like(source), source)


def ask(training: Training, saver: Saver, folder: Path, incremental: bool) -> tuple[Seconds, Future[str]]:
    """Asks for a save: the seconds that the asking thread waits, and the save.

    Not among it: rows that the latest step took out of the cache go to the store, which the next step would do.
    """
    with training.embedding.exclusive():
        for group in training.embedding.groups:
            group.swap.settle()
    writing: list[Any] = []
    save = partial(saver.save, training.embedding, folder, incremental=incremental, background=True)
    with no_collection():
        return timed(lambda: writing.append(save())), writing[0]


def delay(training: Training, saver: Saver, folder: Path, share: float | None, rounds: int) -> Row:
    """The time until a save returns. `share` of the rows change before a delta; None: a full save."""
    count = training.rows if share is None else max(1, int(training.rows * share))
    copy = training.copy(count)
    asked, copied = [], []
    for _ in range(rounds):
        if share is not None:
            training.change(count)
        seconds, writing = ask(training, saver, folder, share is not None)
        asked.append(seconds)
        writing.result()
        copied.append(timed(copy))
    asking, copying = summary(asked, "asking"), summary(copied, "copy")
    return {
        **{"table": "until a save returns", "save": "full" if share is None else f"delta of {share:g}", "rows": count},
        **asking,
        **{name: value for name, value in copying.items() if name.startswith("copy")},
        **{
            f"over copy {clock}": asking[f"asking {clock}_ms"] / copying[f"copy {clock}_ms"]
            for clock in ("cpu", "wall")
        },
    }


def write_with_numpy(records: np.ndarray, path: Path) -> None:
    """The bytes of `records` to a file, a megabyte at a time, and to the disk."""
    rows = max(1, (1 << 20) // records.shape[1])
    with path.open("wb") as file:
        for begin in range(0, len(records), rows):
            records[begin : begin + rows].tofile(file)
        file.flush()
        os.fsync(file.fileno())


def steps_beside(training: Training, saver: Saver, folder: Path, rounds: int) -> Iterator[Row]:
    """Steps while a full save is written, while numpy writes as many bytes in a thread, and beside nothing, in turn."""
    steps: dict[str, list[Seconds]] = {"a save": [], "numpy": [], "nothing": []}
    saves = []
    records = np.ones((training.rows, training.record_bytes), np.uint8)
    for _ in range(rounds):
        begin, count = time.perf_counter(), len(steps["a save"])
        future = saver.save(training.embedding, folder, background=True)
        steps["a save"].append(training.step())
        while not future.done():
            steps["a save"].append(training.step())
        saves.append(time.perf_counter() - begin)
        steps["nothing"] += [training.step() for _ in range(max(len(steps["a save"]) - count, 20))]
        writer = threading.Thread(target=write_with_numpy, args=(records, folder / "numpy"))
        writer.start()
        steps["numpy"].append(training.step())
        while writer.is_alive():
            steps["numpy"].append(training.step())
    found = {name: summary(each, "step") for name, each in steps.items()}
    for name, figures in found.items():
        over = {
            f"over {other} {clock}": figures[f"step {clock}_ms"] / found[other][f"step {clock}_ms"]
            for other in ("nothing", "numpy")
            for clock in ("cpu", "wall")
        }
        yield {"table": "steps beside", "beside": name, "steps a round": len(steps[name]) / rounds, **figures, **over}
    plain, during = found["nothing"]["step cpu_ms"], steps["a save"]
    extra = (1e3 * sum(each.cpu for each in during) - plain * len(during)) / rounds
    copied = summary([timed(training.copy(training.rows)) for _ in range(rounds)], "copy")["copy cpu_ms"]
    yield {
        **{"table": "a full save", "seconds": statistics.median(saves), "extra cpu_ms of its steps": extra},
        **{"copy of all rows cpu_ms": copied, "extra over copy": extra / copied},
    }


def run(options: argparse.Namespace) -> Iterator[Row]:
    """Deltas and a full save, then steps beside one."""
    torch.set_num_threads(options.threads)
    training, saver = Training(options.rows, options.lookups, options.cache, not options.index), Saver()
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        path = Path(folder)
        saver.save(training.embedding, path)
        for share in (*SHARES, None):
            yield delay(training, saver, path, share, options.rounds)
        yield from steps_beside(training, saver, path / "steps", max(1, options.rounds // 2))


BENCHMARK = Benchmark(
    run,
    {
        "rows": Option(1_000_000, quick=3000),
        "lookups": Option(16_384, "of a step", quick=256),
        "cache": Option(0.2, "part of the rows on the device"),
        "index": Option(False, "an index table instead of a hash table"),
        "rounds": Option(5, quick=2),
        "threads": Option(1),
        "path": Option(help="on the disk to save to"),
    },
    [
        Target("a save returns, over a copy of its rows", "over copy cpu", worst=1.0),
        Target("steps beside a save take more, over a copy of all rows", "extra over copy", worst=1.3),
    ],
)

if __name__ == "__main__":
    BENCHMARK.start()
