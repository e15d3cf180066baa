"""The processes that torchrun started, and a model that is divided between them."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv

from rec_sdk_torch import get_default_hybrid_sharders


@dataclass(frozen=True)
class Ranks:
    """Which of how many processes this one is."""

    rank: int = 0
    count: int = 1


def join() -> Ranks:
    """The ranks of torchrun, now a process group; a single one without it."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Ranks()
    dist.init_process_group("gloo")
    return Ranks(dist.get_rank(), dist.get_world_size())


def leave(ranks: Ranks) -> None:
    """Ends the process group."""
    if ranks.count > 1:
        dist.barrier()  # neither closes its sockets before the other is through
        dist.destroy_process_group()


def shard(model: nn.Module, tables: list[str], ranks: Ranks) -> DistributedModelParallel:
    """Each table's rows go to the ranks by id; dense parameters are on all ranks, their gradients averaged."""
    world = dist.group.WORLD
    assert world is not None
    env = ShardingEnv.from_process_group(world)
    sharders = get_default_hybrid_sharders(env)
    constraints = {table: ParameterConstraints(sharding_types=["row_wise"]) for table in tables}
    planner = EmbeddingShardingPlanner(Topology(ranks.count, "cpu"), constraints=constraints)
    plan = planner.collective_plan(model, sharders, world)
    return DistributedModelParallel(model, env, torch.device("cpu"), plan, sharders)
