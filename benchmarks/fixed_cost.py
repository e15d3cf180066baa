"""The fixed cost of a step on the CPU: small batches, by the number of tables."""

from __future__ import annotations

import argparse
import gc
import itertools
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from .contenders import optimizer_of
from .rivals import fbgemm_module
from .runner import Benchmark, Option, Row, Target, say
from .tables import NotAvailableError, configs, make_collection
from .timing import no_collection

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


def _collection_step(pooled: bool, prefix: str, optimizer: str, batches: Batches) -> Step:
    """The step of a collection of ours, or of TorchRec's, which is unsharded: the gradient of each table is dense.

    A model has one loss, not one for each table. So a sequence calls the engine without `torch.autograd.backward`,
    which checks the shape of each gradient in Python first, 4 us for every table.
    """
    keys = batches.keys
    options: dict[str, Any] = {"cache": ROWS, "seed": 0} if prefix else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = make_collection(
            configs([(ROWS, DIM)] * len(keys)), *optimizer_of(optimizer), pooled, prefix, device="cpu", **options
        )
    if pooled:
        grad = torch.ones(batches.samples, DIM * len(keys))
        return lambda batch: module(batch).values().backward(grad)
    grads, engine = tuple(torch.ones(count, DIM) for count in batches.of_features), _ENGINE

    def step(batch: KeyedJaggedTensor) -> None:
        outputs = module(batch)
        roots = tuple([outputs[key].values() for key in keys])
        engine.run_backward(roots, grads, False, False, (), allow_unreachable=True, accumulate_grad=True)

    return step


_ENGINE: Any = torch.autograd.Variable._execution_engine


def _fbgemm(optimizer: str, batches: Batches) -> Step:
    """The module alone, from ids and offsets: there is no KeyedJaggedTensor."""
    module = fbgemm_module([(ROWS, DIM)] * len(batches.keys), optimizer)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), batches.lengths.cumsum(0)])
    grad = torch.ones(batches.samples, DIM * len(batches.keys))
    return lambda ids: module(ids, offsets).backward(grad)


def contenders(optimizer: str, batches: Batches) -> dict[str, tuple[Step, Callable[[], Any]]]:
    """By name a step, and what makes a batch for it."""
    made: dict[str, tuple[Step, Callable[[], Any]]] = {
        f"{name}{'pooled' if pooled else 'sequence'}": (
            _collection_step(pooled, prefix, optimizer, batches),
            batches.jagged,
        )
        for pooled in (True, False)
        for name, prefix in (("", "EmbCache"), ("TorchRec ", ""))
    }
    try:
        made["FBGEMM pooled"] = (_fbgemm(optimizer, batches), batches.ids)
    except NotAvailableError as error:
        say(str(error))
    return made


def measure(optimizer: str, tables: int, lookups: int, steps: int) -> dict[str, float]:
    """Microseconds of processor time of a step: the tenth percentile, contenders turn by turn."""
    made = contenders(optimizer, Batches(tables, lookups))
    times: dict[str, list[int]] = {name: [] for name in made}
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
                    times[name].append(time.thread_time_ns() - begin)
            gc.collect(0)
    return {name: sorted(each)[len(each) // 10] / 1e3 for name, each in times.items()}


def run(options: argparse.Namespace) -> Iterator[Row]:
    """A row for each optimizer, number of lookups and number of tables."""
    for optimizer, lookups, tables in itertools.product(options.optimizers, options.lookups, options.tables):
        shown = {"table": "microseconds", "optimizer": optimizer, "lookups": lookups, "tables": tables}
        yield {**shown, **measure(optimizer, tables, lookups, options.steps)}


def over_target(form: str, row: Row) -> float:
    """A step of ours over its target."""
    over: float = row[form] / (FIXED + PER_TABLE * (row["tables"] - 1))
    return over


BENCHMARK = Benchmark(
    run,
    {
        "tables": Option([1, 26, 200], quick=[1, 3]),
        "lookups": Option([128, 1024], "of a batch, in all tables", quick=[7]),
        "optimizers": Option(["sgd", "adagrad"], choices=("sgd", "adagrad"), quick=["sgd"]),
        "steps": Option(200, "that are timed, of each contender", quick=1),
    },
    [
        Target(
            f"{form} over {FIXED:.0f} us and {PER_TABLE:.0f} for each table more",
            partial(over_target, form),
            worst=1.0,
        )
        for form in ("pooled", "sequence")
    ],
)

if __name__ == "__main__":
    BENCHMARK.start()
