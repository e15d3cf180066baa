"""Activation checkpointing runs each lookup twice: the second run reads the same rows and counts no ids.

Results must be bit-identical to the same training without checkpointing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from embeddings import embedding_of
from oracle_events import collect
from oracle_evictions import Result
from torch.utils.checkpoint import checkpoint

from rec_sdk_torch.rules import Age, Count, Idle, Norm, Probability, Rows, Score, Share, ShowClick, Sketch
from rec_sdk_torch.tbe import Pooling, TableConfig, TableLifecycle

RULES: dict[str, TableLifecycle | None] = {
    "no rule": None,
    "counts": TableLifecycle(admission=Count(2), default_value=3),
    "clicks": TableLifecycle(admission=ShowClick(3, alpha=0.5, beta=1), default_value=3),
    "a sketch": TableLifecycle(admission=Sketch(3, bytes=256, halve_after=20), default_value=3),
    "a coin": TableLifecycle(admission=Probability(0.5), default_value=3),
    "idleness": TableLifecycle(eviction=Idle(2), every=1),
    "age": TableLifecycle(eviction=Age(25), every=1),
    "a half-life": TableLifecycle(eviction=Share(0.3), every=2, score=Score(half_life=2)),
    "decay": TableLifecycle(eviction=Share(0.3), every=2, score=Score(decay=0.5)),
    "a norm": TableLifecycle(eviction=Norm(0.2), every=2),
    "a bound": TableLifecycle(bound=Rows(8)),
}
UPDATE = pytest.mark.parametrize("update", ["backward", "step"])


class Model:
    """Two tables, one with a rule, and a function of their rows that saves tensors for its backward pass."""

    def __init__(
        self, device: torch.device, lifecycle: TableLifecycle | None, *, pooled: bool = True, update: str = "backward"
    ):
        pooling = Pooling.SUM if pooled else Pooling.NONE
        tables = [
            TableConfig("a", 100, 4, lifecycle=lifecycle, pooling=pooling),
            TableConfig("b", 100, 4, pooling=pooling),
        ]
        optimizer = torch.optim.Adagrad, {"lr": 0.5}
        self.embedding = embedding_of(*tables, optimizer=optimizer, cache=24, device=device, update=update)
        self.device, self.pooled = device, pooled
        self.dense = torch.linspace(0.5, 2, 4, device=device, requires_grad=True)
        self.read: list[torch.Tensor] = []

    def batch(self, number: int) -> dict[str, Any]:
        rng = np.random.default_rng(number)
        ids = torch.from_numpy(rng.integers(0, 12, 12))
        batch: dict[str, Any] = {"indices": ids, "offsets": torch.tensor([0, 2, 5, 6, 6, 10, 12])}
        batch["timestamps"] = torch.full((12,), 10 * number)
        batch["clicks"] = torch.from_numpy(rng.integers(0, 2, 12))
        if self.pooled:
            weights = torch.from_numpy(rng.normal(size=12).astype(np.float32)).to(self.device)
            batch["per_sample_weights"] = weights.requires_grad_()
        return batch

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        rows = self.embedding(**batch)
        self.read.append(rows.detach().clone())
        loss: torch.Tensor = (rows.reshape(-1, 4) * self.dense).tanh().sum()
        return loss

    def checkpointed(self, batch: dict[str, Any]) -> torch.Tensor:
        loss: torch.Tensor = checkpoint(self.forward, batch, use_reentrant=False)
        return loss

    def step(self) -> None:
        if self.embedding.options.updates_at_step:
            self.embedding.apply_gradients()

    def state(self) -> Result:
        result: Result = {}
        for table in self.embedding.tables:
            collect(self.embedding, table.name, result)
        stats = {name: torch.tensor(n) for name, n in self.embedding.cache_stats().items() if not name.endswith("_us")}
        return result | stats


def assert_same(one: Result, other: Result) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize(
    ("rule", "pooled", "update"),
    [(rule, i % 2 == j, ("backward", "step")[j]) for i, rule in enumerate(RULES) for j in range(2)],
)
def test_every_rule(device: torch.device, rule: str, pooled: bool, update: str) -> None:
    plain, twice = (Model(device, RULES[rule], pooled=pooled, update=update) for _ in range(2))
    for number in range(6):
        batches = plain.batch(number), twice.batch(number)
        plain.forward(batches[0]).backward()
        twice.checkpointed(batches[1]).backward()
        for model in (plain, twice):
            model.step()
        forwards, again = twice.read[::2], twice.read[1::2]
        assert len(forwards) == len(again) == len(plain.read)
        assert torch.equal(forwards[-1], again[-1])
        assert torch.equal(forwards[-1], plain.read[-1])
        if pooled:
            assert torch.equal(batches[0]["per_sample_weights"].grad, batches[1]["per_sample_weights"].grad)
    assert_same(plain.state(), twice.state())


@UPDATE
@pytest.mark.parametrize("pooled", [True, False])
def test_rows_that_changed_meanwhile(device: torch.device, update: str, pooled: bool) -> None:
    """The recomputation reads the rows as they were in the forward, although another batch has updated them since."""
    model = Model(device, None, pooled=pooled, update=update)
    model.forward(model.batch(1)).backward()
    model.step()
    del model.read[:]
    loss = model.checkpointed(model.batch(1))
    model.forward(model.batch(1)).backward()
    if update == "backward":
        after = model.embedding.eval()(**model.batch(1))
        model.embedding.train()
        assert not torch.equal(after, model.read[0])
    loss.backward()
    assert torch.equal(model.read[0], model.read[2])


def one_after_the_other(model: Model) -> None:
    """Runs two checkpointed regions with the same batch; the lookup of the second region admits ids."""
    first, second = model.checkpointed(model.batch(1)), model.checkpointed(model.batch(1))
    first.backward()
    second.backward()


def the_sum_of_two(model: Model) -> None:
    (model.checkpointed(model.batch(1)) + model.checkpointed(model.batch(1))).backward()


def twice_in_one(model: Model) -> None:
    def both(batch: dict[str, Any]) -> torch.Tensor:
        return model.forward(batch) * model.forward(batch)

    loss: torch.Tensor = checkpoint(both, model.batch(1), use_reentrant=False)
    loss.backward()


def one_inside_another(model: Model) -> None:
    def outer(batch: dict[str, Any]) -> torch.Tensor:
        return model.checkpointed(batch).exp()

    loss: torch.Tensor = checkpoint(outer, model.batch(1), use_reentrant=False)
    loss.backward()


@UPDATE
@pytest.mark.parametrize(
    ("regions", "forwards"),
    [
        (one_after_the_other, [0, 1, 0, 1]),
        (the_sum_of_two, [0, 1, 1, 0]),
        (twice_in_one, [0, 1, 0, 1]),
        (one_inside_another, [0, 0, 0]),
    ],
)
def test_equal_batches(
    device: torch.device, regions: Callable[[Model], None], forwards: list[int], update: str
) -> None:
    """An id is admitted by its second lookup.

    Recomputations are matched to their forwards even if batches have equal ids.
    """
    model = Model(device, RULES["counts"], update=update)
    regions(model)
    assert [torch.equal(model.read[forwards[i]], read) for i, read in enumerate(model.read)] == [True] * len(forwards)
    model.step()
    plain = Model(device, RULES["counts"], update=update)
    for _ in set(forwards):
        plain.embedding(**plain.batch(1))
    expected, found = plain.state(), model.state()
    for key in ("a.ids", "a.candidate ids", "a.not_admitted_lookups"):
        assert torch.equal(expected[key], found[key]), key


def test_another_batch_is_an_error(device: torch.device) -> None:
    model = Model(device, RULES["counts"])
    numbers = iter((1, 2))
    loss: torch.Tensor = checkpoint(lambda: model.forward(model.batch(next(numbers))), use_reentrant=False)
    with pytest.raises(RuntimeError, match="looks up another batch of tables than before"):
        loss.backward()


def test_tables_that_did_not_train_before(device: torch.device) -> None:
    model = Model(device, RULES["counts"])
    model.forward(model.batch(0)).backward()
    model.embedding.eval()
    loss = model.checkpointed(model.batch(1))
    model.embedding.train()
    with pytest.raises(RuntimeError, match="tables that did not train then"):
        loss.backward()


@UPDATE
def test_a_second_pass_through_the_region(device: torch.device, update: str) -> None:
    """A second backward pass is allowed while rows are unchanged: with update="step", until step()."""
    model = Model(device, RULES["counts"], update=update)
    loss = model.checkpointed(model.batch(1))
    loss.backward(retain_graph=True)
    if update == "step":
        torch.autograd.grad(loss, [model.dense], retain_graph=True)
        assert torch.equal(model.read[0], model.read[2])
    model.step()
    with pytest.raises(RuntimeError, match="whose rows were updated meanwhile"):
        torch.autograd.grad(loss, [model.dense])


def test_steps_end_with_their_graph(device: torch.device) -> None:
    """A region without a backward pass releases its rows when its autograd graph is freed."""
    model = Model(device, None)
    for number in range(30):
        loss = model.checkpointed(model.batch(number))
        del loss
    assert model.embedding.layout.in_flight() == 0
    loss = model.checkpointed(model.batch(1))
    loss.backward()
    del loss
    assert model.embedding.layout.in_flight() == 0
