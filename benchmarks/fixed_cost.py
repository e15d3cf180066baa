"""The fixed cost of a step on the CPU: small batches, by the number of tables.

python -m benchmarks.fixed_cost [--tables T ...] [--lookups N ...] [--optimizers NAME ...] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torchrec
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import rec_sdk_torch

from .contenders import NotAvailableError, optimizer_of
from .machine import describe, with_malloc_settings, write_json
from .options import positive_int
from .rivals import fbgemm_training
from .timing import no_collection
from .workload import EPS, LEARNING_RATE

DIM, ROWS = 16, 1_000
FIXED, PER_TABLE = 150.0, 1.0
"""Targets of the collections, in microseconds of processor time: a step with one table, and each table more."""
WARM_UP, ROUND = 20, 10


class Batches:
    """Batches of so many uniform ids, divided among all tables: one in each bag, and none in the last few."""

    def __init__(self, tables: int, lookups: int) -> None:
        self.keys = [f"f{i}" for i in range(tables)]
        self.samples = -(-lookups // tables)
        self.lengths = torch.zeros(tables * self.samples, dtype=torch.int64)
        self.lengths[:lookups] = 1
        self.of_features = [int(part.sum()) for part in self.lengths.split(self.samples)]
        self._lookups = lookups
        self._generator = torch.Generator().manual_seed(1)

    def jagged(self) -> KeyedJaggedTensor:
        """As a data loader makes one."""
        return KeyedJaggedTensor(self.keys, self.ids(), lengths=self.lengths)

    def ids(self) -> torch.Tensor:
        return torch.randint(ROWS, (self._lookups,), generator=self._generator)


Step = Callable[[Any], object]
"""A function of a batch: forward, backward and update."""


def _configs(kind: type, keys: Sequence[str]) -> list[Any]:
    return [kind(name=f"t{k}", feature_names=[k], num_embeddings=ROWS, embedding_dim=DIM) for k in keys]


def _pooled(module: Any, batches: Batches) -> Step:
    grad = torch.ones(batches.samples, DIM * len(batches.keys))
    return lambda batch: module(batch).values().backward(grad)


def _sequence(module: Any, batches: Batches) -> Step:
    """A model has one loss, not one for each table. So the engine is called without `torch.autograd.backward`, which
    checks the shape of each gradient in Python first, 4 us for every table.
    """
    keys, grads = batches.keys, tuple(torch.ones(count, DIM) for count in batches.of_features)
    engine: Any = torch.autograd.Variable._execution_engine

    def step(batch: KeyedJaggedTensor) -> None:
        outputs = module(batch)
        roots = tuple([outputs[key].values() for key in keys])
        engine.run_backward(roots, grads, False, False, (), allow_unreachable=True, accumulate_grad=True)

    return step


def _ours(pooled: bool, optimizer: str, batches: Batches) -> Step:
    config = rec_sdk_torch.EmbCacheEmbeddingBagConfig if pooled else rec_sdk_torch.EmbCacheEmbeddingConfig
    kind: Any = rec_sdk_torch.EmbCacheEmbeddingBagCollection if pooled else rec_sdk_torch.EmbCacheEmbeddingCollection
    module = kind(_configs(config, batches.keys), cache=ROWS, seed=0, device="cpu")
    cls, options = optimizer_of(optimizer)
    rec_sdk_torch.apply_optimizer_in_backward(cls, module.parameters(), options)
    return (_pooled if pooled else _sequence)(module, batches)


def _torchrec(pooled: bool, optimizer: str, batches: Batches) -> Step:
    """Unsharded: the gradient of each table is dense."""
    config = torchrec.EmbeddingBagConfig if pooled else torchrec.EmbeddingConfig
    kind: Any = torchrec.EmbeddingBagCollection if pooled else torchrec.EmbeddingCollection
    module = kind(tables=_configs(config, batches.keys), device=torch.device("cpu"))
    cls, options = optimizer_of(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torchrec.optim.apply_optimizer_in_backward(cls, module.parameters(), options)
    return (_pooled if pooled else _sequence)(module, batches)


def _fbgemm(optimizer: str, batches: Batches) -> Step:
    """The module alone, from ids and offsets: there is no KeyedJaggedTensor."""
    training = fbgemm_training()
    place = (training.EmbeddingLocation.HOST, training.ComputeDevice.CPU)
    module = training.SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, DIM, *place)] * len(batches.keys),
        optimizer=getattr(training.OptimType, {"sgd": "EXACT_SGD", "adagrad": "EXACT_ADAGRAD"}[optimizer]),
        learning_rate=LEARNING_RATE,
        eps=EPS,
        bounds_check_mode=training.BoundsCheckMode.NONE,
        stochastic_rounding=False,
    )
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), batches.lengths.cumsum(0)])
    grad = torch.ones(batches.samples, DIM * len(batches.keys))
    return lambda ids: module(ids, offsets).backward(grad)


def contenders(optimizer: str, batches: Batches) -> dict[str, tuple[Step, Callable[[], Any]]]:
    """By name a step, and what makes a batch for it."""
    made: dict[str, tuple[Step, Callable[[], Any]]] = {
        "pooled": (_ours(True, optimizer, batches), batches.jagged),
        "TorchRec pooled": (_torchrec(True, optimizer, batches), batches.jagged),
        "sequence": (_ours(False, optimizer, batches), batches.jagged),
        "TorchRec sequence": (_torchrec(False, optimizer, batches), batches.jagged),
    }
    try:
        made["FBGEMM pooled"] = (_fbgemm(optimizer, batches), batches.ids)
    except NotAvailableError as error:
        print(error)
    return made


def measure(optimizer: str, tables: int, lookups: int, steps: int) -> dict[str, float]:
    """Microseconds of processor time of a step: the tenth percentile, contenders turn by turn."""
    times: dict[str, list[int]] = {}
    made = contenders(optimizer, Batches(tables, lookups))
    for step, batch in made.values():
        for _ in range(WARM_UP):
            step(batch())
    with no_collection():
        for _ in range(-(-steps // ROUND)):
            for name, (step, batch) in made.items():
                for _ in range(ROUND):
                    given = batch()
                    begin = time.thread_time_ns()
                    step(given)
                    times.setdefault(name, []).append(time.thread_time_ns() - begin)
            gc.collect(0)
    return {name: sorted(each)[len(each) // 10] / 1e3 for name, each in times.items()}


def _report(results: Sequence[dict[str, Any]]) -> None:
    names = list(results[0]["microseconds"])
    print(f"{'optimizer':<10}{'lookups':>8}{'tables':>7}" + "".join(f"{name:>19}" for name in names))
    for result in results:
        row = "".join(f"{result['microseconds'].get(name, float('nan')):>19.0f}" for name in names)
        print(f"{result['optimizer']:<10}{result['lookups']:>8}{result['tables']:>7}{row}")
    for name in ("pooled", "sequence"):
        reached = [(r["microseconds"][name], FIXED + PER_TABLE * (r["tables"] - 1)) for r in results if name in names]
        missed = sum(took > target for took, target in reached)
        print(f"{name}: target {FIXED:.0f} us and {PER_TABLE:.0f} per table more: ", end="")
        print("met" if not missed else f"MISSED by {missed} of {len(reached)}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=positive_int, nargs="+", default=[1, 26, 200])
    parser.add_argument(
        "--lookups", type=positive_int, nargs="+", default=[128, 1024], help="of a batch, in all tables"
    )
    parser.add_argument("--optimizers", nargs="+", choices=("sgd", "adagrad"), default=["sgd", "adagrad"])
    parser.add_argument("--steps", type=positive_int, default=200, help="that are timed, of each contender")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    results = [
        {
            "optimizer": optimizer,
            "lookups": lookups,
            "tables": tables,
            "microseconds": measure(optimizer, tables, lookups, options.steps),
        }
        for optimizer in options.optimizers
        for lookups in options.lookups
        for tables in options.tables
    ]
    _report(results)
    write_json(options.json, {"machine": describe(), "results": results})
    return 0


if __name__ == "__main__":
    with_malloc_settings("benchmarks.fixed_cost")
    torch.set_num_threads(1)
    sys.exit(main())
