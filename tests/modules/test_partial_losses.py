"""Sequence features that a loss leaves out have no gradient: their rows stay, whatever their tables are grouped with.

The reference is torch.nn.Embedding, one lookup per feature of the loss, with the documented formulas on the rows of
its sparse gradients; t advances with every backward pass, or window, of the collection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from jagged import apply, jagged, sequence_config, sequences_collection

import rec_sdk_torch as rst

IDS = 12
LR, EPS, BETAS = 0.1, 1e-3, (0.8, 0.95)
FEATURES = {"t0": ("f0", "f1"), "t1": ("f2",), "t2": ("f3",)}


class Reference:
    """Tables as `nn.Embedding`s in float64, and Adam, SparseAdam, Adagrad or SGD on the rows that a loss reads."""

    def __init__(self, weights: Mapping[str, torch.Tensor], optimizer: str, window: int) -> None:
        self.tables = {
            name: torch.nn.Embedding.from_pretrained(weight.double(), freeze=False, sparse=True)
            for name, weight in weights.items()
        }
        self.states = {
            name: [torch.zeros_like(weight, dtype=torch.float64) for _ in range(2)] for name, weight in weights.items()
        }
        self.optimizer, self.window = optimizer, window
        self.backwards = self.t = 0

    def forward(self, bags: Mapping[str, Sequence[Sequence[int]]]) -> dict[str, torch.Tensor]:
        return {
            feature: self.tables[name](torch.tensor([i for bag in bags[feature] for i in bag], dtype=torch.int64))
            for name, features in FEATURES.items()
            for feature in features
        }

    @torch.no_grad()
    def after_backward(self) -> None:
        self.backwards += 1
        if self.backwards % self.window:
            return
        self.t += 1
        for name, table in self.tables.items():
            if table.weight.grad is None:
                continue
            grad = table.weight.grad.coalesce()
            self.update(table.weight, self.states[name], grad.indices()[0], grad.values())
            table.weight.grad = None

    def update(self, weight: torch.Tensor, states: list[torch.Tensor], rows: torch.Tensor, g: torch.Tensor) -> None:
        if self.optimizer == "sgd":
            weight[rows] -= LR * g
            return
        if self.optimizer == "adagrad":
            states[0][rows] += g * g
            weight[rows] -= LR * g / (states[0][rows].sqrt() + EPS)
            return
        (b1, b2), t = BETAS, self.t
        m, v = (state[rows] for state in states)
        m, v = m * b1 + (1 - b1) * g, v * b2 + (1 - b2) * g * g
        states[0][rows], states[1][rows] = m, v
        if self.optimizer == "adam":
            weight[rows] -= LR / (1 - b1**t) * m / (v.sqrt() / (1 - b2**t) ** 0.5 + EPS)
        else:
            weight[rows] -= LR * (1 - b2**t) ** 0.5 / (1 - b1**t) * m / (v.sqrt() + EPS)


OPTIMIZERS: dict[tuple[str, int], tuple[type, dict[str, Any]]] = {
    ("sgd", 1): (torch.optim.SGD, {}),
    ("adagrad", 1): (torch.optim.Adagrad, {"eps": EPS}),
    ("adam", 1): (torch.optim.Adam, {"eps": EPS, "betas": BETAS}),
    ("sparse_adam", 1): (torch.optim.SparseAdam, {"eps": EPS, "betas": BETAS}),
    ("sparse_adam", 3): (rst.AccumulateAdam, {"eps": EPS, "betas": BETAS}),
    ("adagrad", 2): (rst.AccumulateAdagrad, {"eps": EPS}),
}

LOSSES: dict[str, list[tuple[str, ...]]] = {
    "without a table": [("f0", "f1", "f2", "f3"), ("f0", "f1", "f3"), ("f2",), ("f0", "f1", "f2")],
    "without a feature of a table": [("f0", "f1", "f2", "f3"), ("f0", "f2", "f3"), ("f1", "f2", "f3"), ("f1",)],
    "one feature": [("f0", "f1", "f2", "f3"), ("f1",), ("f3",), ("f0",)],
}
"""The features of the loss of each step, over and over."""


def collection_of(device: torch.device, dims: Sequence[int], optimizer: str, window: int) -> Any:
    tables = [
        sequence_config(name, features, embedding_dim=dim)
        for (name, features), dim in zip(FEATURES.items(), dims, strict=True)
    ]
    collection = sequences_collection(device, *tables, cache=IDS)
    cls, options = OPTIMIZERS[optimizer, window]
    if window > 1:
        options = {**options, "use_accumulate": True, "accumulate_step": window}
    apply(collection, cls, lr=LR, **options)
    return collection


def tables_of(collection: Any) -> dict[str, torch.Tensor]:
    """Every row of every table, in the order of the ids."""
    collection.eval()
    every = jagged({feature: [list(range(IDS))] for features in FEATURES.values() for feature in features})
    output = collection(every)
    collection.train()
    return {name: output[features[0]].values().cpu().clone() for name, features in FEATURES.items()}


def draw(seed: int) -> dict[str, list[list[int]]]:
    """Ids of each feature: both features of t0 have some in common, and some of their own."""
    rng = np.random.default_rng(seed)
    return {f"f{n}": [rng.integers(0, IDS, 3).tolist(), rng.integers(0, IDS, 2).tolist()] for n in range(4)}


def loss_of(outputs: Mapping[str, torch.Tensor], features: Sequence[str]) -> torch.Tensor:
    return torch.stack([(outputs[feature] ** 2).sum() + outputs[feature].sum() for feature in features]).sum()


DIMS = pytest.mark.parametrize("dims", [(4, 4, 4), (4, 8, 4), (4, 8, 16)], ids=["one group", "two", "three"])


@DIMS
@pytest.mark.parametrize("losses", LOSSES)
@pytest.mark.parametrize(("optimizer", "window"), OPTIMIZERS)
def test_only_what_the_loss_reads_moves(
    device: torch.device, dims: Sequence[int], losses: str, optimizer: str, window: int
) -> None:
    collection = collection_of(device, dims, optimizer, window)
    reference = Reference(tables_of(collection), optimizer, window)
    for step in range(12):
        bags, features = draw(step), LOSSES[losses][step % 4]
        outputs = {name: part.values() for name, part in collection(jagged(bags)).items()}
        expected = reference.forward(bags)
        before = tables_of(collection)
        loss_of(outputs, features).backward()
        loss_of(expected, features).backward()
        reference.after_backward()
        for name, weight in tables_of(collection).items():
            table = reference.tables[name].weight
            torch.testing.assert_close(
                weight, table.float(), rtol=1e-4, atol=1e-4, msg=lambda m, n=name, s=step: f"step {s}, table {n}: {m}"
            )
            if window == 1 and not set(FEATURES[name]) & set(features):
                assert torch.equal(weight, before[name]), f"step {step}: table {name} is not in the loss"
    state = collection.fused_optimizer.state_dict()["state"]
    steps = {key: int(value) for values in state.values() for key, value in values.items() if key.endswith(".step")}
    assert steps == {f"{name}.step": 12 // window for name in FEATURES}, "t advances for all tables"


@DIMS
def test_a_gradient_of_zero_is_one(device: torch.device, dims: Sequence[int]) -> None:
    """A feature that the loss multiplies by 0 is in it: with Adam, rows that have momentum move on."""
    collection = collection_of(device, dims, "adam", 1)
    reference = Reference(tables_of(collection), "adam", 1)
    for factor in (1.0, 0.0):
        bags = draw(0)
        for outputs, model in ((collection(jagged(bags)), collection), (reference.forward(bags), None)):
            values = {n: o.values() if model is not None else o for n, o in outputs.items()}
            (loss_of(values, ["f0", "f1", "f3"]) + factor * values["f2"].sum()).backward()
        reference.after_backward()
    for name, weight in tables_of(collection).items():
        torch.testing.assert_close(weight, reference.tables[name].weight.float(), rtol=1e-4, atol=1e-4)
    assert not torch.equal(reference.states["t1"][0], torch.zeros(1)), "t1 has momentum"


@DIMS
def test_no_gradient_is_none(device: torch.device, dims: Sequence[int]) -> None:
    """Each feature is a leaf of its own for hooks: those of features outside the loss are not called."""
    collection = collection_of(device, dims, "adam", 1)
    outputs = {name: part.values() for name, part in collection(jagged(draw(0))).items()}
    called = []
    for name, output in outputs.items():
        output.register_hook(lambda grad, name=name: called.append(name))
    for output in outputs.values():
        output.retain_grad()
    loss_of(outputs, ["f1", "f3"]).backward()
    assert sorted(called) == ["f1", "f3"]
    assert [name for name, output in outputs.items() if output.grad is not None] == ["f1", "f3"]
