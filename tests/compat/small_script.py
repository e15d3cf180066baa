"""A user's script for Rec SDK, unchanged; writes its results to the file named by its argument."""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hybrid_torchrec.distributed.sharding_plan import get_default_hybrid_sharders
from torchrec import KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec_embcache.distributed import EmbCacheTrainPipelineSparseDist
from torchrec_embcache.distributed.configs import EmbCacheEmbeddingConfig
from torchrec_embcache.distributed.embedding import EmbCacheEmbeddingCollection
from torchrec_embcache.distributed.sharding.embedding_sharder import EmbCacheEmbeddingCollectionSharder

try:
    import torch_npu
except ImportError:
    torch_npu = None

torch.ops.load_library("libfbgemm_npu_api.so")
WORLD_SIZE = 2
STEPS = 4


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        config = EmbCacheEmbeddingConfig(
            name="table0",
            num_embeddings=400,
            embedding_dim=8,
            feature_names=["feat0"],
            weight_init_min=0.0,
            weight_init_max=1.0,
        )
        self.ec = EmbCacheEmbeddingCollection([config], 2, 16, [1], device=torch.device("meta"))
        torch.manual_seed(0)
        self.dense = torch.nn.Linear(8, 1)

    def forward(self, batch):
        out = self.dense(self.ec(batch)["feat0"].values())
        return out.square().mean(), out


def batches(rank):
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        ids = torch.randint(0, 400, (16,), generator=generator)
        yield KeyedJaggedTensor(["feat0"], ids, lengths=torch.ones(16, dtype=torch.int64))


def execute(rank, store, result):
    device = torch.device("cpu" if torch_npu is None else f"npu:{rank}")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD_SIZE)
    model = Model()
    apply_optimizer_in_backward(torch.optim.Adagrad, model.ec.parameters(), {"lr": 0.02})
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    sharders = [EmbCacheEmbeddingCollectionSharder(torch.device("cpu"), env, device, env)]
    assert len(get_default_hybrid_sharders(env)) > 1
    constraints = {"table0": ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["fused"])}
    planner = EmbeddingShardingPlanner(Topology(world_size=WORLD_SIZE, compute_device="npu"), constraints=constraints)
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    model = DistributedModelParallel(model, sharders=sharders, device=device, plan=plan)
    dense = KeyedOptimizerWrapper(dict(model.module.dense.named_parameters()), lambda p: torch.optim.SGD(p, lr=0.1))
    optimizer = CombinedOptimizer([model.fused_optimizer, dense])
    pipeline = EmbCacheTrainPipelineSparseDist(model, optimizer, torch.device("cpu"), device, return_loss=True)
    losses = []
    data = batches(rank)
    while True:
        try:
            losses.append(float(pipeline.progress(data)[1].detach()))
        except StopIteration:
            break
    pipeline.wait_pipeline_compute_swapinfo()
    eps = model.fused_optimizer.param_groups[0]["eps"]
    torch.save({"losses": losses, "eps": eps}, f"{result}{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    path = os.path.abspath(sys.argv[1])
    mp.spawn(execute, args=(path + ".store", path), nprocs=WORLD_SIZE)
