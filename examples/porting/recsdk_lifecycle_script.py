"""Admission and eviction of ids, saves and a reload, as an unchanged script for Rec SDK 26:

torchrun --nproc-per-node 2 -m rec_sdk_torch.compat examples/porting/recsdk_lifecycle_script.py FOLDER
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from clicks import BATCH, DIM, Clicks, Model, end, sequences
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec_embcache.distributed.configs import (
    AdmitAndEvictConfig,
    AdmitAndEvictPolicyType,
    EmbCacheEmbeddingConfig,
    ShowClickParams,
)
from torchrec_embcache.distributed.embedding import EmbCacheEmbeddingCollection
from torchrec_embcache.distributed.sharding.embedding_sharder import EmbCacheEmbeddingCollectionSharder
from torchrec_embcache.distributed.train_pipeline import EmbCacheTrainPipelineSparseDist
from torchrec_embcache.saver import Saver
from torchrec_embcache.sparse.jagged_tensor_with_timestamp import (
    JaggedTensorWithTimestamp,
    KeyedJaggedTensorWithTimestamp,
)
from torchrec_embcache.utils import safe_makedirs

try:
    import torch_npu  # noqa: F401

    DEVICE, BACKEND = "npu", "hccl"
except ImportError:
    DEVICE, BACKEND = "cpu", "gloo"

STEPS, ITEMS, SEEN_DAILY = 160, 300, 200
NEW_PER_STEP = 2
"""New users in each step; as many others do not appear again."""
RULES = {
    "user": AdmitAndEvictConfig(admit_threshold=3, evict_threshold=30, evict_step_interval=20),
    "item": AdmitAndEvictConfig(
        policy_type=AdmitAndEvictPolicyType.POLICY_SHOWCLICK,
        showclick_params=ShowClickParams(alpha=0.5, beta=1.0, admit_threshold=2.0),
    ),
}


@dataclass
class TimedClicks(Clicks):
    """A batch of clicks whose ids have timestamps. Clicks, int64 [B] on the host, are used by the tables' rules."""

    sparse: KeyedJaggedTensorWithTimestamp
    click_labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> TimedClicks:
        """Copies the labels to the device; the tables' inputs stay on the host."""
        return replace(self, labels=self.labels.to(device, non_blocking=non_blocking))


def clicks(rank: int) -> Iterator[TimedClicks]:
    """Generates batches: the ids of the user and the item determine the click."""
    generator = torch.Generator().manual_seed(1 + rank)
    lengths = torch.ones(BATCH, dtype=torch.int64)
    for step in range(STEPS):
        first = NEW_PER_STEP * step
        users = torch.randint(first, first + SEEN_DAILY, (BATCH,), generator=generator)
        items = torch.randint(0, ITEMS, (BATCH,), generator=generator)
        clicked = users % 3 + items % 3 > 2
        times = torch.full((BATCH,), step, dtype=torch.int64)
        jagged = {
            name: JaggedTensorWithTimestamp(ids, lengths=lengths, timestamps=times)
            for name, ids in {"user": users, "item": items}.items()
        }
        yield TimedClicks(KeyedJaggedTensorWithTimestamp.from_jt_dict(jagged), clicked.float(), clicked.long())


def build(world_size: int, device: torch.device, host_env: ShardingEnv) -> DistributedModelParallel:
    """Builds the sharded model."""
    torch.manual_seed(0)
    tables = EmbCacheEmbeddingCollection(
        tables=[
            EmbCacheEmbeddingConfig(
                name=f"t_{name}",
                num_embeddings=1000,
                embedding_dim=DIM,
                feature_names=[name],
                admit_and_evict_config=rules,
                is_incremental=True,
            )
            for name, rules in RULES.items()
        ],
        world_size=world_size,
        batch_size=BATCH,
        multi_hot_sizes=[1, 1],
        device=torch.device("meta"),
    )
    dense = nn.Sequential(nn.Linear(2 * DIM, 32), nn.ReLU(), nn.Linear(32, 1)).to(device)
    model = Model(tables, sequences, dense)
    apply_optimizer_in_backward(torch.optim.Adagrad, tables.parameters(), {"lr": 0.1})
    device_env = ShardingEnv.from_process_group(dist.group.WORLD)
    sharders = [EmbCacheEmbeddingCollectionSharder(torch.device("cpu"), host_env, device, device_env)]
    constraints = {f"t_{name}": ParameterConstraints(sharding_types=["row_wise"]) for name in RULES}
    topology = Topology(world_size=world_size, compute_device="npu")
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    return DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)


def reload_matches(model: DistributedModelParallel, folder: Path, device: torch.device, host_env: ShardingEnv) -> bool:
    """Returns whether a new model, loaded from the save of this model, gives the same logits."""
    other = build(dist.get_world_size(), device, host_env)
    Saver().load(other, Saver.get_latest_load_path(str(folder)))
    other.module.dense.load_state_dict(model.module.dense.state_dict())
    batch = next(clicks(dist.get_rank())).to(device)
    model.eval()
    other.eval()
    with torch.no_grad():
        return torch.equal(model(batch)[1], other(batch)[1])


def main() -> None:
    """Trains and saves, and prints the loss of the first and the last steps."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu") if DEVICE == "cpu" else torch.device(DEVICE, int(os.environ["LOCAL_RANK"]))
    if DEVICE != "cpu":
        torch.npu.set_device(device)
    dist.init_process_group(BACKEND)
    host_env = ShardingEnv.from_process_group(dist.new_group(backend="gloo"))
    model = build(world_size, device, host_env)
    dense = dict(model.module.dense.named_parameters())
    optimizer = CombinedOptimizer(
        [model.fused_optimizer, KeyedOptimizerWrapper(dense, lambda each: torch.optim.Adagrad(each, lr=0.05))]
    )
    pipeline = EmbCacheTrainPipelineSparseDist(model, optimizer, torch.device("cpu"), device, return_loss=True)
    folder, batches, losses = Path(sys.argv[1]), clicks(rank), []
    safe_makedirs(str(folder))
    for step in range(STEPS):
        losses.append(pipeline.progress(batches)[1].detach())
        if step in (STEPS // 2, STEPS - 1):
            Saver().save(model, str(folder), incremental=step == STEPS - 1)
    if not reload_matches(model, folder, device, host_env):
        raise RuntimeError("the reloaded model gives other logits")
    end(device, losses)


if __name__ == "__main__":
    main()
