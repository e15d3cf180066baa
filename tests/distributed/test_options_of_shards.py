"""No option is lost where a collection is sharded: option_cases.py says what each becomes on a rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from jagged import apply, bag_config, bags_collection, jagged
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
    plan = EmbeddingModuleShardingPlan({collection.embedding.tables[0].name: by_rows})
    env = ShardingEnv.from_process_group(torch.distributed.group.WORLD)
    found = observed(name, sharder.shard(collection, plan, env, Place.device).home.embedding)
    wanted = expected(OPTIONS[name], OPTIONS[name].shard, rank, Place.device)
    assert found == wanted, f"{name} is {found!r} on rank {rank}, not {wanted!r}"
    return True


@pytest.mark.parametrize("name", OPTIONS)
def test_shards(ranks_of: Callable[[int], Ranks], name: str) -> None:
    assert all(ranks_of(WORLD_SIZE).run(shard, name))


def share_of_a_rank(rank: int, world_size: int, depth: int) -> dict[str, int]:
    """The slots of a rank for a tenth of a small table, once a batch of 40 samples of each rank was trained."""
    small = bag_config("t0", ["f0"], num_embeddings=160)
    large = bag_config("t1", ["f1"], num_embeddings=2000)
    collection = bags_collection(Place.device, small, large, cache=0.1)
    apply(collection)
    (sharder,) = [each for each in rst.get_default_hybrid_sharders(None) if each.module_type is type(collection)]
    by_rows: Any = ParameterSharding(ShardingType.ROW_WISE.value, EmbeddingComputeKernel.FUSED.value)
    plan = EmbeddingModuleShardingPlan(dict.fromkeys(("t0", "t1"), by_rows))
    env = ShardingEnv.from_process_group(torch.distributed.group.WORLD)
    tables = sharder.shard(collection, plan, env, Place.device)
    each = [[[(40 * rank + 80 * step + i) % 160] for i in range(40)] for step in range(5)]
    batches = [jagged({"f0": ids, "f1": ids}) for ids in each]
    for batch in rst.prefetch(iter(batches), tables, depth=depth) if depth else batches:
        tables(batch).wait().values().sum().backward()
    sizes: dict[str, int] = tables.cache_sizes
    return sizes


@pytest.mark.parametrize(("depth", "slots"), [(0, 40), (1, 80), (2, 80)])
def test_a_share_of_a_small_table_holds_a_batch_of_all_ranks(
    ranks_of: Callable[[int], Ranks], depth: int, slots: int
) -> None:
    """Half of the 80 rows of a batch are at home on each rank, and 80 of the table."""
    assert ranks_of(2).run(share_of_a_rank, depth) == [{"t0": slots, "t1": max(40 * (depth + 1), 100)}] * 2


@pytest.mark.parametrize("bounds", [{}, {"init_min": 0.0}, {"init_min": -0.25, "init_max": 0.5}], ids=str)
@pytest.mark.parametrize("initializer", rst.InitializerType)
def test_initial_weights_of_a_part(initializer: rst.InitializerType, bounds: dict[str, float]) -> None:
    table = TableConfig("t", 100, 4, initializer_type=initializer, **bounds)
    part = _part(table, RowWise(0, 2), 2)
    assert part.num_embeddings == 50
    assert (part.initializer_kind, part.init_range) == (table.initializer_kind, table.init_range)
