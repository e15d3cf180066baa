"""FBGEMM's module on the CPU against ours of the same name, option by option.

Both take every step in turn, in one process and on one thread. Times are of the processor: other processes may run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rec_sdk_torch import fbgemm

from .rivals import fbgemm_training
from .runner import Benchmark, Option, Row
from .timing import Samples, no_collection

TABLES, DIM, FEATURES = 4, 64, 8
WARM_UP = 3


@dataclass(frozen=True)
class Case:
    """One option, beside the defaults.

    Attributes:
        options: of the constructor; members of enums by name.
        weighted: with per-sample weights that want a gradient.
        ranks: each feature has batch sizes of its own, on so many ranks; 0: all have one.
        shared: two features a table, else one.
        bag: ids of a bag.
    """

    options: dict[str, Any] = field(default_factory=dict)
    weighted: bool = False
    ranks: int = 0
    shared: bool = False
    bag: int = 8


ROWWISE = {"optimizer": "EXACT_ROWWISE_ADAGRAD"}
CASES = {
    "EXACT_SGD": Case(),
    "EXACT_ADAGRAD": Case({"optimizer": "EXACT_ADAGRAD"}),
    "EXACT_ROWWISE_ADAGRAD": Case(ROWWISE),
    "bags of one id": Case(ROWWISE, bag=1),
    "MEAN": Case({**ROWWISE, "pooling_mode": "MEAN"}),
    "NONE": Case({**ROWWISE, "pooling_mode": "NONE"}, bag=1),
    "per_sample_weights": Case(ROWWISE, weighted=True),
    "feature_table_map": Case(ROWWISE, shared=True),
    "weight_decay L2": Case({**ROWWISE, "weight_decay": 0.01, "weight_decay_mode": "L2"}, shared=True),
    "gradient_clipping": Case({**ROWWISE, "gradient_clipping": True}),
    "output_dtype FP16": Case({**ROWWISE, "output_dtype": "FP16"}),
    "weights_precision FP16": Case({**ROWWISE, "weights_precision": "FP16", "stochastic_rounding": False}),
    "bounds_check_mode IGNORE": Case({**ROWWISE, "bounds_check_mode": "IGNORE"}),
    "batch_size_per_feature_per_rank": Case(ROWWISE, ranks=2),
}
_ENUMS = {
    "optimizer": "OptimType",
    "pooling_mode": "PoolingMode",
    "weight_decay_mode": "WeightDecayMode",
    "output_dtype": "SparseType",
    "weights_precision": "SparseType",
    "bounds_check_mode": "BoundsCheckMode",
}


class Batches:
    """Batches of a case, with the gradients of their outputs."""

    def __init__(self, case: Case, rows: int, lookups: int, seed: int) -> None:
        self._case, self._rows = case, rows
        self._generator = torch.Generator().manual_seed(seed)
        self.features = FEATURES if case.shared else TABLES
        bags = lookups // self.features // case.bag
        self.sizes: list[list[int]] | None = None
        if case.ranks:
            mean = bags // case.ranks
            sizes = torch.randint(mean // 2, mean * 3 // 2, (self.features, case.ranks), generator=self._generator)
            self.sizes = sizes.tolist()
        total = int(sizes.sum()) if case.ranks else bags * self.features
        self._offsets = torch.arange(0, total * case.bag + 1, case.bag)

    def next(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, None, list[list[int]] | None]:
        """The arguments of a forward: ids of a power law."""
        count = int(self._offsets[-1])
        draws = torch.rand(count, generator=self._generator, dtype=torch.float64) ** 4
        ids = (draws * self._rows).long()
        weights = torch.rand(count, generator=self._generator) if self._case.weighted else None
        return ids, self._offsets, weights, None, self.sizes


def make(module: Any, case: Case, features: int, rows: int) -> Any:
    """The module of `module`, FBGEMM's or ours, with random weights."""
    enums = {
        name: getattr(getattr(module, _ENUMS[name]), value) for name, value in case.options.items() if name in _ENUMS
    }
    place = (module.EmbeddingLocation.HOST, module.ComputeDevice.CPU)
    made = module.SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, DIM, *place)] * TABLES,
        feature_table_map=[feature * TABLES // features for feature in range(features)],
        **{"bounds_check_mode": module.BoundsCheckMode.NONE, "learning_rate": 1e-4, **case.options, **enums},
    )
    torch.manual_seed(1)
    made.init_embedding_weights_uniform(-0.1, 0.1)
    return made


def _step(module: Any, batch: Sequence[Any]) -> tuple[float, torch.Tensor]:
    """Seconds of the processor, without those of making a gradient, and the output."""
    ids, offsets, weights, *others = batch
    weights = None if weights is None else weights.clone().requires_grad_()
    begin = time.process_time()
    out = module(ids, offsets, weights, *others)
    middle = time.process_time()
    grad = torch.ones_like(out)
    again = time.process_time()
    out.backward(grad)
    return middle - begin + time.process_time() - again, out.detach()


def run_case(name: str, options: argparse.Namespace) -> Row:
    """Milliseconds of a step of each, and how many times ours theirs takes: median of rounds.

    Raises:
        AssertionError: the outputs differ.
    """
    case = CASES[name]
    batches = Batches(case, options.rows, options.lookups, options.seed)
    modules = [make(module, case, batches.features, options.rows) for module in (fbgemm_training(), fbgemm)]
    theirs, ours = samples = Samples(), Samples()
    with no_collection():
        for number in range(WARM_UP + options.rounds):
            batch = batches.next()
            outputs = []
            for index in (0, 1) if number % 2 else (1, 0):
                spent, out = _step(modules[index], batch)
                outputs.append(out.flatten().float())
                if number >= WARM_UP:
                    samples[index].seconds.append(spent)
            torch.testing.assert_close(*outputs, rtol=1e-2, atol=1e-2)
    times = {"fbgemm_ms": 1e3 * theirs.best, "ours_ms": 1e3 * ours.best}
    return {"case": name, **times, "ratio": theirs.over(ours)}


def run(options: argparse.Namespace) -> Iterator[Row]:
    """A row for each option."""
    return (run_case(name, options) for name in options.cases)


BENCHMARK = Benchmark(
    run,
    {
        "cases": Option(list(CASES), choices=list(CASES)),
        "rows": Option(100_000, "of each of the 4 tables", quick=200),
        "lookups": Option(65536, "per step", quick=512),
        "rounds": Option(15, quick=2),
        "seed": Option(0, kind=int),
    },
    malloc=False,
)

if __name__ == "__main__":
    BENCHMARK.start()
