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
from rec_sdk_torch.distributed.local_shard import _part
from rec_sdk_torch.distributed.placement import RowWise
from rec_sdk_torch.tbe import TableConfig


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


@pytest.mark.parametrize("bounds", [{}, {"init_min": 0.0}, {"init_min": -0.25, "init_max": 0.5}], ids=str)
@pytest.mark.parametrize("initializer", rst.InitializerType)
def test_initial_weights_of_a_part(initializer: rst.InitializerType, bounds: dict[str, float]) -> None:
    table = TableConfig("t", 100, 4, initializer_type=initializer, **bounds)
    part = _part(table, RowWise(0, 2), 2)
    assert part.num_embeddings == 50
    assert (part.initializer_kind, part.init_range) == (table.initializer_kind, table.init_range)
