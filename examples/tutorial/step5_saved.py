"""Step 5, saved and loaded: torchrun --nproc-per-node 2 examples/tutorial/step5_saved.py saves."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from clicks import DIM, ROWS, Model, batches, loss_of, report
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from rec_sdk_torch import (
    EmbCacheEmbeddingBagCollection,
    EmbCacheEmbeddingBagConfig,
    Saver,
    get_default_hybrid_sharders,
    prefetch,
)


def make_model():
    tables = EmbCacheEmbeddingBagCollection(
        tables=[
            EmbCacheEmbeddingBagConfig(
                name=f"t_{name}",
                num_embeddings=rows,
                embedding_dim=DIM,
                feature_names=[name],
                is_incremental=True,  # keeps what has changed since the last save
            )
            for name, rows in ROWS.items()
        ],
        cache=0.4,  # of the rows are on the device
    )
    apply_optimizer_in_backward(torch.optim.Adagrad, tables.parameters(), {"lr": 0.1})
    return Model(tables)


def sharded(model):
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    sharders = get_default_hybrid_sharders(env)
    constraints = {f"t_{name}": ParameterConstraints(sharding_types=["row_wise"]) for name in ROWS}
    planner = EmbeddingShardingPlanner(Topology(dist.get_world_size(), "cpu"), constraints=constraints)
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    return DistributedModelParallel(model, env, torch.device("cpu"), plan, sharders)


def train(model, optimizer, steps):
    losses = []
    model.train()
    for batch in prefetch(batches(steps, dist.get_rank()), model, depth=2):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()  # also updates the rows of the tables
        optimizer.step()
        losses.append(loss.detach())
    if dist.get_rank() == 0:
        report(losses)


def save(model, folder, incremental=False):
    path = Saver().save(model, folder, incremental)  # all ranks together
    if dist.get_rank() == 0:
        torch.save(model.module.dense.state_dict(), folder / "dense.pt")
        print(f"saved {Path(path).name}")
    dist.barrier()


def load(model, folder):
    Saver().load(model, folder)
    model.module.dense.load_state_dict(torch.load(folder / "dense.pt"))


@torch.no_grad()
def evaluate(model):
    return torch.stack([loss_of(model.eval(), batch) for batch in batches(steps=5)]).mean()


def main(folder):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = sharded(make_model())
    optimizer = torch.optim.Adam(model.module.dense.parameters(), lr=0.01)
    train(model, optimizer, steps=200)
    save(model, folder)
    train(model, optimizer, steps=20)
    save(model, folder, incremental=True)
    again = sharded(make_model())
    load(again, folder)
    before, after = evaluate(model), evaluate(again)
    if dist.get_rank() == 0:
        print(f"loss on five batches: {before:.4f} before the save, {after:.4f} after the load")
        stats = model.module.tables.cache_stats()
        print(f"rows in the cache: {model.module.tables.cache_sizes}")
        print(f"found in the cache: {1 - stats['unique_misses'] / stats['unique_rows']:.0%}")
        print(f"planned ahead at once: {stats['depth_reached']}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
