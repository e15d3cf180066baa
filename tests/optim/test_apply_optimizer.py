"""`apply_optimizer_in_backward`: accepted classes and keywords, and the resulting backward pass."""

from __future__ import annotations

import copy
import pkgutil
from typing import Any

import pytest
import torch
import torchrec
from batches import jagged, numbered, single_ids
from collection_factory import apply, bag_config, bags_collection, index_bag_config
from optimizer_table import ROWS, Row
from torch.distributed.optim import _apply_optimizer_in_backward as torchs_apply
from torch.distributed.optim import _get_in_backward_optimizers
from torchrec.optim import apply_optimizer_in_backward as torchrecs_apply
from training import assert_trains, differing_tensors, read, rows_of, train, train_step

import rec_sdk_torch as rst
from rec_sdk_torch.formulas import SPECS, spec_for

NOTES = ("_in_backward_optimizers", "_optimizer_classes", "_optimizer_kwargs")
ONES = {"weight_init_min": 1.0, "weight_init_max": 1.0}
EVERY_CLASS: dict[type, str] = {
    pkgutil.resolve_name(name): spec.family for spec in SPECS if not spec.collects_gradients for name in spec.classes
}
"""The family of each class that the fused update knows."""

BATCHES = [[1, 2, 2], [2, 5, 6], [1, 1, 1], [6, 5, 2]]


class NoSuchOptimizer(torch.optim.SGD):
    pass


@pytest.mark.parametrize("cls", [NoSuchOptimizer, torch.optim.Optimizer, "SGD", None])
def test_other_classes_are_refused_with_a_list(device: torch.device, cls: Any) -> None:
    collection = bags_collection(device)
    with pytest.raises(TypeError) as error:
        rst.apply_optimizer_in_backward(cls, collection.parameters(), {"lr": 0.1})
    assert getattr(cls, "__name__", repr(cls)) in str(error.value)
    for known in EVERY_CLASS:
        assert f"{known.__module__}.{known.__qualname__}" in str(error.value)
    apply(collection)
    assert_trains(collection)


# ---- the optimizer with which a table was built


@pytest.mark.parametrize("made_for", dict.fromkeys(EVERY_CLASS.values()))
def test_a_table_accepts_its_optimizer_family(device: torch.device, made_for: str) -> None:
    for number, (given, family) in enumerate(EVERY_CLASS.items()):
        alike = [cls for cls, each in EVERY_CLASS.items() if each == made_for]
        chosen = alike[number % len(alike)]
        collection = bags_collection(device, embedding_optimizer_cls=chosen)
        if family == made_for:
            train_step(apply(collection, given), numbered(2))
            continue
        with pytest.raises(TypeError) as error:
            apply(collection, given)
        for part in ("'t0'", chosen.__name__, given.__name__, "embedding_optimizer_cls", "apply_optimizer_in_back"):
            assert part in str(error.value)


@pytest.mark.parametrize("theirs", [torchs_apply, torchrecs_apply])
@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (torch.optim.SGD, r"'t0'.*embedding_optimizer_cls=torch\.optim\.adam\.Adam.*sgd\.SGD"),
        (NoSuchOptimizer, "NoSuchOptimizer.*has no fused update; supported are .*SparseAdam"),
    ],
)
def test_unsupported_optimizers_are_refused_by_torchs_apply(
    device: torch.device, theirs: Any, cls: type, message: str
) -> None:
    """The call raises an error; afterwards a supported class can be applied."""
    collection = bags_collection(device, embedding_optimizer_cls=torch.optim.Adam)
    (handle,) = collection.parameters()
    for _ in range(2):
        with pytest.raises((TypeError, ValueError), match=message):
            theirs(cls, [handle], {"lr": 0.1})
        assert not any(hasattr(handle, name) for name in NOTES)
    with pytest.raises(RuntimeError, match=r"\['t0'\] have no optimizer"):
        collection(numbered(2))
    theirs(torch.optim.Adam, [handle], {"lr": 0.1})
    other = apply(bags_collection(device), torch.optim.Adam, lr=0.1)
    for each in (collection, other):
        train(each, map(single_ids, BATCHES))
    assert not list(differing_tensors(collection.state_dict(), other.state_dict()))


@pytest.mark.parametrize("trained_before", [False, True])
def test_no_hook_is_refused(device: torch.device, trained_before: bool) -> None:
    """register_hook=False is refused, because the training loop would have to call step()."""
    collection = bags_collection(device)
    if trained_before:
        torchs_apply(torch.optim.SGD, collection.parameters(), {"lr": 0.5})
        assert_trains(collection)
        torchs_apply(torch.optim.SGD, collection.parameters(), {"lr": 0.5}, register_hook=False)
        assert_trains(collection)  # a parameter with a hook keeps it
        return
    torchs_apply(torch.optim.SGD, collection.parameters(), {"lr": 0.5}, register_hook=False)
    twin = copy.deepcopy(collection)
    for unhooked in (collection, twin):
        with pytest.raises(RuntimeError, match=r"'t0'.*register_hook=False.*without"):
            unhooked(numbered(2))
        assert rows_of(unhooked) == {}
        torchs_apply(torch.optim.SGD, unhooked.parameters(), {"lr": 0.5})
        assert_trains(unhooked)


# ---- the optimizers that torch's function creates


@pytest.mark.parametrize("theirs", [torchs_apply, torchrecs_apply])
@pytest.mark.parametrize("cls", [torch.optim.SGD, torchrec.optim.SGD, rst.AccumulateSGD])
@pytest.mark.parametrize("ours_too", [None, "before", "after"])
@pytest.mark.filterwarnings("error:Detected call of")
def test_learning_rates_of_in_backward_optimizers(
    device: torch.device, theirs: Any, cls: type, ours_too: str | None
) -> None:
    """Each table's own learning rate can be set before the first forward, later, or by a scheduler that
    multiplies it.
    """
    collection = bags_collection(device, bag_config(**ONES), bag_config("t1", ["f1"], **ONES))
    batch = jagged({"f0": [[3]], "f1": [[3]]})
    if ours_too == "before":
        for handle in collection.parameters():
            rst.apply_optimizer_in_backward(cls, [handle], {"lr": 0.5})
    theirs(cls, collection.parameters(), {"lr": 0.5})
    if ours_too == "after":
        apply(collection, cls)
    optimizers = _get_in_backward_optimizers(collection)
    assert len(optimizers) == 2
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5) for optimizer in optimizers]

    def moved() -> list[float]:
        before = read(collection, batch)
        train_step(collection, batch)
        return (before - read(collection, batch))[0, ::4].tolist()

    optimizers[0].param_groups[0]["lr"] = 0.25
    assert moved() == [0.25, 0.5]
    optimizers[1].param_groups[0]["lr"] = 2.0
    assert moved() == [0.25, 2.0]
    for scheduler in schedulers:
        scheduler.step()
    assert moved() == [0.125, 1.0]
    assert [group["lr"] for group in collection.fused_optimizer.param_groups] == [0.125, 1.0]
    for group in collection.fused_optimizer.param_groups:
        group["lr"] = 4.0
    assert moved() == [4.0, 4.0]
    assert [optimizer.param_groups[0]["lr"] for optimizer in optimizers] == [4.0, 4.0]


def test_a_copy_has_options_of_its_own(device: torch.device) -> None:
    collection = bags_collection(device)
    torchs_apply(torch.optim.SGD, collection.parameters(), {"lr": 0.5})
    assert_trains(collection)
    twin = copy.deepcopy(collection)
    _get_in_backward_optimizers(collection)[0].param_groups[0]["lr"] = 0.25
    assert_trains(collection, lr=0.25)
    assert_trains(twin, lr=0.5)


def test_unsupported_options_in_param_groups_are_refused(device: torch.device) -> None:
    collection = bags_collection(device)
    torchs_apply(torch.optim.SGD, collection.parameters(), {"lr": 0.5})
    for optimizer in (_get_in_backward_optimizers(collection)[0], collection.fused_optimizer):
        (group,) = optimizer.param_groups
        group["momentum"] = 0.9
        loss = collection(numbered(2)).values().sum()
        with pytest.raises(ValueError, match=r"'t0'.*momentum=0\.9 is not supported"):
            loss.backward()
        group["momentum"] = 0
        assert_trains(collection)


def test_unknown_embedding_optimizer_cls(device: torch.device) -> None:
    with pytest.raises(TypeError, match="NoSuchOptimizer"):
        bags_collection(device, embedding_optimizer_cls=NoSuchOptimizer)


# ---- one optimizer per table


@pytest.mark.parametrize("entry", [rst.apply_optimizer_in_backward, torchs_apply, torchrecs_apply])
@pytest.mark.parametrize(
    ("cls", "options"),
    [(torch.optim.SGD, {"lr": 0.25}), (torch.optim.Adagrad, {"lr": 0.5}), (torchrec.optim.SGD, {"lr": 0.5})],
)
@pytest.mark.parametrize("trained_before", [False, True])
def test_a_second_different_optimizer_is_refused(
    device: torch.device, entry: Any, cls: type, options: dict[str, Any], trained_before: bool
) -> None:
    collection = apply(bags_collection(device))
    if trained_before:
        assert_trains(collection)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"'t0' already has .*SGD.*{cls.__name__}"):
            entry(cls, collection.parameters(), options)
        assert_trains(collection)


@pytest.mark.parametrize("again", [rst.apply_optimizer_in_backward, torchs_apply, torchrecs_apply])
def test_applying_the_same_optimizer_again_is_accepted(device: torch.device, again: Any) -> None:
    collection = apply(bags_collection(device))
    again(torch.optim.SGD, collection.parameters(), {"lr": 0.5})
    assert_trains(collection)
    collection.fused_optimizer.param_groups[0]["lr"] = 0.25
    again(torch.optim.SGD, collection.parameters(), {"lr": 0.5})
    assert_trains(collection, lr=0.25)


def row_of(cls: type) -> Row:
    """Returns the first row of the optimizer table with the same update as the class."""
    spec = spec_for(cls)
    return next(row for row in ROWS if (row.spec.formula, row.spec.coefficients) == (spec.formula, spec.coefficients))


FORMULAS = {cls: row_of(cls) for cls in EVERY_CLASS if cls.__module__.startswith("torchrec.")}
"""The case of each of TorchRec's classes; only RowWiseAdagrad has an update of its own."""


def test_every_class_of_torchrec_has_its_formula() -> None:
    theirs = {cls for cls in vars(torchrec.optim).values() if isinstance(cls, type)}
    wrappers = (torchrec.optim.KeyedOptimizer, *(getattr(rst, name) for name in dir(rst) if "Accumulate" in name))
    classes = {cls for cls in theirs if issubclass(cls, torch.optim.Optimizer) and not issubclass(cls, wrappers)}
    assert classes == set(FORMULAS)


@pytest.mark.parametrize("entry", [rst.apply_optimizer_in_backward, torchs_apply, torchrecs_apply])
@pytest.mark.parametrize("cls", list(FORMULAS))
def test_torchrecs_classes_through_all_entry_points(device: torch.device, entry: Any, cls: type) -> None:
    """Each class updates by its formula, whichever function applies it; compared in float64 with a table of
    nine rows.
    """
    options = FORMULAS[cls].options
    collection = bags_collection(device, index_bag_config(num_embeddings=9))
    weight = torch.nn.Parameter(torch.stack(list(rows_of(collection).values())).double())
    reference = FORMULAS[cls].on_rows(weight)
    entry(cls, collection.parameters(), dict(options))
    for number, ids in enumerate(BATCHES):
        factor = (-1.0) ** number * (number + 1)
        train_step(collection, single_ids(ids), factor)
        (factor * torch.nn.functional.embedding(torch.tensor(ids), weight, sparse=True).sum()).backward()
        reference.step()
        reference.zero_grad()
    found = torch.stack(list(rows_of(collection).values())).double()
    torch.testing.assert_close(found, weight.detach(), rtol=1e-5, atol=1e-5)
    assert collection.fused_optimizer.param_groups[0]["lr"] == options["lr"]


def test_training_without_an_optimizer(device: torch.device) -> None:
    collection = bags_collection(device, bag_config(), bag_config("t1", ["f1"]))
    batch = jagged({"f0": [[1]], "f1": [[2]]})
    with pytest.raises(RuntimeError, match=r"\['t0', 't1'\].*apply_optimizer_in_backward"):
        collection(batch)
    first, second = collection.parameters()
    rst.apply_optimizer_in_backward(torch.optim.SGD, [second], {"lr": 0.5})
    with pytest.raises(RuntimeError, match=r"\['t0'\].*apply_optimizer_in_backward"):
        collection(batch)
    rst.apply_optimizer_in_backward(torch.optim.SGD, [first], {"lr": 0.25})
    before = rows_of(collection), rows_of(collection, "t1")
    assert before == ({}, {}), "a refused forward adds no rows"
    start = read(collection, batch)
    train_step(collection, batch)
    torch.testing.assert_close(start - read(collection, batch), torch.tensor([[0.25] * 4 + [0.5] * 4]))


# ---- attributes of the parameter handles


def test_attributes_that_torchrec_reads(device: torch.device) -> None:
    collection = bags_collection(device)
    (handle,) = collection.parameters()
    assert not hasattr(handle, "_in_backward_optimizers")
    options = {"lr": 0.5}
    rst.apply_optimizer_in_backward(torch.optim.Adagrad, [handle], options)
    assert handle._optimizer_classes == [torch.optim.Adagrad]
    assert handle._optimizer_kwargs == [{"lr": 0.5}]
    assert isinstance(handle._in_backward_optimizers, list)
    options["lr"] = 9.0
    apply(collection, torch.optim.Adagrad)  # the same call can be repeated, since the caller's dict was copied
    assert options == {"lr": 9.0}


# ---- parameters of other modules


@pytest.mark.parametrize("windowed", [False, True])
def test_other_modules_are_trained_in_backward(device: torch.device, windowed: bool) -> None:
    collection = bags_collection(device)
    dense = torch.nn.Linear(4, 1, bias=False).to(device)
    model = torch.nn.ModuleList([collection, dense])
    apply(model, window=2 if windowed else 1)
    start, expected = dense.weight.detach().clone(), torch.zeros(1, 4)
    for step in range(1, 5):
        rows = collection(numbered(2)).values()
        expected += 0.5 * rows.detach().cpu()
        dense(rows).sum().backward()
        assert dense.weight.grad is None
        moved = (start - dense.weight.detach()).cpu()
        if windowed and step % 2:
            assert not torch.allclose(moved, expected)
        else:
            torch.testing.assert_close(moved, expected, rtol=1e-5, atol=1e-6)
    assert collection.cache_stats()["batches"] == 4


def test_only_other_modules(device: torch.device) -> None:
    dense = torch.nn.Linear(2, 1, bias=False).to(device)
    rst.apply_optimizer_in_backward(torch.optim.AdamW, dense.parameters(), {"lr": 0.5})
    before = dense.weight.detach().clone()
    dense(torch.ones(1, 2, device=device)).sum().backward()
    assert dense.weight.grad is None
    assert (before - dense.weight).min() > 0.4


def test_nothing_is_applied_if_a_check_fails(device: torch.device) -> None:
    model = torch.nn.ModuleList([bags_collection(device), torch.nn.Linear(4, 1).to(device)])
    for cls, options in ((NoSuchOptimizer, {}), (torch.optim.SGD, {"dampening": 0.9}), (torch.optim.SGD, {"lr": -1})):
        with pytest.raises((TypeError, ValueError)):
            rst.apply_optimizer_in_backward(cls, model.parameters(), options)
    assert not any(hasattr(p, "_in_backward_optimizers") for p in model.parameters())
    rst.apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.5})
