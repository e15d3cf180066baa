"""Steps on the CPU with variants: FBGEMM's options, optimizers, rounding of 16-bit weights, and few lookups."""

from __future__ import annotations

import argparse
import itertools
import pkgutil
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torchrec.modules.embedding_configs import DataType
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from rec_sdk_torch import fbgemm as ours_of_fbgemm
from rec_sdk_torch.formulas import UPDATES, OptimizerSpec
from rec_sdk_torch.operators.calls import ops
from rec_sdk_torch.operators.record import RecordLayout
from rec_sdk_torch.tbe import TableConfig, TableOptimizer
from rec_sdk_torch.tbe.cache.group_spec import record_layout

from .bounds import CopyBound
from .contenders import optimizer_of
from .rivals import fbgemm_module, fbgemm_training
from .runner import Option, Row, Target, benchmark, say
from .tables import NotAvailableError, configs, make_collection
from .timing import best_of, no_collection, seconds_of, take_turns, timed

TABLES = 4
Step = Callable[[], object]
_ENGINE: Any = torch.autograd.Variable._execution_engine


def collection_step(module: Any, grads: Sequence[torch.Tensor], batch: KeyedJaggedTensor) -> None:
    """Runs forward, backward and update of a collection; `grads` has one gradient per output tensor.

    A model has one loss, not one for each table. So this calls the autograd engine directly, without
    `torch.autograd.backward`, which first checks the shape of each gradient in Python and takes 4 us per table.
    """
    outputs, keys = module(batch), batch.keys()
    features = [outputs[key] for key in keys] if isinstance(outputs, dict) else [outputs]
    roots = tuple([each.values() for each in features])
    _ENGINE.run_backward(roots, tuple(grads), False, False, (), allow_unreachable=True, accumulate_grad=True)


# ---- FBGEMM's options

DIM, FEATURES = 64, 8


@dataclass(frozen=True)
class FbgemmCase:
    """One option of FBGEMM's module; all other options have their defaults.

    Attributes:
        options: constructor arguments; enum members by name.
        weighted: whether there are per-sample weights that need a gradient.
        ranks: number of ranks with different batch sizes per feature; 0 if all features have one batch size.
        shared: whether a table has two features instead of one.
        bag: ids per bag.
    """

    options: dict[str, Any] = field(default_factory=dict)
    weighted: bool = False
    ranks: int = 0
    shared: bool = False
    bag: int = 8


def _rowwise(**options: Any) -> dict[str, Any]:
    return {"optimizer": "EXACT_ROWWISE_ADAGRAD", **options}


FBGEMM_CASES = {
    "EXACT_SGD": FbgemmCase(),
    "EXACT_ADAGRAD": FbgemmCase({"optimizer": "EXACT_ADAGRAD"}),
    "EXACT_ROWWISE_ADAGRAD": FbgemmCase(_rowwise()),
    "bags of one id": FbgemmCase(_rowwise(), bag=1),
    "MEAN": FbgemmCase(_rowwise(pooling_mode="MEAN")),
    "NONE": FbgemmCase(_rowwise(pooling_mode="NONE"), bag=1),
    "per_sample_weights": FbgemmCase(_rowwise(), weighted=True),
    "feature_table_map": FbgemmCase(_rowwise(), shared=True),
    "weight_decay L2": FbgemmCase(_rowwise(weight_decay=0.01, weight_decay_mode="L2"), shared=True),
    "gradient_clipping": FbgemmCase(_rowwise(gradient_clipping=True)),
    "output_dtype FP16": FbgemmCase(_rowwise(output_dtype="FP16")),
    "weights_precision FP16": FbgemmCase(_rowwise(weights_precision="FP16", stochastic_rounding=False)),
    "bounds_check_mode IGNORE": FbgemmCase(_rowwise(bounds_check_mode="IGNORE")),
    "batch_size_per_feature_per_rank": FbgemmCase(_rowwise(), ranks=2),
}
_ENUMS = {
    "optimizer": "OptimType",
    "pooling_mode": "PoolingMode",
    "weight_decay_mode": "WeightDecayMode",
    "output_dtype": "SparseType",
    "weights_precision": "SparseType",
    "bounds_check_mode": "BoundsCheckMode",
}


class FbgemmSteps:
    """The module of `namespace`, FBGEMM's or ours, with random weights, and random batches of skewed ids."""

    def __init__(self, namespace: Any, case: FbgemmCase, options: argparse.Namespace) -> None:
        self._case, self._rows = case, options.rows
        self._generator = torch.Generator().manual_seed(options.seed)
        features = FEATURES if case.shared else TABLES
        bags = options.lookups // features // case.bag
        self._sizes: list[list[int]] | None = None
        if case.ranks:
            mean, shape = bags // case.ranks, (features, case.ranks)
            self._sizes = torch.randint(mean // 2, mean * 3 // 2, shape, generator=self._generator).tolist()
        total = sum(map(sum, self._sizes)) if self._sizes else bags * features
        self._offsets = torch.arange(0, total * case.bag + 1, case.bag)
        enums = {
            name: getattr(getattr(namespace, kind), case.options.get(name, ""), None) for name, kind in _ENUMS.items()
        }
        place = (namespace.EmbeddingLocation.HOST, namespace.ComputeDevice.CPU)
        made = {name: value for name, value in enums.items() if value is not None}
        self.module = namespace.SplitTableBatchedEmbeddingBagsCodegen(
            [(options.rows, DIM, *place)] * TABLES,
            feature_table_map=[feature * TABLES // features for feature in range(features)],
            **{"bounds_check_mode": namespace.BoundsCheckMode.NONE, "learning_rate": 1e-4, **case.options, **made},
        )
        torch.manual_seed(1)
        self.module.init_embedding_weights_uniform(-0.1, 0.1)
        self.outputs: list[torch.Tensor] = []

    def step(self) -> float:
        """Runs a step and keeps its output; returns its processor seconds without building batch and gradient."""
        count, weights = int(self._offsets[-1]), None
        ids = (torch.rand(count, generator=self._generator, dtype=torch.float64) ** 4 * self._rows).long()
        if self._case.weighted:
            weights = torch.rand(count, generator=self._generator).requires_grad_()
        outputs: list[torch.Tensor] = []
        forward = partial(self.module, ids, self._offsets, weights, None, self._sizes)
        seconds = seconds_of(lambda: outputs.append(forward()), time.process_time)
        self.outputs.append(outputs[0].detach().flatten().float())
        grad = torch.ones_like(outputs[0])
        return seconds + seconds_of(lambda: outputs[0].backward(grad), time.process_time)


@benchmark(
    {
        "cases": Option(list(FBGEMM_CASES), choices=list(FBGEMM_CASES)),
        "rows": Option(100_000, "of each of the 4 tables", quick=200),
        "lookups": Option(65536, "per step", quick=512),
        "rounds": Option(15, quick=2),
        "seed": Option(0, kind=int),
    },
    malloc=False,
)
def fbgemm(options: argparse.Namespace) -> Iterator[Row]:
    """Compares FBGEMM's module on the CPU with our module of the same name, option by option.

    The steps of both alternate, in one process and on one thread, and their outputs are compared. Times are processor
    times, so other processes may run. `ratio` is the median over the rounds of FBGEMM's time divided by ours.
    """
    for name in options.cases:
        pair = [FbgemmSteps(each, FBGEMM_CASES[name], options) for each in (fbgemm_training(), ours_of_fbgemm)]

        def step(steps: FbgemmSteps, pair: list[FbgemmSteps] = pair) -> float:
            seconds = steps.step()
            if all(each.outputs for each in pair):
                torch.testing.assert_close(*(each.outputs.pop() for each in pair), rtol=1e-2, atol=1e-2)
            return seconds

        calls = dict(zip(("fbgemm", "ours"), (partial(step, each) for each in pair), strict=True))
        samples = take_turns(calls, options.rounds)
        times = {f"{who}_ms": 1e3 * each.best for who, each in samples.items()}
        yield {"case": name, **times, "ratio": samples["fbgemm"].over(samples["ours"])}


# ---- few lookups

SMALL_DIM, SMALL_ROWS = 16, 1_000
FIXED, PER_TABLE = 150.0, 1.0
"""Targets of the collections, in microseconds of processor time: a step with one table, and every additional table."""


class Batches:
    """Batches of `lookups` uniform ids, divided among the tables. A bag has one id; the last bags are empty."""

    def __init__(self, tables: int, lookups: int) -> None:
        self.keys = [f"f{i}" for i in range(tables)]
        self.samples = -(-lookups // tables)
        self.lengths = torch.zeros(tables * self.samples, dtype=torch.int64)
        self.lengths[:lookups] = 1
        self.of_features = [int(part.sum()) for part in self.lengths.split(self.samples)]
        self._lookups = lookups
        self._generator = torch.Generator().manual_seed(1)

    def jagged(self) -> KeyedJaggedTensor:
        """Builds a batch as a data loader would."""
        return KeyedJaggedTensor(self.keys, self.ids(), lengths=self.lengths)

    def ids(self) -> torch.Tensor:
        return torch.randint(SMALL_ROWS, (self._lookups,), generator=self._generator)


def small_steps(optimizer: str, batches: Batches) -> dict[str, Callable[[], float]]:
    """Returns functions by contender name; each runs a step on a new batch and returns its seconds.

    TorchRec's collections are unsharded: the gradient of each table is dense. FBGEMM's module is used directly with ids
    and offsets.
    """
    calls: dict[str, tuple[Callable[[Any], object], Callable[[], Any]]] = {}
    sizes, count = [(SMALL_ROWS, SMALL_DIM)] * len(batches.keys), len(batches.keys)
    together = torch.ones(batches.samples, SMALL_DIM * count)
    for pooled, prefix in itertools.product((True, False), ("EmbCache", "")):
        options: dict[str, Any] = {"cache": SMALL_ROWS, "seed": 0} if prefix else {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = make_collection(configs(sizes), *optimizer_of(optimizer), pooled, prefix, device="cpu", **options)
        grads = [together] if pooled else [torch.ones(each, SMALL_DIM) for each in batches.of_features]
        name = f"{'' if prefix else 'TorchRec '}{'pooled' if pooled else 'sequence'}"
        calls[name] = partial(collection_step, module, grads), batches.jagged
    try:
        rival = fbgemm_module(sizes, optimizer)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), batches.lengths.cumsum(0)])
        calls["FBGEMM pooled"] = lambda ids: rival(ids, offsets).backward(together), batches.ids
    except NotAvailableError as error:
        say(str(error))

    def seconds(step: Callable[[Any], object], batch: Callable[[], Any]) -> float:
        return seconds_of(partial(step, batch()), time.thread_time)

    return {name: partial(seconds, *each) for name, each in calls.items()}


def over_target(form: str, row: Row) -> float:
    """Returns the time of our step divided by its target."""
    over: float = row[form] / (FIXED + PER_TABLE * (row["tables"] - 1))
    return over


@benchmark(
    {
        "tables": Option([1, 26, 200], quick=[1, 3]),
        "lookups": Option([128, 1024], "of a batch, in all tables", quick=[7]),
        "optimizers": Option(["sgd", "adagrad"], choices=("sgd", "adagrad"), quick=["sgd"]),
        "rounds": Option(20, "of ten steps of each contender", quick=1),
    },
    [
        Target(
            f"{form} over {FIXED:.0f} us and {PER_TABLE:.0f} for each table more", partial(over_target, form), worst=1
        )
        for form in ("pooled", "sequence")
    ],
)
def fixed_cost(options: argparse.Namespace) -> Iterator[Row]:
    """Measures the fixed cost of a step on the CPU: small batches, by the number of tables.

    Values are microseconds of processor time: the tenth percentile of a contender's steps. The contenders alternate.
    """
    for optimizer, lookups, tables in itertools.product(options.optimizers, options.lookups, options.tables):
        samples = take_turns(small_steps(optimizer, Batches(tables, lookups)), options.rounds, warm=2, repeats=10)
        shown = {"table": "microseconds", "optimizer": optimizer, "lookups": lookups, "tables": tables}
        yield {
            **shown,
            **{name: 1e6 * sorted(each.seconds)[len(each.seconds) // 10] for name, each in samples.items()},
        }


# ---- every optimizer

BATCHES, WARM_UP = 4, 3


@dataclass(frozen=True)
class OptimizerCase:
    """An optimizer, its keywords except `lr`, and the dtype of the weights."""

    cls: type[torch.optim.Optimizer]
    options: dict[str, Any] = field(default_factory=dict)
    weights: DataType = DataType.FP32

    @property
    def keywords(self) -> dict[str, Any]:
        return {"lr": 0.01, **self.options}

    def step_bytes(self, dim: int, lookups: int, unique: float) -> float:
        """Computes the bytes that the copy bound counts: ids, outputs, gradients, weights and records."""
        dtype = torch.bfloat16 if self.weights is DataType.BF16 else torch.float32
        optimizer = TableOptimizer.create(self.cls, self.keywords)
        record = record_layout(TableConfig("t", 1, dim, weight_dtype=dtype), optimizer).bytes
        return 8.0 * lookups * (1 + dim) + unique * (dtype.itemsize * dim + 2 * record)


def _named(spec: OptimizerSpec) -> str:
    short = spec.classes[0].rpartition(".")[2]
    return " ".join([short, *(f"{name}={value}" for name, value in spec.example.items())])


HALF = {"state_dtypes": dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.bfloat16)}
OPTIMIZER_CASES = {
    **{
        _named(spec): OptimizerCase(pkgutil.resolve_name(spec.classes[0]), dict(spec.example))
        for spec in UPDATES
        if not spec.collects_gradients
    },
    "Adam, bf16 states": OptimizerCase(torch.optim.Adam, HALF),
    "Adam, bf16 weights": OptimizerCase(torch.optim.Adam, weights=DataType.BF16),
    "Adam, bf16 weights and states": OptimizerCase(torch.optim.Adam, HALF, DataType.BF16),
}


def resident_step(case: OptimizerCase, rows: int, dim: int, lookups: int) -> tuple[Step, float]:
    """Returns a step of a sequence collection with resident tables, on batches of uniform ids, and its bytes."""
    generator, each = torch.Generator().manual_seed(1), lookups // TABLES
    module = make_collection(
        configs([(rows, dim)] * TABLES, data_type=case.weights), case.cls, case.keywords, pooled=False
    )
    ids = torch.randint(rows, (BATCHES, TABLES, each), generator=generator)
    lengths, names = torch.ones(TABLES * each, dtype=torch.int32), [f"f{i}" for i in range(TABLES)]
    batches = itertools.cycle([KeyedJaggedTensor(names, batch.reshape(-1), lengths=lengths) for batch in ids])
    grads = [torch.randn(each, dim, generator=generator)] * TABLES
    unique = TABLES * statistics.mean(float(part.unique().numel()) for batch in ids for part in batch)
    return lambda: collection_step(module, grads, next(batches)), case.step_bytes(dim, lookups, unique)


@benchmark(
    {
        "optimizers": Option(list(OPTIMIZER_CASES), choices=list(OPTIMIZER_CASES)),
        "dims": Option([32, 64, 128], quick=[8]),
        "rows": Option(100_000, "of each of 4 tables", quick=50),
        "lookups": Option(65_536, "of a step, in all tables", quick=80),
        "rounds": Option(15, quick=1),
        "copy_bytes": Option(256 << 20, "of the copy that is the bound", quick=4096),
    },
    [Target("step over the copy bound", "over_copy_bound", worst=2.5)],
)
def optimizers(options: argparse.Namespace) -> Iterator[Row]:
    """Measures steps of optimizers on the CPU relative to the time of moving the steps' bytes.

    By default all optimizers that update in every step are measured. `over_copy_bound` is the time of the fastest step
    divided by its copy bound: the time of copying its bytes at the highest copy bandwidth of the whole run.
    """
    bound, found = CopyBound(options.copy_bytes, 2), []
    for name, dim in itertools.product(options.optimizers, options.dims):
        step, size = resident_step(OPTIMIZER_CASES[name], options.rows, dim, options.lookups)
        with no_collection():
            best_of(step, WARM_UP)
            found.append((name, dim, best_of(step, options.rounds), size))
        bound.observe()
    for name, dim, seconds, size in found:
        over = seconds * bound.bandwidth / size
        yield {"optimizer": name, "dim": dim, "milliseconds": 1e3 * seconds, "bytes": size, "over_copy_bound": over}
    yield {"table": "copy", "bytes_per_second": bound.bandwidth}


# ---- rounding

FORMS: dict[str, type[torch.optim.Optimizer]] = {
    "SGD": torch.optim.SGD,
    "Adagrad": torch.optim.Adagrad,
    "Adam": torch.optim.SparseAdam,
    "RowWiseAdagrad": RowWiseAdagrad,
}
"""One optimizer for each form of a record."""
DTYPES = {"bf16": (torch.bfloat16, DataType.BF16), "fp16": (torch.float16, DataType.FP16)}
LOOKUPS, BAG = 65_536, 16


def update(rows: int, dim: int, optimizer: str, dtype: str) -> tuple[Step, Step]:
    """Returns two calls of `update_rows`: with rounding to nearest and with stochastic rounding.

    Every row has one lookup; the lookups are in random order.
    """
    of_tables = TableOptimizer.create(FORMS[optimizer], {"lr": 0.01})
    formula, weight_dtype = of_tables.spec.formula, DTYPES[dtype][0]
    layout = RecordLayout(dim, weight_dtype, formula.state_elements(dim))
    cache = torch.zeros((rows, layout.bytes), dtype=torch.uint8)
    layout.weight(cache).normal_()
    places = torch.arange(rows + 1, dtype=torch.int32)
    tables, row = torch.tensor([0, rows], dtype=torch.int32), torch.tensor([of_tables.coefficients()])
    lookups = (torch.randperm(rows).int(), tables, places, places[:-1], None, None, None)
    arguments = (cache, [torch.randn(rows, dim)], *lookups, row, formula.kernel, dim, weight_dtype)
    ids, seeds = torch.randint(2**40, (rows,)), torch.tensor([77])
    return lambda: ops.update_rows(*arguments), lambda: ops.update_rows(*arguments, ids, seeds)


def pooled_steps(rows: int, dim: int, optimizer: str, dtype: str) -> list[Step]:
    """Returns two steps on uniform ids: with rounding to nearest and with stochastic rounding.

    Each trains a collection of pooled tables whose rows are all resident.
    """
    bags, names = LOOKUPS // (TABLES * BAG), [f"f{i}" for i in range(TABLES)]
    lengths = torch.full((TABLES * bags,), BAG, dtype=torch.int32)
    batches = [KeyedJaggedTensor(names, torch.randint(rows, (LOOKUPS,)), lengths=lengths) for _ in range(4)]
    grad, tables = torch.randn(bags, TABLES * dim), configs([(rows, dim)] * TABLES, data_type=DTYPES[dtype][1])

    def step_of(stochastic: bool) -> Step:
        module = make_collection(tables, FORMS[optimizer], {"lr": 0.01}, stochastic_rounding=stochastic)
        endless = itertools.cycle(batches)
        return lambda: collection_step(module, [grad], next(endless))

    return [step_of(False), step_of(True)]


@benchmark(
    {
        "rows": Option([4096, 200_000], "of an update", quick=[64]),
        "steps": Option(True, "steps of a collection beside the updates"),
        "step_rows": Option(100_000, "of each of 4 tables of a step", quick=500),
        "dims": Option([32, 64, 128], quick=[8]),
        "optimizers": Option(list(FORMS), choices=list(FORMS)),
        "dtypes": Option(list(DTYPES), choices=list(DTYPES)),
        "rounds": Option(21, quick=1),
    },
    lambda rows: [
        Target(f"{kind}, ratio", "ratio", {"kind": kind}) for kind in dict.fromkeys(row["kind"] for row in rows)
    ],
)
def rounding(options: argparse.Namespace) -> Iterator[Row]:
    """Compares stochastic rounding with rounding to nearest for updates and whole steps of 16-bit weights, on the CPU.

    Reports the fastest round with each rounding in milliseconds, and `ratio`, the time with stochastic rounding divided
    by the time with rounding to nearest. `median_ratio` is the median of this ratio over all rounds.
    """
    torch.manual_seed(0)
    kinds: list[tuple[str, Callable[..., Sequence[Step]], int]] = [
        (f"update of {rows} rows", update, rows) for rows in options.rows
    ]
    if options.steps:
        kinds.append(("step of a collection", pooled_steps, options.step_rows))
    for (kind, make, rows), dtype, name, dim in itertools.product(
        kinds, options.dtypes, options.optimizers, options.dims
    ):
        nearest, stochastic = map(timed, make(rows, dim, name, dtype))
        samples = take_turns({"nearest": nearest, "stochastic": stochastic}, options.rounds)
        yield {
            **{"kind": kind, "dtype": dtype, "optimizer": name, "dim": dim},
            **{f"{name}_ms": 1e3 * each.best for name, each in samples.items()},
            "ratio": samples["stochastic"].best / samples["nearest"].best,
            "median_ratio": samples["stochastic"].over(samples["nearest"]),
        }
