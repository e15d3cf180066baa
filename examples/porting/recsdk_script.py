"""Clicks of users on items, as an unchanged script for Rec SDK 26:

torchrun --nproc-per-node 2 -m rec_sdk_torch.compat examples/porting/recsdk_script.py
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from clicks import BATCH, DIM, ROWS, STEPS, Model, clicks, end, sequences
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec_embcache.distributed.configs import EmbCacheEmbeddingConfig
from torchrec_embcache.distributed.embedding import EmbCacheEmbeddingCollection
from torchrec_embcache.distributed.sharding.embedding_sharder import EmbCacheEmbeddingCollectionSharder
from torchrec_embcache.distributed.train_pipeline import EmbCacheTrainPipelineSparseDist

try:
    import torch_npu  # noqa: F401

    DEVICE, BACKEND = "npu", "hccl"
except ImportError:
    DEVICE, BACKEND = "cpu", "gloo"
try:
    torch.ops.load_library("libfbgemm_npu_api.so")
except OSError as error:
    print(f"the operators of Rec SDK are missing: {error}")


def main() -> None:
    """Trains, and prints the loss of the first and the last steps."""
    world_size = int(os.environ["WORLD_SIZE"])
    host = torch.device("cpu")
    device = host if DEVICE == "cpu" else torch.device(DEVICE, int(os.environ["LOCAL_RANK"]))
    if DEVICE != "cpu":
        torch.npu.set_device(device)
    dist.init_process_group(BACKEND)
    torch.manual_seed(0)
    tables = EmbCacheEmbeddingCollection(
        tables=[
            EmbCacheEmbeddingConfig(name=f"t_{name}", num_embeddings=rows, embedding_dim=DIM, feature_names=[name])
            for name, rows in ROWS.items()
        ],
        world_size=world_size,
        batch_size=BATCH,
        multi_hot_sizes=[1, 1],
        device=torch.device("meta"),
    )
    model: nn.Module = Model(tables, sequences, nn.Linear(2 * DIM, 1, device=device))
    apply_optimizer_in_backward(torch.optim.Adagrad, tables.parameters(), {"lr": 0.1})
    host_env = ShardingEnv.from_process_group(dist.new_group(backend="gloo"))
    device_env = ShardingEnv.from_process_group(dist.group.WORLD)
    sharders = [EmbCacheEmbeddingCollectionSharder(host, host_env, device, device_env)]
    topology = Topology(world_size=world_size, compute_device="npu")
    constraints = {f"t_{name}": ParameterConstraints(sharding_types=["row_wise"]) for name in ROWS}
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    model = DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)
    dense = dict(model.module.dense.named_parameters())
    optimizer = CombinedOptimizer(
        [model.fused_optimizer, KeyedOptimizerWrapper(dense, lambda each: torch.optim.SGD(each, lr=0.1))]
    )
    pipeline = EmbCacheTrainPipelineSparseDist(model, optimizer, host, device, return_loss=True)
    batches = clicks(dist.get_rank())
    losses = [pipeline.progress(batches)[1].detach() for _ in range(STEPS)]
    end(device, losses)


if __name__ == "__main__":
    main()
