"""Updates and whole steps of 16-bit weights: rounding stochastically over rounding to nearest, on the CPU."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator

import torch
from torchrec.modules.embedding_configs import DataType
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from rec_sdk_torch.operators.calls import ops
from rec_sdk_torch.operators.record import RecordLayout
from rec_sdk_torch.tbe import TableOptimizer

from .runner import Benchmark, Option, Row, Target
from .tables import configs, make_collection
from .timing import take_turns

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
    names = [f"f{i}" for i in range(TABLES)]
    lengths = torch.full((TABLES * bags,), BAG, dtype=torch.int32)
    batches = [KeyedJaggedTensor(names, torch.randint(rows, (LOOKUPS,)), lengths=lengths) for _ in range(4)]
    grad = torch.randn(bags, TABLES * dim)
    tables = configs([(rows, dim)] * TABLES, data_type=DTYPES[dtype][1])

    def step_of(stochastic: bool) -> Step:
        collection = make_collection(tables, OPTIMIZERS[optimizer], {"lr": 0.01}, stochastic_rounding=stochastic)
        endless = itertools.cycle(batches)
        return lambda: collection(next(endless)).values().backward(grad)

    return step_of(False), step_of(True)


def run(options: argparse.Namespace) -> Iterator[Row]:
    """Fastest rounds in milliseconds, their ratio, and the median of the ratios of single rounds."""
    torch.manual_seed(0)
    kinds = [(f"update of {rows} rows", update, rows) for rows in options.rows]
    if options.steps:
        kinds.append((STEP, collection_step, options.step_rows))
    for (kind, make, rows), dtype, name, dim in itertools.product(
        kinds, options.dtypes, options.optimizers, options.dims
    ):
        nearest, stochastic = make(rows, dim, name, dtype)
        samples = take_turns({"nearest": nearest, "stochastic": stochastic}, options.rounds)
        yield {
            **{"kind": kind, "dtype": dtype, "optimizer": name, "dim": dim},
            **{f"{name}_ms": 1e3 * each.best for name, each in samples.items()},
            "ratio": samples["stochastic"].best / samples["nearest"].best,
            "median_ratio": samples["stochastic"].over(samples["nearest"]),
        }


STEP = "step of a collection"
BENCHMARK = Benchmark(
    run,
    {
        "rows": Option([4096, 200_000], "of an update", quick=[64]),
        "steps": Option(True, "steps of a collection beside the updates"),
        "step_rows": Option(100_000, "of each of 4 tables of a step", quick=500),
        "dims": Option([32, 64, 128], quick=[8]),
        "optimizers": Option(list(OPTIMIZERS), choices=list(OPTIMIZERS)),
        "dtypes": Option(list(DTYPES), choices=list(DTYPES)),
        "rounds": Option(21, quick=1),
    },
    lambda rows: [
        Target(f"{kind}, ratio", "ratio", {"kind": kind}) for kind in dict.fromkeys(row["kind"] for row in rows)
    ],
)

if __name__ == "__main__":
    BENCHMARK.start()
