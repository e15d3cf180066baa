"""Data that ends at different steps on ranks: all train the batches that every rank has, then end together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from jagged import jagged
from ranks import Place, Ranks
from sharded_model import Model, Scenario, bags_of, rows, shard
from torchrec import KeyedJaggedTensor

import rec_sdk_torch as rst

Start = Callable[[int], Ranks]
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
    model = shard(Two(scenario), scenario, world_size)
    whole = model.module
    dense = torch.optim.SGD([whole.first.scale, whole.second.scale], lr=0.05)
    epoch_of = pipelined(model, dense, kind, depth)
    steps = []
    for epoch in range(EPOCHS):
        steps.append(
            epoch_of(jagged(*bags_of(scenario, 10 * epoch + i, world_size)[rank]) for i in range(counts[rank]))
        )
    return steps, [rows(part.sparse) for part in (whole.first, whole.second)]


def same(mine: Any, its: Any) -> None:
    for one, other in zip(mine, its, strict=True):
        for table in one:
            assert one[table].keys() == other[table].keys()
            assert all(torch.equal(row, other[table][i]) for i, row in one[table].items())


KINDS = [*((kind, depth) for kind in ("all", "loop") for depth in range(4)), ("hybrid", 2)]
CASES = [
    pytest.param(*case, world_size, marks=[] if world_size == (2, 4)[place % 2] else [pytest.mark.full])
    for place, case in enumerate(KINDS)
    for world_size in BATCHES
]


@pytest.mark.parametrize(("kind", "depth", "world_size"), CASES)
def test_all_ranks_train_what_all_have(ranks_of: Start, kind: str, depth: int, world_size: int) -> None:
    counts = BATCHES[world_size]
    results = ranks_of(world_size).run(train, kind, depth, counts)
    assert [steps for steps, _ in results] == [[min(counts)] * EPOCHS] * world_size
    even = ranks_of(world_size).run(train, "loop", 0, (min(counts),) * world_size)
    for (_, mine), (_, its) in zip(results, even, strict=True):
        same(mine, its)


@pytest.mark.parametrize("kind", NAMED)
def test_some_collections_prefetch(ranks_of: Start, kind: str) -> None:
    results = ranks_of(2).run(train, kind, 2, (6, 4))
    assert [steps for steps, _ in results] == [[4] * EPOCHS] * 2
    for (_, mine), (_, its) in zip(results, ranks_of(2).run(train, "loop", 0, (4, 4)), strict=True):
        same(mine, its)


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_without_the_batches_that_were_read_ahead(ranks_of: Start, depth: int) -> None:
    for counts in ((6, 4), (4, 6), (4, 4)):
        results = ranks_of(2).run(train, "ahead", depth, counts)
        assert [steps for steps, _ in results] == [[4 - depth] * EPOCHS] * 2


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("counts", [(0, 3), (1, 0), (0, 0), (3, 1)])
def test_fewer_batches_than_are_read_ahead(ranks_of: Start, counts: tuple[int, int], depth: int) -> None:
    results = ranks_of(2).run(train, "all", depth, counts)
    assert [steps for steps, _ in results] == [[min(counts)] * EPOCHS] * 2


def ends_beside_a_bad_batch(rank: int, world_size: int, depth: int) -> tuple[int, str]:
    """Rank 1's third batch cannot be looked up; rank 0 has none in its place."""
    scenario = Scenario()
    model = shard(Model(scenario, 3), scenario, world_size)
    dense = torch.optim.SGD([model.module.scale], lr=0.05)
    good = [jagged(*bags_of(scenario, step, world_size)[rank]) for step in range(2)]
    progress = pipelined(model, dense, "all", depth)
    try:
        return progress(iter([*good, jagged({"f0": [[1]]})] if rank else good)), ""
    except ValueError as error:
        return -1, str(error)


@pytest.mark.parametrize("depth", [0, 2])
def test_a_batch_that_is_not_trained_does_not_fail(ranks_of: Start, depth: int) -> None:
    assert ranks_of(2).run(ends_beside_a_bad_batch, depth) == [(2, "")] * 2
