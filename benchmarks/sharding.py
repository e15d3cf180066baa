"""The sharding benchmark: `python -m benchmarks.sharding [--quick] [--json FILE]`, from the repository root."""

from __future__ import annotations

import argparse
import gc
import logging
import socket
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import multiprocessing
from torch.multiprocessing.spawn import spawn

from .ids import Distribution
from .machine import describe, load_average, with_malloc_settings, write_json
from .options import check_outputs, fill, positive_int
from .report import machine_lines, table
from .workload import TableSet, Workload, make_workload

Result = dict[str, Any]

_SIZES = {"tables": TableSet(4, 100_000), "dim": 64, "lookups": 32_768, "steps": 12, "warm": 4}
_QUICK = {"tables": TableSet(2, 1_000), "dim": 8, "lookups": 512, "steps": 3, "warm": 1}
MODELLED_DEVICES = ((8, 1), (1024, 1), (1024, 8), (1024, 16), (1024, 32))
"""W devices in machines of L; 1: one level."""
LINK = 25e9
"""Bytes per second out of a device, and into it: a port of 200 Gbit/s."""
WITHIN = 100e9
"""The same within a machine. DeepEP's and DeepEP-Ascend's pages measure 125 to 158 GB/s, over NVLink and HCCS."""
MACHINE = 16
"""Devices of the largest machine, Atlas A3; more are several machines, and nearly all of their bytes go by `LINK`."""
MESSAGE = 5e-6
"""Seconds that a message takes whatever its size, within a machine too: an assumption."""
EXCHANGES = 4
"""All-to-alls of a step: counts, ids, rows, gradients."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; those not given are those of the sizes, or of `--quick`."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sharding",
        description="Bytes that sharded tables exchange, counted; steps of processes on one machine; a model of more.",
        allow_abbrev=False,
    )
    parser.add_argument("--quick", action="store_true", help="small tables and few steps: tries the benchmark itself")
    parser.add_argument("--tables", type=TableSet.parse, metavar="TABLES", help="such as 4x100k")
    parser.add_argument("--dim", type=positive_int, metavar="D")
    parser.add_argument("--lookups", type=positive_int, help="of a rank and step, of all tables")
    parser.add_argument("--bag", type=positive_int, default=8, help="ids of a sample in a table (default %(default)s)")
    parser.add_argument("--ids", nargs="+", type=Distribution.parse, default=[Distribution(1.05), Distribution(0.0)])
    parser.add_argument("--ranks", nargs="+", type=positive_int, default=[1, 2, 4])
    parser.add_argument("--steps", type=positive_int)
    parser.add_argument("--warm", type=positive_int, help="steps before the clock starts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    options = parser.parse_args(arguments)
    check_outputs(parser, options.json)
    fill(options, _QUICK if options.quick else _SIZES)
    return options


def _sharded(workload: Workload, world_size: int) -> Any:
    """The model of a rank: pooled tables, row by row."""
    import torchrec
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
    from torchrec.distributed.types import ShardingEnv

    import rec_sdk_torch as rst

    configs = [
        torchrec.EmbeddingBagConfig(
            name=f"t{i}",
            num_embeddings=rows,
            embedding_dim=dim,
            feature_names=[f"f{i}"],
            pooling=torchrec.PoolingType.SUM,
        )
        for i, (rows, dim) in enumerate(zip(workload.tables.sizes, workload.dims, strict=True))
    ]
    model = torch.nn.Sequential(rst.EmbCacheEmbeddingBagCollection(configs, cache=1.0, seed=1))
    rst.apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.01})
    world = torch.distributed.group.WORLD
    env = ShardingEnv.from_process_group(world)
    sharders = rst.get_default_hybrid_sharders(env)
    constraints = {config.name: ParameterConstraints(sharding_types=["row_wise"]) for config in configs}
    topology = Topology(world_size, "cpu", local_world_size=world_size)
    plan = EmbeddingShardingPlanner(topology, constraints=constraints).collective_plan(model, sharders, world)
    return DistributedModelParallel(model, env, torch.device("cpu"), plan, sharders)


def _train(rank: int, world_size: int, port: int, workload: Workload, ids: Distribution, sizes: tuple[int, int]) -> Any:
    """The counts of a rank in the timed steps, and their seconds."""
    from torchrec import KeyedJaggedTensor

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore", FutureWarning)  # of the planner
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://localhost:{port}", rank=rank, world_size=world_size
    )
    warm, steps = sizes
    model = _sharded(workload, world_size)
    collection = model.module[0]
    rng = np.random.default_rng([rank, world_size])
    keys = [f"f{i}" for i in range(workload.tables.count)]
    batches = [
        KeyedJaggedTensor(keys, workload.draw(ids, rng).flatten(), lengths=workload.lengths)
        for _ in range(warm + steps)
    ]
    before, begin = {}, 0.0
    for number, batch in enumerate(batches):
        if number == warm:
            torch.distributed.barrier()
            before, begin = collection.exchange_stats(), time.perf_counter()
        model(batch).values().sum().backward()
    torch.distributed.barrier()
    seconds = time.perf_counter() - begin
    after = collection.exchange_stats()
    torch.distributed.destroy_process_group()
    return {name: after[name] - before[name] for name in after}, seconds


def _start(rank: int, results: Any, *arguments: Any) -> None:
    results.put(_train(rank, *arguments))
    gc.collect()  # models, which hold the group and so its threads: none may live while the interpreter ends


def run_ranks(workload: Workload, ids: Distribution, world_size: int, warm: int, steps: int) -> Result:
    """A case: figures of a step and rank, the mean over both."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    results = multiprocessing.get_context("spawn").SimpleQueue()
    arguments = (results, world_size, port, workload, ids, (warm, steps))
    context = spawn(_start, arguments, world_size, join=False)
    while not context.join():
        pass
    found = [results.get() for _ in range(world_size)]
    counted = {name: sum(stats[name] for stats, _ in found) / (world_size * steps) for name in found[0][0]}
    exchanged = counted["id_bytes"] + counted["row_bytes"] + counted["grad_bytes"]
    seconds = max(seconds for _, seconds in found) / steps
    return {
        "ids": ids.name,
        "ranks": world_size,
        **counted,
        "exchanged_bytes": exchanged,
        "least_bytes": least_bytes(workload, counted["unique_ids"], world_size),
        "steps_per_second": 1 / seconds,
    }


def least_bytes(workload: Workload, unique_ids: float, world_size: int) -> float:
    """Bytes of a step and rank, ids spread evenly: each distinct one is sent, its row comes, its gradient goes."""
    dim = sum(workload.dims) / len(workload.dims)
    return unique_ids * (1 - 1 / world_size) * (8 + 2 * 4 * dim)


def model_devices(workload: Workload, case: Result, devices: int, size: int) -> Result:
    """MODELLED: the exchange of a step between devices with the batch of one rank each, in machines of `size`.

    By two levels a rank hands on all but the ids of its own place within the machine, and then all but those of the
    machine between machines.
    """
    unique = case["unique_ids"]
    within = least_bytes(workload, unique, size)
    between = least_bytes(workload, unique, devices // size)
    messages = size - 1 + devices // size - 1
    seconds = between / LINK + within / (WITHIN if size <= MACHINE else LINK) + EXCHANGES * messages * MESSAGE
    return {
        "ids": case["ids"],
        "devices": devices,
        "local_size": size,
        "messages": EXCHANGES * messages,
        "bytes": within + between,
        "exchange_ms": seconds * 1e3,
        "status_ms": 2 * messages * MESSAGE * 1e3,
    }


def run(options: argparse.Namespace) -> Result:
    """All cases, as what the JSON holds."""
    workload = make_workload(options.tables, options.dim, True, "sgd", options.lookups, options.bag)
    cases = []
    for ids in options.ids:
        for world_size in options.ranks:
            print(f"{ids.name}, {world_size} ranks", file=sys.stderr, flush=True)
            cases.append(run_ranks(workload, ids, world_size, options.warm, options.steps))
    alone = [case for case in cases if case["ranks"] == options.ranks[0]]
    return {
        "schema": 1,
        "machine": describe(),
        "workload": workload.describe(),
        "cases": cases,
        "modelled": [model_devices(workload, case, *each) for case in alone for each in MODELLED_DEVICES],
        "load_average_at_end": load_average(),
    }


def _kilobytes(count: float) -> str:
    return f"{count / 1e3:,.0f}"


def render(results: Result) -> str:
    """Everything a run found."""
    header = ["a step of a rank", "lookups", "distinct", "kB", "kB least", "over least", "kB, each lookup", "steps/s"]
    rows = [
        [
            f"{case['ids']}, {case['ranks']} ranks",
            f"{case['lookups']:,.0f}",
            f"{case['unique_ids']:,.0f}",
            _kilobytes(case["exchanged_bytes"]),
            _kilobytes(case["least_bytes"]),
            f"{case['exchanged_bytes'] / case['least_bytes']:.3f}" if case["least_bytes"] else "-",
            _kilobytes(case["bytes_with_duplicates"]),
            f"{case['steps_per_second']:.1f}",
        ]
        for case in results["cases"]
    ]
    modelled = [
        [
            f"{case['ids']}, {case['devices']} devices"
            + (f", two levels, L = {case['local_size']}" if case["local_size"] > 1 else ""),
            f"{case['messages']:,}",
            _kilobytes(case["bytes"]),
            f"{case['exchange_ms']:.2f}",
            f"{case['status_ms']:.2f}",
        ]
        for case in results["modelled"]
    ]
    assumed = (
        f"MODELLED, {LINK / 1e9:g} GB/s a device, {WITHIN / 1e9:g} within a machine of at most {MACHINE}, "
        f"{MESSAGE * 1e6:g} us a message, nothing overlapped; the status of a forward goes around a ring"
    )
    return "\n\n".join(
        [
            machine_lines(results["machine"]),
            table(header, rows),
            table([assumed, "messages", "kB", "exchange ms", "status ms"], modelled),
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs, prints, writes."""
    options = parse(arguments)
    results = run(options)
    print(render(results))
    write_json(options.json, results)
    return 0


if __name__ == "__main__":
    with_malloc_settings("benchmarks.sharding")
    sys.exit(main())
