"""Data that ends at different steps on ranks: all train the batches that every rank has, then end together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from jagged import jagged
from ranks import Place, Ranks, Start, on_ranks
from sharded_model import Model, Scenario, assert_same, batch_of, batches_of, rows, shard, sharded
from torchrec import KeyedJaggedTensor

import rec_sdk_torch as rst

BATCHES = {2: (6, 4), 4: (5, 7, 3, 4)}
EPOCHS = 2
NAMED = {"one": ("second",), "turned": ("second", "first")}
"""Collections whose ids a loop says to prefetch."""


class Two(torch.nn.Module):
    """Two collections, each of which exchanges."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__()
        self.first, self.second = Model(scenario, 3), Model(scenario, 4)

    def forward(self, batch: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.first(batch)[0] + self.second(batch)[0], batch.values()


def pipelined(model: Any, dense: Any, kind: str, depth: int) -> Callable[[Iterator[Any]], int]:
    if kind in ("loop", *NAMED):

        def loop(batches: Iterator[Any]) -> int:
            steps = 0
            names = NAMED.get(kind)
            features = None if names is None else lambda batch: {f"{name}.sparse": batch for name in names}
            for batch in rst.prefetch(batches, model.module, depth=depth, features=features):
                dense.zero_grad()
                model(batch)[0].backward()
                dense.step()
                steps += 1
            return steps

        return loop
    if kind == "hybrid":
        pipeline: Any = rst.HybridTrainPipelineSparseDist(model, dense, Place.device, pipe_n_batch=depth)
    else:
        pipeline = rst.EmbCacheTrainPipelineSparseDist(
            model, dense, "cpu", Place.device, depth=depth, execute_all_batches=kind == "all"
        )

    def progress(batches: Iterator[Any]) -> int:
        steps = 0
        while True:
            try:
                pipeline.progress(batches)
            except StopIteration:
                return steps
            steps += 1

    return progress


def train(rank: int, world_size: int, kind: str, depth: int, counts: tuple[int, ...]) -> Any:
    """(steps of each epoch, rows)"""
    scenario = Scenario(optimizer=torch.optim.Adagrad, rules={"admit_threshold": 2}, seed=51)
    model: Any = shard(Two(scenario), scenario)
    parts = model.module.first, model.module.second
    epoch_of = pipelined(model, torch.optim.SGD([part.scale for part in parts], lr=0.05), kind, depth)
    steps = [epoch_of(batch_of(scenario, 10 * epoch + i) for i in range(counts[rank])) for epoch in range(EPOCHS)]
    return steps, [rows(part.sparse) for part in parts]


def check(ranks: Ranks, kind: str, depth: int, counts: tuple[int, ...], even: Any = None) -> None:
    """The ranks train what all have; with the rows of `even`, where every rank has as much."""
    results = ranks.run(train, kind, depth, counts)
    assert [steps for steps, _ in results] == [[min(counts)] * EPOCHS] * len(counts)
    if even is not None:
        assert_same([found for _, found in results], [found for _, found in even])


@pytest.mark.parametrize("world_size", BATCHES)
def test_all_ranks_train_what_all_have(ranks_of: Start, pytestconfig: pytest.Config, world_size: int) -> None:
    """Two ranks have half of the pipelines and depths, and four a quarter, where the suite is not the full one."""
    counts, ranks = BATCHES[world_size], ranks_of(world_size)
    kinds = [*((kind, depth) for kind in ("all", "loop") for depth in range(4)), ("hybrid", 2)]
    some = kinds if pytestconfig.getoption("--full") else {2: kinds[::2], 4: kinds[3::4]}[world_size]
    even = ranks.run(train, "loop", 0, (min(counts),) * world_size)
    for kind, depth in some:
        check(ranks, kind, depth, counts, even)


def test_some_collections_prefetch(ranks_of: Start) -> None:
    even = ranks_of(2).run(train, "loop", 0, (4, 4))
    for kind in NAMED:
        check(ranks_of(2), kind, 2, (6, 4), even)


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_without_the_batches_that_were_read_ahead(ranks_of: Start, depth: int) -> None:
    for counts in ((6, 4), (4, 6), (4, 4)) if depth == 1 else ((6, 4),):
        results = ranks_of(2).run(train, "ahead", depth, counts)
        assert [steps for steps, _ in results] == [[4 - depth] * EPOCHS] * 2


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("counts", [(0, 3), (1, 0), (0, 0), (3, 1)])
def test_fewer_batches_than_are_read_ahead(ranks_of: Start, counts: tuple[int, int], depth: int) -> None:
    check(ranks_of(2), "all", depth, counts)


@on_ranks(2)
@pytest.mark.parametrize("depth", [0, 2])
def test_a_batch_that_is_not_trained_does_not_fail(rank: int, depth: int) -> None:
    """Rank 1's third batch cannot be looked up; rank 0 has none in its place."""
    model = sharded(Scenario())
    dense = torch.optim.SGD([model.module.scale], lr=0.05)
    good = list(batches_of(Scenario(), 2))
    assert pipelined(model, dense, "all", depth)(iter([*good, jagged({"f0": [[1]]})] if rank else good)) == 2
