"""Sequence features outside the loss have no gradient: their rows are unchanged, even if tables share a group.

The reference is torch.nn.Embedding with one lookup per feature of the loss. The documented formulas update the rows of
its sparse gradients. The step count t advances with every backward pass, or accumulation window, of the collection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from batches import jagged
from collection_factory import apply, sequence_config, sequences_collection
from optimizer_table import BY_NAME

IDS = 12
LR = 0.1
FEATURES = {"t0": ("f0", "f1"), "t1": ("f2",), "t2": ("f3",)}


class Reference:
    """Tables as float64 `nn.Embedding`s; the optimizer updates only rows that the loss depends on."""

    def __init__(self, weights: Mapping[str, torch.Tensor], optimizer: str, window: int) -> None:
        self.tables = {
            name: torch.nn.Embedding.from_pretrained(weight.double(), freeze=False, sparse=True)
            for name, weight in weights.items()
        }
        self.optimizers = {name: BY_NAME[optimizer].on_rows(table.weight, lr=LR) for name, table in self.tables.items()}
        self.window = window
        self.backwards = self.t = 0

    def forward(self, bags: Mapping[str, Sequence[Sequence[int]]]) -> dict[str, torch.Tensor]:
        return {
            feature: self.tables[name](torch.tensor([i for bag in bags[feature] for i in bag], dtype=torch.int64))
            for name, features in FEATURES.items()
            for feature in features
        }

    def states(self, table: str) -> dict[str, torch.Tensor]:
        """Returns the table's states, `[rows, D]`."""
        optimizer = self.optimizers[table]
        return {name: optimizer.state[optimizer.weight][name] for name in optimizer.states}

    def after_backward(self) -> None:
        self.backwards += 1
        if self.backwards % self.window:
            return
        self.t += 1
        for optimizer in self.optimizers.values():
            optimizer.state[optimizer.weight]["step"] = self.t - 1  # t advances also for tables without a gradient
            if optimizer.weight.grad is not None:
                optimizer.step()
                optimizer.weight.grad = None


OPTIMIZERS = [("sgd", 1), ("adagrad", 1), ("adam", 1), ("sparse_adam", 1), ("sparse_adam", 3), ("adagrad", 2)]
"""Names in the table of optimizers, with the number of backward passes of a window."""

LOSSES: dict[str, list[tuple[str, ...]]] = {
    "without a table": [("f0", "f1", "f2", "f3"), ("f0", "f1", "f3"), ("f2",), ("f0", "f1", "f2")],
    "without a feature of a table": [("f0", "f1", "f2", "f3"), ("f0", "f2", "f3"), ("f1", "f2", "f3"), ("f1",)],
    "one feature": [("f0", "f1", "f2", "f3"), ("f1",), ("f3",), ("f0",)],
}
"""The features in the loss of each step, repeated."""


def collection_of(device: torch.device, dims: Sequence[int], optimizer: str, window: int) -> Any:
    tables = [sequence_config(*table, embedding_dim=dim) for table, dim in zip(FEATURES.items(), dims, strict=True)]
    collection, row = sequences_collection(device, *tables, cache=IDS), BY_NAME[optimizer]
    windowed = {"use_accumulate": True, "accumulate_step": window} if window > 1 else {}
    return apply(collection, row.class_of(window), **{**row.options, "lr": LR}, **windowed)


def tables_of(collection: Any) -> dict[str, torch.Tensor]:
    """Returns all rows of all tables, ordered by id."""
    collection.eval()
    every = jagged({feature: [list(range(IDS))] for features in FEATURES.values() for feature in features})
    output = collection(every)
    collection.train()
    return {name: output[features[0]].values().cpu().clone() for name, features in FEATURES.items()}


def draw(seed: int) -> dict[str, list[list[int]]]:
    """Draws ids for each feature; the two features of t0 have some ids in common."""
    rng = np.random.default_rng(seed)
    return {f"f{n}": [rng.integers(0, IDS, 3).tolist(), rng.integers(0, IDS, 2).tolist()] for n in range(4)}


def loss_of(outputs: Mapping[str, torch.Tensor], features: Sequence[str]) -> torch.Tensor:
    return torch.stack([(outputs[feature] ** 2).sum() + outputs[feature].sum() for feature in features]).sum()


DIMS = pytest.mark.parametrize("dims", [(4, 4, 4), (4, 8, 4), (4, 8, 16)], ids=["one group", "two", "three"])


@DIMS
@pytest.mark.parametrize("losses", LOSSES)
@pytest.mark.parametrize(("optimizer", "window"), OPTIMIZERS)
def test_only_features_of_the_loss_are_updated(
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
def test_a_zero_gradient_still_updates(device: torch.device, dims: Sequence[int]) -> None:
    """A feature that the loss multiplies by 0 does have a gradient: Adam still updates rows with momentum."""
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
    assert not torch.equal(reference.states("t1")["exp_avg"][0], torch.zeros(1)), "t1 has momentum"


@DIMS
def test_hooks_of_unused_features_receive_none(device: torch.device, dims: Sequence[int]) -> None:
    """All outputs come from one autograd function.

    Hooks of outputs outside the loss receive None, as with `torch.split`.
    """
    collection = collection_of(device, dims, "adam", 1)
    outputs = {name: part.values() for name, part in collection(jagged(draw(0))).items()}
    called: dict[str, torch.Tensor | None] = {}
    for name, output in outputs.items():
        output.register_hook(lambda grad, name=name: called.update({name: grad}))
    for output in outputs.values():
        output.retain_grad()
    loss_of(outputs, ["f1", "f3"]).backward()
    assert [name for name, grad in called.items() if grad is not None] == ["f1", "f3"]
    assert [name for name, output in outputs.items() if output.grad is not None] == ["f1", "f3"]
