"""The life of one large table, for a night. 100 million rows of D = 8 take 8 GiB, by estimate.

A hash table that expects few ids is trained on batches of new ones until it has all rows, so its id map grows many
times; then on ids that are as skewed as clicks are. It is saved, saved again as a delta, loaded and served. Rows per
second and bytes per row stand beside their bounds, and the longest step beside the median.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchrec import KeyedJaggedTensor

import rec_sdk_torch as rst
from rec_sdk_torch.serving import TableReader

from .runner import Benchmark, Option, Row
from .tables import configs, make_collection
from .targets import BYTES_PER_ROW
from .timing import Samples, best_of, seconds_of

EXPECTED = 1000
"""Rows that the table is said to have: it grows to all others."""
SPREAD = 7919
"""Ids are multiples of it, so that no row is where its neighbour in the order of insertion is."""
VERSION_BYTES = 10
"""A row of a table that deltas are saved of keeps so many at most, to know when it changed."""


def collection(options: argparse.Namespace) -> Any:
    """A sequence collection of the table, with SGD."""
    tables = configs([(EXPECTED, options.dim)], is_incremental=True)
    store = None if options.folder is None else str(options.folder)
    settings = {"cache": options.cache, "seed": 0, "host_store": store}
    return make_collection(tables, torch.optim.SGD, {"lr": 0.1}, pooled=False, **settings)


def new_ids(rows: int, batch: int) -> Iterator[torch.Tensor]:
    """All ids, each once."""
    for begin in range(0, rows, batch):
        yield torch.arange(begin, min(begin + batch, rows)) * SPREAD


def skewed_ids(options: argparse.Namespace, seed: int) -> Iterator[torch.Tensor]:
    """The batches of a phase, of the ids that there are."""
    rng = np.random.default_rng(seed)
    for _ in range(options.steps):
        ranks = np.minimum(rng.zipf(1.2, options.batch) - 1, options.rows - 1)
        yield torch.from_numpy(ranks.astype(np.int64)) * SPREAD


def forward(tables: Any, ids: torch.Tensor) -> torch.Tensor:
    """The rows of the ids."""
    rows: torch.Tensor = tables(KeyedJaggedTensor(["f0"], ids, lengths=torch.ones_like(ids)))["f0"].values()
    return rows


def step(tables: Any, ids: torch.Tensor) -> None:
    """Forward, backward and update."""
    forward(tables, ids).sum().backward()


def train(tables: Any, batches: Iterable[torch.Tensor]) -> Row:
    """Steps, and what they took."""
    before, steps, lookups = tables.cache_stats()["rows_in"], Samples(), 0
    for ids in batches:
        steps.seconds.append(seconds_of(partial(step, tables, ids)))
        lookups += len(ids)
    return {
        "steps": len(steps.seconds),
        "rows_per_second": lookups / sum(steps.seconds),
        "median_ms": 1e3 * steps.median,
        "worst_ms": 1e3 * max(steps.seconds),
        "rows_in": tables.cache_stats()["rows_in"] - before,
    }


def looked_up(tables: Any, ids: torch.Tensor) -> torch.Tensor:
    """Weights that the collection has now, which brings no row to the cache."""
    tables.eval()
    with torch.no_grad():
        found = forward(tables, ids)
    tables.train()
    return found


def copy_bandwidth() -> float:
    """Bytes per second of a large copy, read and written bytes both counted."""
    source, target = torch.ones(2, 64 << 20, dtype=torch.uint8)
    return float(2 * source.nbytes / best_of(lambda: target.copy_(source), 9))


def memory(tables: Any, options: argparse.Namespace) -> Row:
    """Bytes of the host per row, and over their bound."""
    report = tables.memory_report("t0")
    each = sum(report[part] for part in ("host", "disk", "index", "columns")) / options.rows
    return {"bytes_per_row": each, "over_bound": each / (4 * options.dim + BYTES_PER_ROW + VERSION_BYTES)}


def saves(tables: Any, options: argparse.Namespace, path: Path) -> Iterator[Row]:
    """Saves, a delta, a load and lookups of a reader; loaded and served rows are compared with the trained ones."""
    bandwidth, saver = copy_bandwidth(), rst.Saver()

    def timed(phase: str, call: Callable[[], object], rows: int) -> Row:
        """Seconds, beside the time in which the rows and their ids are read and written."""
        seconds, copy = seconds_of(call), 2 * rows * (4 * options.dim + 8) / bandwidth
        return {"phase": phase, "rows_per_second": rows / seconds, "seconds": seconds, "over_copy": seconds / copy}

    yield timed("full save", partial(saver.save, tables, path), options.rows)
    some = torch.arange(0, options.rows, max(1, 2 * options.rows // options.cache + options.rows // 5000)) * SPREAD
    train(tables, [some])
    expected = looked_up(tables, some)
    yield timed("delta", partial(saver.save, tables, path, incremental=True), len(some))
    del tables
    loaded = collection(options)
    yield timed("load", partial(saver.load, loaded, path), options.rows)
    assert torch.equal(looked_up(loaded, some), expected), "loaded rows are others"
    del loaded
    with TableReader(path, "t0") as reader:
        assert torch.equal(reader.lookup(some), expected), "served rows are others"
        batches = list(skewed_ids(options, 3))
        seconds = seconds_of(lambda: [reader.lookup(ids) for ids in batches])
        yield {"phase": "serve", "rows_per_second": options.batch * len(batches) / seconds}


def run(options: argparse.Namespace) -> Iterator[Row]:
    """All phases."""
    tables = collection(options)
    yield {"phase": "insert", **train(tables, new_ids(options.rows, options.batch))}
    yield {"phase": "steady state", **train(tables, skewed_ids(options, 1))}
    yield {"phase": "memory", **memory(tables, options)}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        held = [tables]
        del tables
        yield from saves(held.pop(), options, Path(folder))


BENCHMARK = Benchmark(
    run,
    {
        "rows": Option(100_000_000, quick=50_000),
        "dim": Option(8),
        "batch": Option(65_536, "lookups of a step", quick=1024),
        "steps": Option(100, "of the steady state, and batches that are served", quick=5),
        "cache": Option(262_144, "rows of the device cache", quick=4096),
        "folder": Option(help="for the host store and saves; without it rows are in memory"),
    },
)

if __name__ == "__main__":
    BENCHMARK.start()
