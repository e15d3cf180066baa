"""Backward passes with `inputs=`: exactly the tables whose parameters are listed are trained.

Trained tables must be bit-identical to the same backward pass without `inputs=`; other tables must be unchanged.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from batches import jagged, random_bags, random_weights
from collection_factory import apply, bag_config, bags_collection, sequence_config, sequences_collection
from torch.autograd.graph import get_gradient_edge
from torch.distributed.optim import _apply_optimizer_in_backward as torchs_apply
from torchrec.modules.embedding_configs import PoolingType
from torchrec.optim import RowWiseAdagrad
from torchrec.optim import apply_optimizer_in_backward as torchrecs_apply
from training import differing_tensors, equal_rows, output_parts, output_values, rows_of, state_of

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
    """Three tables, two of them (t0 and t1) in one group, and one dense weight."""

    def __init__(self, device: torch.device, kind: str, update: str, optimizer: type = torch.optim.Adam, **how: Any):
        super().__init__()
        make, config = KINDS[kind]
        configs = [config(name, FEATURES[name], embedding_dim=4 + 4 * (name == "t2")) for name in TABLES]
        self.tables = apply(make(device, *configs, cache=40, update=update), optimizer, **how)
        self.weighted = kind.startswith("weighted")
        self.dense = torch.nn.Parameter(torch.full((1,), 0.5, device=device))

    def features(self, seed: int) -> Any:
        rng = np.random.default_rng(seed)
        bags = random_bags(rng, KEYS, 20)
        return jagged(bags, random_weights(rng, bags) if self.weighted else None)

    def forward(self, features: Any) -> torch.Tensor:
        loss: torch.Tensor = sum(part.pow(2).sum() for part in output_parts(self.tables(features))) * self.dense.sum()
        return loss

    def handles(self, *names: str) -> list[Any]:
        return [handle for handle in self.tables.parameters() if handle.table in names]

    def rows(self) -> dict[str, dict[int, torch.Tensor]]:
        return {name: rows_of(self.tables, name) for name in TABLES}

    def unchanged_tables(self, before: dict[str, dict[int, torch.Tensor]]) -> list[str]:
        """Lists the tables whose rows are unchanged; new ids are allowed."""
        rows = self.rows()
        return [name for name in TABLES if all(torch.equal(rows[name][i], row) for i, row in before[name].items())]

    def step(self, seed: int, inputs: Sequence[Any] | None = None) -> None:
        """Trains a batch; calls the optimizer's `step()` unless updates run in the backward pass."""
        self(self.features(seed)).backward(inputs=inputs)
        self.tables.fused_optimizer.step()


def model(device: torch.device, kind: str, update: str, *args: Any, **how: Any) -> Model:
    """Builds a model that has trained one batch."""
    made = Model(device, kind, update, *args, **how)
    made.step(0)
    made.dense.grad = None
    return made


@KIND
@UPDATE
@pytest.mark.parametrize(
    "listed", [list, lambda parameters: list(map(get_gradient_edge, parameters))], ids=["", "edges"]
)
def test_listing_all_parameters_trains_as_without_inputs(
    device: torch.device, kind: str, update: str, listed: Callable[[Iterable[Any]], list[Any]]
) -> None:
    expected, found = model(device, kind, update), model(device, kind, update)
    for seed in (1, 2):
        expected.step(seed)
        found.step(seed, listed(found.parameters()))
    assert not list(differing_tensors(state_of(expected.tables), state_of(found.tables)))
    assert expected.dense.grad is not None
    assert found.dense.grad is not None
    assert torch.equal(expected.dense.grad, found.dense.grad)


@pytest.mark.parametrize("chosen", [("t0",), ("t1",), ("t2",), ("t0", "t2"), ("t0", "t1")], ids=" ".join)
@pytest.mark.parametrize(("update", "window"), [("backward", 1), ("backward", 2), ("step", 1)])
@KIND
def test_only_listed_tables_are_trained(
    device: torch.device, kind: str, update: str, window: int, chosen: Sequence[str]
) -> None:
    """Rows and states of all other tables are unchanged, even of tables in the same group."""
    expected, found = (model(device, kind, update, window=window) for _ in range(2))
    if window > 1:
        for one in (expected, found):
            one.step(3)
    before = found.rows()
    for seed in range(window):
        expected.step(seed)
        found.step(seed, found.handles(*chosen))
    assert found.dense.grad is None or window > 1
    trained, after = expected.rows(), found.rows()
    for name in TABLES:
        assert after[name].keys() == trained[name].keys()
        if name in chosen:
            assert equal_rows(after[name], trained[name])
        if name in chosen or window == 1:
            assert (name in found.unchanged_tables(before)) is (name not in chosen)


@KIND
@UPDATE
@pytest.mark.parametrize("how", ["autograd.grad", "inputs", "output"])
def test_inputs_without_a_table_change_nothing(device: torch.device, kind: str, update: str, how: str) -> None:
    """No table changes, and a second backward pass through the retained graph can still train the tables."""
    expected, found = model(device, kind, update), model(device, kind, update)
    before, features = found.rows(), found.features(1)
    wanted = [found.dense]
    if found.weighted:
        features._weights = features.weights().clone().requires_grad_()
        wanted.append(features.weights())
    loss = found(features)
    if how == "inputs":
        loss.backward(inputs=wanted, retain_graph=True)
        gradients = [tensor.grad for tensor in wanted]
    else:
        if how == "output":
            values = output_parts(found.tables(found.features(1)))[0]
            values.sum().backward(inputs=[values])
            assert torch.equal(values.grad, torch.ones_like(values))  # type: ignore[arg-type]
        gradients = list(torch.autograd.grad(loss, wanted, retain_graph=True))
    assert all(handle.grad is None for handle in found.tables.parameters())
    found.tables.fused_optimizer.step()
    assert found.unchanged_tables(before) == list(TABLES)
    found.zero_grad()
    for tensor in wanted:
        tensor.grad = None
    loss.backward()
    found.tables.fused_optimizer.step()
    expected.step(1)
    assert not list(differing_tensors(state_of(expected.tables), state_of(found.tables)))
    # type: ignore[arg-type]
    assert all(torch.equal(tensor.grad, grad) for tensor, grad in zip(wanted, gradients, strict=True))


@UPDATE
@pytest.mark.parametrize(("inner", "unchanged"), [(None, []), ("t1", ["t2"])], ids=str)
def test_a_pass_within_a_pass_has_its_own_inputs(
    device: torch.device, update: str, inner: str | None, unchanged: list[str]
) -> None:
    """A hook of a pass that lists t0 runs a pass that lists all tables or t1."""
    found = model(device, "bags", update)
    before = found.rows()
    loss, loss_inside = (found(found.features(1)) for _ in range(2))
    loss.register_hook(lambda grad: loss_inside.backward(inputs=inner and found.handles(inner)))
    loss.backward(inputs=found.handles("t0"))
    found.tables.fused_optimizer.step()
    assert found.unchanged_tables(before) == unchanged


@UPDATE
def test_gradients_of_tables_are_not_returned(device: torch.device, update: str) -> None:
    found = model(device, "bags", update)
    before = state_of(found.tables)
    loss = found(found.features(0))
    for inputs in (found.handles("t1"), list(found.parameters())):
        with pytest.raises(RuntimeError, match=r"autograd\.grad cannot return the gradient of table 't[01]'"):
            torch.autograd.grad(loss, inputs, retain_graph=True, allow_unused=True)
    assert not list(differing_tensors(before, state_of(found.tables)))
    loss.backward()
    found.tables.fused_optimizer.step()
    assert list(differing_tensors(before, state_of(found.tables)))


@UPDATE
def test_frozen_tables_stay(device: torch.device, update: str) -> None:
    found = model(device, "bags", update)
    found.handles("t0")[0].requires_grad_(False)
    before = found.rows()
    found.step(0, list(found.parameters()))
    unchanged_tables = found.unchanged_tables(before)
    assert "t0" in unchanged_tables
    assert "t1" not in unchanged_tables


@UPDATE
def test_a_copy_has_parameters_of_its_own(device: torch.device, update: str) -> None:
    first = model(device, "bags", update)
    twin = copy.deepcopy(first)
    with pytest.raises(RuntimeError, match=r"not .*used in the graph"):
        torch.autograd.grad(twin(twin.features(1)), first.handles("t0"))
    for one in (first, twin):
        one.step(1, one.handles(*TABLES))
    assert not list(differing_tensors(state_of(first.tables), state_of(twin.tables)))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, RowWiseAdagrad], ids=lambda each: each.__name__)
@pytest.mark.parametrize("give", [torchs_apply, torchrecs_apply], ids=["torch", "TorchRec"])
@UPDATE
def test_optimizers_that_torch_has_hooked(device: torch.device, update: str, give: Any, optimizer: type) -> None:
    """The hooks that torch sets on parameters neither run torch's own optimizer nor remove gradients of tables."""
    expected, found = apply(bags_collection(device, update=update), optimizer), bags_collection(device, update=update)
    for _ in range(2):  # the second call must change nothing
        give(optimizer, found.parameters(), {"lr": 0.5})
    for ids in ([[1, 2], [3]], [[2], [4]]):
        for one in (expected, found):
            output_values(one(jagged({"f0": ids}))).pow(2).sum().backward(inputs=list(one.parameters()))
            assert all((handle.grad is not None) == (update == "step") for handle in one.parameters())
            one.fused_optimizer.step()
    assert not list(differing_tensors(expected.state_dict(), found.state_dict()))


@UPDATE
def test_hooks_of_parameters(device: torch.device, update: str) -> None:
    """A gradient hook is never called; a post-accumulate hook sees the pending gradient, if there is one."""
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
