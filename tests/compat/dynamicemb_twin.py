"""The first model of dynamicemb_script.py, written with this package's own names.

Writes its losses to the file named by its argument.

"""

import json
import os
import sys

import dynamicemb_script as script
import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv

import rec_sdk_torch as rst


def create_model(device: torch.device) -> DistributedModelParallel:
    torch.manual_seed(3)
    configs = [
        rst.EmbCacheEmbeddingConfig(
            name=name,
            num_embeddings=rows,
            embedding_dim=script.DIM,
            feature_names=[name],
            initializer_type=rst.InitializerType.UNIFORM,
            weight_init_min=-((1 / rows) ** 0.5),
            weight_init_max=(1 / rows) ** 0.5,
        )
        for name, rows in script.FEATURES.items()
    ]
    model = script.Model(None)
    # Created after the dense weights.
    model.tables = rst.EmbCacheEmbeddingCollection(configs, device="meta", cache=0.9)
    options = {"lr": 0.05, "eps": 0.001, "weight_decay": 0}
    rst.apply_optimizer_in_backward(torch.optim.AdamW, model.tables.parameters(), options)
    world = dist.group.WORLD
    sharders = rst.get_default_hybrid_sharders()
    constraints = {name: ParameterConstraints(sharding_types=["row_wise"]) for name in script.FEATURES}
    planner = EmbeddingShardingPlanner(Topology(dist.get_world_size(), "cpu"), constraints=constraints)
    plan = planner.collective_plan(model, sharders, world)
    return DistributedModelParallel(model, ShardingEnv.from_process_group(world), device, plan, sharders)


def main() -> None:
    dist.init_process_group(backend="nccl")
    torch.cuda.set_device(dist.get_rank())
    device = torch.device(f"cuda:{dist.get_rank()}")
    script.get_score = lambda model: None
    script.incremental_dump = lambda model, threshold: ({"model.tables": {}}, None)
    losses, _, _ = script.train(create_model(device), device)
    with open(f"{sys.argv[1]}{dist.get_rank()}", "w") as file:
        json.dump(losses, file)
    dist.barrier(device_ids=[int(os.environ["LOCAL_RANK"])])
    dist.destroy_process_group()


main()
