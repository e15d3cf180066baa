"""Training with a host store on disk, more rows than memory: python -m benchmarks.disk_store --folder /path

Runs under a memory limit (a cgroup, made below the one of this process where that is allowed), first inserts all rows,
then trains on batches of ids that are uniform, or as skewed as clicks are, and writes what a step costs as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from rec_sdk_torch.settings import parse_bytes
from rec_sdk_torch.tbe import Pooling, TableBatchedEmbedding, TableConfig, TableOptimizer

from .machine import write_json


@contextlib.contextmanager
def memory_limit(size: int) -> Iterator[str]:
    """Limits this process and its page cache to `size` bytes; gives how."""
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
        print(f"no memory limit: {error}; run it under: systemd-run --scope -p MemoryMax={size} ...")
        yield "none"
        return
    try:
        yield f"cgroup {'v2' if v1 is None else 'v1'}, {size} bytes"
    finally:
        (parent / "cgroup.procs").write_text(str(os.getpid()))
        own.rmdir()


def batches(kind: str, rows: int, size: int, count: int, seed: int) -> Iterator[torch.Tensor]:
    rng = np.random.default_rng(seed)
    for index in range(count):
        if kind == "insert":
            yield torch.arange(index * size, min((index + 1) * size, rows))
        elif kind == "uniform":
            yield torch.from_numpy(rng.integers(0, rows, size))
        else:  # the rank of an id in the order of its frequency, spread over the table by a product
            ranks = np.minimum(rng.zipf(1.2, size), rows).astype(np.int64)
            yield torch.from_numpy(ranks * 7919 % rows)


def steps(embedding: TableBatchedEmbedding, kind: str, rows: int, size: int, count: int) -> dict[str, float]:
    """Medians and sums of a phase."""
    seconds = []
    before, processor, faults = embedding.cache_stats(), time.process_time(), resource.getrusage(resource.RUSAGE_SELF)
    for ids in batches(kind, rows, size, count, 1):
        begin = time.perf_counter()
        embedding(ids, torch.arange(len(ids) + 1)).sum().backward()
        seconds.append(time.perf_counter() - begin)
    after, now = embedding.cache_stats(), resource.getrusage(resource.RUSAGE_SELF)
    return {
        "steps": count,
        "lookups_per_step": size,
        "rows_in_per_step": (after["rows_in"] - before["rows_in"]) / count,
        "rows_out_per_step": (after["rows_out"] - before["rows_out"]) / count,
        "median_ms": 1e3 * float(np.median(seconds)),
        "worst_ms": 1e3 * max(seconds),
        "total_s": sum(seconds),
        "processor_s": time.process_time() - processor,
        "read_from_disk_MiB": (now.ru_inblock - faults.ru_inblock) / 2048,
        "major_faults": now.ru_majflt - faults.ru_majflt,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", help="for the host store; without it rows are in memory")
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--memory", default="4GiB")
    parser.add_argument("--cache", type=int, default=200_000, help="rows of the device cache")
    parser.add_argument("--batch", type=int, default=65_536, help="lookups of a step")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    table = TableConfig(name="t", num_embeddings=options.rows, embedding_dim=options.dim, pooling=Pooling.SUM)
    result: dict[str, object] = vars(options).copy()
    with memory_limit(parse_bytes(options.memory, "--memory")) as limit:
        optimizer = TableOptimizer.create(torch.optim.Adagrad, {"lr": 0.1})
        embedding = TableBatchedEmbedding(
            [table], optimizer=optimizer, cache=options.cache, seed=0, host_store=options.folder
        )
        result["limit"] = limit
        for kind in ("insert", "uniform", "skewed"):
            count = -(-options.rows // options.batch) if kind == "insert" else options.steps
            result[kind] = steps(embedding, kind, options.rows, options.batch, count)
            print(kind, json.dumps(result[kind]), flush=True)
        result["memory_report"] = embedding.memory_report()
        result["peak_memory_MiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        del embedding
    print(json.dumps(result, indent=1, default=str))
    write_json(options.json, result)


if __name__ == "__main__":
    main()
