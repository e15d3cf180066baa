"""Training with a host store on disk, more rows than memory.

Runs under a memory limit (a cgroup, made below the one of this process where that is allowed), first inserts all rows,
then trains on batches of ids that are uniform, or as skewed as clicks are. Without --folder rows are in memory.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch

from rec_sdk_torch.runtime.settings import parse_bytes
from rec_sdk_torch.tbe import Pooling, TableBatchedEmbedding, TableConfig

from .runner import Benchmark, Option, Row
from .tables import make_table
from .timing import Samples, seconds_of


@contextlib.contextmanager
def memory_limit(text: str) -> Iterator[str]:
    """Limits this process and its page cache to the bytes of `text`, such as 4GiB, or `none`; gives how."""
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


def batches(kind: str, rows: int, size: int, count: int, seed: int) -> Iterator[torch.Tensor]:
    """The ids of each step."""
    rng = np.random.default_rng(seed)
    for index in range(count):
        if kind == "insert":
            yield torch.arange(index * size, min((index + 1) * size, rows))
        elif kind == "uniform":
            yield torch.from_numpy(rng.integers(0, rows, size))
        else:  # the rank of an id in the order of its frequency, spread over the table by a product
            ranks = np.minimum(rng.zipf(1.2, size), rows).astype(np.int64)
            yield torch.from_numpy(ranks * 7919 % rows)


def step(embedding: TableBatchedEmbedding, ids: torch.Tensor) -> None:
    """Forward, backward and update."""
    embedding(ids, torch.arange(len(ids) + 1)).sum().backward()


def steps(embedding: TableBatchedEmbedding, kind: str, options: argparse.Namespace) -> Row:
    """Medians and sums of a phase."""
    count = -(-options.rows // options.batch) if kind == "insert" else options.steps
    samples = Samples()
    before, processor, faults = embedding.cache_stats(), time.process_time(), resource.getrusage(resource.RUSAGE_SELF)
    for ids in batches(kind, options.rows, options.batch, count, 1):
        samples.seconds.append(seconds_of(partial(step, embedding, ids)))
    after, now = embedding.cache_stats(), resource.getrusage(resource.RUSAGE_SELF)
    return {
        "ids": kind,
        "steps": count,
        "rows_in_per_step": (after["rows_in"] - before["rows_in"]) / count,
        "rows_out_per_step": (after["rows_out"] - before["rows_out"]) / count,
        "median_ms": 1e3 * samples.median,
        "worst_ms": 1e3 * max(samples.seconds),
        "total_s": sum(samples.seconds),
        "processor_s": time.process_time() - processor,
        "read_from_disk_MiB": (now.ru_inblock - faults.ru_inblock) / 2048,
        "major_faults": now.ru_majflt - faults.ru_majflt,
    }


def run(options: argparse.Namespace) -> Iterator[Row]:
    """Three phases, then the memory."""
    table = TableConfig(name="t", num_embeddings=options.rows, embedding_dim=options.dim, pooling=Pooling.SUM)
    with memory_limit(options.memory) as limit:
        store = None if options.folder is None else str(options.folder)
        embedding = make_table(table, torch.optim.Adagrad, cache=options.cache, seed=0, host_store=store)
        for kind in ("insert", "uniform", "skewed"):
            yield steps(embedding, kind, options)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        yield {"table": "limit", "limit": limit, "peak_memory_MiB": peak, "report": embedding.memory_report()}


BENCHMARK = Benchmark(
    run,
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

if __name__ == "__main__":
    BENCHMARK.start()
