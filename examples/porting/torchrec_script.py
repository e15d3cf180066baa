"""Clicks of users on items, with TorchRec: torchrun --nproc-per-node 2 examples/porting/torchrec_script.py."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from clicks import DIM, ROWS, Model, clicks, end, pooled
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper


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
    tables = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name=f"t_{name}", num_embeddings=rows, embedding_dim=DIM, feature_names=[name])
            for name, rows in ROWS.items()
        ],
        device=torch.device("meta"),
    )
    model: nn.Module = Model(tables, pooled, nn.Linear(2 * DIM, 1, device=device))
    apply_optimizer_in_backward(torch.optim.Adagrad, tables.parameters(), {"lr": 0.1})
    sharders = [EmbeddingBagCollectionSharder()]
    constraints = {f"t_{name}": ParameterConstraints(sharding_types=["table_wise"]) for name in ROWS}
    plan = EmbeddingShardingPlanner(constraints=constraints).collective_plan(model, sharders, dist.group.WORLD)
    model = DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)
    dense = dict(model.module.dense.named_parameters())
    optimizer = CombinedOptimizer(
        [model.fused_optimizer, KeyedOptimizerWrapper(dense, lambda each: torch.optim.SGD(each, lr=0.1))]
    )
    losses = []
    for batch in clicks(dist.get_rank()):
        optimizer.zero_grad()
        loss, _ = model(batch.to(device))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    end(device, losses)


if __name__ == "__main__":
    main()
