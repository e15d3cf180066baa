"""TorchRec's optimizer wrappers around the tables' optimizer: states pass through, and learning rates reach the update.

test_fused_optimizer.py tests GradientClippingOptimizer.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from batches import single_ids
from collection_factory import apply, bag_config, bags_collection
from torchrec.optim import (
    CombinedOptimizer,
    FusedOptimizer,
    KeyedOptimizer,
    KeyedOptimizerWrapper,
    OptimizerWrapper,
    WarmupOptimizer,
    WarmupPolicy,
    WarmupStage,
)
from torchrec.optim.fused import EmptyFusedOptimizer
from training import differing_tensors, rows_of, train_step

import rec_sdk_torch as rst

T0 = "embedding_bags.t0.weight"
BATCHES = [[1, 2], [2, 3], [3, 1, 4], [4, 2]]


def trained(device: torch.device, steps: int = 4, **options: Any) -> Any:
    collection = apply(bags_collection(device), torch.optim.Adam, **{"lr": 0.1, **options})
    for ids in BATCHES[:steps]:
        train_step(collection, single_ids(ids))
    return collection


def on_disk(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file)
    return loaded


def itself(optimizer: KeyedOptimizer) -> KeyedOptimizer:
    return optimizer


def keyed_wrapper(optimizer: KeyedOptimizer) -> KeyedOptimizer:
    return KeyedOptimizerWrapper(optimizer.params, lambda params: optimizer)


def warmed_up(optimizer: KeyedOptimizer) -> KeyedOptimizer:
    return WarmupOptimizer(optimizer, [WarmupStage(WarmupPolicy.LINEAR, max_iters=9, value=0.5)], lr=0.1)


def combined(optimizer: KeyedOptimizer) -> KeyedOptimizer:
    return CombinedOptimizer([("sparse", optimizer), ("none", EmptyFusedOptimizer())])


WRAPPERS = [itself, keyed_wrapper, OptimizerWrapper, warmed_up, combined]


# ---- states


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_every_wrapper_saves_and_loads_states(device: torch.device, wrap: Callable[[Any], KeyedOptimizer]) -> None:
    """After a save and a load through the wrapper, rows, states and options of continued training are bit-identical."""
    source, target = trained(device), trained(device, steps=1, lr=9.0)
    train_step(target, single_ids([9, 4, 1]))  # the loading model has other rows, in another order
    wrapped, reader = wrap(source.fused_optimizer), wrap(target.fused_optimizer)
    for optimizer in (wrapped, reader):
        optimizer.save_param_groups(True)
        optimizer.step()  # creates the state of WarmupOptimizer that a strict load requires
    assert all(group["lr"] < 1 for group in wrapped.param_groups)
    saved = on_disk(wrapped.state_dict())
    assert [name.rpartition("sparse.")[2] for name in saved["state"] if "t0" in name] == [T0]
    target.load_state_dict(source.state_dict())
    reader.load_state_dict(saved)
    states = [collection.fused_optimizer.state_dict() for collection in (source, target)]
    assert [group["lr"] for group in reader.param_groups] == [group["lr"] for group in wrapped.param_groups]
    of_tables = [
        dict(zip(s["state"][T0]["t0.ids"].tolist(), s["state"][T0]["t0.momentum1"], strict=True)) for s in states
    ]
    assert all(torch.equal(row, of_tables[1][i]) for i, row in of_tables[0].items())
    for ids in BATCHES:
        for collection, optimizer in ((source, wrapped), (target, reader)):
            train_step(collection, single_ids(ids))
            optimizer.step()
    theirs = rows_of(target)
    assert all(torch.equal(row, theirs[i]) for i, row in rows_of(source).items())


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_every_wrapper_is_strict(device: torch.device, wrap: Callable[[Any], KeyedOptimizer]) -> None:
    collection = trained(device)
    optimizer = wrap(collection.fused_optimizer)
    optimizer.step()
    saved = optimizer.state_dict()
    (name,) = [name for name in saved["state"] if name.endswith(T0)]
    of_table = saved["state"][name]
    wrong: list[dict[str, Any]] = [
        {},
        {**saved["state"], "more": of_table},
        {**saved["state"], name: {}},
        {**saved["state"], name: {key: value for key, value in of_table.items() if key != "t0.exp_avg_sq"}},
        {**saved["state"], name: {**of_table, "t0.momentum1": torch.zeros(4, 3)}},
        {("other" if key == name else key): value for key, value in saved["state"].items()},
    ]
    before = collection.fused_optimizer.state_dict()["state"]
    for state in wrong:
        with pytest.raises(ValueError, match=r"ount|t0|state size|not found"):
            optimizer.load_state_dict({"state": state})
        assert not list(differing_tensors(before, collection.fused_optimizer.state_dict()["state"]))
    with pytest.raises(NotImplementedError):
        optimizer.add_param_group({"params": []})


def test_combined_with_prefixed_keys(device: torch.device) -> None:
    """Two collections have tables with the same name, under different prefixes; one collection is also loaded from its
    part of the state alone.
    """
    first, second = trained(device), trained(device, steps=2)
    with pytest.raises(ValueError, match=f"Duplicate param key {T0}"):
        CombinedOptimizer([first.fused_optimizer, second.fused_optimizer])
    inner = CombinedOptimizer([("b", second.fused_optimizer)])
    both = CombinedOptimizer([("a", first.fused_optimizer), ("nested", inner)])
    assert list(both.params) == [f"a.{T0}", f"nested.b.{T0}"]
    state = both.state_dict()["state"]
    assert {name: float(value["t0.step"]) for name, value in state.items()} == {f"a.{T0}": 4, f"nested.b.{T0}": 2}
    alone = trained(device, steps=3)
    alone.load_state_dict(second.state_dict())
    alone.fused_optimizer.load_state_dict({"state": {T0: state[f"nested.b.{T0}"]}})
    train_step(second, single_ids([1, 3]))
    train_step(alone, single_ids([1, 3]))
    assert torch.equal(rows_of(second)[3], rows_of(alone)[3])
    assert len(both.param_groups) == 2


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_init_state_changes_no_table(device: torch.device, wrap: Callable[[Any], KeyedOptimizer]) -> None:
    """init_state runs a step with zero gradients. A table's parameter has no rows, so this step changes nothing."""
    collection = trained(device)
    before = collection.state_dict(), collection.fused_optimizer.state_dict()["state"][T0]
    optimizer = wrap(collection.fused_optimizer)
    optimizer.init_state()
    if device.type != "npu":  # NPUs have no sparse tensors
        optimizer.init_state({name for name in optimizer.params if name.endswith(T0)})  # with sparse gradients
    optimizer.zero_grad()
    assert not list(differing_tensors(before[0], collection.state_dict()))
    assert not list(differing_tensors(before[1], collection.fused_optimizer.state_dict()["state"][T0]))
    fresh = apply(bags_collection(device), torch.optim.Adam, lr=0.1)
    reader = wrap(fresh.fused_optimizer)
    reader.init_state()  # emulates a new process
    fresh.load_state_dict(collection.state_dict())
    reader.load_state_dict(optimizer.state_dict())
    assert not list(differing_tensors(before[1], fresh.fused_optimizer.state_dict()["state"][T0]))


def test_a_collection_without_an_optimizer(device: torch.device) -> None:
    """EmptyFusedOptimizer is part of a combination until the tables get an optimizer."""
    collection = bags_collection(device)
    empty = collection.fused_optimizer
    assert isinstance(empty, EmptyFusedOptimizer)
    optimizer = CombinedOptimizer([("a", empty), ("b", trained(device).fused_optimizer)])
    optimizer.zero_grad()
    optimizer.step()
    assert list(optimizer.state_dict()["state"]) == [f"b.{T0}"]
    optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="Different parameter count"):
        empty.load_state_dict({"state": {T0: {}}})
    apply(collection)
    assert list(collection.fused_optimizer.params) == [T0]
    assert isinstance(collection.fused_optimizer, FusedOptimizer)


# ---- learning rates

MULTIPLIERS: dict[WarmupPolicy, tuple[dict[str, Any], list[float]]] = {
    WarmupPolicy.NONE: ({}, [1.0, 1.0, 1.0]),
    WarmupPolicy.LINEAR: ({"value": 0.5}, [0.75, 0.875, 1.0]),
    WarmupPolicy.CONSTANT: ({"value": 0.25}, [0.25, 0.25, 0.25]),
    WarmupPolicy.POLY: ({"value": 2.0, "decay_iters": 8}, [0.5625, 0.390625, 0.25]),
    WarmupPolicy.STEP: ({"value": 0.5, "decay_iters": 2}, [0.5, 0.5, 0.25]),
    WarmupPolicy.INVSQRT: ({}, [1 / math.sqrt(2), 1 / math.sqrt(3), 0.5]),
    WarmupPolicy.COSINE_ANNEALING_WARM_RESTARTS: (
        {"value": 0.5, "sgdr_period": 4},
        [0.75, 0.75 - math.sqrt(2) / 8, 1.0],
    ),
    WarmupPolicy.INTERPOLATE: (
        {"value": 0.5, "end_value": 0.25, "start_interpolating_iters": 2},
        [0.5, 0.375, 0.25],
    ),
}
"""For each policy the fields of a stage up to iteration 4, and the factors of the rate in iterations 2, 3 and 4."""


@pytest.mark.parametrize("policy", list(WarmupPolicy))
def test_rates_of_every_warmup_policy_reach_the_update(device: torch.device, policy: WarmupPolicy) -> None:
    """A first stage with factor 0.5 precedes the policy, and a stage without a factor follows. At iteration 4, a loaded
    copy takes over.
    """
    fields, multipliers = MULTIPLIERS[policy]
    collections, optimizers = [bags_collection(device), bags_collection(device)], []
    for collection in collections:
        apply(collection, lr=7.0)
        stages = [
            WarmupStage(WarmupPolicy.CONSTANT, max_iters=1, value=0.5),
            WarmupStage(policy, max_iters=4, lr_scale=0.5, **fields),
        ]
        optimizers.append(WarmupOptimizer(collection.fused_optimizer, stages, lr=2.0))
    collection, optimizer = collections[0], optimizers[0]
    for iteration, rate in enumerate([1.0, 1.0, *multipliers, 2.0]):
        if iteration == 4:  # post_load_state_dict sets the rate of the loaded iteration
            collection, optimizer = collections[1], optimizers[1]
            optimizer.init_state()
            collection.load_state_dict(collections[0].state_dict())
            optimizer.load_state_dict(on_disk(optimizers[0].state_dict()))
        before = train_step(collection, single_ids([1]))
        optimizer.step()
        torch.testing.assert_close(before - rows_of(collection)[1], torch.full((1, 4), rate), rtol=1e-5, atol=1e-6)


def test_a_combination_sets_the_rate_of_a_loaded_warmup(device: torch.device) -> None:
    """CombinedOptimizer loads states without calling its wrappers' load_state_dict, then calls their
    post_load_state_dict.
    """
    source, target = trained(device), trained(device)
    stages = [WarmupStage(WarmupPolicy.LINEAR, max_iters=4, value=0.0)]
    optimizers = [
        CombinedOptimizer([("a", WarmupOptimizer(collection.fused_optimizer, stages, lr=1.0))])
        for collection in (source, target)
    ]
    for _ in range(3):
        optimizers[0].step()
    optimizers[1].step()
    assert target.fused_optimizer.param_groups[0]["lr"] == 0.25
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    assert target.fused_optimizer.param_groups[0]["lr"] == 0.75


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_every_wrapper_passes_options_and_steps(device: torch.device, wrap: Callable[[Any], Any]) -> None:
    collection, other = trained(device), trained(device)
    optimizer = wrap(collection.fused_optimizer)
    optimizer.update_hyper_parameters({"lr": 0.25, "beta1": 0.5, "beta2": 0.75, "eps": 0.125})
    optimizer.set_optimizer_step(11)
    assert collection.fused_optimizer.param_groups[0]["betas"] == (0.5, 0.75)
    state = other.fused_optimizer.state_dict()
    state["state"][T0]["t0.step"].fill_(11)
    other.fused_optimizer.load_state_dict(state)
    other.fused_optimizer.param_groups[0].update(lr=0.25, betas=(0.5, 0.75), eps=0.125)
    for each in (collection, other):
        train_step(each, single_ids([1, 2, 9]))
    assert not list(differing_tensors(other.state_dict(), collection.state_dict()))
    with pytest.raises(NotImplementedError, match=r"'weight_decay'.*'betas'"):
        optimizer.update_hyper_parameters({"lr": 4.0, "weight_decay": 0.5})
    assert collection.fused_optimizer.param_groups[0]["lr"] == 0.25
    for step in (-1, 0.5, True):
        with pytest.raises(ValueError, match=f"step is {step}, expected an int"):
            optimizer.set_optimizer_step(step)


def test_an_option_missing_in_one_optimizer_is_set_in_no_optimizer(device: torch.device) -> None:
    collection = bags_collection(device, bag_config("t0"), bag_config("t1", ["f1"]))
    for cls, handle in zip((torch.optim.Adam, torch.optim.SGD), collection.parameters(), strict=True):
        rst.apply_optimizer_in_backward(cls, [handle], {"lr": 0.5})
    optimizer = collection.fused_optimizer
    with pytest.raises(NotImplementedError, match="'beta1'"):
        optimizer.update_hyper_parameters({"lr": 4.0, "beta1": 0.5})
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]
    assert optimizer.param_groups[0]["betas"][0] == 0.9
