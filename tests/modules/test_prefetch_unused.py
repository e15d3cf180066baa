"""Batches that are prefetched and never looked up: a warning, and no plans for nothing; never more plans than depth."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from jagged import apply, bag_config, bags_collection, jagged
from torchrec import KeyedJaggedTensor
from torchrec.distributed.train_pipeline import TrainPipelineBase

import rec_sdk_torch as rst
from rec_sdk_torch.tbe.step.prefetch_queue import FEW

SIZE = 8
UNUSED = "none of those that were prefetched"


def make(device: torch.device, policy: str = "lrfu") -> Any:
    tables = bags_collection(device, bag_config("t0", num_embeddings=9000), cache=600, cache_policy=policy)
    apply(tables, torch.optim.SGD, lr=0.1)
    train(tables, batch_of(0))
    return tables


def batch_of(step: int) -> KeyedJaggedTensor:
    return jagged({"f0": [[SIZE * step + i] for i in range(SIZE)]})


def batches(count: int = 30) -> Iterator[KeyedJaggedTensor]:
    for step in range(count):
        yield batch_of(step)


def other(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """As a model makes of its ids."""
    return KeyedJaggedTensor(batch.keys(), batch.values() * 3 + 5000, lengths=batch.lengths())


def train(tables: Any, batch: KeyedJaggedTensor) -> None:
    tables(batch).values().sum().backward()


def read(tables: Any, batch: KeyedJaggedTensor) -> None:
    with torch.no_grad():
        tables(batch)


class Plans:
    """Counts the plans that are made, and those that there are at once."""

    def __init__(self, tables: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made = self.most = 0
        self._tables = tables
        (group,) = tables.embedding.groups
        plan = group.plan

        def counted(*arguments: Any) -> Any:
            self.made += 1
            return plan(*arguments)

        monkeypatch.setattr(group, "plan", counted)

    def look(self) -> None:
        self._tables.wait_for_plans()
        coming = tuple(self._tables.embedding.queue._coming)
        self.most = max(self.most, sum(each.plans is not None for each in coming))


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_a_model_that_changes_ids_is_told_once(
    device: torch.device, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables, plain = make(device), make(device)
    plans = Plans(tables, monkeypatch)
    given = rst.prefetch(batches(), tables, depth)
    so_far = [0]

    def run() -> None:
        for batch in given:
            plans.look()
            train(tables, other(batch))
            so_far.append(plans.made)

    with pytest.warns(UserWarning, match=rf"tables \['t0'\].*{UNUSED}.*features=") as caught:
        run()
    assert len([each for each in caught if UNUSED in str(each.message)]) == 1
    assert plans.most <= depth + 1
    made = [after - before for before, after in pairwise(so_far)]
    assert sum(made[: FEW - 1]) >= 2 * (FEW - 1)
    assert made[FEW + 1 :] == [1] * (len(made) - FEW - 1), "its own, and no other"
    for batch in batches():
        train(plain, other(batch))
    assert torch.equal(tables.table_ids("t0"), plain.table_ids("t0"))
    # Where one of them comes, the next are planned again.
    for batch in rst.prefetch(batches(), tables, depth):
        plans.look()
        train(tables, batch)
    assert plans.made == so_far[-1] + 30
    assert plans.most == depth + 1


def every(tables: Any, batch: KeyedJaggedTensor) -> None:
    train(tables, batch)


def some(tables: Any, batch: KeyedJaggedTensor) -> None:
    if int(batch.values()[0]) % 3:
        train(tables, batch)


def one_of_two(tables: Any, batch: KeyedJaggedTensor) -> None:
    """Another data set is trained between."""
    train(tables, batch)
    train(tables, other(batch))


def read_before(tables: Any, batch: KeyedJaggedTensor) -> None:
    read(tables, batch)
    train(tables, batch)


def evaluate(tables: Any, batch: KeyedJaggedTensor) -> None:
    tables.eval()
    tables(batch)
    tables.train()


LOOPS: dict[str, Callable[[Any, KeyedJaggedTensor], None]] = {
    each.__name__: each for each in (every, some, one_of_two, read_before, read, evaluate)
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("policy", ["lrfu", "look_ahead"])
def test_loops_that_are_told_nothing(
    device: torch.device, loop: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = make(device, policy)
    plans = Plans(tables, monkeypatch)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=f".*{UNUSED}")
        for batch in rst.prefetch(batches(40), tables, 2):
            plans.look()
            LOOPS[loop](tables, batch)
    assert plans.most <= 3


def test_what_is_only_read_is_not_planned(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it may have been before the first was read."""
    tables = make(device)
    plans = Plans(tables, monkeypatch)
    for batch in rst.prefetch(batches(), tables, 2):
        plans.look()
        read(tables, batch)
    assert plans.made <= 3
    train(tables, batch_of(50))
    made = plans.made
    for batch in rst.prefetch(batches(10), tables, 2):
        plans.look()
        train(tables, batch)
    assert plans.made == made + 10, "ahead, each once"


@pytest.mark.parametrize("depth", [1, 3])
def test_pipelines_that_hold_batches_plan_no_further(
    device: torch.device, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TorchRec's are given batches that they train later."""
    tables = make(device)
    plans = Plans(tables, monkeypatch)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = tables
            self.scale = torch.nn.Parameter(torch.ones(1, device=device))

        def forward(self, batch: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
            plans.look()
            output = self.tables(batch).values() * self.scale
            return output.sum(), output

    model = Model()
    pipeline = TrainPipelineBase(model, torch.optim.SGD([model.scale], lr=0.1), device)
    coming = rst.prefetch(batches(), tables, depth)
    for _ in range(28):
        pipeline.progress(coming)
    assert 1 < plans.most <= depth + 1
    assert tables.cache_stats()["depth_reached"] <= depth + 1
