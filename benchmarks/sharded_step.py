"""Benchmark of sharded training steps over gloo, beside TorchRec's sharded tables."""

from __future__ import annotations

import argparse
import gc
import itertools
import logging
import socket
import statistics
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from .ids import Distribution
from .runner import Option, Row, Target, benchmark
from .tables import configs, import_torchrec, make_collection
from .timing import in_processes, no_collection
from .workload import FORMS, TableSet, Workload, make_workload

CONTENDERS = {"ours": "EmbCache", "torchrec": ""}
"""Prefixes of the classes of the collections, by contender."""
LEARNING_RATE = 0.0625
"""A power of two: with the gradients of `Workload.gradient`, results are exact in any order of sums."""
WARM_ROUNDS = 2


def shard(collection: Any, placement: str, world_size: int) -> Any:
    """Shards a collection with one sharding type for all tables, over the ranks of one machine (collective)."""
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
    from torchrec.distributed.types import ShardingEnv

    from rec_sdk_torch import get_default_hybrid_sharders

    model, world = torch.nn.Sequential(collection), torch.distributed.group.WORLD
    env = ShardingEnv.from_process_group(world)
    rivals: list[Any] = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
    sharders = get_default_hybrid_sharders(env) if hasattr(collection, "embedding") else rivals
    own = collection.embedding_bag_configs if hasattr(collection, "embedding_bags") else collection.embedding_configs
    constraints = {
        config.name: ParameterConstraints(sharding_types=[placement], compute_kernels=["fused"]) for config in own()
    }
    topology = Topology(world_size, "cpu", local_world_size=world_size)
    plan = EmbeddingShardingPlanner(topology, constraints=constraints).collective_plan(model, sharders, world)
    return DistributedModelParallel(model, env, torch.device("cpu"), plan, sharders)


def _step(model: Any, batch: Any, keys: Sequence[str], grads: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Trains a batch; returns the pooled output, or the sequence of each feature in `keys`."""
    output = model(batch)
    output = output.wait() if hasattr(output, "wait") else output
    outputs = [output.values()] if "" in grads else [output[key].values() for key in keys]
    torch.autograd.backward(outputs, list(grads.values()))
    return outputs


def _gradients(model: Any, batch: Any, workload: Workload, seed: int) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Returns the features in the order of the model's output, and gradients by feature; "" if pooled.

    TorchRec orders the columns of a pooled output by rank.
    """
    own = dict(zip(batch.keys(), workload.by_feature(workload.gradient(seed)), strict=True))
    if not workload.pooled:
        return list(own), own
    keys = model(batch).keys()
    return keys, {"": torch.cat([own[key] for key in keys], 1)}


def _same(workload: Workload, *found: tuple[list[str], list[torch.Tensor]]) -> bool:
    """Returns whether outputs, with their features in any order, are equal."""
    by_feature = []
    for keys, outputs in found:
        parts = outputs[0].split(list(workload.dims), 1) if workload.pooled else outputs
        by_feature.append(dict(zip(keys, parts, strict=True)))
    ours, theirs = by_feature
    return all(torch.equal(ours[key], theirs[key]) for key in ours)


def _rank(rank: int, world_size: int, port: int, cases: Sequence[tuple[Workload, str]], *arguments: Any) -> Any:
    """Trains all cases on one rank; returns what `_train` returns for each."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")  # the planner emits FutureWarnings
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://localhost:{port}", rank=rank, world_size=world_size
    )
    found = [_train(rank, world_size, *case, *arguments) for case in cases]
    torch.distributed.destroy_process_group()
    gc.collect()  # frees the models, which keep the group's threads alive; none may run while the interpreter exits
    return found


def _train(
    rank: int, world_size: int, workload: Workload, placement: str, ids: Distribution, sizes: tuple[int, int]
) -> Any:
    """Trains both contenders on one rank.

    Returns:
        (whether the outputs of both are equal in each warm step; by contender, the seconds by the clock and the seconds
        of processor time of each round; our counters of exchanges per step)
    """
    jagged = import_torchrec().KeyedJaggedTensor
    tables = configs(list(zip(workload.tables.sizes, workload.dims, strict=True)), init_fn=torch.nn.init.zeros_)
    models = {}
    for name, prefix in CONTENDERS.items():
        options: dict[str, Any] = {"config_prefix": "", "cache": 1.0} if prefix else {}
        rate = {"lr": LEARNING_RATE}
        collection = make_collection(tables, torch.optim.SGD, rate, workload.pooled, prefix, **options)
        own = placement if prefix or not workload.pooled else "table_wise"  # on a CPU, TorchRec has no row-wise bags
        models[name] = shard(collection, own, world_size)
    rounds, steps = sizes
    rng, keys = np.random.default_rng([rank, world_size]), [table["feature_names"][0] for table in tables]
    first = jagged(keys, workload.draw(ids, rng).flatten(), lengths=workload.lengths)
    grads = {name: _gradients(model, first, workload, rank) for name, model in models.items()}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    equal, collection = True, models["ours"].module[0]
    with no_collection():
        for number in range(WARM_ROUNDS + rounds):
            drawn = [workload.draw(ids, rng).flatten() for _ in range(steps)]
            outputs = {}
            if number == WARM_ROUNDS:
                before = collection.exchange_stats()
            for name in models if number % 2 else reversed(models):
                batches = [jagged(keys, values, lengths=workload.lengths) for values in drawn]
                torch.distributed.barrier()
                begin = time.perf_counter(), time.process_time()
                for batch in batches:
                    outputs[name] = _step(models[name], batch, *grads[name])
                took = time.perf_counter() - begin[0], time.process_time() - begin[1]
                torch.distributed.barrier()
                seconds[name].append((took[0] / steps, took[1] / steps))
            if number < WARM_ROUNDS:
                equal &= _same(workload, *((grads[name][0], outputs[name]) for name in models))
            gc.collect(0)
    after = collection.exchange_stats()
    counters = {name: (after[name] - before[name]) / (rounds * steps) for name in after}
    return equal, {name: times[WARM_ROUNDS:] for name, times in seconds.items()}, counters


def _row(workload: Workload, placement: str, world_size: int, found: Sequence[Any]) -> Row:
    """Returns medians over the rounds, and counters of a rank's step, from what `_train` returned on each rank."""
    clock, processor = {}, {}
    for name in CONTENDERS:
        by_round = list(zip(*(seconds[name] for _, seconds, _ in found), strict=True))
        clock[name] = [max(wall for wall, _ in ranks) for ranks in by_round]
        processor[name] = [statistics.mean(used for _, used in ranks) for ranks in by_round]
    row: Row = {
        "form": "pooled" if workload.pooled else "sequence",
        "sharding": placement,
        "ranks": world_size,
        "correct": all(equal for equal, *_ in found),
    }
    for title, kind in (("clock", clock), ("cpu", processor)):
        medians = {name: statistics.median(values) for name, values in kind.items()}
        row |= {f"{title}_ms": 1e3 * medians["ours"], f"torchrec_{title}_ms": 1e3 * medians["torchrec"]}
        pairs = zip(kind["ours"], kind["torchrec"], strict=True)
        row[f"{title}_ratio"] = statistics.median(ours / theirs for ours, theirs in pairs)
    row |= {name: statistics.mean(counters[name] for *_, counters in found) for name in found[0][2]}
    return row | {"clock": clock, "processor": processor}


@benchmark(
    {
        "tables": Option(TableSet(4, 100_000), "such as 4x100k", TableSet(2, 1_000), kind=TableSet.parse),
        "dim": Option(64, quick=8),
        "lookups": Option(65_536, "of a rank and step, of all tables", quick=512),
        "bag": Option(8, "ids of a sample in a table"),
        "ids": Option(Distribution(1.05), kind=Distribution.parse),
        "forms": Option(list(FORMS), choices=FORMS),
        "sharding": Option(["row_wise", "table_wise"], choices=("row_wise", "table_wise")),
        "ranks": Option(2),
        "rounds": Option(40, "alternations of the contenders", quick=2),
        "steps": Option(5, "of a contender in a round", quick=2),
    },
    [
        Target("a step by the clock, over TorchRec's", "clock_ratio", worst=0.8),
        Target("processor time of a rank, over TorchRec's", "cpu_ratio", worst=0.8),
    ],
)
def sharded_step(options: argparse.Namespace) -> Iterator[Row]:
    """Times training steps of sharded tables in processes on one machine, beside TorchRec's sharded tables.

    Both contenders are in the same processes, with one thread each, and run in alternating rounds. The clock is the
    time of the slowest rank; processor time counts all threads of a rank. Outputs must be equal.
    """
    cases = [
        (make_workload(options.tables, options.dim, form == "pooled", "sgd", options.lookups, options.bag), placement)
        for form, placement in itertools.product(options.forms, options.sharding)
    ]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    sizes = options.rounds, options.steps
    by_rank = in_processes(options.ranks, _rank, options.ranks, port, cases, options.ids, sizes)
    for case, found in zip(cases, zip(*by_rank, strict=True), strict=True):
        yield _row(*case, options.ranks, found)
