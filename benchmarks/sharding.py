"""Bytes that sharded tables exchange between ranks."""

from __future__ import annotations

import argparse
import gc
import logging
import socket
import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from .ids import Distribution
from .runner import Option, Row, benchmark, say
from .tables import configs, make_collection
from .timing import in_processes
from .workload import TableSet, Workload, make_workload

MODELLED_DEVICES = ((8, 1), (1024, 1), (1024, 8), (1024, 16), (1024, 32))
"""Modelled numbers of devices, and of devices per machine; 1: an exchange without hierarchy."""
LINK = 25e9
"""Bytes per second between devices of different machines, in each direction: a port of 200 Gbit/s."""
WITHIN = 100e9
"""Bytes per second within a machine. DeepEP and DeepEP-Ascend publish 125 to 158 GB/s with NVLink and HCCS."""
MACHINE = 16
"""Devices of the largest machine, an Atlas A3. With more devices, nearly all bytes are sent between machines."""
MESSAGE = 5e-6
"""The fixed seconds of a message, also within a machine: an assumption."""
EXCHANGES = 4
"""The all-to-alls of a step: counts, ids, rows, gradients."""


def _sharded(workload: Workload, world_size: int) -> Any:
    """Builds the sharded model of a rank: pooled tables, sharded by rows."""
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
    from torchrec.distributed.types import ShardingEnv

    from rec_sdk_torch import get_default_hybrid_sharders

    tables = configs(list(zip(workload.tables.sizes, workload.dims, strict=True)))
    settings: dict[str, Any] = {"config_prefix": "", "cache": 1.0, "seed": 1}
    model = torch.nn.Sequential(make_collection(tables, torch.optim.SGD, {"lr": 0.01}, **settings))
    world = torch.distributed.group.WORLD
    env = ShardingEnv.from_process_group(world)
    sharders = get_default_hybrid_sharders(env)
    constraints = {table["name"]: ParameterConstraints(sharding_types=["row_wise"]) for table in tables}
    topology = Topology(world_size, "cpu", local_world_size=world_size)
    plan = EmbeddingShardingPlanner(topology, constraints=constraints).collective_plan(model, sharders, world)
    return DistributedModelParallel(model, env, torch.device("cpu"), plan, sharders)


def _train(rank: int, world_size: int, port: int, workload: Workload, ids: Distribution, sizes: tuple[int, int]) -> Any:
    """Trains on one rank; returns the counters and the seconds of the timed steps."""
    from torchrec import KeyedJaggedTensor

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore", FutureWarning)  # the planner emits FutureWarnings
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


def _rank(rank: int, *arguments: Any) -> Any:
    found = _train(rank, *arguments)
    gc.collect()  # frees the model, which keeps the group's threads alive; none may run while the interpreter exits
    return found


def run_ranks(workload: Workload, ids: Distribution, world_size: int, warm: int, steps: int) -> Row:
    """Runs a case; returns counters averaged over steps and ranks, and the steps per second of the slowest rank."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    found = in_processes(world_size, _rank, world_size, port, workload, ids, (warm, steps))
    counted = {name: sum(stats[name] for stats, _ in found) / (world_size * steps) for name in found[0][0]}
    exchanged = counted["id_bytes"] + counted["row_bytes"] + counted["grad_bytes"]
    least = least_bytes(workload, counted["unique_ids"], world_size)
    seconds = max(seconds for _, seconds in found) / steps
    return {
        **{"table": "a step of a rank", "ids": ids.name, "ranks": world_size, **counted},
        **{"exchanged_bytes": exchanged, "least_bytes": least, "over_least": exchanged / least if least else None},
        "steps_per_second": 1 / seconds,
    }


def least_bytes(workload: Workload, unique_ids: float, world_size: int) -> float:
    """Computes the minimum bytes per step and rank if ids are spread evenly: each distinct id, its row and gradient."""
    dim = sum(workload.dims) / len(workload.dims)
    return unique_ids * (1 - 1 / world_size) * (8 + 2 * 4 * dim)


def model_devices(workload: Workload, case: Row, devices: int, size: int) -> Row:
    """Models the exchange of a step between `devices` devices, `size` in each machine, each with one rank's batch.

    With two levels, a rank first sends within its machine all ids that belong to another local rank. Then it sends to
    other machines all ids that do not belong to its own machine.
    """
    unique = case["unique_ids"]
    within = least_bytes(workload, unique, size)
    between = least_bytes(workload, unique, devices // size)
    messages = size - 1 + devices // size - 1
    seconds = between / LINK + within / (WITHIN if size <= MACHINE else LINK) + EXCHANGES * messages * MESSAGE
    return {
        **{"table": ASSUMED, "ids": case["ids"], "devices": devices, "local_size": size},
        "messages": EXCHANGES * messages,
        "bytes": within + between,
        "exchange_ms": seconds * 1e3,
        "status_ms": 2 * messages * MESSAGE * 1e3,
    }


ASSUMED = (
    f"MODELLED, {LINK / 1e9:g} GB/s a device, {WITHIN / 1e9:g} within a machine of at most {MACHINE}, "
    f"{MESSAGE * 1e6:g} us a message, nothing overlapped; the status of a forward goes around a ring"
)


@benchmark(
    {
        "tables": Option(TableSet(4, 100_000), "such as 4x100k", TableSet(2, 1_000), kind=TableSet.parse),
        "dim": Option(64, quick=8),
        "lookups": Option(32_768, "of a rank and step, of all tables", quick=512),
        "bag": Option(8, "ids of a sample in a table"),
        "ids": Option([Distribution(1.05), Distribution(0.0)], kind=Distribution.parse),
        "ranks": Option([1, 2, 4], quick=[1, 2]),
        "steps": Option(12, quick=3),
        "warm": Option(4, "steps before the clock starts", quick=1),
    },
)
def sharding(options: argparse.Namespace) -> Iterator[Row]:
    """Counts the bytes that sharded tables exchange, times steps of processes on one machine, and models more devices.

    The model uses the counts of the runs with the first number of --ranks.
    """
    workload = make_workload(options.tables, options.dim, True, "sgd", options.lookups, options.bag)
    alone = []
    for ids in options.ids:
        for world_size in options.ranks:
            say(f"{ids.name}, {world_size} ranks")
            case = run_ranks(workload, ids, world_size, options.warm, options.steps)
            alone += [case] if world_size == options.ranks[0] else []
            yield case
    for case in alone:
        yield from (model_devices(workload, case, *each) for each in MODELLED_DEVICES)
