"""Sharded tables that hand out their gradients: each rank those of the rows that are at home there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from jagged import bags_collection, jagged
from ranks import Place, Ranks
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingEnv

import rec_sdk_torch as rst

BAGS = ([[1, 2], [3]], [[2], [3, 4]])
"""The bags of each rank."""


def collection(device: torch.device) -> Any:
    made = bags_collection(device)
    rst.apply_optimizer_in_backward(rst.SparseGradients, made.parameters(), {})
    return made


def gradients(rank: int, world_size: int) -> dict[int, list[float]]:
    fused = EmbeddingComputeKernel.FUSED.value
    plan = EmbeddingModuleShardingPlan({"t0": ParameterSharding("row_wise", fused, None)})
    world = ShardingEnv.from_process_group(torch.distributed.group.WORLD)
    sharder = rst.EmbCacheEmbeddingBagCollectionSharder()
    sharded = sharder.shard(collection(Place.device), plan, world, Place.device)
    (sharded(jagged({"f0": BAGS[rank]})).values() * (rank + 1)).sum().backward()
    before = sharded.state_dict()["embedding_bags.t0.weight"].clone()
    taken = sharded.take_gradients()["t0"]
    mine = taken.ids[taken.ids % world_size == rank]
    assert mine.tolist() == taken.ids.tolist()
    sharded.add_to_rows("t0", taken.ids, torch.ones(len(taken.ids), 4))
    after = sharded.state_dict()["embedding_bags.t0.weight"]
    torch.testing.assert_close(after, before + 1)
    with pytest.raises(KeyError, match="have no row"):
        sharded.add_to_rows("t0", torch.tensor([900]), torch.ones(1, 4))
    return dict(zip(taken.ids.tolist(), taken.rows.cpu().tolist(), strict=True))


def test_gradients_of_all_ranks(ranks_of: Callable[[int], Ranks]) -> None:
    """They are the gradients of one process whose loss is the mean over ranks."""
    alone = collection(torch.device("cpu"))
    values = alone(jagged({"f0": [*BAGS[0], *BAGS[1]]})).values()
    (values * torch.tensor([[1.0], [1], [2], [2]])).sum().div(2).backward()
    ids, rows = alone.take_gradients()["t0"]
    found: dict[int, list[float]] = {}
    for part in ranks_of(2).run(gradients):
        assert not found.keys() & part.keys()
        found |= part
    assert found == dict(zip(ids.tolist(), rows.tolist(), strict=True))
