"""Step 4, tables divided among ranks: torchrun --nproc-per-node 2 examples/tutorial/step4_two_ranks.py."""

import torch
import torch.distributed as dist
from clicks import ROWS, batches, train
from step2_cached import make_model, report
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv

from rec_sdk_torch import get_default_hybrid_sharders, prefetch


def sharded(model):
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    sharders = get_default_hybrid_sharders(env)
    constraints = {f"t_{name}": ParameterConstraints(sharding_types=["row_wise"]) for name in ROWS}
    planner = EmbeddingShardingPlanner(Topology(dist.get_world_size(), "cpu"), constraints=constraints)
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    return DistributedModelParallel(model, env, torch.device("cpu"), plan, sharders)


def train_ahead(model, optimizer, steps):
    train(model, optimizer, prefetch(batches(steps, dist.get_rank()), model, depth=2))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = sharded(make_model())
    optimizer = torch.optim.Adam(model.module.dense.parameters(), lr=0.01)
    train_ahead(model, optimizer, steps=200)
    report(model.module.tables)
    dist.barrier()
    dist.destroy_process_group()
