"""The way of one warm training batch through a sharded collection, on one of two ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from jagged import apply, bag_config, bags_collection, jagged
from ranks import Place, Ranks
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingEnv, ShardingType
from walks import Walk, walking

import rec_sdk_torch as rst

ROWS = 16
ALL_TO_ALL, TWO_LEVELS = "distributed/all_to_all.py", "distributed/two_levels.py"


def sharded(local_size: int | None) -> Any:
    """Two tables in one group, whose cache on each rank holds two batches and a half."""
    collection = bags_collection(
        Place.device,
        *(bag_config(f"t{table}", [f"f{table}"], num_embeddings=1000) for table in range(2)),
        cache=ROWS * 5 // 2,
    )
    apply(collection, torch.optim.Adagrad, lr=0.1)
    by_rows: Any = ParameterSharding(ShardingType.ROW_WISE.value, EmbeddingComputeKernel.FUSED.value)
    plan = EmbeddingModuleShardingPlan(dict.fromkeys(("t0", "t1"), by_rows))
    env = ShardingEnv.from_process_group(torch.distributed.group.WORLD)
    sharders = rst.get_default_hybrid_sharders(local_size=local_size)
    (sharder,) = [each for each in sharders if each.module_type is type(collection)]
    return sharder.shard(collection, plan, env, Place.device)


def walk_of_rank(rank: int, world_size: int, local_size: int | None) -> tuple[Walk, int]:
    """The walk of a batch, and the rows that left the cache before its end."""
    with walking() as walk:
        tables = sharded(local_size)

        def train(number: int) -> None:
            ids = [[ROWS * (world_size * number + rank) + row] for row in range(ROWS)]
            tables(jagged({"f0": ids, "f1": ids})).wait().values().sum().backward()

        for number in range(4):
            train(number)
        walk.count(lambda: train(4))
        return walk, tables.cache_stats()["rows_out"]


@pytest.fixture
def on_host(device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("on a device autograd has a thread of its own, and batches wait for copies")


@pytest.mark.usefixtures("on_host")
def test_a_batch(ranks_of: Callable[[int], Ranks]) -> None:
    walk, rows_out = ranks_of(2).run(walk_of_rank, None)[0]
    assert rows_out >= ROWS, "rows leave in every batch"
    walk.check(calls=126, classes=24, cache=5, step=3)
    once = ("plan", "read_in", "pass_plans", "begin", "applied", "release", "land")
    assert +walk.engine == Counter(once)
    assert walk.entries[ALL_TO_ALL] <= 6, "numbers of ids, ids, vote, rows, gradients"
    assert not walk.entries[TWO_LEVELS]


@pytest.mark.usefixtures("on_host")
def test_a_batch_by_two_levels(ranks_of: Callable[[int], Ranks]) -> None:
    walk, _ = ranks_of(4).run(walk_of_rank, 2)[0]
    assert walk.entries[TWO_LEVELS] > 0
    assert walk.calls <= 193
