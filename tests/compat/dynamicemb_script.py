"""A user's script for dynamicemb on GPUs, unchanged; writes its results to the file named by its argument.

Two optional arguments are the `dist_type` of the model, and of the model that loads its dump.
"""

import json
import os
import sys

import torch
import torch.distributed as dist
from dynamicemb import (
    DynamicEmbDump,
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    DynamicEmbLoad,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
    FrequencyAdmissionStrategy,
    KVCounter,
    get_sharded_table_capacity,
    get_table_value_bytes,
)
from dynamicemb.incremental_dump import get_score, incremental_dump
from dynamicemb.optimizer import EmbOptimType
from dynamicemb.planner import (
    DynamicEmbeddingEnumerator,
    DynamicEmbeddingShardingPlanner,
    DynamicEmbParameterConstraints,
)
from dynamicemb.shard import DynamicEmbeddingCollectionSharder
from fbgemm_gpu.split_embedding_configs import SparseType
from torch import nn
from torch.optim import Adam
from torchrec import DataType, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.storage_reservations import HeuristicalStorageReservation
from torchrec.distributed.types import ShardingType

FEATURES = {"user": 40, "item": 200}
BATCH, DIM, STEPS, BUCKET = 16, 8, 12, 16


class Model(nn.Module):
    def __init__(self, tables):
        super().__init__()
        self.tables = tables
        self.dense = nn.Sequential(nn.Linear(DIM, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, features):
        rows = self.tables(features)
        joined = torch.cat([rows[name].values() for name in rows.keys()], dim=0)  # noqa: SIM118
        return self.dense(joined).view(len(FEATURES), -1).sum(dim=0)


def planner_of(device, configs, threshold, dist_type):
    constraints = {}
    world_size = dist.get_world_size()
    for config in configs:
        options = {}
        if threshold:
            capacity = get_sharded_table_capacity(config, world_size, BUCKET)
            zeros = DynamicEmbInitializerArgs(mode=DynamicEmbInitializerMode.CONSTANT, value=0.0)
            options = {
                "admission_counter": KVCounter(capacity=capacity, bucket_capacity=1024, key_type=torch.int64),
                "admit_strategy": FrequencyAdmissionStrategy(threshold=threshold, initializer_args=zeros),
            }
        constraints[config.name] = DynamicEmbParameterConstraints(
            sharding_types=[ShardingType.ROW_WISE.value],
            use_dynamicemb=True,
            dynamicemb_options=DynamicEmbTableOptions(
                global_hbm_for_values=get_table_value_bytes(config, EmbOptimType.ADAM, world_size, BUCKET),
                initializer_args=DynamicEmbInitializerArgs(mode=DynamicEmbInitializerMode.UNIFORM),
                dist_type=dist_type,
                score_strategy=DynamicEmbScoreStrategy.STEP,
                caching=True,
                training=True,
                bucket_capacity=BUCKET,
                **options,
            ),
        )
    topology = Topology(
        local_world_size=get_local_size(),
        world_size=world_size,
        compute_device=device.type,
        hbm_cap=80 * 1024**3,
        ddr_cap=512 * 1024**3,
    )
    enumerator = DynamicEmbeddingEnumerator(topology=topology, constraints=constraints)
    return DynamicEmbeddingShardingPlanner(
        eb_configs=configs,
        topology=topology,
        constraints=constraints,
        batch_size=BATCH,
        enumerator=enumerator,
        storage_reservation=HeuristicalStorageReservation(percentage=0.05),
        debug=True,
    )


def create_model(device, threshold, dist_type="roundrobin"):
    torch.manual_seed(3)
    configs = [
        EmbeddingConfig(
            name=name, embedding_dim=DIM, num_embeddings=rows, feature_names=[name], data_type=DataType.FP32
        )
        for name, rows in FEATURES.items()
    ]
    model = Model(EmbeddingCollection(tables=configs, device=torch.device("meta")))
    fused_params = {
        "output_dtype": SparseType.FP32,
        "optimizer": EmbOptimType.ADAM,
        "learning_rate": 0.05,
        "beta1": 0.9,
        "beta2": 0.999,
        "weight_decay": 0,
        "eps": 0.001,
        "prefetch_pipeline": False,
    }
    precision = QCommsConfig(forward_precision=CommType.FP32, backward_precision=CommType.FP32)
    sharder = DynamicEmbeddingCollectionSharder(
        qcomm_codecs_registry=get_qcomm_codecs_registry(qcomms_config=precision),
        fused_params=fused_params,
        use_index_dedup=True,
    )
    planner = planner_of(device, model.tables.embedding_configs(), threshold, dist_type)
    plan = planner.collective_plan(model, [sharder], dist.GroupMember.WORLD)
    return DistributedModelParallel(module=model, device=device, sharders=[sharder], plan=plan)


def batches(rank, high):
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        ids = [torch.randint(0, high * rows, (BATCH,), generator=generator) for rows in FEATURES.values()]
        lengths = torch.ones(len(FEATURES) * BATCH, dtype=torch.long)
        yield KeyedJaggedTensor(list(FEATURES), torch.cat(ids), lengths=lengths), torch.rand(BATCH, generator=generator)


def train(model, device, high=1):
    """Trains the model; returns the losses and the sizes of the increments."""
    model.to(device)
    optimizer = Adam(model.parameters(), lr=0.01)
    losses, sizes, threshold = [], [], get_score(model)
    model.train()
    for step, (features, labels) in enumerate(batches(dist.get_rank(), high)):
        loss = nn.functional.mse_loss(model(features.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 4 == 3:
            increment, threshold = incremental_dump(model, threshold)
            sizes.append({name: len(rows[0]) for name, rows in increment["model.tables"].items()})
    return losses, sizes, optimizer


def evaluate(model, device):
    model.eval()
    with torch.inference_mode():
        return [model(features.to(device)).sum().item() for features, _ in batches(dist.get_rank(), 2)]


def main():
    dist.init_process_group(backend="nccl")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device(f"cuda:{local_rank}")
    torch.cuda.manual_seed(5)
    dist.barrier(device_ids=[local_rank])
    folder, name = os.path.split(sys.argv[1])
    trains, loads = sys.argv[2:] or ("roundrobin", "roundrobin")

    model = create_model(device, 0, trains)
    losses, sizes, optimizer = train(model, device)
    saved = os.path.join(folder, f"dense{rank}.pt")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
    DynamicEmbDump(os.path.join(folder, "dynamicemb"), model, optim=True)
    results = {"device": str(device), "losses": losses, "sizes": sizes, "evaluated": evaluate(model, device)}

    model = create_model(device, 0, loads)
    checkpoint = torch.load(saved, weights_only=True)
    dense = {key: value for key, value in checkpoint["model"].items() if "dense" in key}
    model.load_state_dict(dense, strict=False)
    DynamicEmbLoad(os.path.join(folder, "dynamicemb"), model, optim=True)
    results["loaded"] = evaluate(model, device)

    model = create_model(device, 2, trains)
    results["admitting"] = train(model, device, high=4)[1]
    with open(os.path.join(folder, f"{name}{rank}"), "w") as file:
        json.dump(results, file)
    dist.barrier(device_ids=[local_rank])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
