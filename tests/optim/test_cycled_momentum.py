"""Schedulers that cycle the momentum as well as the learning rate, compared with torch's optimizers."""

from __future__ import annotations

import pkgutil
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from batches import jagged
from collection_factory import apply, bag_config, bags_collection, index_bag_config
from torch.distributed.optim import _apply_optimizer_in_backward, _get_in_backward_optimizers
from torch.optim import lr_scheduler
from training import differing_tensors, rows_of, train_step

import rec_sdk_torch as rst
from rec_sdk_torch.formulas import UPDATES

CYCLES: dict[str, Callable[[Any], Any]] = {
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=6, base_momentum=0.3, max_momentum=0.9),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.05, 0.2, step_size_up=2, base_momentum=0.3, max_momentum=0.9),
}
CYCLED = {spec.kernel: spec for spec in UPDATES if spec.options.keys() & {"momentum", "betas"}}


def states_of(collection: Any) -> torch.Tensor:
    states = collection.fused_optimizer.state_dict()["state"]["embedding_bags.t0.weight"]
    return torch.cat([value.flatten() for name, value in states.items() if name not in ("t0.ids", "t0.step")])


def of_collection(collection: Any) -> Any:
    return collection.fused_optimizer


def of_parameter(collection: Any) -> Any:
    (optimizer,) = _get_in_backward_optimizers(collection)
    return optimizer


@pytest.mark.parametrize("kind", list(CYCLES))
@pytest.mark.parametrize("name", list(CYCLED))
@pytest.mark.parametrize("optimizer_of", [of_collection, of_parameter])
def test_a_momentum_that_is_cycled_reaches_the_update(
    device: torch.device, kind: str, name: str, optimizer_of: Callable[[Any], Any]
) -> None:
    """Updates equal a dense parameter's with momentum set by hand at each step, and differ from a constant
    momentum's.
    """
    spec = CYCLED[name]
    cls, options = pkgutil.resolve_name(spec.classes[0]), spec.example
    option = "momentum" if "momentum" in spec.options else "betas"
    first: Any = 0.5 if option == "momentum" else (0.5, 0.99)
    cycled, by_hand, constant = (bags_collection(device) for _ in range(3))
    for collection in (cycled, by_hand, constant):
        _apply_optimizer_in_backward(cls, collection.parameters(), {"lr": 0.1, **options, option: first})
    dense = torch.nn.Parameter(torch.zeros(1))
    beta: dict[str, Any] = {"betas": first} if option == "betas" else {}
    reference: Any = torch.optim.Adam([dense], **beta) if beta else torch.optim.SGD([dense], momentum=first)
    schedules = [CYCLES[kind](optimizer) for optimizer in (optimizer_of(cycled), reference)]
    used = set()
    for step in range(5):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for collection in (cycled, by_hand, constant):
                group = of_collection(collection).param_groups[0]
                if collection is not cycled:
                    group["lr"] = reference.param_groups[0]["lr"]
                if collection is by_hand:
                    group[option] = reference.param_groups[0][option]
                train_step(collection, jagged({"f0": [[1, 2], [step]]}), factor=0.5 + step)
            reference.step()
            for schedule in schedules:
                schedule.step()
        used.add(reference.param_groups[0][option])
    assert len(used) > 2
    assert not list(differing_tensors(cycled.state_dict(), by_hand.state_dict()))
    found, expected, other = (states_of(collection) for collection in (cycled, by_hand, constant))
    assert torch.equal(found, expected)
    assert not torch.equal(found, other)


@pytest.mark.parametrize(("cls", "options"), [(torch.optim.Adam, {}), (torch.optim.AdamW, {"weight_decay": 0.01})])
def test_a_cycled_momentum_matches_torch(device: torch.device, cls: Any, options: dict[str, Any]) -> None:
    collection = apply(bags_collection(device, index_bag_config(num_embeddings=3)), cls, **options)
    weight = torch.nn.Parameter(torch.stack(list(rows_of(collection).values())))
    reference = cls([weight], lr=0.5, **options)
    schedules = [CYCLES["one cycle"](optimizer) for optimizer in (collection.fused_optimizer, reference)]
    for step in range(6):
        train_step(collection, jagged({"f0": [[0], [1], [2]]}), factor=1.0 + step)
        weight.grad = torch.full((3, 4), 1.0 + step)
        reference.step()
        for schedule in schedules[: 2 if step < 5 else 0]:
            schedule.step()
    torch.testing.assert_close(torch.stack(list(rows_of(collection).values())), weight.data, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", list(CYCLES))
@pytest.mark.parametrize("optimizer_of", [of_collection, of_parameter])
def test_cycling_a_missing_momentum_names_the_alternative(
    device: torch.device, kind: str, optimizer_of: Callable[[Any], Any]
) -> None:
    collection = bags_collection(device)
    _apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": 0.5})
    with pytest.raises(ValueError, match="cycle_momentum"):
        CYCLES[kind](optimizer_of(collection))
    mixed = bags_collection(device, bag_config(), bag_config("t1", ["f1"]))
    first, second = mixed.parameters()
    rst.apply_optimizer_in_backward(torch.optim.Adam, [first], {"lr": 0.1})
    rst.apply_optimizer_in_backward(torch.optim.SGD, [second], {"lr": 0.1})
    with pytest.raises(ValueError, match="cycle_momentum"):
        CYCLES[kind](mixed.fused_optimizer)
    lr_scheduler.OneCycleLR(mixed.fused_optimizer, 0.2, total_steps=6, cycle_momentum=False)
