"""Lookups of TableReader from warm pages, beside numpy's gather of the same rows: python -m benchmarks.serving"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rec_sdk_torch.checkpoint.saver import Saver
from rec_sdk_torch.serving import TableReader
from rec_sdk_torch.tbe import TableBatchedEmbedding, TableConfig, TableOptimizer

from .machine import describe, write_json

Array = npt.NDArray[Any]


def rates(calls: dict[str, Callable[[], object]], lookups: int, rounds: int) -> dict[str, float]:
    """Rows per second of the processor, of the fastest of some interleaved rounds."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            begin = time.process_time()
            call()
            best[name] = min(best[name], time.process_time() - begin)
    return {name: lookups / seconds for name, seconds in best.items()}


def lookups(reader: TableReader, every: Array, plain: Array, places: Array) -> dict[str, Callable[[], object]]:
    """The same rows, by their ids and by their places in an array."""
    ids, out = every[places], np.empty((len(places), plain.shape[1]), plain.dtype)
    return {
        "TableReader": lambda: reader.lookup(ids),
        "numpy": lambda: np.take(plain, places, axis=0, out=out, mode="clip"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--lookups", type=int, default=100_000, help="of a call")
    parser.add_argument("--deltas", type=int, default=2, help="saves behind the full one, of a hundredth of the rows")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    result: dict[str, object] = {"machine": describe(), **vars(options)}
    with tempfile.TemporaryDirectory() as folder:
        table = TableConfig(name="t", num_embeddings=options.rows, embedding_dim=options.dim, track_changes=True)
        optimizer = TableOptimizer.create(torch.optim.SGD, {"lr": 0.1})
        embedding = TableBatchedEmbedding([table], optimizer=optimizer, cache=1000, seed=0)
        every = rng.integers(0, 2**62, options.rows)
        every = np.unique(every)
        for number in range(options.deltas + 1):
            some = torch.from_numpy(every if number == 0 else rng.choice(every, options.rows // 100, replace=False))
            embedding.view("t").write(some, {"weight": torch.rand(len(some), options.dim)})
            Saver().save(embedding, folder, incremental=number > 0)
            begin = time.perf_counter()
            reader = TableReader(folder, "t")
            opened = 1e3 * (time.perf_counter() - begin)
            places = rng.integers(0, len(every), options.lookups)
            plain = reader.lookup(every)
            calls = lookups(reader, every, plain, places)
            rows = {f"{name}_rows_per_s": rate for name, rate in rates(calls, len(places), options.rounds).items()}
            result[f"{number} deltas"] = {"open_ms": opened, **rows}
            print(number, "deltas:", json.dumps(result[f"{number} deltas"]), flush=True)
    write_json(options.json, result)


if __name__ == "__main__":
    main()
