"""Steps of every optimizer over the time that moving their bytes takes, on the CPU.

python -m benchmarks.optimizers [--optimizers NAME ...] [--dims D ...] [--json FILE]
"""

from __future__ import annotations

import argparse
import pkgutil
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torchrec.modules.embedding_configs import DataType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from rec_sdk_torch import EmbCacheEmbeddingCollection, EmbCacheEmbeddingConfig, apply_optimizer_in_backward
from rec_sdk_torch.formulas import UPDATES, OptimizerSpec
from rec_sdk_torch.tbe import TableConfig, TableOptimizer
from rec_sdk_torch.tbe.cache.group_spec import record_layout

from .bounds import huge_buffer
from .machine import describe, with_malloc_settings, write_json
from .options import positive_int
from .timing import best_of, no_collection

TABLES, BATCHES, WARM_UP = 4, 4, 3
TARGET = 2.5
"""A step takes at most so many times its copy bound."""


@dataclass(frozen=True)
class Case:
    """An optimizer, its keywords beside `lr`, and the data type of the weights."""

    cls: type[torch.optim.Optimizer]
    options: dict[str, Any] = field(default_factory=dict)
    weights: DataType = DataType.FP32

    @property
    def record_bytes(self) -> Callable[[int], int]:
        """A function from D to the bytes of a row's record."""
        dtype = torch.bfloat16 if self.weights is DataType.BF16 else torch.float32
        optimizer = TableOptimizer.create(self.cls, {"lr": 0.01, **self.options})
        return lambda dim: record_layout(TableConfig("t", 1, dim, weight_dtype=dtype), optimizer).bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of an element."""
        return 2 if self.weights is DataType.BF16 else 4


def _named(spec: OptimizerSpec) -> str:
    short = spec.classes[0].rpartition(".")[2]
    return " ".join([short, *(f"{name}={value}" for name, value in spec.example.items())])


HALF = torch.bfloat16
CASES = {
    **{
        _named(spec): Case(pkgutil.resolve_name(spec.classes[0]), dict(spec.example))
        for spec in UPDATES
        if not spec.hands_out
    },
    "Adam, bf16 states": Case(torch.optim.Adam, {"state_dtypes": {"exp_avg": HALF, "exp_avg_sq": HALF}}),
    "Adam, bf16 weights": Case(torch.optim.Adam, weights=DataType.BF16),
    "Adam, bf16 weights and states": Case(
        torch.optim.Adam, {"state_dtypes": {"exp_avg": HALF, "exp_avg_sq": HALF}}, DataType.BF16
    ),
}


class Steps:
    """Forward, backward and update of a sequence collection whose tables are resident, on batches of uniform ids."""

    def __init__(self, case: Case, rows: int, dim: int, lookups: int) -> None:
        generator = torch.Generator().manual_seed(1)
        names = [f"t{i}" for i in range(TABLES)]
        configs = [
            EmbCacheEmbeddingConfig(
                name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[name], data_type=case.weights
            )
            for name in names
        ]
        self._collection = EmbCacheEmbeddingCollection(configs)
        apply_optimizer_in_backward(case.cls, self._collection.parameters(), {"lr": 0.01, **case.options})
        each = lookups // TABLES
        ids = torch.randint(rows, (BATCHES, TABLES, each), generator=generator)
        lengths = torch.ones(TABLES * each, dtype=torch.int32)
        self._batches = [KeyedJaggedTensor(names, of_batch.reshape(-1), lengths=lengths) for of_batch in ids]
        self._grad = torch.randn(each, dim, generator=generator)
        self._count = 0
        unique = statistics.mean(float(ids[b, t].unique().numel()) for b in range(BATCHES) for t in range(TABLES))
        record = case.record_bytes(dim)
        self.bytes = 8.0 * lookups * (1 + dim) + TABLES * unique * (case.weight_bytes * dim + 2 * record)
        """As the copy bound of `benchmarks.cpu` counts: ids, outputs, gradients; weights and records of the rows."""

    def run(self) -> None:
        """One step."""
        features = self._collection(self._batches[self._count % BATCHES])
        outputs = [features[name].values() for name in features]
        torch.autograd.backward(outputs, [self._grad] * TABLES)
        self._count += 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizers", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--dims", type=positive_int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--rows", type=positive_int, default=100_000, help="of each of 4 tables")
    parser.add_argument("--lookups", type=positive_int, default=65_536, help="of a step, in all tables")
    parser.add_argument("--rounds", type=positive_int, default=15)
    parser.add_argument("--copy-bytes", type=positive_int, default=256 << 20, help="of the copy that is the bound")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    source, target = huge_buffer(options.copy_bytes), huge_buffer(options.copy_bytes)
    bandwidth = 0.0
    results: list[dict[str, Any]] = []
    for name in options.optimizers:
        for dim in options.dims:
            steps = Steps(CASES[name], options.rows, dim, options.lookups)
            with no_collection():
                best_of(steps.run, WARM_UP)
                seconds = best_of(steps.run, options.rounds)
            bandwidth = max(bandwidth, 2 * options.copy_bytes / best_of(lambda: target.copy_(source), 2))
            results.append({"optimizer": name, "dim": dim, "milliseconds": 1e3 * seconds, "bytes": steps.bytes})
    print(f"copy {bandwidth / 1e9:.1f} GB/s; milliseconds of a step, and over the copy bound of its bytes")
    for result in results:
        result["over_copy_bound"] = 1e-3 * result["milliseconds"] * bandwidth / result["bytes"]
    for name in options.optimizers:
        of_name = [result for result in results if result["optimizer"] == name]
        numbers = "".join(f"   D = {r['dim']}: {r['milliseconds']:7.2f} {r['over_copy_bound']:5.2f}" for r in of_name)
        print(f"  {name:<72}{numbers}")
    worst = max(results, key=lambda result: float(result["over_copy_bound"]))
    verdict = "met" if worst["over_copy_bound"] <= TARGET else "MISSED"
    print(f"worst {worst['over_copy_bound']:.2f} ({worst['optimizer']}, D = {worst['dim']}); target {TARGET} {verdict}")
    write_json(options.json, {"machine": describe(), "copy_bytes_per_second": bandwidth, "results": results})
    return 0


if __name__ == "__main__":
    with_malloc_settings("benchmarks.optimizers")
    torch.set_num_threads(1)
    sys.exit(main())
