"""No option is lost where a collection is sharded: option_cases.py says what each becomes on a rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from option_cases import OPTIONS, WORLD_SIZE, expected, make_collection, observed
from ranks import Place, Ranks
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingEnv,
    ShardingType,
)

import rec_sdk_torch as rst


def shard(rank: int, world_size: int, name: str) -> bool:
    """Whether the option is what it has to be in the tables on this rank."""
    collection = make_collection(name, rst)
    (sharder,) = [each for each in rst.get_default_hybrid_sharders(None) if each.module_type is type(collection)]
    by_rows: Any = ParameterSharding(ShardingType.ROW_WISE.value, EmbeddingComputeKernel.FUSED.value)
    plan = EmbeddingModuleShardingPlan({collection._embedding.tables[0].name: by_rows})
    env = ShardingEnv.from_process_group(torch.distributed.group.WORLD)
    found = observed(name, sharder.shard(collection, plan, env, Place.device).home._embedding)
    wanted = expected(OPTIONS[name], OPTIONS[name].shard, rank, Place.device)
    assert found == wanted, f"{name} is {found!r} on rank {rank}, not {wanted!r}"
    return True


@pytest.mark.parametrize("name", OPTIONS)
def test_shards(ranks_of: Callable[[int], Ranks], name: str) -> None:
    assert all(ranks_of(WORLD_SIZE).run(shard, name))
