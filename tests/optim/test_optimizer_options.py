"""Keywords of `apply_optimizer_in_backward`: refusals, clipping, learning rates, accumulation windows."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from batches import jagged, numbered, single_ids
from collection_factory import apply, bag_config, bags_collection
from training import assert_trains, differing_tensors, read, rows_of, state_of, train, train_step

import rec_sdk_torch as rst

ONES = {"weight_init_min": 1.0, "weight_init_max": 1.0}
SGD, ADAM, ADAGRAD, RMSPROP = torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad, torch.optim.RMSprop
ADADELTA = torch.optim.Adadelta

# ---- learning rates


def test_a_tensor_as_learning_rate(device: torch.device) -> None:
    collection = apply(bags_collection(device), lr=torch.tensor(0.25))
    assert_trains(collection, lr=0.25)
    collection.fused_optimizer.param_groups[0]["lr"].fill_(0.75)
    assert_trains(collection, lr=0.75)


def test_learning_rate_is_read_at_each_update(device: torch.device) -> None:
    collection = apply(bags_collection(device))
    (group,) = collection.fused_optimizer.param_groups
    for rate in (0.5, 0.125, 0.0, 2.0):
        output = collection(numbered(1)).values().sum()
        before = rows_of(collection)[0]
        group["lr"] = rate  # the learning rate changes between forward and backward
        output.backward()
        torch.testing.assert_close(rows_of(collection)[0], before - rate)


@pytest.mark.parametrize("bad", [math.nan, -1.0, math.inf, "fast", 1e39, torch.tensor(1e39, dtype=torch.float64)])
def test_a_bad_learning_rate_set_later(device: torch.device, bad: Any) -> None:
    collection = apply(bags_collection(device), ADAGRAD, eps=0.0)
    train_step(collection, numbered(3))
    twin = copy.deepcopy(collection)
    (group,) = collection.fused_optimizer.param_groups
    group["lr"] = bad
    before = state_of(collection)
    for _ in range(2):
        loss = collection(numbered(3)).values().sum()
        with pytest.raises((TypeError, ValueError), match=r"'t0'.*lr is"):
            loss.backward()
    assert not list(differing_tensors(before, state_of(collection)))
    group["lr"] = 0.5
    train_step(collection, numbered(3))
    train_step(twin, numbered(3))
    assert not list(differing_tensors(twin.state_dict(), collection.state_dict()))


def test_a_bad_learning_rate_of_one_table_updates_none(device: torch.device) -> None:
    collection = bags_collection(device, bag_config(), bag_config("t1", ["f1"], embedding_dim=8))
    first, second = collection.parameters()
    rst.apply_optimizer_in_backward(SGD, [first], {"lr": 0.5})
    rst.apply_optimizer_in_backward(SGD, [second], {"lr": 0.5})
    collection.fused_optimizer.param_groups[1]["lr"] = math.nan
    loss = collection(jagged({"f0": [[1]], "f1": [[2]]})).values().sum()
    before = collection.state_dict()
    with pytest.raises(ValueError, match=r"'t1'.*lr is nan"):
        loss.backward()
    assert not list(differing_tensors(before, collection.state_dict()))
    state = state_of(collection)["states"]
    assert [float(state[f"embedding_bags.{t}.weight"][f"{t}.step"]) for t in ("t0", "t1")] == [0, 0]


# ---- several tables


def several(device: torch.device, count: int, **fields: Any) -> Any:
    return bags_collection(device, *[bag_config(f"t{i}", [f"f{i}"], **fields) for i in range(count)])


def test_tables_with_their_own_learning_rate(device: torch.device) -> None:
    """One launch updates tables with different learning rates. Tables that share a dict share one param group."""
    collection = several(device, 3)
    handles = list(collection.parameters())
    rst.apply_optimizer_in_backward(torch.optim.SGD, handles[:2], {"lr": 0.5})
    rst.apply_optimizer_in_backward(torch.optim.SGD, handles[2:], {"lr": 0.125})
    groups = collection.fused_optimizer.param_groups
    assert [(len(g["params"]), g["lr"]) for g in groups] == [(2, 0.5), (1, 0.125)]
    batch = jagged({f"f{i}": [[3]] for i in range(3)})
    for rates in ((0.5, 0.125), (0.25, 4.0)):
        groups[0]["lr"], groups[1]["lr"] = rates
        before = read(collection, batch)
        train_step(collection, batch)
        expected = torch.tensor([rates[0]] * 8 + [rates[1]] * 4)
        torch.testing.assert_close(before - read(collection, batch), expected[None], rtol=1e-5, atol=1e-6)


def test_equal_keywords_of_two_calls_are_two_optimizers(device: torch.device) -> None:
    collection = several(device, 3)
    handles = list(collection.parameters())
    for handle, cls in zip(handles, (torch.optim.SGD, torch.optim.SGD, torch.optim.Adagrad), strict=True):
        rst.apply_optimizer_in_backward(cls, [handle], {"lr": 0.5})
    batch = jagged({f"f{i}": [[3]] for i in range(3)})
    before = read(collection, batch)
    train_step(collection, batch)
    collection.fused_optimizer.param_groups[0]["lr"] = 0.25
    train_step(collection, batch)
    expected = torch.tensor([0.75] * 4 + [1.0] * 4 + [0.5 + 0.5 / 2**0.5] * 4)
    torch.testing.assert_close(before - read(collection, batch), expected[None], rtol=1e-5, atol=1e-6)


def test_tables_with_different_optimizers_and_windows(device: torch.device) -> None:
    collection = several(device, 4, **ONES)
    handles = list(collection.parameters())
    rst.apply_optimizer_in_backward(torch.optim.Adagrad, handles[:1], {"lr": 1.0, "initial_accumulator_value": 3.0})
    for handle, step in zip(handles[1:], (1, 2, 3), strict=True):
        options = {"lr": 0.25, "use_accumulate": True, "accumulate_step": step}
        rst.apply_optimizer_in_backward(rst.AccumulateSGD, [handle], options)
    batch = jagged({f"f{i}": [[3]] for i in range(4)})
    adagrad = 1.0
    for backwards in range(1, 8):
        train_step(collection, batch)
        adagrad -= 1.0 / (3.0 + backwards) ** 0.5
        expected = [adagrad] + [1.0 - 0.25 * (backwards // step * step) for step in (1, 2, 3)]
        weights = [rows_of(collection, f"t{i}")[3] for i in range(4)]
        torch.testing.assert_close(torch.stack(weights)[:, 0], torch.tensor(expected), rtol=1e-5, atol=1e-6)
    state = state_of(collection)["states"]
    steps = [float(state[f"embedding_bags.t{i}.weight"][f"t{i}.step"]) for i in range(4)]
    assert steps == [7, 7, 3, 2]


# ---- changes of weight decay

DECAYING = [(SGD, {}), (ADAGRAD, {}), (ADAM, {"eps": 1e-3}), (ADADELTA, {"eps": 1e-3})]
DECAYING_IDS = [cls.__name__ for cls, _ in DECAYING]


@pytest.mark.parametrize(("cls", "options"), DECAYING, ids=DECAYING_IDS)
@pytest.mark.parametrize("update", ["backward", "step"])
def test_weight_decay_and_direction_change_in_mid_training(
    device: torch.device, cls: Any, options: dict[str, Any], update: str
) -> None:
    """Changes of the param group by a scheduler or the user have the same effect as in torch. Decay may become 0 and
    return.
    """
    options = {"lr": 0.1, "weight_decay": 0.5, **options}
    collection = apply(bags_collection(device, bag_config(**ONES), update=update), cls, **options)
    rows = torch.nn.Parameter(torch.ones(3, 4))
    torchs = cls([rows], **options)
    groups = (collection.fused_optimizer.param_groups[0], torchs.param_groups[0])
    changes: list[dict[str, Any]] = [{}, {"weight_decay": 0.0}, {"weight_decay": 2.0}, {"maximize": True}, {"lr": 0.3}]
    for change in changes:
        for group in groups:
            group.update(change)
        train_step(collection, single_ids([0, 1, 2]), factor=0.25)
        collection.fused_optimizer.step()
        collection.fused_optimizer.zero_grad()
        rows.grad = torch.full_like(rows, 0.25)
        torchs.step()
        ours = torch.stack(list(rows_of(collection).values()))
        torch.testing.assert_close(ours, rows.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("cls", "options"), DECAYING, ids=DECAYING_IDS)
def test_weight_decay_cannot_be_enabled_later(device: torch.device, cls: type, options: dict[str, Any]) -> None:
    """The backward pass raises an error and changes nothing."""
    collection = apply(bags_collection(device), cls, lr=0.1, **options)
    train_step(collection, numbered(3))
    before = collection.state_dict()
    (group,) = collection.fused_optimizer.param_groups
    group["weight_decay"] = 0.1
    loss = collection(numbered(3)).values().sum()
    with pytest.raises(ValueError, match="weight_decay selects another kernel and cannot be turned on later"):
        loss.backward()
    assert not list(differing_tensors(before, collection.state_dict()))
    group["weight_decay"] = 0
    train_step(collection, numbered(3))


def test_decay_comes_after_the_bound_of_the_gradient(device: torch.device) -> None:
    """Decay is applied once per window, after the summed gradient was clipped."""
    options = {"lr": 1.0, "weight_decay": 0.5, "gradient_clipping": True, "max_gradient": 0.25}
    collection = apply(bags_collection(device, bag_config(**ONES)), window=2, **options)
    for _ in range(2):
        train_step(collection, single_ids([7]))
    assert rows_of(collection)[7].tolist() == [1.0 - (0.25 + 0.5)] * 4


# ---- clipping


@pytest.mark.parametrize("window", [1, 2])
def test_clipping_acts_on_the_aggregated_gradient(device: torch.device, window: int) -> None:
    """Gradients are 0.4 each: only the sum of two exceeds the bound of 0.6."""
    options = {"lr": 1.0, "gradient_clipping": True, "max_gradient": 0.6}
    collection = apply(bags_collection(device, bag_config(**ONES)), window=window, **options)
    for ids in ([7, 8, 8, 8], [8]) if window == 2 else ([7, 8, 8, 8, 8],):
        train_step(collection, single_ids(ids), factor=0.4)
    rows = rows_of(collection)
    assert torch.equal(rows[7], torch.full((4,), 1.0) - 0.4)
    assert torch.equal(rows[8], torch.full((4,), 1.0) - 0.6)
    cancelled = apply(bags_collection(device, bag_config(**ONES)), **options)
    output = cancelled(single_ids([1, 1, 2])).values()
    output.backward(torch.tensor([[5.0], [-4.5], [-9.0]], device=device).expand(3, 4))
    torch.testing.assert_close(torch.stack(list(rows_of(cancelled).values()))[:, 0], torch.tensor([0.5, 1.6]))


# ---- accumulation windows


def test_a_window_applies_the_sum_once(device: torch.device) -> None:
    """The update includes rows that the cache has spilled, and uses the learning rate at the window's end."""
    collection = apply(bags_collection(device, bag_config(**ONES), cache=2), window=3, lr=9.0)
    (group,) = collection.fused_optimizer.param_groups
    for window in (1, 2):
        for ids in ([1, 2], [3, 3]):
            before = rows_of(collection)
            train_step(collection, single_ids(ids), factor=0.5)
            after = rows_of(collection)
            assert all(torch.equal(row, after[i]) for i, row in before.items())
        group["lr"] = 1.0
        train_step(collection, single_ids([1, 4]), factor=0.25)
        rows = {i: float(row[0]) for i, row in rows_of(collection).items()}
        assert rows == {1: 1 - 0.75 * window, 2: 1 - 0.5 * window, 3: 1 - window, 4: 1 - 0.25 * window}
        group["lr"] = 9.0
    assert collection.cache_stats()["rows_out"] > 0


def test_reading_within_a_window_sees_the_weights_before_it(device: torch.device) -> None:
    collection = apply(bags_collection(device, bag_config(**ONES)), window=2)
    train_step(collection, numbered(2))
    assert torch.equal(read(collection, numbered(2)), torch.full((1, 4), 2.0))
    train_step(collection, numbered(2))
    assert torch.equal(read(collection, numbered(2)), torch.zeros(1, 4))


# ---- the Accumulate classes on other parameters

DENSE = [
    (rst.AccumulateSGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (rst.AccumulateAdagrad, torch.optim.Adagrad, {"lr": 0.1}),
    (rst.AccumulateAdadelta, torch.optim.Adadelta, {"lr": 0.5, "rho": 0.5, "weight_decay": 0.1, "maximize": True}),
    (rst.AccumulateRMSprop, torch.optim.RMSprop, {"lr": 0.1, "momentum": 0.9, "centered": True}),
    (rst.AccumulateAdam, torch.optim.Adam, {"lr": 0.1, "eps": 1e-12}),
]


@pytest.mark.parametrize(("cls", "base", "options"), DENSE)
@pytest.mark.parametrize("shape", [(3, 2), (3,), ()])
def test_accumulate_classes_on_dense_parameters(cls: Any, base: Any, options: dict[str, Any], shape: Any) -> None:
    param = torch.nn.Parameter(torch.ones(shape))
    expected = torch.nn.Parameter(torch.ones(shape))
    optimizer = cls([param], **options, use_accumulate=True, accumulate_step=3)
    reference = base([expected], **options)
    torch.manual_seed(0)
    for number in range(1, 10):
        grad = torch.randn(shape) * (torch.rand(shape) > 0.3)  # with zeros, whose rows keep their momentum
        if number == 5:
            (param,) = (optimizer := copy.deepcopy(optimizer)).param_groups[0]["params"]
        param.grad = grad
        expected.grad = grad.clone() if number % 3 == 1 else expected.grad + grad
        before = param.detach().clone()
        optimizer.step()
        if number % 3:
            assert torch.equal(param, before)
        else:
            reference.step()
            torch.testing.assert_close(param, expected, rtol=1e-5, atol=1e-6)


def test_a_window_of_dense_parameters_whose_gradient_is_zeroed_in_place() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = rst.AccumulateSGD([param], lr=1.0, use_accumulate=True, accumulate_step=2)
    for factor in (1.0, 2.0):
        optimizer.zero_grad(set_to_none=False)
        (factor * param.sum()).backward()
        optimizer.step()
    assert param.tolist() == [1.0 - 3.0] * 2


@pytest.mark.parametrize("cls", [rst.AccumulateSGD, rst.AccumulateAdagrad, rst.AccumulateAdam])
def test_accumulate_classes_check_their_window(cls: Any) -> None:
    for used, step in ((False, 2), (True, 0), (True, 1.5), (1, 2)):
        with pytest.raises((TypeError, ValueError), match="accumulate"):
            cls([torch.nn.Parameter(torch.ones(2))], lr=0.1, use_accumulate=used, accumulate_step=step)


def test_loading_drops_an_open_window(device: torch.device) -> None:
    collection = apply(bags_collection(device, cache=4), window=2)
    train(collection, [numbered(3)] * 2)
    saved = collection.state_dict()
    train_step(collection, numbered(3))
    collection.load_state_dict(saved)
    train_step(collection, numbered(3))
    assert not list(differing_tensors(saved, collection.state_dict())), (
        "one backward after the load: the window is open"
    )
    ids = torch.tensor([7, 8, 9])
    collection.load_state_dict({"embedding_bags.t0.ids": ids, "embedding_bags.t0.weight": torch.ones(3, 4)})
    train(collection, [single_ids([7, 8])] * 2)
    assert [float(row[0]) for row in rows_of(collection).values()] == [0.0, 0.0, 1.0], "nor have other rows any"
