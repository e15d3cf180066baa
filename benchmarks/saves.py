"""Benchmarks of one table's saves: compared with NumPy, in the background of training, and read by a TableReader."""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rec_sdk_torch import Saver
from rec_sdk_torch.serving import TableReader
from rec_sdk_torch.tbe import TableConfig

from .runner import Option, Row, Target, benchmark
from .tables import make_table
from .timing import no_collection, seconds_of, take_turns, timed

DIM = 64
SHARES = (0.001, 0.01, 0.1)
"""The fractions of the rows that change before a delta."""


def write_with_numpy(arrays: dict[str, np.ndarray], folder: Path) -> None:
    """Writes arrays to files of a new folder, a megabyte at a time, and syncs them."""
    folder.mkdir()
    for name, array in arrays.items():
        rows = max(1, (1 << 20) // array[0].nbytes)
        with (folder / name).open("wb") as file:
            for begin in range(0, len(array), rows):
                array[begin : begin + rows].tofile(file)
            file.flush()
            os.fsync(file.fileno())


# ---- against NumPy


def _whole(table: Callable[[], Any], source: Any, rows: int, rounds: int, path: Path) -> Iterator[Row]:
    """Measures the median seconds of full saves and loads, alternating with NumPy, and the speed relative to NumPy."""
    target, saver, random = table(), Saver(), np.random.default_rng(1)
    arrays: dict[str, np.ndarray] = {name: random.random((rows, DIM), np.float32) for name in ("weight", "sum")}
    arrays["ids"] = np.arange(rows)
    theirs, ours = path / "numpy", path / "ours"

    def written(folder: Path, write: Callable[[Path], object]) -> float:
        shutil.rmtree(folder, ignore_errors=True)
        return seconds_of(partial(write, folder))

    save: Callable[[Path], object] = partial(saver.save, source)
    pairs: dict[str, dict[str, Callable[[], float]]] = {
        "save": {
            "ours": partial(written, ours, save),
            "numpy": partial(written, theirs, partial(write_with_numpy, arrays)),
        },
        "load": {
            "ours": timed(partial(saver.load, target, ours), time.perf_counter),
            "numpy": timed(lambda: [np.fromfile(theirs / name, np.uint8) for name in arrays], time.perf_counter),
        },
    }
    for what, calls in pairs.items():
        samples = take_turns(calls, rounds, warm=0)
        seconds, numpy = samples["ours"].median, samples["numpy"].median
        size = sum(array.nbytes for array in arrays.values())
        shown = {"table": "whole tables", "what": what, "rows": rows, "bytes": size, "seconds": seconds}
        yield {**shown, "numpy_seconds": numpy, "speed_to_numpy": numpy / seconds}


def _deltas(source: Any, rows: int, path: Path) -> Iterator[Row]:
    """Measures seconds and bytes of deltas, and their time relative to a full save."""
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


@benchmark(
    {
        "rows": Option(1_000_000, quick=2000),
        "rounds": Option(5, quick=2),
        "folder": Option(help="on the disk to measure"),
    },
    threads=None,
    malloc=False,
)
def checkpoint(options: argparse.Namespace) -> Iterator[Row]:
    """Measures deltas, and saves and loads against NumPy, which writes and reads as many bytes on the same disk."""
    config = TableConfig("t", options.rows, DIM, track_changes=True)
    table = partial(make_table, config, torch.optim.Adagrad, cache=max(1000, options.rows // 20), seed=1)
    source = table()
    for begin in range(0, options.rows, 1 << 16):
        ids = torch.arange(begin, min(begin + (1 << 16), options.rows))
        source.view("t").write(ids, {"weight": torch.rand(len(ids), DIM), "sum": torch.rand(len(ids), DIM)})
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        yield from _whole(table, source, options.rows, options.rounds, Path(folder))
        yield from _deltas(source, options.rows, Path(folder) / "deltas")


# ---- in the background of training


@dataclass(frozen=True)
class Seconds:
    """Wall-clock seconds of a call, and the processor seconds that this thread used for it."""

    wall: float
    cpu: float

    @classmethod
    def of(cls, call: Callable[[], object]) -> Seconds:
        """Measures a call."""
        wall, cpu = time.perf_counter(), time.thread_time()
        call()
        return cls(time.perf_counter() - wall, time.thread_time() - cpu)


def summary(samples: list[Seconds], name: str) -> dict[str, float]:
    """Summarizes samples in milliseconds by their median and their maximum."""
    found: dict[str, float] = {}
    for clock in ("cpu", "wall"):
        seconds = [getattr(each, clock) for each in samples]
        found |= {f"{name} {clock}_ms": 1e3 * statistics.median(seconds), f"longest {clock}_ms": 1e3 * max(seconds)}
    return found


class Training:
    """A table with Adagrad, in which every row exists, and training steps on batches of uniform ids."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.rows, self.lookups = options.rows, options.lookups
        table = TableConfig("t", self.rows, DIM, hashed=not options.index, track_changes=True)
        size = max(2 * self.lookups, int(options.cache * self.rows))
        self.embedding = make_table(table, torch.optim.Adagrad, cache=size, seed=1)
        self.random = np.random.default_rng(1)
        self.update(np.arange(self.rows))
        self.record_bytes = int(self.embedding.layout.find_table("t")[0].layout.bytes)

    def update(self, ids: np.ndarray) -> None:
        """Runs one update of the given rows."""
        for begin in range(0, len(ids), self.lookups):
            some = torch.from_numpy(ids[begin : begin + self.lookups])
            out = self.embedding(some, torch.tensor([0, len(some)]))
            out.backward(torch.ones_like(out))

    def step(self) -> Seconds:
        return Seconds.of(partial(self.update, self.random.integers(0, self.rows, self.lookups)))

    def copy(self, rows: int) -> Callable[[], None]:
        """Returns a function that copies `rows` records between two arrays whose pages are already mapped."""
        source = np.ones((rows, self.record_bytes), np.uint8)
        return partial(np.copyto, np.zeros_like(source), source)

    def save(self, folder: Path, incremental: bool) -> tuple[Seconds, Future[str]]:
        """Starts a background save; returns the seconds that starting it took, and its future.

        Pending write-backs are completed first, as the next step would do.
        """
        with self.embedding.exclusive():
            for group in self.embedding.groups:
                group.swap.settle()
        started: list[Any] = []
        save = partial(Saver().save, self.embedding, folder, incremental=incremental, background=True)
        with no_collection():
            return Seconds.of(lambda: started.append(save())), started[0]


def delay(training: Training, folder: Path, share: float | None, rounds: int) -> Row:
    """Measures the time to start a save: a delta after a `share` of the rows has changed, or a full save with None."""
    count = training.rows if share is None else max(1, int(training.rows * share))
    copy = training.copy(count)
    begun, copied = [], []
    for _ in range(rounds):
        if share is not None:
            training.update(training.random.choice(training.rows, count, replace=False))
        seconds, writing = training.save(folder, share is not None)
        begun.append(seconds)
        writing.result()
        copied.append(Seconds.of(copy))
    asking, copying = summary(begun, "asking"), summary(copied, "copy")
    return {
        **{"table": "until a save returns", "save": "full" if share is None else f"delta of {share:g}", "rows": count},
        **asking,
        **{name: value for name, value in copying.items() if name.startswith("copy")},
        **{f"over copy {each}": asking[f"asking {each}_ms"] / copying[f"copy {each}_ms"] for each in ("cpu", "wall")},
    }


def steps_beside(training: Training, folder: Path, rounds: int) -> Iterator[Row]:
    """Times steps during a full save, while NumPy writes as many bytes, and with nothing else running."""
    steps: dict[str, list[Seconds]] = {"a save": [], "numpy": [], "nothing": []}
    saves = []
    records = np.ones((training.rows, training.record_bytes), np.uint8)

    def until(done: Callable[[], bool], name: str) -> int:
        """Runs steps, at least one, until `done` returns true; returns the number of steps."""
        before = len(steps[name])
        steps[name].append(training.step())
        while not done():
            steps[name].append(training.step())
        return len(steps[name]) - before

    for number in range(rounds):
        begin = time.perf_counter()
        count = until(training.save(folder / "save", False)[1].done, "a save")
        saves.append(time.perf_counter() - begin)
        steps["nothing"] += [training.step() for _ in range(max(count, 20))]
        with ThreadPoolExecutor(1) as pool:
            until(pool.submit(write_with_numpy, {"records": records}, folder / f"numpy{number}").done, "numpy")
    found = {name: summary(each, "step") for name, each in steps.items()}
    for name, figures in found.items():
        over = {
            f"over {other} {clock}": figures[f"step {clock}_ms"] / found[other][f"step {clock}_ms"]
            for other in ("nothing", "numpy")
            for clock in ("cpu", "wall")
        }
        yield {"table": "steps beside", "beside": name, "steps a round": len(steps[name]) / rounds, **figures, **over}
    during = steps["a save"]
    extra = (1e3 * sum(each.cpu for each in during) - found["nothing"]["step cpu_ms"] * len(during)) / rounds
    copied = summary([Seconds.of(training.copy(training.rows)) for _ in range(rounds)], "copy")["copy cpu_ms"]
    yield {
        **{"table": "a full save", "seconds": statistics.median(saves), "extra cpu_ms of its steps": extra},
        **{"copy of all rows cpu_ms": copied, "extra over copy": extra / copied},
    }


@benchmark(
    {
        "rows": Option(1_000_000, quick=3000),
        "lookups": Option(16_384, "of a step", quick=256),
        "cache": Option(0.2, "part of the rows on the device"),
        "index": Option(False, "an index table instead of a hash table"),
        "rounds": Option(5, quick=2),
        "folder": Option(help="on the disk to save to"),
    },
    [
        Target("a save returns, over a copy of its rows", "over copy cpu", worst=1.0),
        Target("steps beside a save take more, over a copy of all rows", "extra over copy", worst=1.3),
    ],
)
def background_saves(options: argparse.Namespace) -> Iterator[Row]:
    """Measures how long background saves delay training, relative to a memory copy of the changed rows."""
    training = Training(options)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder)
        Saver().save(training.embedding, path)
        for share in (*SHARES, None):
            yield delay(training, path, share, options.rounds)
        (path / "steps").mkdir()
        with no_collection():
            yield from steps_beside(training, path / "steps", max(1, options.rounds // 2))


# ---- with a reader


@benchmark(
    {
        "rows": Option(2_000_000, quick=5000),
        "dim": Option(64, quick=8),
        "lookups": Option(100_000, "of a call", quick=200),
        "deltas": Option(2, "saves behind the full one, of a hundredth of the rows"),
        "rounds": Option(30, quick=2),
    },
    [Target("rows per second of a thread", "TableReader_rows_per_s", worst=5e6, at_least=True)],
    malloc=False,
)
def serving(options: argparse.Namespace) -> Iterator[Row]:
    """Times lookups of TableReader in cached files with a growing number of deltas, against NumPy's gather of the rows.

    Reports rows per processor second in the fastest of several alternating rounds.
    """
    rng = np.random.default_rng(0)
    table = TableConfig(name="t", num_embeddings=options.rows, embedding_dim=options.dim, track_changes=True)
    embedding = make_table(table, torch.optim.SGD, cache=1000, seed=0)
    every = np.unique(rng.integers(0, 2**62, options.rows))
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.deltas + 1):
            some = torch.from_numpy(every if number == 0 else rng.choice(every, options.rows // 100, replace=False))
            embedding.view("t").write(some, {"weight": torch.rand(len(some), options.dim)})
            Saver().save(embedding, folder, incremental=number > 0)
            begin = time.perf_counter()
            reader = TableReader(folder, "t")
            opened = 1e3 * (time.perf_counter() - begin)
            places, plain = rng.integers(0, len(every), options.lookups), reader.lookup(every)
            ids, out = every[places], np.empty((len(places), options.dim), plain.dtype)
            calls = {
                "TableReader": timed(partial(reader.lookup, ids), time.process_time),
                "numpy": timed(partial(np.take, plain, places, 0, out, "clip"), time.process_time),
            }
            found = take_turns(calls, options.rounds, 0)
            rates = {f"{name}_rows_per_s": len(places) / samples.best for name, samples in found.items()}
            yield {"deltas": number, "open_ms": opened, **rates, "correct": bool((reader.lookup(ids) == out).all())}
