"""Steps of every optimizer over the time that moving their bytes takes, on the CPU."""

from __future__ import annotations

import argparse
import pkgutil
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torchrec.modules.embedding_configs import DataType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from rec_sdk_torch.formulas import UPDATES, OptimizerSpec
from rec_sdk_torch.tbe import TableConfig, TableOptimizer
from rec_sdk_torch.tbe.cache.group_spec import record_layout

from .bounds import huge_buffer
from .runner import Benchmark, Option, Row, Target
from .tables import configs, make_collection
from .timing import best_of, no_collection

TABLES, BATCHES, WARM_UP = 4, 4, 3


@dataclass(frozen=True)
class Case:
    """An optimizer, its keywords beside `lr`, and the data type of the weights."""

    cls: type[torch.optim.Optimizer]
    options: dict[str, Any] = field(default_factory=dict)
    weights: DataType = DataType.FP32

    @property
    def keywords(self) -> dict[str, Any]:
        return {"lr": 0.01, **self.options}

    def row_bytes(self, dim: int) -> tuple[int, int]:
        """Bytes of a row's weight, and of its record."""
        dtype = torch.bfloat16 if self.weights is DataType.BF16 else torch.float32
        optimizer = TableOptimizer.create(self.cls, self.keywords)
        record = record_layout(TableConfig("t", 1, dim, weight_dtype=dtype), optimizer).bytes
        return dtype.itemsize * dim, record


def _named(spec: OptimizerSpec) -> str:
    short = spec.classes[0].rpartition(".")[2]
    return " ".join([short, *(f"{name}={value}" for name, value in spec.example.items())])


HALF = {"state_dtypes": dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.bfloat16)}
CASES = {
    **{
        _named(spec): Case(pkgutil.resolve_name(spec.classes[0]), dict(spec.example))
        for spec in UPDATES
        if not spec.hands_out
    },
    "Adam, bf16 states": Case(torch.optim.Adam, HALF),
    "Adam, bf16 weights": Case(torch.optim.Adam, weights=DataType.BF16),
    "Adam, bf16 weights and states": Case(torch.optim.Adam, HALF, DataType.BF16),
}


class Steps:
    """Forward, backward and update of a sequence collection whose tables are resident, on batches of uniform ids."""

    def __init__(self, case: Case, rows: int, dim: int, lookups: int) -> None:
        generator = torch.Generator().manual_seed(1)
        tables = configs([(rows, dim)] * TABLES, data_type=case.weights)
        self._collection = make_collection(tables, case.cls, case.keywords, pooled=False)
        each = lookups // TABLES
        ids = torch.randint(rows, (BATCHES, TABLES, each), generator=generator)
        lengths, names = torch.ones(TABLES * each, dtype=torch.int32), [f"f{i}" for i in range(TABLES)]
        self._batches = [KeyedJaggedTensor(names, of_batch.reshape(-1), lengths=lengths) for of_batch in ids]
        self._grad = torch.randn(each, dim, generator=generator)
        self._count = 0
        unique = statistics.mean(float(part.unique().numel()) for batch in ids for part in batch)
        weight, record = case.row_bytes(dim)
        self.bytes = 8.0 * lookups * (1 + dim) + TABLES * unique * (weight + 2 * record)
        """As the copy bound of `benchmarks.cpu` counts: ids, outputs, gradients; weights and records of the rows."""

    def run(self) -> None:
        """One step."""
        features = self._collection(self._batches[self._count % BATCHES])
        outputs = [features[name].values() for name in features]
        torch.autograd.backward(outputs, [self._grad] * TABLES)
        self._count += 1


def run(options: argparse.Namespace) -> Iterator[Row]:
    """The fastest steps, over the copy bound of their bytes: the fastest copy of the whole run counts."""
    source, target = huge_buffer(options.copy_bytes), huge_buffer(options.copy_bytes)
    bandwidth = 0.0
    found = []
    for name in options.optimizers:
        for dim in options.dims:
            steps = Steps(CASES[name], options.rows, dim, options.lookups)
            with no_collection():
                best_of(steps.run, WARM_UP)
                seconds = best_of(steps.run, options.rounds)
            bandwidth = max(bandwidth, 2 * options.copy_bytes / best_of(lambda: target.copy_(source), 2))
            found.append((name, dim, seconds, steps.bytes))
    for name, dim, seconds, size in found:
        over = seconds * bandwidth / size
        yield {"optimizer": name, "dim": dim, "milliseconds": 1e3 * seconds, "bytes": size, "over_copy_bound": over}
    yield {"table": "copy", "bytes_per_second": bandwidth}


BENCHMARK = Benchmark(
    run,
    {
        "optimizers": Option(list(CASES), choices=list(CASES)),
        "dims": Option([32, 64, 128], quick=[4, 8]),
        "rows": Option(100_000, "of each of 4 tables", quick=50),
        "lookups": Option(65_536, "of a step, in all tables", quick=80),
        "rounds": Option(15, quick=1),
        "copy_bytes": Option(256 << 20, "of the copy that is the bound", quick=4096),
    },
    [Target("step over the copy bound", "over_copy_bound", worst=2.5)],
)

if __name__ == "__main__":
    BENCHMARK.start()
