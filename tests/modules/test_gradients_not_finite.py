"""`check_finite=` and `set_grad_scaler`: what gradients pass before they reach rows."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from jagged import (
    apply,
    assert_trains,
    bag_config,
    bags_collection,
    jagged,
    output_values,
    read,
    same_bits,
    sequence_config,
    sequences_collection,
    single_ids,
)

import rec_sdk_torch as rst

BAD = [math.nan, math.inf, -math.inf]
BATCH = {"f0": [[1], [2]], "f1": [[3], [1]]}


def two_groups(device: torch.device, sequence: bool, **options: Any) -> torch.nn.Module:
    """Tables of two optimizers, so that their rows are in two groups."""
    config, make = (sequence_config, sequences_collection) if sequence else (bag_config, bags_collection)
    collection = make(device, config("t0", ["f0"]), config("t1", ["f1"]), **options)
    first, second = collection.parameters()
    rst.apply_optimizer_in_backward(torch.optim.SGD, [first], {"lr": 0.5})
    rst.apply_optimizer_in_backward(torch.optim.Adam, [second], {"lr": 0.5})
    return collection


def backward(collection: torch.nn.Module, factor: float, scaler: Any = None) -> None:
    """One training step whose gradient is `factor` in one element of the last feature, 1 elsewhere."""
    output = collection(jagged(BATCH))
    values = [output.values()] if not isinstance(output, dict) else [part.values() for part in output.values()]
    factors = [torch.ones_like(value) for value in values]
    factors[-1][-1, -1] = factor
    loss = sum((value * factor).sum() for value, factor in zip(values, factors, strict=True))
    (loss if scaler is None else scaler.scale(loss)).backward()


def state(collection: Any) -> dict[str, Any]:
    return {"rows": collection.state_dict(), "optimizer": collection.fused_optimizer.state_dict()["state"]}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("sequence", [False, True])
def test_raise_changes_no_row_of_any_group(device: torch.device, sequence: bool, bad: float) -> None:
    collection = two_groups(device, sequence, check_finite="raise")
    backward(collection, 1.0)
    before = state(collection)
    with pytest.raises(FloatingPointError, match=r"'t1'.*NaN or infinite.*no row was changed") as error:
        backward(collection, bad)
    assert ("'t0'" in str(error.value)) is not sequence, "features of a sequence have gradients of their own"
    assert not list(same_bits(before, state(collection)))
    backward(collection, 1.0)
    assert list(same_bits(before, state(collection)))


@pytest.mark.parametrize("bad", BAD)
def test_warn_says_so_and_goes_on(device: torch.device, bad: float) -> None:
    collection = two_groups(device, False, check_finite="warn")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backward(collection, 1.0)
    with pytest.warns(UserWarning, match="'t1'.*NaN or infinite"):
        backward(collection, bad)
    assert not read(collection, jagged(BATCH)).isfinite().all()


def test_off_is_the_default(device: torch.device) -> None:
    collection = two_groups(device, False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backward(collection, math.nan)
    assert not read(collection, jagged(BATCH)).isfinite().all()


def test_other_modes_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"check_finite is 'no_such', allowed are \['off', 'warn', 'raise'\]"):
        two_groups(device, False, check_finite="no_such")


@pytest.mark.parametrize("sequence", [False, True])
def test_scaled_losses_train_as_plain_ones(device: torch.device, sequence: bool) -> None:
    """The scale is a power of two, so the bits are the same."""
    plain, scaled = two_groups(device, sequence, seed=1), two_groups(device, sequence, seed=1)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)
    scaled.set_grad_scaler(scaler)
    for factor in (1.0, -3.0, 0.5):
        backward(plain, factor)
        backward(scaled, factor, scaler)
    assert not list(same_bits(state(plain), state(scaled)))
    scaled.set_grad_scaler(None)
    backward(plain, 1.0)
    backward(scaled, 1.0, scaler)
    assert list(same_bits(state(plain), state(scaled)))


@pytest.mark.parametrize("bad", BAD)
def test_an_overflow_skips_the_update_of_all_groups(device: torch.device, bad: float) -> None:
    collection = two_groups(device, True)
    scaler = torch.amp.GradScaler(device.type, init_scale=4.0)
    collection.set_grad_scaler(scaler)
    backward(collection, 1.0, scaler)
    before = state(collection)
    backward(collection, bad, scaler)
    assert not list(same_bits(before, state(collection)))
    assert collection.skipped_updates == 1
    backward(collection, 1.0, scaler)
    assert list(same_bits(before, state(collection)))
    assert collection.skipped_updates == 1


def test_an_overflow_is_no_backward_of_a_window(device: torch.device) -> None:
    collection = bags_collection(device)
    apply(collection, rst.AccumulateSGD, lr=0.5, use_accumulate=True, accumulate_step=2)
    scaler = torch.amp.GradScaler(device.type, init_scale=4.0)
    collection.set_grad_scaler(scaler)
    start = read(collection, single_ids([1]))
    for factor in (1.0, math.inf, 1.0):
        scaler.scale(factor * output_values(collection(single_ids([1]))).sum()).backward()
    torch.testing.assert_close(start - read(collection, single_ids([1])), torch.ones(1, 4))


def test_a_disabled_scaler_changes_nothing(device: torch.device) -> None:
    collection = bags_collection(device)
    apply(collection)
    collection.set_grad_scaler(torch.amp.GradScaler(device.type, enabled=False))
    assert_trains(collection)


def test_what_is_no_scaler(device: torch.device) -> None:
    with pytest.raises(TypeError, match=r"scaler is 2\.0, expected a torch\.amp\.GradScaler"):
        bags_collection(device).set_grad_scaler(2.0)
