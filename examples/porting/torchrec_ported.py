"""Clicks of users on items, with cached tables: torchrun --nproc-per-node 2 examples/porting/torchrec_ported.py."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from clicks import DIM, ROWS, Model, clicks, end, pooled
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from rec_sdk_torch import (
    EmbCacheEmbeddingBagCollection,
    EmbCacheEmbeddingBagConfig,
    get_default_hybrid_sharders,
    prefetch,
)


def main() -> None:
    """Trains, and prints the loss of the first and the last steps."""
    accelerator = torch.accelerator.current_accelerator()
    device = (
        torch.device("cpu") if accelerator is None else torch.device(accelerator.type, int(os.environ["LOCAL_RANK"]))
    )
    if accelerator is not None:
        torch.accelerator.set_device_index(device.index)
    dist.init_process_group(dist.get_default_backend_for_device(device))
    torch.manual_seed(0)
    tables = EmbCacheEmbeddingBagCollection(
        tables=[
            EmbCacheEmbeddingBagConfig(name=f"t_{name}", num_embeddings=rows, embedding_dim=DIM, feature_names=[name])
            for name, rows in ROWS.items()
        ],
        device=torch.device("meta"),
        cache=0.5,
    )
    model: nn.Module = Model(tables, pooled, nn.Linear(2 * DIM, 1, device=device))
    apply_optimizer_in_backward(torch.optim.Adagrad, tables.parameters(), {"lr": 0.1})
    sharders = get_default_hybrid_sharders(ShardingEnv.from_process_group(dist.new_group(backend="gloo")))
    constraints = {f"t_{name}": ParameterConstraints(sharding_types=["row_wise"]) for name in ROWS}
    plan = EmbeddingShardingPlanner(constraints=constraints).collective_plan(model, sharders, dist.group.WORLD)
    model = DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)
    dense = dict(model.module.dense.named_parameters())
    optimizer = CombinedOptimizer(
        [model.fused_optimizer, KeyedOptimizerWrapper(dense, lambda each: torch.optim.SGD(each, lr=0.1))]
    )
    losses = []
    for batch in prefetch(clicks(dist.get_rank()), model):
        optimizer.zero_grad()
        loss, _ = model(batch.to(device))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    end(device, losses)


if __name__ == "__main__":
    main()
