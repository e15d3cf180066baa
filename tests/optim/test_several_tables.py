"""Several tables of a collection: each has the optimizer, the rate and the window that it was given."""

from __future__ import annotations

import torch
from jagged import bag_config, bags_collection, jagged, read, rows_of, train_step

import rec_sdk_torch as rst


def test_tables_with_their_own_learning_rate(device: torch.device) -> None:
    """One cache, one launch: the rates are per table. A shared dict stays one param group."""
    tables = [bag_config(f"t{i}", [f"f{i}"]) for i in range(3)]
    collection = bags_collection(device, *tables)
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
    collection = bags_collection(device, *[bag_config(f"t{i}", [f"f{i}"]) for i in range(3)])
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
    tables = [bag_config(f"t{i}", [f"f{i}"], weight_init_min=1.0, weight_init_max=1.0) for i in range(4)]
    collection = bags_collection(device, *tables)
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
    state = collection.fused_optimizer.state_dict()["state"]
    steps = [float(state[f"embedding_bags.t{i}.weight"][f"t{i}.step"]) for i in range(4)]
    assert steps == [7, 7, 3, 2]
