"""Collections inside modules of TorchRec's, and TorchRec's functions that shard a module by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from jagged import jagged, random_bags
from ranks import Place, Ranks
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.fp_embeddingbag import (
    FeatureProcessedEmbeddingBagCollectionSharder,
    ShardedFeatureProcessedEmbeddingBagCollection,
)
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.shard import shard, shard_modules
from torchrec.distributed.sharding_plan import row_wise
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)

import rec_sdk_torch as rst
from rec_sdk_torch.distributed.sharded import ShardedCollection

Start = Callable[[int], Ranks]
KEYS = ["f0", "f1"]
FIELDS: dict[str, Any] = {"num_embeddings": 31, "embedding_dim": 4}


def tables(weighted: bool = False, seed: int = 3) -> Any:
    configs = [
        rst.EmbCacheEmbeddingBagConfig(
            name="hash", feature_names=["f0"], initializer_type=rst.InitializerType.UNIFORM, **FIELDS
        ),
        EmbeddingBagConfig(name="index", feature_names=["f1"], **FIELDS),
    ]
    collection = rst.EmbCacheEmbeddingBagCollection(
        configs, cache=31, is_weighted=weighted, device=Place.device, seed=seed
    )
    rst.apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": 0.1})
    return collection


class Processed(torch.nn.Module):
    """Bags whose samples have a weight by their position, which is trained."""

    def __init__(self, inside: Any) -> None:
        super().__init__()
        processors: Any = {key: PositionWeightedModule(8, device=Place.device) for key in KEYS}
        self.bags = FeatureProcessedEmbeddingBagCollection(inside, processors)
        for i, weight in enumerate(self.bags._feature_processors.parameters()):
            drawn = torch.empty(weight.shape).uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(i))
            weight.data.copy_(drawn)  # the same on every device

    def forward(self, batch: KeyedJaggedTensor) -> torch.Tensor:
        return self.bags(batch).values().pow(2).sum()


def sharded(module: torch.nn.Module, kind: str | None) -> Any:
    group: Any = torch.distributed.group.WORLD
    env, names = ShardingEnv.from_process_group(group), ("hash", "index")
    constraints = {name: ParameterConstraints(sharding_types=[kind]) for name in names} if kind else None
    host = ShardingEnv.from_process_group(torch.distributed.new_group(backend="gloo"))
    sharders = rst.get_default_hybrid_sharders(host)
    planner = EmbeddingShardingPlanner(Topology(group.size(), "cpu"), constraints=constraints)
    plan = planner.collective_plan(module, sharders, group)
    return DistributedModelParallel(module, env, Place.device, plan, sharders)


def batches(world_size: int) -> list[list[Any]]:
    """Bags of each rank, by step."""
    return [
        [
            random_bags(np.random.default_rng([step, rank]), KEYS, 31, batch_size=3, longest=4)
            for rank in range(world_size)
        ]
        for step in range(3)
    ]


def rows_of(collection: Any) -> dict[str, dict[int, torch.Tensor]]:
    state, found = collection.state_dict(), {}
    for name in ("hash", "index"):
        weight = state[f"embedding_bags.{name}.weight"].cpu()
        ids = state.get(f"embedding_bags.{name}.ids", torch.arange(len(weight)))
        found[name] = dict(zip(ids.tolist(), weight, strict=True))
    return found


def train_processed(rank: int, world_size: int, kind: str | None) -> Any:
    model = sharded(Processed(tables(weighted=True, seed=3 + rank)), kind)
    assert type(model.module.bags._embedding_bag_collection) is ShardedCollection
    dense = torch.optim.SGD([p for n, p in model.named_parameters() if "_feature_processors" in n], lr=0.05)
    for bags in batches(world_size):
        dense.zero_grad()
        model(jagged(bags[rank]).to(Place.device)).backward()  # weights by position are made on the device
        dense.step()
    weights = [weight.detach().cpu() for weight in model.module.bags._feature_processors.parameters()]
    return rows_of(model.module.bags._embedding_bag_collection), weights


@pytest.mark.parametrize("kind", [None, "row_wise"])
def test_processed_features(ranks_of: Start, kind: str | None) -> None:
    results = ranks_of(2).run(train_processed, kind)
    alone = Processed(tables(weighted=True))
    dense = torch.optim.SGD(alone.bags._feature_processors.parameters(), lr=0.05)
    for bags in batches(2):
        dense.zero_grad()
        (alone(concatenated_bags(bags)) / 2).backward()
        dense.step()
    expected = rows_of(alone.bags._embedding_bag_collection)
    for table, values in expected.items():
        found = {i: row for of_rank, _ in results for i, row in of_rank[table].items()}
        assert found.keys() == values.keys()
        assert all(torch.allclose(found[i], row, 1e-5, 1e-6) for i, row in values.items()), table
    for _, weights in results:
        for weight, of_one in zip(weights, alone.bags._feature_processors.parameters(), strict=True):
            assert torch.allclose(weight, of_one.detach().cpu(), 1e-5, 1e-6)


def concatenated_bags(of_ranks: list[Any]) -> KeyedJaggedTensor:
    return jagged({key: [bag for bags in of_ranks for bag in bags[key]] for key in KEYS})


def torchrecs_own(rank: int, world_size: int) -> str:
    configs = [EmbeddingBagConfig(name="t", feature_names=KEYS, **FIELDS)]
    inside = EmbeddingBagCollection(configs, is_weighted=True, device=torch.device("meta"))
    return type(sharded(Processed(inside), None).module.bags).__name__


def test_processed_features_of_torchrecs_collection(device: torch.device, ranks_of: Start) -> None:
    if device.type == "npu":
        pytest.skip("TorchRec has no kernels for it")
    assert ranks_of(2).run(torchrecs_own) == [ShardedFeatureProcessedEmbeddingBagCollection.__name__] * 2


def test_torchrecs_sharder_of_processed_features_is_refused() -> None:
    module = Processed(tables(weighted=True)).bags
    with pytest.raises(ValueError, match=r"around EmbCacheEmbeddingBagCollection: .*get_default_hybrid_sharders"):
        FeatureProcessedEmbeddingBagCollectionSharder().shardable_parameters(module)


@pytest.mark.parametrize("pooled", [True, False])
def test_managed_collision_is_refused(pooled: bool) -> None:
    device, cls = torch.device("cpu"), EmbeddingBagConfig if pooled else EmbeddingConfig
    configs: Any = [cls(name="index", feature_names=["f"], **FIELDS)]
    policy = DistanceLFU_EvictionPolicy()
    remap: Any = {"index": MCHManagedCollisionModule(31, device, policy, eviction_interval=2)}
    collisions = ManagedCollisionCollection(remap, configs)
    make: Any = rst.EmbCacheEmbeddingBagCollection if pooled else rst.EmbCacheEmbeddingCollection
    around: Any = ManagedCollisionEmbeddingBagCollection if pooled else ManagedCollisionEmbeddingCollection
    with pytest.raises(TypeError, match="Hash tables need none, they take any id"):
        around(make(configs, cache=31, device="cpu"), collisions)
    theirs: Any = EmbeddingBagCollection(configs) if pooled else None
    if pooled:
        around(theirs, collisions)


def by_itself(rank: int, world_size: int, inside: bool) -> bool:
    """Whether a module that TorchRec's functions have sharded looks up what it did before."""
    batch = jagged({"f0": [[1, 2], [7]], "f1": [[rank], [3, 4]]})
    expected = tables().eval()(batch).values()
    env = ShardingEnv.from_process_group(torch.distributed.group.WORLD)
    if inside:
        model = torch.nn.ModuleDict({"tables": tables()})
        sharders = rst.get_default_hybrid_sharders()
        found: Any = shard_modules(model, env, Place.device, sharders=sharders)["tables"]
    else:
        found = shard(tables(), row_wise(), env, Place.device, rst.EmbCacheEmbeddingBagCollectionSharder())
    assert type(found) is ShardedCollection
    return torch.equal(found.eval()(batch).values(), expected)


@pytest.mark.parametrize("inside", [False, True], ids=["shard", "shard_modules"])
def test_modules_that_are_sharded_by_themselves(ranks_of: Start, inside: bool) -> None:
    assert ranks_of(2).run(by_itself, inside) == [True, True]
