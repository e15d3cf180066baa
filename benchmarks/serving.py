"""Lookups of TableReader from warm pages, beside numpy's gather of the same rows."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from rec_sdk_torch.saves.saver import Saver
from rec_sdk_torch.serving import TableReader
from rec_sdk_torch.tbe import TableConfig

from .runner import Benchmark, Option, Row, Target
from .tables import make_table
from .timing import take_turns


def run(options: argparse.Namespace) -> Iterator[Row]:
    """Rows per second of the processor, of the fastest of some interleaved rounds, behind more and more deltas."""
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
            calls: dict[str, Callable[[], object]] = {
                "TableReader": partial(reader.lookup, ids),
                "numpy": partial(np.take, plain, places, 0, out, "clip"),
            }
            found = take_turns(calls, options.rounds, 0, time.process_time)
            rates = {f"{name}_rows_per_s": len(places) / samples.best for name, samples in found.items()}
            yield {"deltas": number, "open_ms": opened, **rates, "correct": bool((reader.lookup(ids) == out).all())}


BENCHMARK = Benchmark(
    run,
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

if __name__ == "__main__":
    BENCHMARK.start()
