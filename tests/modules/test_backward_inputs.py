"""Backward passes that name their inputs: a table trains where its parameter is one of them, and only there.

The reference of a table that trains is the same backward pass without `inputs=`, bit for bit; other tables stay.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from jagged import (
    apply,
    bag_config,
    bags_collection,
    jagged,
    output_values,
    random_bags,
    random_weights,
    rows_of,
    same_bits,
    sequence_config,
    sequences_collection,
)
from torch.distributed.optim import _apply_optimizer_in_backward as torchs_apply
from torchrec.modules.embedding_configs import PoolingType
from torchrec.optim import RowWiseAdagrad
from torchrec.optim import apply_optimizer_in_backward as torchrecs_apply

import rec_sdk_torch as rst

TABLES = ("t0", "t1", "t2")
FEATURES = {"t0": ["f0", "f3"], "t1": ["f1"], "t2": ["f2"]}
KEYS = ("f0", "f1", "f2", "f3")


def weighted(device: torch.device, *configs: Any, **options: Any) -> Any:
    return bags_collection(device, *configs, is_weighted=True, **options)


def mean(*args: Any, **fields: Any) -> Any:
    return bag_config(*args, pooling=PoolingType.MEAN, **fields)


KINDS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "bags": (bags_collection, bag_config),
    "mean bags": (bags_collection, mean),
    "weighted bags": (weighted, bag_config),
    "sequences": (sequences_collection, sequence_config),
}
KIND, UPDATE = pytest.mark.parametrize("kind", KINDS), pytest.mark.parametrize("update", ["backward", "step"])


class Model(torch.nn.Module):
    """Tables, of which t0 and t1 are in one group, and one dense weight."""

    def __init__(self, device: torch.device, kind: str, update: str, optimizer: type = torch.optim.Adam, **how: Any):
        super().__init__()
        make, config = KINDS[kind]
        configs = [config(name, FEATURES[name], embedding_dim=4 + 4 * (name == "t2")) for name in TABLES]
        self.tables = make(device, *configs, cache=40, update=update)
        self.weighted = kind.startswith("weighted")
        apply(self.tables, optimizer, **how)
        self.dense = torch.nn.Parameter(torch.full((1,), 0.5, device=device))

    def features(self, seed: int) -> Any:
        rng = np.random.default_rng(seed)
        bags = random_bags(rng, KEYS, 20)
        return jagged(bags, random_weights(rng, bags) if self.weighted else None)

    def forward(self, features: Any) -> torch.Tensor:
        output = self.tables(features)
        parts = [output.values()] if hasattr(output, "length_per_key") else [part.values() for part in output.values()]
        loss: torch.Tensor = sum(part.pow(2).sum() for part in parts) * self.dense.sum()
        return loss

    def handles(self, *names: str) -> list[Any]:
        return [handle for handle in self.tables.parameters() if handle.table in names]

    def end(self) -> None:
        self.tables.fused_optimizer.step()

    def state(self) -> dict[str, Any]:
        return {"rows": self.tables.state_dict(), "optimizer": self.tables.fused_optimizer.state_dict()}


def model(device: torch.device, kind: str, update: str, *args: Any, **how: Any) -> Model:
    """A model that was trained for a batch."""
    made = Model(device, kind, update, *args, **how)
    made(made.features(0)).backward()
    made.end()
    made.dense.grad = None
    return made


@KIND
@UPDATE
def test_all_parameters_of_a_model(device: torch.device, kind: str, update: str) -> None:
    expected, found = model(device, kind, update), model(device, kind, update)
    for seed in (1, 2):
        expected(expected.features(seed)).backward()
        found(found.features(seed)).backward(inputs=list(found.parameters()))
        for one in (expected, found):
            one.end()
    assert not list(same_bits(expected.state(), found.state()))
    assert expected.dense.grad is not None
    assert found.dense.grad is not None
    assert torch.equal(expected.dense.grad, found.dense.grad)


@pytest.mark.parametrize("chosen", [("t0",), ("t1",), ("t2",), ("t0", "t2"), ("t0", "t1")], ids=" ".join)
@pytest.mark.parametrize("window", [1, 2])
@KIND
@UPDATE
def test_some_tables(device: torch.device, kind: str, update: str, window: int, chosen: Sequence[str]) -> None:
    """The others stay as they are, in their states too, also those of the same group."""
    how: dict[str, Any] = {}
    if window > 1:
        if update == "step":
            pytest.skip("windows are for updates in the backward pass")
        how = {"optimizer": rst.AccumulateAdam, "use_accumulate": True, "accumulate_step": window}
    expected, found = model(device, kind, update, **how), model(device, kind, update, **how)
    if window > 1:
        for one in (expected, found):
            one(one.features(3)).backward()
    before = {name: rows_of(found.tables, name) for name in TABLES}
    for seed in range(window):
        expected(expected.features(seed)).backward()
        found(found.features(seed)).backward(inputs=found.handles(*chosen))
        for one in (expected, found):
            one.end()
    assert found.dense.grad is None or window > 1
    for name in TABLES:
        trained, rows = rows_of(expected.tables, name), rows_of(found.tables, name)
        assert rows.keys() == trained.keys()
        if name in chosen:
            assert all(torch.equal(rows[i], trained[i]) for i in rows)
            assert any(not torch.equal(rows[i], before[name][i]) for i in before[name])
        elif window == 1:
            assert all(torch.equal(rows[i], before[name][i]) for i in before[name])


@KIND
@UPDATE
@pytest.mark.parametrize("how", ["autograd.grad", "inputs", "output"])
def test_no_table(device: torch.device, kind: str, update: str, how: str) -> None:
    """Nothing changes, and the tables can still be trained through a graph that is retained."""
    expected, found = model(device, kind, update), model(device, kind, update)
    before = {name: rows_of(found.tables, name) for name in TABLES}
    features = found.features(1)
    if found.weighted:
        features._weights = features.weights().clone().requires_grad_()
    loss = found(features)
    wanted = [found.dense, features.weights()] if found.weighted else [found.dense]
    if how == "autograd.grad":
        gradients = torch.autograd.grad(loss, wanted, retain_graph=True)
    elif how == "inputs":
        loss.backward(inputs=wanted, retain_graph=True)
        gradients = tuple(tensor.grad for tensor in wanted)  # type: ignore[misc]
    else:
        output = found.tables(found.features(1))
        values = output.values() if hasattr(output, "length_per_key") else output["f0"].values()
        values.sum().backward(inputs=[values])
        assert torch.equal(values.grad, torch.ones_like(values))
        gradients = torch.autograd.grad(loss, wanted, retain_graph=True)
    assert all(handle.grad is None for handle in found.tables.parameters())
    found.end()
    for name in TABLES:
        rows = rows_of(found.tables, name)
        assert all(torch.equal(rows[i], row) for i, row in before[name].items())
    found.zero_grad()
    found.dense.grad = None
    if found.weighted:
        features.weights().grad = None
    loss.backward()
    expected(expected.features(1)).backward()
    for one in (expected, found):
        one.end()
    assert not list(same_bits(expected.state(), found.state()))
    assert all(torch.equal(tensor.grad, gradient) for tensor, gradient in zip(wanted, gradients, strict=True))  # type: ignore[arg-type]


@UPDATE
def test_gradients_of_tables_are_not_returned(device: torch.device, update: str) -> None:
    found = model(device, "bags", update)
    before = found.state()
    loss = found(found.features(0))
    for inputs in (found.handles("t1"), list(found.parameters())):
        with pytest.raises(RuntimeError, match=r"autograd\.grad cannot return the gradient of table 't[01]'"):
            torch.autograd.grad(loss, inputs, retain_graph=True, allow_unused=True)
    assert not list(same_bits(before, found.state()))
    loss.backward()
    found.end()
    assert list(same_bits(before, found.state()))


@UPDATE
def test_frozen_tables_stay(device: torch.device, update: str) -> None:
    found = model(device, "bags", update)
    (handle,) = found.handles("t0")
    handle.requires_grad_(False)
    before = {name: rows_of(found.tables, name) for name in TABLES}
    found(found.features(0)).backward(inputs=list(found.parameters()))
    found.end()
    after = {name: rows_of(found.tables, name) for name in TABLES}
    assert all(torch.equal(after["t0"][i], before["t0"][i]) for i in before["t0"])
    assert any(not torch.equal(after["t1"][i], before["t1"][i]) for i in before["t1"])


@UPDATE
def test_a_copy_has_parameters_of_its_own(device: torch.device, update: str) -> None:
    first = model(device, "bags", update)
    twin = copy.deepcopy(first)
    loss = twin(twin.features(1))
    with pytest.raises(RuntimeError, match=r"not .*used in the graph"):
        torch.autograd.grad(loss, first.handles("t0"), retain_graph=True)
    first(first.features(1)).backward(inputs=first.handles(*TABLES))
    loss.backward(inputs=twin.handles(*TABLES))
    for one in (first, twin):
        one.end()
    assert not list(same_bits(first.state(), twin.state()))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, RowWiseAdagrad], ids=lambda each: each.__name__)
@pytest.mark.parametrize("give", [torchs_apply, torchrecs_apply], ids=["torch", "TorchRec"])
@UPDATE
def test_optimizers_that_torch_has_hooked(device: torch.device, update: str, give: Any, optimizer: type) -> None:
    """torch's hook on a parameter neither steps the optimizer that torch made nor takes the gradient away."""
    expected, found = bags_collection(device, update=update), bags_collection(device, update=update)
    apply(expected, optimizer)
    for _ in range(2):  # the second call changes nothing
        give(optimizer, found.parameters(), {"lr": 0.5})
    for ids in ([[1, 2], [3]], [[2], [4]]):
        for one in (expected, found):
            output_values(one(jagged({"f0": ids}))).pow(2).sum().backward(inputs=list(one.parameters()))
            assert all((handle.grad is not None) == (update == "step") for handle in one.parameters())
            one.fused_optimizer.step()
    assert not list(same_bits(expected.state_dict(), found.state_dict()))


@UPDATE
def test_hooks_of_parameters(device: torch.device, update: str) -> None:
    """A hook on the gradient is never called; a hook behind it sees the pending gradient, where there is one."""
    found = model(device, "bags", update)
    calls: list[tuple[str, Any]] = []
    hooks = []
    for handle in found.handles("t0", "t2"):
        hooks.append(handle.register_hook(lambda grad: calls.append(("gradient", grad))))
        hooks.append(handle.register_post_accumulate_grad_hook(lambda it: calls.append((it.table, it.grad.shape[1]))))
    found(found.features(0)).backward()
    assert sorted(calls) == ([("t0", 4), ("t2", 8)] if update == "step" else [])
    calls.clear()
    found(found.features(0)).backward(inputs=found.handles("t1"))
    assert not calls
    for hook in hooks:
        hook.remove()
    found(found.features(0)).backward()
    assert not calls
