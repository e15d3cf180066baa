"""Benchmark of rows that are looked up for the first time: their cost beyond known rows, and the longest step."""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from rec_sdk_torch.tbe import InitializerType, TableBatchedEmbedding, TableConfig, TableOptimizer

from .machine import access_free_memory
from .runner import Option, Row, Target, benchmark

BYTES_PER_COLUMN = 24
"""Memory of a table, per column of a row: weights in host memory and in the cache, ids, and reserves of the id map."""
WARM_STEPS = 10
"""First steps that the longest step excludes."""
INITIALIZERS = {kind.value: kind for kind in InitializerType}


def train(table: TableBatchedEmbedding, batches: Sequence[torch.Tensor]) -> list[float]:
    """Trains each batch, of one lookup per bag; returns seconds of processor time per step."""
    seconds = []
    for ids in batches:
        offsets, grad = torch.arange(len(ids) + 1), torch.full((len(ids), table.tables[0].embedding_dim), 1e-3)
        start = time.process_time()
        table(ids, offsets).backward(grad)
        seconds.append(time.process_time() - start)
    return seconds


def batches_of_new_ids(hashed: bool, batch: int, steps: int) -> list[torch.Tensor]:
    """Draws distinct ids: any int64 for a hash table, below the number of rows for an index table."""
    generator = np.random.default_rng(0)
    count = batch * steps
    ids = generator.integers(-(2**62), 2**62, count) if hashed else generator.permutation(count)
    return list(torch.from_numpy(ids).split(batch))


@benchmark(
    {
        "dims": Option([16, 64, 128], "embedding dimensions", quick=[8]),
        "initializers": Option(list(INITIALIZERS), choices=tuple(INITIALIZERS), quick=["uniform"]),
        "caches": Option([1.0, 0.1], "rows of the cache, as a share of all rows", kind=float),
        "batch": Option(4096, "lookups of a step", quick=32),
        "steps": Option(200, quick=12),
    },
    [
        Target("microseconds of a new row", "new_us", worst=0.35),
        Target("longest step with new rows over the median", "longest", worst=3),
    ],
)
def new_rows(options: argparse.Namespace) -> Iterator[Row]:
    """Measures the processor time of a new row beyond a known one, in steps with SGD on one thread.

    All rows of the first pass over the batches are new, and none of the second and third. `new_us` is the difference of
    the first pass and the faster of the others, without the first step, per row.
    """
    threads, collecting = torch.get_num_threads(), gc.isenabled()
    torch.set_num_threads(1)
    gc.disable()
    try:
        for dim, kind, cache, hashed in itertools.product(
            options.dims, options.initializers, options.caches, (True, False)
        ):
            batches = batches_of_new_ids(hashed, options.batch, options.steps)
            rows = options.batch * options.steps
            access_free_memory(rows * dim * BYTES_PER_COLUMN)
            config = TableConfig("t", rows, dim, hashed=hashed, initializer_type=INITIALIZERS[kind])
            optimizer = TableOptimizer.create(torch.optim.SGD, {"lr": 0.1})
            slots = max(2 * options.batch, int(cache * rows))
            table = TableBatchedEmbedding([config], optimizer=optimizer, cache=slots)
            first, *later = (train(table, batches) for _ in range(3))
            known = [min(times) for times in zip(*later, strict=True)]
            median = statistics.median(first)
            yield {
                "table": "hash tables" if hashed else "index tables",
                "D": dim,
                "initializer": kind,
                "cache": cache,
                "new_us": 1e6 * (sum(first[1:]) - sum(known[1:])) / (rows - options.batch),
                "known_us": 1e6 * sum(known[1:]) / (rows - options.batch),
                "longest": max(first[WARM_STEPS:]) / median,
                "first_ms": [1e3 * seconds for seconds in first],
            }
    finally:
        torch.set_num_threads(threads)
        if collecting:
            gc.enable()
