"""Benchmarks of large models: one table of many rows, many small tables, and more rows than fit in memory."""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchrec import KeyedJaggedTensor

import rec_sdk_torch as rst
from rec_sdk_torch.runtime.settings import parse_bytes
from rec_sdk_torch.serving import TableReader

from .bounds import CopyBound
from .machine import resident_memory
from .runner import Option, Row, Target, benchmark
from .tables import configs, make_collection
from .targets import BYTES_PER_ROW
from .timing import Samples, no_collection, seconds_of

SPREAD = 7919
"""Ids are multiples of this number, so rows of consecutive ids are not neighbours in memory."""
VERSION_BYTES = 10
"""The most bytes that a table with `track_changes` keeps per row for the version of its last change."""
EXPECTED = 1000
"""The number of rows in the table's config. The table grows beyond it."""


def ids_of(kind: str, options: argparse.Namespace, seed: int = 1) -> Iterator[torch.Tensor]:
    """Yields the id batches of phase `kind`: every id once (`insert`), skewed like clicks (`skewed`), or `uniform`."""
    rng = np.random.default_rng(seed)
    if kind == "insert":
        for begin in range(0, options.rows, options.batch):
            yield torch.arange(begin, min(begin + options.batch, options.rows)) * SPREAD
        return
    for _ in range(options.steps):
        if kind == "uniform":
            ranks = rng.integers(0, options.rows, options.batch)
        else:
            ranks = np.minimum(rng.zipf(1.2, options.batch) - 1, options.rows - 1)
        yield torch.from_numpy(ranks.astype(np.int64)) * SPREAD


def large_collection(
    options: argparse.Namespace,
    rows: int = EXPECTED,
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
    is_incremental: bool = True,
) -> Any:
    """Builds a sequence collection with one hash table that is configured for `rows` rows."""
    tables = configs([(rows, options.dim)], is_incremental=is_incremental)
    store = None if options.folder is None else str(options.folder)
    settings = {"cache": options.cache, "seed": 0, "host_store": store}
    return make_collection(tables, optimizer, {"lr": 0.1}, pooled=False, **settings)


def forward(tables: Any, ids: torch.Tensor) -> torch.Tensor:
    """Returns the rows of the ids."""
    rows: torch.Tensor = tables(KeyedJaggedTensor(["f0"], ids, lengths=torch.ones_like(ids)))["f0"].values()
    return rows


def step(tables: Any, ids: torch.Tensor) -> None:
    """Trains one step whose loss is the sum of the ids' rows."""
    forward(tables, ids).sum().backward()


def train(tables: Any, batches: Iterable[torch.Tensor]) -> Row:
    """Trains on batches; returns the number of steps, their times, and the rows copied into and out of the cache."""
    before, steps, lookups = tables.cache_stats(), Samples(), 0
    for ids in batches:
        steps.seconds.append(seconds_of(partial(step, tables, ids)))
        lookups += len(ids)
    after = tables.cache_stats()
    return {
        **{"steps": len(steps.seconds), "rows_per_second": lookups / sum(steps.seconds)},
        **{"median_ms": 1e3 * steps.median, "worst_ms": 1e3 * max(steps.seconds)},
        **{name: after[name] - before[name] for name in ("rows_in", "rows_out")},
    }


def current_weights(tables: Any, ids: torch.Tensor) -> torch.Tensor:
    """Returns the current weights of ids, without fetching rows into the cache."""
    tables.eval()
    with torch.no_grad():
        found = forward(tables, ids)
    tables.train()
    return found


def saves(tables: Any, options: argparse.Namespace, path: Path) -> Iterator[Row]:
    """Times saves, a delta, a load and lookups of a reader; compares loaded and served rows with the trained ones."""
    bandwidth, saver = CopyBound(64 << 20, 9).observe(), rst.Saver()

    def timed(phase: str, call: Callable[[], object], rows: int) -> Row:
        """Times a call and compares it with the time of copying the rows and their ids."""
        seconds, copy = seconds_of(call), 2 * rows * (4 * options.dim + 8) / bandwidth
        return {"phase": phase, "rows_per_second": rows / seconds, "seconds": seconds, "over_copy": seconds / copy}

    yield timed("full save", partial(saver.save, tables, path), options.rows)
    some = torch.arange(0, options.rows, max(1, 2 * options.rows // options.cache + options.rows // 5000)) * SPREAD
    train(tables, [some])
    expected = current_weights(tables, some)
    yield timed("delta", partial(saver.save, tables, path, incremental=True), len(some))
    del tables
    loaded = large_collection(options)
    yield timed("load", partial(saver.load, loaded, path), options.rows)
    assert torch.equal(current_weights(loaded, some), expected), "loaded rows are others"
    del loaded
    with TableReader(path, "t0") as reader:
        assert torch.equal(reader.lookup(some), expected), "served rows are others"
        batches = list(ids_of("skewed", options, 3))
        seconds = seconds_of(lambda: [reader.lookup(ids) for ids in batches])
        yield {"phase": "serve", "rows_per_second": options.batch * len(batches) / seconds}


@benchmark(
    {
        "rows": Option(100_000_000, quick=50_000),
        "dim": Option(8),
        "batch": Option(65_536, "lookups of a step", quick=1024),
        "steps": Option(100, "of the steady state, and batches that are served", quick=5),
        "cache": Option(262_144, "rows of the device cache", quick=4096),
        "folder": Option(help="for the host store and saves; without it rows are in memory"),
    },
)
def large_table(options: argparse.Namespace) -> Iterator[Row]:
    """Measures the phases of one large table, from inserts to serving; takes a night.

    100 million rows of D = 8 take an estimated 8 GiB. First a hash table, configured for few ids, is trained on batches
    of new ids until it has all rows, so its id map grows many times. Then it is trained on ids that are skewed like
    clicks. Finally it is saved, saved again as a delta, loaded and served.

    `over_copy` is the time of a phase divided by the time of copying its rows and ids. `over_bound` is the bytes per
    row divided by a bound: the record, plus 24 bytes for the id map and 10 for the version that deltas need.
    `worst_ms`, the longest step, shows whether growth delays a batch.
    """
    tables = large_collection(options)
    yield {"phase": "insert", **train(tables, ids_of("insert", options))}
    yield {"phase": "steady state", **train(tables, ids_of("skewed", options))}
    report = tables.memory_report("t0")
    each = sum(report[part] for part in ("host", "disk", "index", "columns")) / options.rows
    bound = 4 * options.dim + BYTES_PER_ROW + VERSION_BYTES
    yield {"phase": "memory", "bytes_per_row": each, "over_bound": each / bound}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        held = [tables]
        del tables
        yield from saves(held.pop(), options, Path(folder))


# ---- more rows than memory


@contextlib.contextmanager
def memory_limit(text: str) -> Iterator[str]:
    """Limits the memory of this process and its page cache to a size such as `4GiB`; `none` sets no limit.

    Yields a description of the limit, or the reason why there is none.
    """
    if text == "none":
        yield text
        return
    size = parse_bytes(text, "--memory")
    groups = [line.strip().split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    v1 = next((path for _, controllers, path in groups if "memory" in controllers.split(",")), None)
    root = "/sys/fs/cgroup" if v1 is None else "/sys/fs/cgroup/memory"
    parent = Path(root + (v1 if v1 is not None else groups[-1][2]))
    own = parent / f"rec_sdk_disk_store_{os.getpid()}"
    try:
        own.mkdir()
        (own / ("memory.max" if v1 is None else "memory.limit_in_bytes")).write_text(str(size))
        (own / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        with contextlib.suppress(OSError):
            own.rmdir()
        yield f"none: {error}; run it under: systemd-run --scope -p MemoryMax={size} ..."
        return
    try:
        yield f"cgroup {'v2' if v1 is None else 'v1'}, {size} bytes"
    finally:
        (parent / "cgroup.procs").write_text(str(os.getpid()))
        own.rmdir()


@benchmark(
    {
        "folder": Option(help="for the host store; without it rows are in memory"),
        "rows": Option(20_000_000, quick=5000),
        "dim": Option(64, quick=8),
        "memory": Option("4GiB", "limit of this process; or none", quick="none"),
        "cache": Option(200_000, "rows of the device cache", quick=1000),
        "batch": Option(65_536, "lookups of a step", quick=256),
        "steps": Option(100, quick=3),
    },
    threads=None,
    malloc=False,
)
def disk_store(options: argparse.Namespace) -> Iterator[Row]:
    """Trains with a host store on disk and more rows than memory, under a memory limit.

    The limit is set by a new cgroup below this process's own, if the system allows it. First all rows are inserted;
    then the tables are trained on batches of uniform ids, and then on ids skewed like clicks. Without --folder the rows
    are in memory.
    """
    with memory_limit(options.memory) as limit:
        tables = large_collection(options, options.rows, optimizer=torch.optim.Adagrad, is_incremental=False)
        for kind in ("insert", "uniform", "skewed"):
            processor, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF)
            row = {"ids": kind, **train(tables, ids_of(kind, options))}
            after = resource.getrusage(resource.RUSAGE_SELF)
            yield {
                **row,
                **{f"{name}_per_step": row[name] / row["steps"] for name in ("rows_in", "rows_out")},
                "processor_s": time.process_time() - processor,
                "read_from_disk_MiB": (after.ru_inblock - before.ru_inblock) / 2048,
                "major_faults": after.ru_majflt - before.ru_majflt,
            }
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        yield {"table": "limit", "limit": limit, "peak_memory_MiB": peak, "report": tables.memory_report()}


# ---- many tables


class Model:
    """A TorchRec collection trained with SGD, with functions that save and load it."""

    prefix, settings = "", dict[str, Any](device="cpu")

    def __init__(self, options: argparse.Namespace) -> None:
        tables = configs([(options.rows, options.dim)] * options.tables)
        self.tables = make_collection(tables, torch.optim.SGD, {"lr": 0.1}, True, self.prefix, **self.settings)

    def step(self, batch: KeyedJaggedTensor) -> None:
        out = self.tables(batch).values()
        out.backward(torch.ones_like(out))

    def weights(self, batch: KeyedJaggedTensor) -> torch.Tensor:
        with torch.no_grad():
            values: torch.Tensor = self.tables.eval()(batch).values().clone()
        self.tables.train()
        return values

    def save(self, path: Path) -> None:
        path.mkdir()
        torch.save(self.tables.state_dict(), path / "tables")

    def load(self, path: Path) -> None:
        self.tables.load_state_dict(torch.load(path / "tables"))


class Ours(Model):
    """The same model with this package's hash tables, whose caches hold every row."""

    prefix, settings = "EmbCache", dict[str, Any](cache=1.0, seed=0)

    def save(self, path: Path) -> None:
        rst.Saver().save(self.tables, path)

    def load(self, path: Path) -> None:
        rst.Saver().load(self.tables, path)


class ModelPhases:
    """Processor seconds of each phase of a model, summed over all threads, and the bytes of its memory."""

    def __init__(self, kind: type[Model], options: argparse.Namespace) -> None:
        self.options, self.found = options, dict[str, list[float]]()
        made: list[Model] = []
        gc.collect()
        before = resident_memory()
        self.time("construct", lambda: made.append(kind(options)))
        self.model = made[0]
        self.time("first step", partial(self.model.step, self.batch(None)))
        gc.collect()
        self.found["bytes"] = [resident_memory() - before]

    def time(self, phase: str, call: Callable[[], object]) -> None:
        with no_collection():
            self.found.setdefault(phase, []).append(seconds_of(call, time.process_time))

    def batch(self, seed: int | None) -> KeyedJaggedTensor:
        """Draws `lookups` ids of each table, one per sample. With None, the batch contains every id once."""
        tables, rows = self.options.tables, self.options.rows
        random = torch.Generator().manual_seed(seed or 0)
        ids = torch.arange(rows).repeat(tables)
        if seed is not None:
            ids = torch.randint(rows, (tables * self.options.lookups,), generator=random)
        return KeyedJaggedTensor([f"f{table}" for table in range(tables)], ids, lengths=torch.ones_like(ids))

    def round(self, number: int, path: Path) -> None:
        """Runs some steps, a save, one more step and a load.

        Raises:
            AssertionError: loaded rows differ from the saved ones.
        """
        batch = self.batch(number)
        for _ in range(self.options.steps):
            self.time("step", partial(self.model.step, batch))
        before = self.model.weights(batch)
        self.time("save", partial(self.model.save, path))
        self.time("step", partial(self.model.step, batch))
        self.time("load", partial(self.model.load, path))
        assert torch.equal(self.model.weights(batch), before), f"{type(self.model).__name__}: loaded rows are others"
        shutil.rmtree(path)


@benchmark(
    {
        "tables": Option(1000, quick=20),
        "rows": Option(1000, quick=50),
        "dim": Option(64, quick=8),
        "lookups": Option(16, "of each table in a step"),
        "steps": Option(10, "of a round", quick=2),
        "rounds": Option(5, quick=2),
        "folder": Option(help="on the disk for saves"),
    },
    [
        Target(f"{phase}, processor time over TorchRec's", "ratio", {"phase": phase}, worst=1.5)
        for phase in ("save", "load")
    ],
)
def many_tables(options: argparse.Namespace) -> Iterator[Row]:
    """Compares a model of many small tables with TorchRec's EmbeddingBagCollection of the same tables.

    Times are processor times in milliseconds. Construction and the first step are measured once; of the later steps,
    the saves and the loads of all rows, the minimum over alternating rounds is reported. `bytes` is the memory of the
    model in MiB. TorchRec's tables are saved by `torch.save` of their state dict, and loaded by `torch.load` and
    `load_state_dict`.
    """
    lifecycles = {"ours": ModelPhases(Ours, options), "torchrec": ModelPhases(Model, options)}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for number in range(options.rounds):
            for name, lifecycle in lifecycles.items():
                lifecycle.round(number, Path(folder) / f"{number}.{name}")
    for phase in lifecycles["ours"].found:
        ours, theirs = (min(lifecycle.found[phase]) for lifecycle in lifecycles.values())
        unit, factor = ("MiB", 2**-20) if phase == "bytes" else ("ms", 1e3)
        ratio = ours / theirs if theirs else None
        yield {"phase": phase, "ours": ours * factor, "torchrec": theirs * factor, "unit": unit, "ratio": ratio}
