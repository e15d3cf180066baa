"""Keywords of `apply_optimizer_in_backward`: what is refused, clipping, learning rates, accumulation windows."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from jagged import (
    apply,
    assert_trains,
    bag_config,
    bags_collection,
    jagged,
    numbered,
    read,
    rows_of,
    same_bits,
    single_ids,
    train_step,
)

import rec_sdk_torch as rst

ONES = {"weight_init_min": 1.0, "weight_init_max": 1.0}
SGD, ADAM, ADAGRAD, RMSPROP = torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad, torch.optim.RMSprop
ADADELTA = torch.optim.Adadelta

REFUSED: list[tuple[type, dict[str, Any], type[Exception], str]] = [
    # what the fused update cannot honour
    (SGD, {"dampening": 0.1}, ValueError, "dampening=0.1 is not supported by the fused update without momentum"),
    (SGD, {"weight_decay": -0.1}, ValueError, r"weight_decay is -0\.1, must be in \[0\.0, inf\)"),
    (SGD, {"weight_decay": "much"}, TypeError, "weight_decay is 'much', expected a number"),
    (SGD, {"weight_decay": 1e39}, ValueError, "weight_decay is 1e\\+39, which is inf in float32"),
    (SGD, {"maximize": 1}, TypeError, "maximize is 1, expected a bool"),
    (SGD, {"nesterov": True}, ValueError, "nesterov=True is not supported by the fused update without momentum"),
    (SGD, {"momentum": 0.9, "nesterov": True, "dampening": 0.1}, ValueError, "nesterov=True needs dampening=0, but"),
    (torch.optim.Adam, {"betas": None}, TypeError, "betas is None, expected two numbers"),
    (SGD, {"momentum": 10**400}, ValueError, r"momentum is inf, must be in \[0\.0, 1\.0\)"),
    (SGD, {"momentum": 1.0}, ValueError, r"momentum is 1\.0, must be in \[0\.0, 1\.0\)"),
    (RMSPROP, {"alpha": 1.0}, ValueError, r"alpha is 1\.0, must be in \[0\.0, 1\.0\)"),
    (RMSPROP, {"centered": 0.5}, TypeError, "centered is 0.5, expected a bool"),
    (RMSPROP, {"capturable": True}, ValueError, "capturable=True is not supported"),
    (RMSPROP, {"use_accumulate": True}, TypeError, "need an Accumulate optimizer class"),
    (ADAM, {"amsgrad": True}, ValueError, "amsgrad=True"),
    (ADAM, {"weight_decay": 0.1, "amsgrad": True}, ValueError, "amsgrad=True"),
    (ADAM, {"weight_decay": 0.1, "decoupled_weight_decay": True}, ValueError, "decoupled_weight_decay=True"),
    (ADAGRAD, {"maximize": "yes"}, TypeError, "maximize is 'yes', expected a bool"),
    (ADADELTA, {"rho": 1.1}, ValueError, r"rho is 1\.1, must be in"),
    (ADADELTA, {"eps": 1e-60}, ValueError, "eps is 1e-60, which is 0.0 in float32"),
    (ADADELTA, {"capturable": True}, ValueError, "capturable=True is not supported"),
    (torch.optim.SparseAdam, {"weight_decay": 0.1}, ValueError, "weight_decay=0.1 is not supported"),
    (rst.AccumulateSGD, {"dampening": 0.9}, ValueError, "dampening=0.9"),
    (SGD, {"learning_rate": 0.1}, TypeError, "learning_rate=0.1"),
    (SGD, {"eps": 0.1}, TypeError, "eps=0.1"),
    # values out of range
    (SGD, {"lr": -0.1}, ValueError, "lr is -0.1"),
    (SGD, {"lr": math.nan}, ValueError, "lr is nan"),
    (SGD, {"lr": math.inf}, ValueError, "lr is inf"),
    (SGD, {"lr": "fast"}, TypeError, "lr is 'fast'"),
    (SGD, {"lr": None}, TypeError, "lr is None"),
    (SGD, {"lr": True}, TypeError, "lr is True"),
    (ADAM, {"betas": (1.0, 0.9)}, ValueError, r"betas\[0\] is 1.0"),
    (ADAM, {"betas": (0.9, -0.1)}, ValueError, r"betas\[1\] is -0.1"),
    (ADAM, {"betas": (0.9, math.nan)}, ValueError, r"betas\[1\] is nan"),
    (ADAM, {"betas": (0.9,)}, TypeError, "betas is"),
    (ADAM, {"betas": 0.9}, TypeError, "betas is 0.9"),
    (ADAM, {"betas": "ab"}, TypeError, "betas"),
    (ADAM, {"eps": -1e-8}, ValueError, "eps is -1e-08"),
    (ADAGRAD, {"lr_decay": -1.0}, ValueError, "lr_decay is -1.0"),
    (ADAGRAD, {"initial_accumulator_value": -1.0}, ValueError, "initial_accumulator_value is -1.0"),
    # clipping
    (SGD, {"max_gradient": 1.0}, ValueError, "max_gradient.*gradient_clipping=True"),
    (SGD, {"gradient_clipping": True}, ValueError, "gradient_clipping=True needs max_gradient"),
    (SGD, {"gradient_clipping": 1, "max_gradient": 1.0}, TypeError, "gradient_clipping is 1"),
    (SGD, {"gradient_clipping": True, "max_gradient": -1.0}, ValueError, "max_gradient is -1.0"),
    (SGD, {"gradient_clipping": True, "max_gradient": "1"}, TypeError, "max_gradient is '1'"),
    # windows
    (rst.AccumulateSGD, {"accumulate_step": 2}, ValueError, "accumulate_step is 2.*use_accumulate=True"),
    (rst.AccumulateSGD, {"use_accumulate": True, "accumulate_step": 0}, ValueError, "accumulate_step is 0"),
    (rst.AccumulateAdam, {"use_accumulate": True, "accumulate_step": -3}, ValueError, "accumulate_step is -3"),
    (rst.AccumulateAdagrad, {"use_accumulate": True, "accumulate_step": 2.0}, TypeError, "accumulate_step is 2.0"),
    (rst.AccumulateSGD, {"use_accumulate": True, "accumulate_step": True}, TypeError, "accumulate_step is True"),
    (rst.AccumulateSGD, {"use_accumulate": True, "accumulate_step": "2"}, TypeError, "accumulate_step is '2'"),
    (rst.AccumulateSGD, {"use_accumulate": 1, "accumulate_step": 2}, TypeError, "use_accumulate is 1"),
    (rst.AccumulateSGD, {"use_accumulate": None}, TypeError, "use_accumulate is None"),
    (SGD, {"use_accumulate": True, "accumulate_step": 2}, TypeError, "Accumulate"),
    (ADAM, {"use_accumulate": False}, TypeError, "Accumulate"),
    (SGD, {"accumulate_step": 1}, TypeError, "Accumulate"),
]


@pytest.mark.parametrize(("cls", "options", "error", "message"), REFUSED)
def test_refused(
    device: torch.device, cls: type, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    collection = bags_collection(device)
    with pytest.raises(error, match=message) as raised:
        rst.apply_optimizer_in_backward(cls, collection.parameters(), options)
    assert cls.__name__ in str(raised.value)
    apply(collection)
    assert_trains(collection)


def test_neutral_keywords_pass(device: torch.device) -> None:
    neutral: list[tuple[type, dict[str, Any]]] = [
        (SGD, {"momentum": 0, "dampening": 0, "weight_decay": 0.0, "nesterov": False, "maximize": False}),
        (SGD, {"foreach": True, "fused": None, "differentiable": False, "gradient_clipping": False}),
        (ADAM, {"amsgrad": False, "weight_decay": 0, "capturable": False, "foreach": None, "fused": True}),
        (ADAGRAD, {"weight_decay": 0, "maximize": False}),
        (ADADELTA, {"weight_decay": 0, "maximize": False, "capturable": False, "foreach": None}),
        (RMSPROP, {"momentum": 0, "centered": False, "capturable": False, "foreach": True}),
        (rst.AccumulateAdagrad, {"use_accumulate": False, "accumulate_step": 1, "weight_decay": 0}),
    ]
    for cls, options in neutral:
        plain, given = bags_collection(device), bags_collection(device)
        apply(plain, cls, lr=0.1)
        apply(given, cls, lr=0.1, **options)
        train_step(plain, numbered(3))
        train_step(given, numbered(3))
        assert not list(same_bits(plain.state_dict(), given.state_dict()))


# ---- learning rates


def test_a_tensor_as_learning_rate(device: torch.device) -> None:
    collection = bags_collection(device)
    apply(collection, lr=torch.tensor(0.25))
    assert_trains(collection, lr=0.25)
    collection.fused_optimizer.param_groups[0]["lr"].fill_(0.75)
    assert_trains(collection, lr=0.75)


def test_learning_rate_is_read_at_each_update(device: torch.device) -> None:
    collection = bags_collection(device)
    apply(collection)
    (group,) = collection.fused_optimizer.param_groups
    for rate in (0.5, 0.125, 0.0, 2.0):
        output = collection(numbered(1)).values().sum()
        before = rows_of(collection)[0]
        group["lr"] = rate  # between forward and backward
        output.backward()
        torch.testing.assert_close(rows_of(collection)[0], before - rate)


@pytest.mark.parametrize("bad", [math.nan, -1.0, math.inf, "fast", 1e39, torch.tensor(1e39, dtype=torch.float64)])
def test_a_bad_learning_rate_set_later(device: torch.device, bad: Any) -> None:
    collection = bags_collection(device)
    apply(collection, ADAGRAD, eps=0.0)
    train_step(collection, numbered(3))
    twin = copy.deepcopy(collection)
    (group,) = collection.fused_optimizer.param_groups
    group["lr"] = bad
    before = collection.state_dict(), collection.fused_optimizer.state_dict()["state"]
    for _ in range(2):
        loss = collection(numbered(3)).values().sum()
        with pytest.raises((TypeError, ValueError), match=r"'t0'.*lr is"):
            loss.backward()
    after = collection.state_dict(), collection.fused_optimizer.state_dict()["state"]
    assert not [*same_bits(before[0], after[0]), *same_bits(before[1], after[1])]
    group["lr"] = 0.5
    train_step(collection, numbered(3))
    train_step(twin, numbered(3))
    assert not list(same_bits(twin.state_dict(), collection.state_dict()))


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
    assert not list(same_bits(before, collection.state_dict()))
    state = collection.fused_optimizer.state_dict()["state"]
    assert [float(state[f"embedding_bags.{t}.weight"][f"{t}.step"]) for t in ("t0", "t1")] == [0, 0]


# ---- weight decay that changes

DECAYING = [(SGD, {}), (ADAGRAD, {}), (ADAM, {"eps": 1e-3}), (ADADELTA, {"eps": 1e-3})]
DECAYING_IDS = [cls.__name__ for cls, _ in DECAYING]


@pytest.mark.parametrize(("cls", "options"), DECAYING, ids=DECAYING_IDS)
@pytest.mark.parametrize("update", ["backward", "step"])
def test_weight_decay_and_direction_change_in_mid_training(
    device: torch.device, cls: Any, options: dict[str, Any], update: str
) -> None:
    """As those of torch's optimizer do, when a scheduler or a hand changes its group; a decay of 0 comes and goes."""
    collection = bags_collection(device, bag_config(embedding_dim=4, **ONES), update=update)
    apply(collection, cls, lr=0.1, weight_decay=0.5, **options)
    rows = torch.nn.Parameter(torch.ones(3, 4))
    torchs = cls([rows], lr=0.1, weight_decay=0.5, **options)
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
def test_weight_decay_cannot_begin(device: torch.device, cls: type, options: dict[str, Any]) -> None:
    """Not in silence: the backward pass raises, and changes nothing."""
    collection = bags_collection(device)
    apply(collection, cls, lr=0.1, **options)
    train_step(collection, numbered(3))
    before = collection.state_dict()
    (group,) = collection.fused_optimizer.param_groups
    group["weight_decay"] = 0.1
    loss = collection(numbered(3)).values().sum()
    with pytest.raises(ValueError, match="weight_decay may change later, but not begin"):
        loss.backward()
    assert not list(same_bits(before, collection.state_dict()))
    group["weight_decay"] = 0
    train_step(collection, numbered(3))


def test_decay_comes_after_the_bound_of_the_gradient(device: torch.device) -> None:
    """Once for each window, of the clipped sum."""
    collection = bags_collection(device, bag_config(**ONES))
    options = {"lr": 1.0, "weight_decay": 0.5, "gradient_clipping": True, "max_gradient": 0.25}
    apply(collection, rst.AccumulateSGD, use_accumulate=True, accumulate_step=2, **options)
    for _ in range(2):
        train_step(collection, single_ids([7]))
    assert rows_of(collection)[7].tolist() == [1.0 - (0.25 + 0.5)] * 4


# ---- clipping


@pytest.mark.parametrize("window", [1, 2])
def test_clipping_acts_on_the_aggregated_gradient(device: torch.device, window: int) -> None:
    """Gradients of 0.4 each: two of them pass the bound of 0.6 only together."""
    collection = bags_collection(device, bag_config(**ONES))
    options = {"lr": 1.0, "gradient_clipping": True, "max_gradient": 0.6}
    if window == 1:
        apply(collection, **options)
    else:
        apply(collection, rst.AccumulateSGD, use_accumulate=True, accumulate_step=2, **options)
    for ids in ([7, 8, 8, 8], [8]) if window == 2 else ([7, 8, 8, 8, 8],):
        train_step(collection, single_ids(ids), factor=0.4)
    rows = rows_of(collection)
    assert torch.equal(rows[7], torch.full((4,), 1.0) - 0.4)
    assert torch.equal(rows[8], torch.full((4,), 1.0) - 0.6)
    cancelled = bags_collection(device, bag_config(**ONES))
    apply(cancelled, **options)
    output = cancelled(single_ids([1, 1, 2])).values()
    output.backward(torch.tensor([[5.0], [-4.5], [-9.0]], device=device).expand(3, 4))
    torch.testing.assert_close(torch.stack(list(rows_of(cancelled).values()))[:, 0], torch.tensor([0.5, 1.6]))


# ---- accumulation windows


def test_a_window_applies_the_sum_once(device: torch.device) -> None:
    """Also to rows that left the cache meanwhile, and with the learning rate of the window's end."""
    collection = bags_collection(device, bag_config(**ONES), cache=2)
    apply(collection, rst.AccumulateSGD, use_accumulate=True, accumulate_step=3, lr=9.0)
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
    collection = bags_collection(device, bag_config(**ONES))
    apply(collection, rst.AccumulateSGD, use_accumulate=True, accumulate_step=2)
    train_step(collection, numbered(2))
    assert torch.equal(read(collection, numbered(2)), torch.full((1, 4), 2.0))
    train_step(collection, numbered(2))
    assert torch.equal(read(collection, numbered(2)), torch.zeros(1, 4))


def test_loading_drops_the_gradients_of_rows_that_go(device: torch.device) -> None:
    collection = bags_collection(device, cache=4)
    apply(collection, rst.AccumulateSGD, use_accumulate=True, accumulate_step=2)
    train_step(collection, numbered(3))
    ids = torch.tensor([7, 8, 9])
    collection.load_state_dict({"embedding_bags.t0.ids": ids, "embedding_bags.t0.weight": torch.ones(3, 4)})
    train_step(collection, single_ids([7, 8]))
    train_step(collection, single_ids([7, 8]))
    assert [float(row[0]) for row in rows_of(collection).values()] == [0.0, 0.0, 1.0]


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


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"accumulate_step": 2}, ValueError),
        ({"use_accumulate": True, "accumulate_step": 0}, ValueError),
        ({"use_accumulate": True, "accumulate_step": 1.5}, TypeError),
        ({"use_accumulate": 1, "accumulate_step": 2}, TypeError),
    ],
)
def test_accumulate_classes_check_their_window(options: dict[str, Any], error: type[Exception]) -> None:
    for cls in (rst.AccumulateSGD, rst.AccumulateAdagrad, rst.AccumulateAdam):
        with pytest.raises(error, match="accumulate"):
            cls([torch.nn.Parameter(torch.ones(2))], lr=0.1, **options)


def test_loading_drops_an_open_window(device: torch.device) -> None:
    collection = bags_collection(device, cache=4)
    apply(collection, rst.AccumulateSGD, use_accumulate=True, accumulate_step=2)
    train_step(collection, numbered(3))
    train_step(collection, numbered(3))
    saved = collection.state_dict()
    train_step(collection, numbered(3))
    collection.load_state_dict(saved)
    train_step(collection, numbered(3))
    assert rows_equal(collection.state_dict(), saved), "one backward after the load: the window is open"
    train_step(collection, numbered(3))
    assert not rows_equal(collection.state_dict(), saved)


def rows_equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in other)
