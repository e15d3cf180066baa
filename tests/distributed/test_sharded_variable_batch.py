"""Sharded collections and keys with batch sizes of their own: as if every sample had its bags itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from ranks import Ranks
from sharded_model import KEYS, Model, Scenario, rows, shard
from torchrec import KeyedJaggedTensor
from variable_batches import expanded, variable_batch

import rec_sdk_torch as rst

ROW, TABLE = "row_wise", "table_wise"


def train(rank: int, world_size: int, scenario: Scenario, depth: int) -> list[Any]:
    """Outputs and rows with batch sizes per key, and with expanded batches."""
    results = []
    for form in (lambda batch: batch, expanded):
        model = shard(Model(scenario, seed=3), scenario, world_size)
        batches = [
            form(variable_batch(np.random.default_rng([rank, step]), KEYS, 31, scenario.weighted)) for step in range(4)
        ]
        outputs = []
        for batch in rst.prefetch(iter(batches), model, depth=depth) if depth else batches:
            loss, values = model(batch)
            loss.backward()
            outputs.append(values)
        results.append((outputs, rows(model.module.sparse)))
    return results


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    ("scenario", "depth"),
    [
        (Scenario(optimizer=torch.optim.Adagrad, options={"eps": 1e-2}), 0),
        (Scenario(sharding=(ROW, TABLE, ROW), dims=(4, 8, 4), cache=30), 2),
    ],
    ids=["row_wise", "mixed_prefetched"],
)
def test_it_is_the_expanded_batch(
    ranks_of: Callable[[int], Ranks], scenario: Scenario, depth: int, world_size: int
) -> None:
    for results in ranks_of(world_size).run(train, scenario, depth):
        (outputs, found), (wanted, expected) = results
        for output, other in zip(outputs, wanted, strict=True):
            torch.testing.assert_close(output, other, rtol=1e-5, atol=1e-6)
        for table, by_id in expected.items():
            assert found[table].keys() == by_id.keys()
            for i, row in by_id.items():
                torch.testing.assert_close(found[table][i], row, rtol=1e-4, atol=1e-5)


def without_inverse(rank: int, world_size: int) -> None:
    model = shard(Model(Scenario(), 3), Scenario(), world_size)
    batch = variable_batch(np.random.default_rng(0), KEYS, 31)
    bare = KeyedJaggedTensor(
        list(KEYS), batch.values(), lengths=batch.lengths(), stride_per_key_per_rank=batch.stride_per_key_per_rank()
    )
    with pytest.raises(ValueError, match="pooled outputs need inverse_indices"):
        model(bare if rank == 0 else batch)
    model(batch)[0].backward()


def test_a_batch_without_inverse_indices(ranks_of: Callable[[int], Ranks]) -> None:
    """All ranks raise, and can go on."""
    ranks_of(2).run(without_inverse)
