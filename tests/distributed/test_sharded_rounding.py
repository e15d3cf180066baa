"""Stochastic rounding of sharded tables: the same bits on any number of ranks, where the sums of gradients are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from jagged import bag_config, bags_collection, jagged
from ranks import Place, Ranks
from torchrec import EmbeddingBagConfig
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingEnv
from torchrec.modules.embedding_configs import DataType

import rec_sdk_torch as rst

IDS, STEPS = 23, 6
KINDS = {DataType.BF16: torch.bfloat16, DataType.FP16: torch.float16, DataType.FP32: torch.float32}


def collection(device: torch.device, kind: DataType, seed: int, rounds: bool = True) -> Any:
    """A hash table and an index table; of float32 weights the cache is bfloat16."""
    made = bags_collection(
        device,
        bag_config("t0", data_type=kind),
        EmbeddingBagConfig(name="t1", num_embeddings=IDS, embedding_dim=4, feature_names=["f1"], data_type=kind),
        seed=seed,
        stochastic_rounding=rounds,
        cache_dtype=torch.bfloat16 if kind is DataType.FP32 else None,
    )
    rst.apply_optimizer_in_backward(torch.optim.SGD, made.parameters(), {"lr": 0.01})
    return made


def bags(step: int, rank: int) -> dict[str, list[list[int]]]:
    rng = np.random.default_rng([step, rank])
    return {key: [rng.integers(0, IDS, 3).tolist() for _ in range(4)] for key in ("f0", "f1")}


def train_sharded(rank: int, world_size: int, kind: DataType, sharding: tuple[str, str]) -> dict[str, Any]:
    """Rows of this rank."""
    fused = EmbeddingComputeKernel.FUSED.value
    homes = [None if of_table == "row_wise" else [0] for of_table in sharding]
    plan = EmbeddingModuleShardingPlan(
        {
            f"t{i}": ParameterSharding(of_table, fused, home)
            for i, (of_table, home) in enumerate(zip(sharding, homes, strict=True))
        }
    )
    world = ShardingEnv.from_process_group(torch.distributed.group.WORLD)
    origin = collection(Place.device, kind, seed=5 + rank)  # rank 0's seed holds
    sharded = rst.EmbCacheEmbeddingBagCollectionSharder().shard(origin, plan, world, Place.device)
    for step in range(STEPS):
        sharded(jagged(bags(step, rank))).values().sum().backward()
    state = sharded.state_dict()
    return {
        table: (state[f"embedding_bags.{table}.ids"].cpu(), state[f"embedding_bags.{table}.weight"].cpu())
        for table in ("t0", "t1")
    }


def train_alone(kind: DataType, world_size: int, rounds: bool = True) -> dict[str, dict[int, torch.Tensor]]:
    """The loss is the mean over ranks: gradients are sums of halves or quarters, which are exact."""
    alone = collection(torch.device("cpu"), kind, seed=5, rounds=rounds)
    for step in range(STEPS):
        of_ranks = [bags(step, rank) for rank in range(world_size)]
        whole = {key: [bag for batch in of_ranks for bag in batch[key]] for key in ("f0", "f1")}
        alone(jagged(whole)).values().sum().div(world_size).backward()
    state = alone.state_dict()
    return {
        table: dict(zip(sorted(alone.table_ids(table).tolist()), state[f"embedding_bags.{table}.weight"], strict=True))
        for table in ("t0", "t1")
    }


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sharding", [("row_wise", "row_wise"), ("table_wise", "row_wise")], ids=str)
def test_the_bits_of_one_process(
    ranks_of: Callable[[int], Ranks], kind: DataType, sharding: tuple[str, str], world_size: int
) -> None:
    expected, nearest = train_alone(kind, world_size), train_alone(kind, world_size, rounds=False)
    found: dict[str, dict[int, torch.Tensor]] = {"t0": {}, "t1": {}}
    for result in ranks_of(world_size).run(train_sharded, kind, sharding):
        for table, (ids, weight) in result.items():
            assert weight.dtype == KINDS[kind]
            found[table].update(zip(ids.tolist(), weight, strict=True))
    for table, by_id in expected.items():
        assert found[table].keys() == by_id.keys()
        assert all(torch.equal(found[table][i], row) for i, row in by_id.items())
        assert any(not torch.equal(nearest[table][i], row) for i, row in by_id.items()), "it rounds at random"
