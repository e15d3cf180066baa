"""The tables' optimizer as TorchRec's KeyedOptimizer: state, schedules, and combinations."""

from __future__ import annotations

import io
import pkgutil
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from batches import jagged, random_bags, single_ids
from collection_factory import apply, bag_config, bags_collection, index_bag_config
from torch.optim import lr_scheduler
from torchrec.optim import (
    CombinedOptimizer,
    FusedOptimizerModule,
    GradientClipping,
    GradientClippingOptimizer,
    KeyedOptimizer,
    KeyedOptimizerWrapper,
    WarmupOptimizer,
    WarmupPolicy,
    WarmupStage,
)
from training import differing_tensors, rows_of, state_of, train_step

from rec_sdk_torch.formulas import UPDATES, OptimizerSpec
from rec_sdk_torch.optim import torchrec_hooks

UPDATED = [spec for spec in UPDATES if not spec.collects_gradients]
T0, T1 = "embedding_bags.t0.weight", "embedding_bags.t1.weight"
BEYOND_FLOAT32 = 2**24 + 1


def states_of(spec: OptimizerSpec) -> dict[str, tuple[int, ...]]:
    """Returns the shape that each state has per row."""
    names = ["momentum1", *(state.name for state in spec.states[1:])]
    return {name: () if state.rowwise else (4,) for name, state in zip(names, spec.states, strict=False)}


def two_tables(
    device: torch.device,
    cls: type = torch.optim.Adam,
    keywords: Mapping[str, Any] | None = None,
    rows: int = 9,
    **options: Any,
) -> Any:
    """Builds a hash table t0 and an index table t1 of nine rows, with features f0 and f1."""
    index = index_bag_config("t1", ["f1"], num_embeddings=rows)
    return apply(bags_collection(device, bag_config(), index, **options), cls, **{"lr": 0.1, **(keywords or {})})


def train(collection: Any, seed: int, steps: int = 4) -> list[torch.Tensor]:
    rng = np.random.default_rng(seed)
    outputs = []
    for _ in range(steps):
        batch = jagged(random_bags(rng, ["f0", "f1"], 9, batch_size=2))
        outputs.append(train_step(collection, batch, factor=float(rng.normal())))
    return outputs


# ---- optimizer states


@pytest.mark.parametrize("spec", UPDATED, ids=lambda spec: spec.kernel)
def test_state_keys_and_shapes(device: torch.device, spec: OptimizerSpec) -> None:
    states = states_of(spec)
    collection = two_tables(device, pkgutil.resolve_name(spec.classes[0]), spec.example)
    assert isinstance(collection, FusedOptimizerModule)
    optimizer = collection.fused_optimizer
    assert isinstance(optimizer, KeyedOptimizer)
    assert list(optimizer.params) == [T0, T1]
    assert list(optimizer.params.values()) == list(collection.parameters())
    train(collection, 0, steps=3)
    state = optimizer.state_dict()["state"]
    assert set(state) == {T0, T1}
    ids = collection.table_ids("t0")
    expected = {f"t0.{name}": (len(ids), *shape) for name, shape in states.items()} | {"t0.step": ()}
    if states:
        expected["t0.ids"] = (len(ids),)
        assert torch.equal(state[T0]["t0.ids"], ids.sort().values)
    assert {name: tuple(value.shape) for name, value in state[T0].items()} == expected
    expected = {f"t1.{name}": (9, *shape) for name, shape in states.items()} | {"t1.step": ()}
    assert {name: tuple(value.shape) for name, value in state[T1].items()} == expected
    assert float(state[T1]["t1.step"]) == 3
    assert collection.fused_optimizer is optimizer


def test_state_values(device: torch.device) -> None:
    collection = apply(bags_collection(device), torch.optim.Adagrad, initial_accumulator_value=0.25)
    train_step(collection, jagged({"f0": [[7, 8], [8]]}), factor=0.5)
    train_step(collection, jagged({"f0": [[9, 8]]}), factor=2.0)
    state = collection.fused_optimizer.state_dict()["state"][T0]
    assert state["t0.ids"].tolist() == [7, 8, 9]
    assert torch.equal(state["t0.momentum1"], torch.tensor([[0.5], [5.25], [4.25]]).expand(3, 4))


@pytest.mark.parametrize("spec", UPDATED, ids=lambda spec: spec.kernel)
def test_a_round_trip_continues_with_the_same_bits(device: torch.device, spec: OptimizerSpec) -> None:
    """The loading model has another cache size and other rows, and first looked up the ids in another order."""
    cls = pkgutil.resolve_name(spec.classes[0])
    source, target = two_tables(device, cls, spec.example), two_tables(device, cls, spec.example, cache=9)
    train(source, 0)
    train(target, 1, steps=2)
    batch = jagged({"f0": [[500, 501], [8]], "f1": [[0], [0]]})
    train_step(target, batch)
    assert source.table_ids("t0").tolist() != target.table_ids("t0").tolist()
    weights, states = source.state_dict(), source.fused_optimizer.state_dict()
    target.load_state_dict(weights)
    target.fused_optimizer.load_state_dict(states)
    assert all(torch.equal(a, b) for a, b in zip(train(source, 2), train(target, 2), strict=True))
    assert set(source.table_ids("t0").tolist()) == set(target.table_ids("t0").tolist())
    twin = two_tables(device, cls, spec.example)  # a model that looks up the ids in the source's order
    twin.load_state_dict(source.state_dict())
    twin.fused_optimizer.load_state_dict(source.fused_optimizer.state_dict())
    assert not list(differing_tensors(source.state_dict(), twin.state_dict()))
    ours, theirs = source.fused_optimizer.state_dict()["state"], twin.fused_optimizer.state_dict()["state"]
    assert not list(differing_tensors(ours, theirs))


def test_state_of_other_row_orders(device: torch.device) -> None:
    """Each row gets its own state, although the tables list their ids in different orders."""
    source, target = two_tables(device, torch.optim.Adagrad), two_tables(device, torch.optim.Adagrad)
    for collection, order in ((source, [1, 2, 3]), (target, [3, 1, 2])):
        for i in order:
            train_step(collection, jagged({"f0": [[i]], "f1": [[i]]}), factor=float(i))
    state = source.fused_optimizer.state_dict()
    state["state"][T0]["t0.ids"] = torch.tensor([2, 3, 1])
    state["state"][T0]["t0.momentum1"] = torch.tensor([[20.0], [30.0], [10.0]]).expand(3, 4)
    target.fused_optimizer.load_state_dict(state)
    result = target.fused_optimizer.state_dict()["state"][T0]
    assert result["t0.ids"].tolist() == [1, 2, 3]
    assert result["t0.momentum1"][:, 0].tolist() == [10.0, 20.0, 30.0]


def test_momentum2_is_accepted(device: torch.device) -> None:
    source, target = two_tables(device), two_tables(device)
    train(source, 0)
    state = source.fused_optimizer.state_dict()
    old = {
        param: {name.replace("exp_avg_sq", "momentum2"): value for name, value in values.items()}
        for param, values in state["state"].items()
    }
    assert "t1.momentum2" in old[T1]
    target.load_state_dict(source.state_dict())
    target.fused_optimizer.load_state_dict({"state": old})
    assert not list(differing_tensors(state["state"], target.fused_optimizer.state_dict()["state"]))


def test_loading_is_strict(device: torch.device) -> None:
    collection = two_tables(device)
    train(collection, 0)
    state = collection.fused_optimizer.state_dict()["state"]
    hash_state, index_state = state[T0], state[T1]
    rows, moments = len(hash_state["t0.ids"]), index_state["t1.momentum1"]

    def first(name: str, value: Any) -> dict[str, Any]:
        return {T0: {**hash_state, f"t0.{name}": value}, T1: index_state}

    def second(name: str, value: Any) -> dict[str, Any]:
        return {T0: hash_state, T1: {**index_state, f"t1.{name}": value}}

    wrong: list[dict[str, Any]] = [
        {T0: hash_state},
        {T0: hash_state, "embedding_bags.t2.weight": index_state},
        {**state, "embedding_bags.t2.weight": index_state},
        second("more", torch.zeros(1)),
        {T0: hash_state, T1: {k.replace("momentum1", "momentum9"): v for k, v in index_state.items()}},
        first("momentum1", torch.zeros(rows, 5)),
        first("momentum1", torch.zeros(rows + 1, 4)),
        *(second("momentum1", value) for value in (torch.zeros(8, 5), torch.zeros(4, 9))),
        *(first("step", torch.tensor(step)) for step in (-1.0, 1.5, float("nan"), float("inf"))),
        *(first("step", step) for step in ("3", True)),
        *(second("momentum1", value) for value in (moments.to_sparse(), moments * 1j, None)),
        *(first("ids", ids) for ids in (None, hash_state["t0.ids"].float(), hash_state["t0.ids"].clone().fill_(3))),
    ]
    for given in wrong:
        with pytest.raises(ValueError, match=r"t0|t1|count"):
            collection.fused_optimizer.load_state_dict({"state": given})
        after = collection.fused_optimizer.state_dict()["state"]
        assert not list(differing_tensors(state, after)), f"changed by {given}"
    combined = CombinedOptimizer([collection.fused_optimizer])
    for given in wrong[6:]:
        with pytest.raises(ValueError, match=r"t0|t1"):
            combined.load_state_dict({"state": given})
    adagrad = two_tables(device, torch.optim.Adagrad)
    with pytest.raises(ValueError, match="exp_avg_sq"):
        adagrad.fused_optimizer.load_state_dict({"state": state})


# ---- step counts


@pytest.mark.parametrize("through", ["memory", "torch.save"])
@pytest.mark.parametrize(
    "step",
    [
        torch.tensor(BEYOND_FLOAT32),
        torch.tensor(BEYOND_FLOAT32, dtype=torch.float64),
        torch.tensor(7.0),
        torch.tensor([7])[0],
    ],
)
def test_steps_are_exact(device: torch.device, step: torch.Tensor, through: str) -> None:
    """Step counts too large for float32 stay exact, although TorchRec and torch store float32 counts."""
    source, target = two_tables(device), two_tables(device)
    train(source, 0)
    state = source.fused_optimizer.state_dict()
    for param, table in ((T0, "t0"), (T1, "t1")):
        state["state"][param] = {**state["state"][param], f"{table}.step": step}
    source.fused_optimizer.load_state_dict(state)
    saved = source.fused_optimizer.state_dict()
    if through == "torch.save":
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
    target.load_state_dict(source.state_dict())
    target.fused_optimizer.load_state_dict(saved)
    for collection, passed in ((source, 0), (target, 0), (target, 1)):
        if passed:
            train(collection, 1, steps=1)
        states = state_of(collection)["states"]
        assert [int(states[T0]["t0.step"]), int(states[T1]["t1.step"])] == [int(step) + passed] * 2


@pytest.mark.parametrize("rows", [5_000, pytest.param(1_000_000, marks=pytest.mark.full)])
def test_states_of_many_rows(device: torch.device, rows: int) -> None:
    """The state's ids are in another order than the table's, and most rows are not cached."""
    collection = two_tables(device, rows=rows)
    train(collection, 0, steps=1)
    ids = torch.arange(rows).flip(0) * 3 + 1
    weight = torch.arange(rows, dtype=torch.float32).flip(0)[:, None].expand(rows, 4)
    collection.load_state_dict({"embedding_bags.t0.ids": ids, T0: weight, T1: weight})
    values = collection.fused_optimizer.state_dict()["state"]
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
    first, second = torch.arange(rows * 4.0).view(rows, 4), -torch.arange(rows * 4.0).view(rows, 4)
    values[T0] = {"t0.ids": ids[order], "t0.momentum1": first, "t0.exp_avg_sq": second, "t0.step": torch.tensor(3)}
    values[T1] = {"t1.momentum1": second, "t1.exp_avg_sq": first, "t1.step": torch.tensor(3)}
    collection.fused_optimizer.load_state_dict({"state": values})
    found, places = collection.fused_optimizer.state_dict()["state"], rows - 1 - order
    assert torch.equal(found[T0]["t0.ids"], ids.flip(0))
    assert torch.equal(found[T0]["t0.momentum1"][places], first)
    assert torch.equal(found[T0]["t0.exp_avg_sq"][places], second)
    assert torch.equal(found[T1]["t1.momentum1"], second)
    assert torch.equal(found[T1]["t1.exp_avg_sq"], first)
    assert torch.equal(collection.state_dict()[T0], weight.flip(0))
    assert torch.equal(collection.state_dict()[T1], weight)


def test_param_groups_are_saved_on_demand(device: torch.device) -> None:
    source, target = two_tables(device), two_tables(device)
    assert "param_groups" not in source.fused_optimizer.state_dict()
    for collection in (source, target):
        collection.fused_optimizer.save_param_groups(True)
    source.fused_optimizer.param_groups[0].update(lr=0.75, betas=(0.5, 0.6))
    saved = source.fused_optimizer.state_dict()
    assert saved["param_groups"] == [
        {"params": [T0, T1], "lr": 0.75, "betas": (0.5, 0.6), "eps": 1e-8, "maximize": False}
    ]
    target.fused_optimizer.load_state_dict(saved)
    train(source, 0)
    train(target, 0)
    assert not list(differing_tensors(source.state_dict(), target.state_dict()))


def test_odd_param_groups_change_nothing(device: torch.device) -> None:
    source, target = two_tables(device), two_tables(device)
    train(source, 0)
    for collection in (source, target):
        collection.fused_optimizer.save_param_groups(True)
    saved, before = source.fused_optimizer.state_dict(), target.fused_optimizer.state_dict()
    (group,) = saved["param_groups"]
    odd = [{**group, "lr": float("nan")}, {**group, "lr": "3"}, {**group, "betas": 3}, {**group, "params": [T0]}]
    target.load_state_dict(source.state_dict())
    before = target.fused_optimizer.state_dict()
    for given in ([], [{"params": [T0, T1]}], *([each] for each in odd)):
        with pytest.raises((ValueError, TypeError), match=r"options|lr|betas"):
            target.fused_optimizer.load_state_dict({**saved, "param_groups": given})
        after = target.fused_optimizer.state_dict()
        assert not list(differing_tensors(before["state"], after["state"]))
        assert after["param_groups"] == before["param_groups"]


def test_step_and_zero_grad_do_nothing(device: torch.device) -> None:
    collection = two_tables(device)
    train(collection, 0, steps=1)
    before = collection.state_dict(), collection.fused_optimizer.state_dict()["state"]
    collection.fused_optimizer.step()
    collection.fused_optimizer.zero_grad(set_to_none=True)
    assert not list(differing_tensors(before[0], collection.state_dict()))
    assert not list(differing_tensors(before[1], collection.fused_optimizer.state_dict()["state"]))
    assert "lr: 0.1" in repr(collection.fused_optimizer)
    with pytest.raises(NotImplementedError):
        collection.fused_optimizer.add_param_group({"params": []})


# ---- schedules

SCHEDULES = {
    "step": lambda o: lr_scheduler.StepLR(o, step_size=2, gamma=0.5),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1.0 / (1 + epoch)),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=6, cycle_momentum=False),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=5),
}


@pytest.mark.parametrize("kind", list(SCHEDULES))
@pytest.mark.parametrize("combined", [False, True])
def test_torchs_schedulers_drive_the_update(device: torch.device, kind: str, combined: bool) -> None:
    collection = apply(bags_collection(device))
    optimizer: Any = collection.fused_optimizer
    if combined:
        optimizer = CombinedOptimizer([optimizer])
    reference = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    schedule, expected = SCHEDULES[kind](optimizer), SCHEDULES[kind](reference)
    moved = []
    train_step(collection, jagged({"f0": [[1]]}), factor=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            before = rows_of(collection)[1]
            train_step(collection, jagged({"f0": [[1]]}))
            optimizer.step()
            rate = reference.param_groups[0]["lr"]
            torch.testing.assert_close(before - rows_of(collection)[1], torch.full((4,), rate), rtol=1e-4, atol=1e-6)
            moved.append(rate)
            reference.step()
            schedule.step()
            expected.step()
    assert len(set(moved)) > 1


# ---- GradientClippingOptimizer


@pytest.mark.parametrize("clipping", [GradientClipping.NORM, GradientClipping.VALUE])
def test_clipping_around_the_tables_is_refused(device: torch.device, clipping: GradientClipping) -> None:
    optimizer = two_tables(device).fused_optimizer
    stages = [WarmupStage(WarmupPolicy.CONSTANT, max_iters=2, value=0.25)]
    wrapped = WarmupOptimizer(optimizer, stages)
    for around in (optimizer, wrapped, WarmupOptimizer(wrapped, stages), CombinedOptimizer([optimizer])):
        with pytest.raises(ValueError, match="gradient_clipping=True and max_gradient"):
            GradientClippingOptimizer(optimizer=around, clipping=clipping, max_gradient=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GradientClippingOptimizer(optimizer)


@pytest.mark.parametrize("clipping", [GradientClipping.NORM, GradientClipping.VALUE])
def test_clipping_around_a_combination_clips_the_dense_part(device: torch.device, clipping: GradientClipping) -> None:
    torchrec_hooks.warn_tables_not_clipped.cache_clear()
    collection = apply(bags_collection(device), lr=1.0)
    weight = torch.nn.Parameter(torch.tensor([3.0, 4.0], device=device))
    dense = KeyedOptimizerWrapper({"w": weight}, lambda p: torch.optim.SGD(p, lr=1.0))
    combined = CombinedOptimizer([("sparse", collection.fused_optimizer), dense])
    with pytest.warns(UserWarning, match="only gradients of dense parameters") as caught:
        optimizer = GradientClippingOptimizer(combined, clipping, max_gradient=0.5)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GradientClippingOptimizer(CombinedOptimizer([("again", combined)]), clipping)
        GradientClippingOptimizer(dense, clipping)
    rows = collection(jagged({"f0": [[1]]})).values()
    (rows.sum() * 2 + weight.square().sum() / 2).backward()
    optimizer.step()
    torch.testing.assert_close(rows.detach().cpu()[0] - rows_of(collection)[1], torch.full((4,), 2.0))
    clipped = torch.tensor([0.3, 0.4] if clipping is GradientClipping.NORM else [0.5, 0.5])
    torch.testing.assert_close(torch.tensor([3.0, 4.0]) - weight.detach().cpu(), clipped)


def test_loading_resets_rows_that_are_not_loaded(device: torch.device) -> None:
    options = {"initial_accumulator_value": 0.5}
    source, target = (apply(bags_collection(device, cache=8), torch.optim.Adagrad, **options) for _ in range(2))
    train_step(source, single_ids([1, 2]))
    train_step(target, single_ids([2, 9]))
    with pytest.raises(ValueError, match="does not know 1 of its ids, such as 1: load the weights first"):
        target.fused_optimizer.load_state_dict(source.fused_optimizer.state_dict())
    assert target.table_ids("t0").tolist() == [2, 9]
    train_step(target, single_ids([1]))
    target.fused_optimizer.load_state_dict(source.fused_optimizer.state_dict())
    state = next(iter(target.fused_optimizer.state_dict()["state"].values()))
    sums = dict(zip(state["t0.ids"].tolist(), state["t0.momentum1"][:, 0].tolist(), strict=True))
    assert sums == {1: 1.5, 2: 1.5, 9: 0.5}
