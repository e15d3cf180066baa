"""The way of one warm training batch through a sharded collection, on one of two ranks."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from jagged import apply, bag_config, bags_collection, jagged
from ranks import Place, Start
from sharded_model import shard_tables
from walks import Walk, walking

ROWS = 16
ALL_TO_ALL, TWO_LEVELS = "distributed/all_to_all.py", "distributed/two_levels.py"


def walk_of_rank(rank: int, world_size: int, local_size: int | None) -> tuple[Walk, int]:
    """The walk of a batch of two tables in one group, and the rows that left the cache before its end."""
    configs = (bag_config(f"t{table}", [f"f{table}"], num_embeddings=1000) for table in range(2))
    with walking() as walk:
        collection = bags_collection(Place.device, *configs, cache=ROWS * 5 // 2)  # two batches and a half on each rank
        apply(collection, torch.optim.Adagrad, lr=0.1)
        tables = shard_tables(collection, local_size=local_size)

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
def test_a_batch(ranks_of: Start) -> None:
    walk, rows_out = ranks_of(2).run(walk_of_rank, None)[0]
    assert rows_out >= ROWS, "rows leave in every batch"
    walk.check(calls=126, classes=24, cache=5, step=3)
    once = ("plan", "read_in", "pass_plans", "begin", "applied", "release", "land")
    assert +walk.engine == Counter(once)
    assert walk.entries[ALL_TO_ALL] <= 6, "numbers of ids, ids, vote, rows, gradients"
    assert not walk.entries[TWO_LEVELS]


@pytest.mark.usefixtures("on_host")
def test_a_batch_by_two_levels(ranks_of: Start) -> None:
    walk, _ = ranks_of(4).run(walk_of_rank, 2)[0]
    assert walk.entries[TWO_LEVELS] > 0
    assert walk.calls <= 193
