"""Updates and whole steps of 16-bit weights: rounding stochastically over rounding to nearest, on the CPU.

python -m benchmarks.rounding [--rows N ...] [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torchrec.modules.embedding_configs import DataType
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from rec_sdk_torch import EmbCacheEmbeddingBagCollection, EmbCacheEmbeddingBagConfig, apply_optimizer_in_backward
from rec_sdk_torch.ops import ops
from rec_sdk_torch.record import RecordLayout
from rec_sdk_torch.tbe import TableOptimizer

from .machine import describe, with_malloc_settings, write_json
from .options import positive_int
from .timing import no_collection

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "SGD": torch.optim.SGD,
    "Adagrad": torch.optim.Adagrad,
    "Adam": torch.optim.SparseAdam,
    "RowWiseAdagrad": RowWiseAdagrad,
}
"""One optimizer for each form of a record."""
DTYPES = {"bf16": (torch.bfloat16, DataType.BF16), "fp16": (torch.float16, DataType.FP16)}
LOOKUPS, TABLES, BAG = 65_536, 4, 16

Step = Callable[[], object]


def update(rows: int, dim: int, optimizer: str, dtype: str) -> tuple[Step, Step]:
    """`update_rows` of every row by one lookup, in random order: to nearest, stochastically; the same records."""
    of_tables = TableOptimizer.create(OPTIMIZERS[optimizer], {"lr": 0.01})
    formula, weight_dtype = of_tables.spec.formula, DTYPES[dtype][0]
    layout = RecordLayout(dim, weight_dtype, formula.state_elements(dim))
    cache = torch.zeros((rows, layout.bytes), dtype=torch.uint8)
    layout.weight(cache).normal_()
    grad = torch.randn(rows, dim)
    slots = torch.randperm(rows).int()
    places = torch.arange(rows + 1, dtype=torch.int32)
    tables, row = torch.tensor([0, rows], dtype=torch.int32), torch.tensor([of_tables.coefficients()])
    lookups = (slots, tables, places, places[:-1], None, None, None)
    arguments = (cache, [grad], *lookups, row, formula.kernel, dim, weight_dtype)
    ids, seeds = torch.randint(2**40, (rows,)), torch.tensor([77])
    return lambda: ops.update_rows(*arguments), lambda: ops.update_rows(*arguments, ids, seeds)


def collection_step(rows: int, dim: int, optimizer: str, dtype: str) -> tuple[Step, Step]:
    """Forward, backward and update of a collection of pooled tables that are resident, on batches of uniform ids."""
    bags = LOOKUPS // (TABLES * BAG)
    names = [f"t{i}" for i in range(TABLES)]
    lengths = torch.full((TABLES * bags,), BAG, dtype=torch.int32)
    batches = [KeyedJaggedTensor(names, torch.randint(rows, (LOOKUPS,)), lengths=lengths) for _ in range(4)]
    grad = torch.randn(bags, TABLES * dim)

    def step_of(stochastic: bool) -> Step:
        configs = [
            EmbCacheEmbeddingBagConfig(
                name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[name], data_type=DTYPES[dtype][1]
            )
            for name in names
        ]
        collection = EmbCacheEmbeddingBagCollection(configs, stochastic_rounding=stochastic)
        apply_optimizer_in_backward(OPTIMIZERS[optimizer], collection.parameters(), {"lr": 0.01})
        count = 0

        def step() -> None:
            nonlocal count
            collection(batches[count % len(batches)]).values().backward(grad)
            count += 1

        return step

    return step_of(False), step_of(True)


def processor_seconds(call: Step) -> float:
    """Processor time of this thread."""
    begin = time.thread_time()
    call()
    return time.thread_time() - begin


def ratio(nearest: Step, stochastic: Step, rounds: int) -> dict[str, float]:
    """Fastest of each in milliseconds, their ratio, and the median of the ratios of single rounds."""
    seconds: tuple[list[float], list[float]] = ([], [])
    with no_collection():
        for i in range(rounds + 3):
            order = ((0, nearest), (1, stochastic))
            for which, call in order if i % 2 else order[::-1]:
                taken = processor_seconds(call)
                if i >= 3:
                    seconds[which].append(taken)
    fastest = [min(each) for each in seconds]
    return {
        "nearest_ms": 1e3 * fastest[0],
        "stochastic_ms": 1e3 * fastest[1],
        "ratio": fastest[1] / fastest[0],
        "median_ratio": statistics.median(b / a for a, b in zip(*seconds, strict=True)),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=positive_int, nargs="*", default=[4096, 200_000], help="of an update")
    parser.add_argument("--step-rows", type=positive_int, default=100_000, help="of each of 4 tables of a step")
    parser.add_argument("--dims", type=positive_int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--no-steps", dest="steps", action="store_false", help="updates alone")
    parser.add_argument("--rounds", type=positive_int, default=21)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    kinds = [(f"update of {rows} rows", update, rows) for rows in options.rows]
    if options.steps:
        kinds.append(("step of a collection", collection_step, options.step_rows))
    results: list[dict[str, Any]] = []
    for kind, make, rows in kinds:
        for dtype in options.dtypes:
            print(f"{kind}, {dtype}: milliseconds to nearest, stochastically, ratio, median of the rounds' ratios")
            for optimizer in options.optimizers:
                for dim in options.dims:
                    result = ratio(*make(rows, dim, optimizer, dtype), options.rounds)
                    results.append({"kind": kind, "dtype": dtype, "optimizer": optimizer, "dim": dim, **result})
                    numbers = "".join(f"{value:9.3f}" for value in result.values())
                    print(f"  {optimizer:<16}D = {dim:<5}{numbers}", flush=True)
    for kind, _, _ in kinds:
        of_kind = [result["ratio"] for result in results if result["kind"] == kind]
        print(f"{kind}: ratio {statistics.median(of_kind):.3f} (median), {max(of_kind):.3f} (worst)")
    write_json(options.json, {"machine": describe(), "results": results})
    return 0


if __name__ == "__main__":
    with_malloc_settings("benchmarks.rounding")
    torch.set_num_threads(1)
    sys.exit(main())
