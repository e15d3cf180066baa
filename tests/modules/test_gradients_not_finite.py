"""`check_finite=` and `set_grad_scaler`: gradients are checked before they update rows."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from batches import jagged, single_ids
from collection_factory import EACH_KIND, POOLED, SEQUENCE, Kind, apply, bags_collection
from training import assert_trains, differing_tensors, output_parts, output_values, read, state_of

import rec_sdk_torch as rst

BAD = [math.nan, math.inf, -math.inf]
BATCH = {"f0": [[1], [2]], "f1": [[3], [1]]}


def two_groups(device: torch.device, kind: Kind = POOLED, **options: Any) -> Any:
    """Builds two tables with different optimizers and therefore in different groups."""
    collection = kind.collection(device, kind.config(), kind.config("t1", ["f1"]), **options)
    for handle, optimizer in zip(collection.parameters(), (torch.optim.SGD, torch.optim.Adam), strict=True):
        rst.apply_optimizer_in_backward(optimizer, [handle], {"lr": 0.5})
    return collection


def backward(collection: torch.nn.Module, factor: float, scaler: Any = None) -> None:
    """Runs a training step whose gradient is `factor` in one element of the last feature, and 1 elsewhere."""
    values = output_parts(collection(jagged(BATCH)))
    factors = [torch.ones_like(value) for value in values]
    factors[-1][-1, -1] = factor
    loss = sum((value * factor).sum() for value, factor in zip(values, factors, strict=True))
    (loss if scaler is None else scaler.scale(loss)).backward()


@pytest.mark.parametrize("bad", BAD)
@EACH_KIND
def test_raise_changes_no_row_of_any_group(device: torch.device, kind: Kind, bad: float) -> None:
    collection = two_groups(device, kind, check_finite="raise")
    backward(collection, 1.0)
    before = state_of(collection)
    with pytest.raises(FloatingPointError, match=r"'t1'.*NaN or infinite.*no row was changed") as error:
        backward(collection, bad)
    assert ("'t0'" in str(error.value)) is (kind is POOLED), "features of a sequence have gradients of their own"
    assert not list(differing_tensors(before, state_of(collection)))
    backward(collection, 1.0)
    assert list(differing_tensors(before, state_of(collection)))


@pytest.mark.parametrize("bad", BAD)
def test_warn_reports_and_continues(device: torch.device, bad: float) -> None:
    collection = two_groups(device, check_finite="warn")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backward(collection, 1.0)
    with pytest.warns(UserWarning, match="'t1'.*NaN or infinite"):
        backward(collection, bad)
    assert not read(collection, jagged(BATCH)).isfinite().all()


def test_off_is_the_default(device: torch.device) -> None:
    collection = two_groups(device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backward(collection, math.nan)
    assert not read(collection, jagged(BATCH)).isfinite().all()
    with pytest.raises(TypeError, match=r"scaler is 2\.0, expected a torch\.amp\.GradScaler"):
        collection.set_grad_scaler(2.0)


@EACH_KIND
def test_scaled_losses_train_as_plain_ones(device: torch.device, kind: Kind) -> None:
    """The loss scale is a power of two, so results are bit-identical to training without scaling."""
    plain, scaled = two_groups(device, kind, seed=1), two_groups(device, kind, seed=1)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)
    scaled.set_grad_scaler(scaler)
    for factor in (1.0, -3.0, 0.5):
        backward(plain, factor)
        backward(scaled, factor, scaler)
    assert not list(differing_tensors(state_of(plain), state_of(scaled)))
    scaled.set_grad_scaler(None)
    backward(plain, 1.0)
    backward(scaled, 1.0, scaler)
    assert list(differing_tensors(state_of(plain), state_of(scaled)))


@pytest.mark.parametrize("bad", BAD)
def test_an_overflow_skips_the_update_of_all_groups(device: torch.device, bad: float) -> None:
    collection = two_groups(device, SEQUENCE)
    scaler = torch.amp.GradScaler(device.type, init_scale=4.0)
    collection.set_grad_scaler(scaler)
    backward(collection, 1.0, scaler)
    before = state_of(collection)
    backward(collection, bad, scaler)
    assert not list(differing_tensors(before, state_of(collection)))
    assert collection.skipped_updates == 1
    backward(collection, 1.0, scaler)
    assert list(differing_tensors(before, state_of(collection)))
    assert collection.skipped_updates == 1


def test_an_overflow_does_not_count_in_a_window(device: torch.device) -> None:
    collection = apply(bags_collection(device), window=2)
    scaler = torch.amp.GradScaler(device.type, init_scale=4.0)
    collection.set_grad_scaler(scaler)
    start = read(collection, single_ids([1]))
    for factor in (1.0, math.inf, 1.0):
        scaler.scale(factor * output_values(collection(single_ids([1]))).sum()).backward()
    torch.testing.assert_close(start - read(collection, single_ids([1])), torch.ones(1, 4))


def test_a_disabled_scaler_changes_nothing(device: torch.device) -> None:
    collection = apply(bags_collection(device))
    collection.set_grad_scaler(torch.amp.GradScaler(device.type, enabled=False))
    assert_trains(collection)
