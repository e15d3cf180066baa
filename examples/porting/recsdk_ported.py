"""Clicks of users on items, with cached tables: torchrun --nproc-per-node 2 examples/porting/recsdk_ported.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from rec_sdk_torch import (
    EmbCacheEmbeddingCollection,
    EmbCacheEmbeddingCollectionSharder,
    EmbCacheEmbeddingConfig,
    EmbCacheTrainPipelineSparseDist,
)

try:
    import torch_npu  # noqa: F401

    DEVICE, BACKEND = "npu", "hccl"
except ImportError:
    DEVICE, BACKEND = "cpu", "gloo"

ROWS = {"user": 1000, "item": 500}
BATCH, STEPS, DIM = 64, 150, 16


@dataclass
class Clicks:
    """Ids of a user and an item per sample, on the host, and whether the user clicked, float32 [B]."""

    sparse: KeyedJaggedTensor
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Clicks:
        """The pipeline copies the labels; the ids stay on the host."""
        return Clicks(self.sparse, self.labels.to(device, non_blocking=non_blocking))

    def record_stream(self, stream: torch.Stream) -> None:
        """For the copy."""
        self.labels.record_stream(stream)


def clicks(rank: int) -> Iterator[Clicks]:
    """Some users click more than others, and some items are clicked more."""
    taste = torch.Generator().manual_seed(0)
    scores = {name: torch.randn(rows, generator=taste) for name, rows in ROWS.items()}
    generator = torch.Generator().manual_seed(1 + rank)
    for _ in range(STEPS):
        ids = {name: torch.randint(0, rows, (BATCH,), generator=generator) for name, rows in ROWS.items()}
        labels = (scores["user"][ids["user"]] + scores["item"][ids["item"]] > 0).float()
        lengths = torch.ones(2 * BATCH, dtype=torch.int64)
        yield Clicks(KeyedJaggedTensor(list(ids), torch.cat(list(ids.values())), lengths=lengths), labels)


class Model(nn.Module):
    """The logit of a click, from both embeddings."""

    def __init__(self, tables: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.tables = tables
        self.dense = nn.Linear(2 * DIM, 1, device=device)

    def forward(self, batch: Clicks) -> tuple[Tensor, Tensor]:
        """The mean loss, and the logits."""
        found = self.tables(batch.sparse)
        logits = self.dense(torch.cat([found[name].values() for name in ROWS], dim=1)).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels), logits


def main() -> None:
    """Trains, and prints the loss of the first and the last steps."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
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
    model: nn.Module = Model(tables, device)
    apply_optimizer_in_backward(torch.optim.Adagrad, tables.parameters(), {"lr": 0.1, "eps": 1e-8})
    host_env = ShardingEnv.from_process_group(dist.new_group(backend="gloo"))
    device_env = ShardingEnv.from_process_group(dist.group.WORLD)
    sharders = [EmbCacheEmbeddingCollectionSharder(host, host_env, device, device_env)]
    topology = Topology(world_size=world_size, compute_device="cpu")
    constraints = {f"t_{name}": ParameterConstraints(sharding_types=["row_wise"]) for name in ROWS}
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    model = DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)
    dense = dict(model.module.dense.named_parameters())
    optimizer = CombinedOptimizer(
        [model.fused_optimizer, KeyedOptimizerWrapper(dense, lambda each: torch.optim.SGD(each, lr=0.1))]
    )
    pipeline = EmbCacheTrainPipelineSparseDist(model, optimizer, host, device, return_loss=True)
    batches = clicks(rank)
    losses = [pipeline.progress(batches)[1].detach() for _ in range(STEPS)]
    first, last = (float(torch.stack(part).mean()) for part in (losses[:10], losses[-10:]))
    if rank == 0:
        print(f"{device.type}: loss {first:.4f} at first, {last:.4f} at last")
    dist.barrier()  # neither closes its sockets before the other is through
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
