"""The life of one large table, for a night: python -m benchmarks.large_table

python -m benchmarks.large_table                              100 million rows, D = 8: by estimate 8 GiB
python -m benchmarks.large_table --dim 64 --folder /disk      the same with the host store and saves on a disk
python -m benchmarks.large_table --rows 200_000               tries the benchmark itself

A hash table that expects few ids is trained on batches of new ones until it has all rows, so its id map grows many
times; then on ids that are as skewed as clicks are. It is saved, saved again as a delta, loaded and served. Rows per
second and bytes per row stand beside their bounds, and the longest step beside the median.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchrec import KeyedJaggedTensor

import rec_sdk_torch as rst
from rec_sdk_torch.serving import TableReader

from .machine import describe, with_malloc_settings, write_json
from .targets import BYTES_PER_ROW
from .timing import best_of

EXPECTED = 1000
"""Rows that the table is said to have: it grows to all others."""
SPREAD = 7919
"""Ids are multiples of it, so that no row is where its neighbour in the order of insertion is."""
VERSION_BYTES = 10
"""A row of a table that deltas are saved of keeps so many at most, to know when it changed."""
Phase = dict[str, float]


def collection(options: argparse.Namespace) -> Any:
    """A sequence collection of the table, with SGD."""
    config = rst.EmbCacheEmbeddingConfig(
        name="t", feature_names=["f"], num_embeddings=EXPECTED, embedding_dim=options.dim, is_incremental=True
    )
    store = None if options.folder is None else str(options.folder)
    made = rst.EmbCacheEmbeddingCollection(tables=[config], cache=options.cache, seed=0, host_store=store)
    rst.apply_optimizer_in_backward(torch.optim.SGD, made.parameters(), {"lr": 0.1})
    return made


def new_ids(rows: int, batch: int) -> Iterator[torch.Tensor]:
    """All ids, each once."""
    for begin in range(0, rows, batch):
        yield torch.arange(begin, min(begin + batch, rows)) * SPREAD


def skewed_ids(rows: int, batch: int, seed: int) -> Iterator[torch.Tensor]:
    """Batches without end, of the ids that there are."""
    rng = np.random.default_rng(seed)
    while True:
        yield torch.from_numpy(np.minimum(rng.zipf(1.2, batch) - 1, rows - 1).astype(np.int64)) * SPREAD


def train(tables: Any, batches: Iterator[torch.Tensor]) -> Phase:
    """Steps, and what they took."""
    before, seconds, lookups = tables.cache_stats(), [], 0
    for ids in batches:
        features = KeyedJaggedTensor(["f"], ids, lengths=torch.ones_like(ids))
        begin = time.perf_counter()
        tables(features)["f"].values().sum().backward()
        seconds.append(time.perf_counter() - begin)
        lookups += len(ids)
    after = tables.cache_stats()
    return {
        "steps": len(seconds),
        "rows_per_second": lookups / sum(seconds),
        "median_ms": 1e3 * float(np.median(seconds)),
        "worst_ms": 1e3 * max(seconds),
        "rows_in": after["rows_in"] - before["rows_in"],
    }


def looked_up(tables: Any, ids: torch.Tensor) -> torch.Tensor:
    """Weights that the collection has now, which brings no row to the cache."""
    tables.eval()
    with torch.no_grad():
        found: torch.Tensor = tables(KeyedJaggedTensor(["f"], ids, lengths=torch.ones_like(ids)))["f"].values()
    tables.train()
    return found


def copy_bandwidth() -> float:
    """Bytes per second of a large copy, read and written bytes both counted."""
    source, target = torch.ones(2, 64 << 20, dtype=torch.uint8)
    return float(2 * source.nbytes / best_of(lambda: target.copy_(source), 9))


def timed(call: Callable[[], object], rows: int, copied: int, bandwidth: float) -> Phase:
    """A call that reads or writes rows, beside the time in which `copied` bytes are read and written."""
    begin = time.perf_counter()
    call()
    seconds = time.perf_counter() - begin
    return {"rows_per_second": rows / seconds, "seconds": seconds, "over_copy": seconds * bandwidth / (2 * copied)}


def serve(reader: TableReader, batches: Sequence[torch.Tensor]) -> Phase:
    """Lookups of a reader on one thread."""
    begin = time.perf_counter()
    for ids in batches:
        reader.lookup(ids)
    return {"rows_per_second": sum(map(len, batches)) / (time.perf_counter() - begin)}


def run(options: argparse.Namespace, saves: Path) -> dict[str, Phase]:
    """All phases, printed as they end.

    Raises:
        AssertionError: loaded or served rows are others than those that were saved.
    """
    found: dict[str, Phase] = {}

    def ended(name: str, phase: Phase) -> None:
        found[name] = phase
        print(f"{name:14}" + ", ".join(f"{key} {value:,.4g}" for key, value in phase.items()), flush=True)

    bandwidth, saver = copy_bandwidth(), rst.Saver()
    tables: Any = collection(options)
    loaded: Any = None
    rows, batch, record = options.rows, options.batch, 4 * options.dim
    saved_row = record + 8  # with its id
    ended("insert", train(tables, new_ids(rows, batch)))
    ended("steady state", train(tables, itertools.islice(skewed_ids(rows, batch, 1), options.steps)))
    report = tables.memory_report("t")
    kept = sum(report[part] for part in ("host", "disk", "index", "columns"))
    ended(
        "memory", {"bytes_per_row": kept / rows, "over_bound": kept / rows / (record + BYTES_PER_ROW + VERSION_BYTES)}
    )
    ended("full save", timed(lambda: saver.save(tables, saves), rows, rows * saved_row, bandwidth))
    some = torch.arange(0, rows, max(1, 2 * rows // options.cache + rows // 5000)) * SPREAD
    train(tables, iter([some]))
    expected = looked_up(tables, some)
    delta: Any = partial(saver.save, tables, saves, incremental=True)
    ended("delta", timed(delta, len(some), len(some) * saved_row, bandwidth))
    tables = delta = None
    loaded = collection(options)
    ended("load", timed(lambda: saver.load(loaded, saves), rows, rows * saved_row, bandwidth))
    assert torch.equal(looked_up(loaded, some), expected), "loaded rows are others"
    loaded = None
    with TableReader(saves, "t") as reader:
        assert torch.equal(reader.lookup(some), expected), "served rows are others"
        ended("serve", serve(reader, list(itertools.islice(skewed_ids(rows, batch, 3), options.steps))))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000_000)
    parser.add_argument("--dim", type=int, default=8)
    parser.add_argument("--batch", type=int, default=65_536, help="lookups of a step")
    parser.add_argument("--steps", type=int, default=100, help="of the steady state, and batches that are served")
    parser.add_argument("--cache", type=int, default=262_144, help="rows of the device cache")
    parser.add_argument("--folder", type=Path, help="for the host store and saves; without it rows are in memory")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as saves:
        phases = run(options, Path(saves))
    write_json(options.json, {"machine": describe(), "options": vars(options), "phases": phases})
    return 0


if __name__ == "__main__":
    with_malloc_settings("benchmarks.large_table")
    torch.set_num_threads(1)
    sys.exit(main())
