"""Clicks of users on items, with TorchRec: torchrun --nproc-per-node 2 examples/porting/torchrec_script.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

ROWS = {"user": 1000, "item": 500}
BATCH, STEPS, DIM = 64, 150, 16


@dataclass
class Clicks:
    """Ids of a user and an item per sample, on the host, and whether the user clicked, float32 [B]."""

    sparse: KeyedJaggedTensor
    labels: Tensor


def clicks(rank: int, device: torch.device) -> Iterator[Clicks]:
    """Some users click more than others, and some items are clicked more."""
    taste = torch.Generator().manual_seed(0)
    scores = {name: torch.randn(rows, generator=taste) for name, rows in ROWS.items()}
    generator = torch.Generator().manual_seed(1 + rank)
    for _ in range(STEPS):
        ids = {name: torch.randint(0, rows, (BATCH,), generator=generator) for name, rows in ROWS.items()}
        labels = (scores["user"][ids["user"]] + scores["item"][ids["item"]] > 0).float()
        lengths = torch.ones(2 * BATCH, dtype=torch.int64)
        yield Clicks(KeyedJaggedTensor(list(ids), torch.cat(list(ids.values())), lengths=lengths), labels.to(device))


class Model(nn.Module):
    """The logit of a click, from both embeddings."""

    def __init__(self, tables: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.tables = tables
        self.dense = nn.Linear(2 * DIM, 1, device=device)

    def forward(self, batch: Clicks) -> Tensor:
        """The mean loss."""
        logits = self.dense(self.tables(batch.sparse).values()).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)


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
    model: nn.Module = Model(tables, device)
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
    for batch in clicks(dist.get_rank(), device):
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    first, last = (float(torch.stack(part).mean()) for part in (losses[:10], losses[-10:]))
    if dist.get_rank() == 0:
        print(f"{device.type}: loss {first:.4f} at first, {last:.4f} at last")
    dist.barrier()  # neither closes its sockets before the other is through
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
