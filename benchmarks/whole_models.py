"""Whole models of the end-to-end benchmark: the examples' models and data, with our tables or a rival's."""

from __future__ import annotations

import argparse
import itertools
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parent.parent / "examples"))

from dlrm.model import DLRM
from dlrm.plain import PlainTables
from sequence.data_generated import ITEMS, generated_histories
from sequence.model import InterestModel
from support.clicks import ClickData, JaggedIds, random_split
from support.generated import clicks, power_law
from support.optimizers import TABLE_OPTIMIZERS, dense_optimizer
from support.training import evaluate, train_step
from torchrec import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper

import rec_sdk_torch as rst

from .machine import access_free_memory, reset_peak_memory
from .rivals import fbgemm_module
from .runner import Option, Row, Target, benchmark, say
from .tables import make_collection
from .timing import in_processes
from .workload import CRITEO_SIZES

DENSE = 13
EXPONENT = 1.05
HISTORY = 10
STD = 0.05
"""The standard deviation of the initial weights."""


@dataclass(frozen=True)
class Problem:
    """A model and its data.

    Attributes:
        data: samples whose ids are less than the rows of their table, since other libraries' tables have no id map.
        tables: a dict from a table's name to (number of rows, names of its features).
        pooled: whether each sample has a bag per feature; otherwise a sequence.
        model: a function (tables, D) that returns the whole model.
    """

    data: ClickData
    tables: Mapping[str, tuple[int, list[str]]]
    pooled: bool
    model: Callable[[nn.Module, int], nn.Module]


@dataclass(frozen=True)
class Tables:
    """A contender's tables, with their optimizer; it is None if the backward pass updates the tables."""

    module: nn.Module
    optimizer: KeyedOptimizer | None
    stats: Callable[[], dict[str, int]] | None = None


def _scattered(ranks: Tensor, rows: int) -> Tensor:
    """Permutes the ids 0 .. rows - 1, so that frequent rows are not adjacent in memory."""
    step = rows * 5 // 8
    while rows > 1 and torch.gcd(torch.tensor(step), torch.tensor(rows)) != 1:
        step += 1
    return (ranks * max(1, step)) % rows


def criteo_shape(samples: int, seed: int, most_rows: int) -> Problem:
    """Builds 26 features with the sizes of the Criteo Kaggle data, one id per sample; clicks follow a known model."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [min(size, most_rows) for size in CRITEO_SIZES]
    dense = torch.randn(samples, DENSE, generator=generator)
    score = dense @ torch.randn(DENSE, generator=generator) / DENSE**0.5
    features = {}
    for number, size in enumerate(sizes):
        ids = _scattered(power_law(samples, size, EXPONENT, generator), size)
        score += torch.randn(size, generator=generator)[ids] / len(sizes) ** 0.5
        features[f"c{number}"] = JaggedIds.single(ids)
    data = ClickData(dense, features, clicks(score, 2.5, generator))
    tables = {name: (size, [name]) for name, size in zip(features, sizes, strict=True)}
    return Problem(data, tables, True, lambda module, dim: DLRM(module, len(sizes), dim, DENSE))


def histories(samples: int, seed: int, most_rows: int) -> Problem:
    """Builds the histories of examples/train_sequence.py: one table of items, for histories and candidates."""
    del most_rows  # the table is small
    hashed = generated_histories(samples, HISTORY, seed)
    known = torch.unique(torch.cat([ids.values for ids in hashed.features.values()]))
    data = hashed.with_dense_ids(dict.fromkeys(hashed.features, known))
    return Problem(data, {"item": (ITEMS, list(data.features))}, False, InterestModel)


PROBLEMS: dict[str, Callable[[int, int, int], Problem]] = {"dlrm": criteo_shape, "sequence": histories}


def optimizer_of(model: nn.Module, tables: Tables) -> KeyedOptimizer:
    """Builds Adam for the dense part, combined with the tables' optimizer if the backward pass does not update them."""
    return CombinedOptimizer([*filter(None, [tables.optimizer]), dense_optimizer(model, 1e-3)])


# ---- contenders


def _make(problem: Problem, dim: int, optimizer: str, table: dict[str, Any], prefix: str, **options: Any) -> nn.Module:
    """Builds a collection of the problem's tables, updated in the backward pass; `table` are further fields of each."""
    tables = [
        {"name": name, "feature_names": features, "num_embeddings": rows, "embedding_dim": dim, **table}
        for name, (rows, features) in problem.tables.items()
    ]
    choice = TABLE_OPTIMIZERS[optimizer]
    keywords = choice.options(choice.default_lr)
    made: nn.Module = make_collection(tables, choice.optimizer_class, keywords, problem.pooled, prefix, **options)
    return made


def ours(problem: Problem, dim: int, optimizer: str, batch_size: int, seed: int, cache: float = 1.0) -> Tables:
    """Builds hash tables with a device cache of this share of their rows."""
    longest = {name: problem.data.longest(name) for name in problem.data.features}
    sizes = [sum(longest[name] for name in features) for _, features in problem.tables.values()]
    table = {"initializer_type": rst.InitializerType.TRUNCATED_NORMAL, "weight_init_stddev": STD}
    options = {"batch_size": batch_size, "multi_hot_sizes": sizes, "cache": cache, "seed": seed}
    module: Any = _make(problem, dim, optimizer, table, "EmbCache", **options)
    return Tables(module, module.fused_optimizer, module.cache_stats)


class TorchSequences(nn.Module):
    """`torch.nn.Embedding` with sparse gradients and the output of an EmbeddingCollection."""

    def __init__(self, weights: Mapping[str, Tensor], table_of: Mapping[str, str]) -> None:
        super().__init__()
        self.tables = nn.ModuleDict(
            {name: nn.Embedding.from_pretrained(each, freeze=False, sparse=True) for name, each in weights.items()}
        )
        self.table_of = table_of

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Returns a JaggedTensor for each feature."""
        jagged = features.to_dict()
        return {
            name: JaggedTensor(self.tables[table](jagged[name].values()), lengths=jagged[name].lengths())
            for name, table in self.table_of.items()
        }


def torch_sparse(problem: Problem, dim: int, optimizer: str, batch_size: int, seed: int) -> Tables:
    """Builds torch's own embedding modules, updated by torch.optim's sparse optimizers."""
    choice = TABLE_OPTIMIZERS[optimizer]
    table_of = {feature: name for name, (_, features) in problem.tables.items() for feature in features}
    weights = {name: torch.empty(rows, dim).normal_(std=STD) for name, (rows, _) in problem.tables.items()}
    pooled = problem.pooled  # pooled tables have one feature each, with the table's name
    module = PlainTables(weights, sparse_gradients=True) if pooled else TorchSequences(weights, table_of)
    parameters = dict(module.named_parameters())
    return Tables(module, KeyedOptimizerWrapper(parameters, lambda each: choice.create(each, choice.default_lr)))


def torchrec(problem: Problem, dim: int, optimizer: str, batch_size: int, seed: int) -> Tables:
    """Builds TorchRec's collections, unsharded: their gradients are dense."""
    table = {"init_fn": partial(nn.init.normal_, std=STD)}
    return Tables(_make(problem, dim, optimizer, table, ""), None)


class FbgemmTables(nn.Module):
    """FBGEMM's module on the CPU. A sequence is looked up as summed bags of one id, which is FBGEMM's faster form."""

    def __init__(self, problem: Problem, dim: int, optimizer: str, lr: float) -> None:
        super().__init__()
        self.pooled = problem.pooled
        sizes = [(rows, dim) for rows, _ in problem.tables.values()]
        self.lookup = fbgemm_module(sizes, optimizer, learning_rate=lr, eps=1e-10)
        for weight in self.lookup.split_embedding_weights():
            weight.normal_(std=STD)
        self.dim = dim

    def forward(self, features: KeyedJaggedTensor) -> Any:
        """Returns a KeyedTensor, or a JaggedTensor for each feature."""
        keys, values = features.keys(), features.values()
        if self.pooled:
            return KeyedTensor(keys, [self.dim] * len(keys), self.lookup(values, features.offsets()))
        rows = self.lookup(values, torch.arange(values.numel() + 1)).split(features.length_per_key())
        jagged = features.to_dict()
        return {key: JaggedTensor(part, lengths=jagged[key].lengths()) for key, part in zip(keys, rows, strict=True)}


def fbgemm(problem: Problem, dim: int, optimizer: str, batch_size: int, seed: int) -> Tables:
    """Builds FBGEMM's tables, with the fused update in the backward pass."""
    return Tables(FbgemmTables(problem, dim, optimizer, TABLE_OPTIMIZERS[optimizer].default_lr), None)


Make = Callable[[Problem, int, str, int, int], Tables]
CONTENDERS: dict[str, Make] = {
    "cached": partial(ours, cache=0.1),
    "resident": ours,
    "torch": torch_sparse,
    "fbgemm": fbgemm,
    "torchrec": torchrec,
}
"""This package with a cache of 10% of the rows and with all rows resident, and the rivals."""

NEW_BYTES = 1 << 30
"""Free memory that is accessed before a contender's tables are built: more than tables take that create rows in it."""
OURS = ("cached", "resident")
WARM_STEPS = 5
"""The number of untimed first steps, in which memory is accessed for the first time."""


def _peak() -> int:
    """Returns the peak resident memory of this process, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


PASSES = ("first", "second")
"""The passes over the training data. Most ids of the first pass are new to hash tables, and none of the second."""


def _pass(options: argparse.Namespace, whole: nn.Module, optimizer: KeyedOptimizer, batches: Iterable[Any]) -> Row:
    """Trains one pass, for at most `options.seconds`; returns its samples, samples per second and longest step."""
    trained, timed, seconds, begin = 0, 0, [0.0], time.perf_counter()
    for step, batch in enumerate(batches):
        start = time.perf_counter()
        train_step(whole, optimizer, batch)
        if step >= WARM_STEPS:
            timed += batch.labels.numel()
            seconds.append(time.perf_counter() - start)
        trained += batch.labels.numel()
        if time.perf_counter() - begin > options.seconds:
            break
    return {"trained": trained, "rate": timed / sum(seconds) if timed else None, "longest": 1e3 * max(seconds)}


def train_one(rank: int, options: argparse.Namespace, model: str, batch_size: int, contender: str) -> Row:
    """Trains one contender in this process, twice over the same samples; AUC is measured after the first pass."""
    torch.set_num_threads(options.threads)
    problem = PROBLEMS[model](options.samples, options.seed, options.most_rows)
    split = random_split(options.samples, options.seed)
    train, test = problem.data.select(split.train), problem.data.select(split.test)
    torch.manual_seed(options.seed)
    access_free_memory(NEW_BYTES)
    reset_peak_memory()
    before = _peak()
    tables = CONTENDERS[contender](problem, options.dim, options.optimizer, batch_size, options.seed)
    torch.manual_seed(options.seed)
    whole = problem.model(tables.module, options.dim)
    optimizer = optimizer_of(whole, tables)
    first = _pass(options, whole, optimizer, train.batches(batch_size))
    table_bytes = _peak() - before
    auc = evaluate(whole, test, batch_size).auc
    steps = -(-first["trained"] // batch_size)
    second = _pass(options, whole, optimizer, itertools.islice(train.batches(batch_size), steps))
    return {
        "contender": contender,
        **{f"{name}_pass": run["rate"] for name, run in zip(PASSES, (first, second), strict=True)},
        **{f"{name}_longest_ms": run["longest"] for name, run in zip(PASSES, (first, second), strict=True)},
        "trained": first["trained"],
        "whole": first["trained"] == split.train.numel(),
        "auc": auc,
        "table_bytes": table_bytes,
        "cache": tables.stats() if tables.stats else None,
    }


def summary(runs: Sequence[Row]) -> list[Row]:
    """Summarizes each contender by medians of its rounds and of the speed of our contenders over its speed."""
    of_contenders: dict[str, list[Row]] = {}
    for run in runs:
        of_contenders.setdefault(run["contender"], []).append(run)
    result = []
    rates = [f"{name}_pass" for name in PASSES]
    for contender, rounds in of_contenders.items():
        line: Row = {"contender": contender}
        for name in (*rates, *(f"{name}_longest_ms" for name in PASSES), "auc", "table_bytes", "trained"):
            line[name] = statistics.median(run[name] for run in rounds)
        line["whole"] = all(run["whole"] for run in rounds)
        for ours, rate in itertools.product(OURS, rates):
            rate_of = {run["round"]: run[rate] for run in of_contenders.get(ours, [])}
            shared = [rate_of[run["round"]] / run[rate] for run in rounds if run["round"] in rate_of]
            line[f"{ours}_over, {rate}"] = statistics.median(shared) if shared else None
        result.append({**line, "runs": rounds})
    return sorted(result, key=lambda line: list(CONTENDERS).index(line["contender"]))


def _targets() -> list[Target]:
    """Returns the least ratios of the speed of our tables to the speed of others, in the first and second pass."""
    wanted = [("dlrm", ours, "fbgemm", (1.1, 1.2)) for ours in OURS]
    wanted += [("sequence", ours, rival, (1.1, 1.1)) for ours in OURS for rival in ("torch", "fbgemm", "torchrec")]
    wanted.append(("dlrm", "resident", "cached", (1.0, 1.0)))
    return [
        Target(
            f"{model}, {name} pass: {ours} over {other}",
            f"{ours}_over, {name}_pass",
            {"model": model, "contender": other},
            worst=bound,
            at_least=True,
        )
        for model, ours, other, bounds in wanted
        for name, bound in zip(PASSES, bounds, strict=True)
    ]


@benchmark(
    {
        "models": Option(list(PROBLEMS), choices=list(PROBLEMS)),
        "batch_sizes": Option([2048, 128], quick=[64]),
        "contenders": Option(list(CONTENDERS), choices=list(CONTENDERS)),
        "rounds": Option(3, quick=1),
        "samples": Option(1_050_000, "8 of 10 are trained, 1 is tested", quick=1_000),
        "seconds": Option(30.0, "no pass takes longer"),
        "most_rows": Option(2**40, "of a table; larger ones are cut to it", quick=2_000),
        "dim": Option(16),
        "optimizer": Option("adagrad", "of the tables", choices=("sgd", "adagrad")),
        "threads": Option(1, "of torch"),
        "seed": Option(0, kind=int),
    },
    _targets(),
)
def end_to_end(options: argparse.Namespace) -> Iterator[Row]:
    """Measures whole models end to end: samples per second, AUC and peak memory of ours and of rivals.

    Takes about an hour, 8 GiB of memory and an idle core. The models are DLRM (examples/train_dlrm.py), on
    generated clicks with 26 tables of the sizes of the Criteo Kaggle data (33.8 million rows), and
    examples/train_sequence.py. In each round every contender trains once, in its own process; the order is random.
    Times cover forward, backward and update, without the first steps. `first_pass` and `second_pass` are samples per
    second of two passes over the same samples, and the ratios of a pass compare the speed of `cached` or `resident`.
    """
    for model, batch_size in itertools.product(options.models, options.batch_sizes):
        order, runs = random.Random(options.seed), []
        for number in range(options.rounds):
            for contender in order.sample(options.contenders, len(options.contenders)):
                try:
                    (run,) = in_processes(1, train_one, options, model, batch_size, contender)
                    runs.append({"round": number, **run})
                except Exception as error:  # a rival that cannot run, or whose process crashed
                    say(f"{contender} took no part: {error!r}")
        yield from (
            {"table": f"{model}, batches of {batch_size}, {options.optimizer}", "model": model, **line}
            for line in summary(runs)
        )
        missing = options.rounds * len(options.contenders) - len(runs)
        if missing:
            yield {"table": "took no part", "model": model, "batch": batch_size, "runs": missing, "correct": False}
