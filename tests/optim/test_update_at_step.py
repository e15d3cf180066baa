"""update="step": backward passes aggregate gradients, and step() of the fused optimizer updates the rows once.

The reference is torch's: dense parameters of the same weights, or tables that are updated in the backward pass.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jagged import (
    apply,
    bag_config,
    bags_collection,
    jagged,
    random_bags,
    read,
    rows_of,
    same_bits,
    sequence_config,
    sequences_collection,
    single_ids,
)
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torchrec.optim import CombinedOptimizer, KeyedOptimizerWrapper, WarmupOptimizer, WarmupPolicy, WarmupStage
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer

import rec_sdk_torch as rst

KEYS = ("f0", "f1", "f2")


def tables(device: torch.device, update: str = "step", optimizer: type = torch.optim.SGD, **options: Any) -> Any:
    """Three tables in two groups, whose first rows are known."""
    dims = (4, 8, 4)
    configs = [bag_config(f"t{i}", [key], embedding_dim=dims[i]) for i, key in enumerate(KEYS)]
    keywords = {name: options.pop(name) for name in ("update", "cache", "check_finite") if name in options}
    collection = bags_collection(device, *configs, **{"update": update, "cache": 40, **keywords})
    apply(collection, optimizer, **options)
    return collection


def batches(count: int, seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [jagged(random_bags(rng, KEYS, 30)) for _ in range(count)]


def loss_of(collection: Any, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = collection(batch).values().pow(2).sum()
    return loss


def assert_same(one: Any, other: Any) -> None:
    """Rows, states and steps have the same bits."""
    assert not list(same_bits(one.state_dict(), other.state_dict()))
    assert not list(same_bits(one.fused_optimizer.state_dict(), other.fused_optimizer.state_dict()))


def handles(collection: Any) -> dict[str, Any]:
    return {name.split(".")[-2]: parameter for name, parameter in collection.named_parameters()}


# ---- when rows change


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad])
def test_it_has_the_bits_of_updates_in_the_backward_pass(device: torch.device, optimizer: type, looks: bool) -> None:
    first, then = tables(device, "backward", optimizer), tables(device, "step", optimizer)
    for batch in batches(6):
        loss_of(first, batch).backward()
        before = then.state_dict()
        loss_of(then, batch).backward()
        known = {name: value[: len(before[name])] for name, value in then.state_dict().items()}
        assert not list(same_bits(before, known)), "a backward pass changes no row"
        if looks:
            assert all(handle.grad is not None for handle in then.parameters())
        then.fused_optimizer.step()
        assert_same(first, then)
        assert all(handle.grad is None for handle in then.parameters()), "the gradients are used up"
        then.fused_optimizer.step()  # for which there was no backward pass
        then.fused_optimizer.zero_grad()
        assert_same(first, then)


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("passes", [2, 3])
def test_several_backward_passes_are_one_window(device: torch.device, passes: int, looks: bool) -> None:
    """Summed as the windows of Accumulate classes sum them, bit for bit, also where the gradients were looked at."""
    window = {"use_accumulate": True, "accumulate_step": passes}
    first, then = (
        tables(device, "backward", rst.AccumulateAdagrad, **window),
        tables(device, "step", torch.optim.Adagrad),
    )
    for index, batch in enumerate(batches(3 * passes)):
        loss_of(first, batch).backward()
        loss_of(then, batch).backward()
        if looks:
            assert all(handle.grad is not None for handle in then.parameters())
        if index % passes == passes - 1:
            then.fused_optimizer.step()
            assert_same(first, then)


def test_several_backward_passes_through_one_forward(device: torch.device) -> None:
    first, then = tables(device, "backward"), tables(device)
    (batch,) = batches(1)
    output = first(batch).values()
    (output.pow(2).sum() + 3 * output.sum()).backward()
    output = then(batch).values()
    output.pow(2).sum().backward(retain_graph=True)
    (3 * output.sum()).backward()
    with pytest.raises(RuntimeError, match="second time"):  # torch's: the graph was not retained
        output.sum().backward()
    then.fused_optimizer.step()
    for table in ("t0", "t1", "t2"):
        for i, row in rows_of(first, table).items():
            torch.testing.assert_close(rows_of(then, table)[i], row)
    assert then.fused_optimizer.state_dict()["state"]["embedding_bags.t0.weight"]["t0.step"] == 1


def test_a_backward_pass_through_a_forward_that_was_updated(device: torch.device) -> None:
    collection = tables(device)
    loss = loss_of(collection, batches(1)[0])
    loss.backward(retain_graph=True)
    collection.fused_optimizer.zero_grad()
    loss.backward(retain_graph=True)  # as torch has it: what was dropped is not in it
    collection.fused_optimizer.step()
    once = tables(device)
    loss_of(once, batches(1)[0]).backward()
    once.fused_optimizer.step()
    assert_same(once, collection)
    with pytest.raises(RuntimeError, match=r"updated by step\(\).*look the batch up again"):
        loss.backward()
    assert_same(once, collection)


def test_sequences_and_features_that_are_not_part_of_the_loss(device: torch.device) -> None:
    made = []
    for update in ("backward", "step"):
        configs = [sequence_config(f"t{i}", [f"f{i}"]) for i in range(2)]
        collection = sequences_collection(device, *configs, update=update)
        apply(collection, torch.optim.Adam)
        for number in range(3):
            output = collection(jagged({"f0": [[1, 2], [3]], "f1": [[1], [5, 6]]}))
            output[f"f{number % 2}"].values().pow(2).sum().backward()
            if update == "step":
                untouched = handles(collection)[f"t{1 - number % 2}"].grad
                assert torch.equal(untouched.cpu(), torch.zeros(1, 4)), "a row of zeros in place of none"
            collection.fused_optimizer.step()
        made.append(collection)
    assert_same(*made)


def test_gradients_of_sample_weights(device: torch.device) -> None:
    """They are of the rows that the forward read, though others were updated since, before it or between its passes."""
    collection = bags_collection(device, update="step", is_weighted=True)
    apply(collection)

    def change_row_1() -> None:
        collection(jagged({"f0": [[1]]}, {"f0": [[1.0]]})).values().sum().backward()
        collection.fused_optimizer.step()

    weights = torch.tensor([1.0, 2.0], device=device, requires_grad=True)
    batch = jagged({"f0": [[1, 2]]}, {"f0": [[1.0, 2.0]]})
    batch = type(batch)(batch.keys(), batch.values(), weights=weights, lengths=batch.lengths())
    for passes_before in (0, 1):
        weights.grad = None
        rows = {i: read(collection, jagged({"f0": [[i]]}, {"f0": [[1.0]]})).flatten() for i in (1, 2)}
        output = collection(batch).values().sum()
        for _ in range(passes_before):
            output.backward(retain_graph=True)
            collection.fused_optimizer.zero_grad()
        change_row_1()
        for _ in range(2 - passes_before):
            output.backward(retain_graph=True)
        expected = 2 * torch.stack([rows[1].sum(), rows[2].sum()])
        assert weights.grad is not None
        torch.testing.assert_close(weights.grad.cpu(), expected)


# ---- gradients that are dropped, set, or not there


def test_zero_grad_drops(device: torch.device) -> None:
    for drop in (
        lambda c: c.fused_optimizer.zero_grad(),
        lambda c: c.fused_optimizer.zero_grad(set_to_none=True),
        lambda c: c.zero_grad(),
        lambda c: [setattr(handle, "grad", None) for handle in c.parameters()],
        lambda c: c.fused_optimizer.init_state(),
    ):
        first, then = tables(device, "step", torch.optim.Adam), tables(device, "step", torch.optim.Adam)
        one, other = batches(2)
        loss_of(then, one).backward()
        loss_of(first, one)
        drop(then)
        assert all(handle.grad is None for handle in then.parameters())
        for collection in (first, then):
            loss_of(collection, other).backward()
            collection.fused_optimizer.step()
        assert_same(first, then)


@pytest.mark.parametrize("again", [False, True])
def test_a_table_without_a_gradient_is_left_out(device: torch.device, again: bool) -> None:
    """Its rows stay, as those of a dense parameter would; another backward pass gives it one."""
    collection, reference = tables(device), tables(device)
    one, other = batches(2)
    loss_of(collection, one).backward()
    loss_of(reference, one)
    before = {table: rows_of(collection, table) for table in ("t0", "t1", "t2")}
    handles(collection)["t2"].grad = None
    assert handles(collection)["t2"].grad is None
    assert handles(collection)["t0"].grad is not None
    if again:
        loss_of(collection, other).backward()
        loss_of(reference, other).backward()
        assert handles(collection)["t2"].grad is not None
    collection.fused_optimizer.step()
    reference.fused_optimizer.step()
    now = {table: rows_of(collection, table) for table in ("t0", "t1", "t2")}
    assert any(not torch.equal(now["t0"][i], row) for i, row in before["t0"].items())
    expected = rows_of(reference, "t2") if again else before["t2"]
    assert all(torch.equal(now["t2"][i], row) for i, row in expected.items())


def test_frozen_tables_have_no_gradient(device: torch.device) -> None:
    collection = tables(device)
    one, other = batches(2)
    loss_of(collection, one).backward()
    with pytest.raises(RuntimeError, match=r"gradients wait.*frozen"):
        collection.freeze("t1")
    collection.fused_optimizer.step()
    before = rows_of(collection, "t1")
    handles(collection)["t1"].requires_grad_(False)
    loss_of(collection, other).backward()
    assert [name for name, handle in handles(collection).items() if handle.grad is None] == ["t1"]
    clip_grad_norm_(collection.parameters(), 0.5)
    collection.fused_optimizer.step()
    assert all(torch.equal(rows_of(collection, "t1")[i], row) for i, row in before.items())
    loss_of(collection, one).backward()
    collection.zero_grad()  # which the frozen table has no gradient for
    collection.thaw()


def test_gradients_that_are_set(device: torch.device) -> None:
    collection = bags_collection(device, update="step")
    apply(collection, lr=1.0)
    (handle,) = collection.parameters()
    collection(single_ids([3, 4, 3])).values().sum().backward()
    before = rows_of(collection)
    assert torch.equal(handle.grad.cpu().sort(0).values, torch.tensor([[1.0], [2.0]]).expand(2, 4))
    handle.grad = handle.grad * 2
    handle.grad.add_(1)
    handle.grad.data.mul_(0.5)  # which autograd's counters do not show
    with pytest.raises(ValueError, match=r"table 't0': a gradient of shape \(3, 4\).*expected"):
        handle.grad = torch.zeros(3, 4, device=device)
    collection.fused_optimizer.step()
    for i, step in ((3, 2.5), (4, 1.5)):
        assert torch.equal(rows_of(collection)[i], before[i] - step)
    with pytest.raises(ValueError, match="no backward pass waits"):
        handle.grad = torch.zeros(2, 4, device=device)


def test_gradients_that_are_changed_between_backward_passes(device: torch.device) -> None:
    collection = bags_collection(device, update="step")
    apply(collection, lr=1.0)
    (handle,) = collection.parameters()
    collection(single_ids([3, 4])).values().sum().backward()
    before = rows_of(collection)
    handle.grad.mul_(0.5)
    collection(single_ids([4, 5])).values().sum().backward()
    collection.fused_optimizer.step()
    now = rows_of(collection)
    for i, step in ((3, 0.5), (4, 1.5)):
        assert torch.equal(now[i], before[i] - step)


# ---- clipping, beside dense parameters


class Both(torch.nn.Module):
    """Tables and a dense layer; `plain`: in place of tables, embeddings of torch's with the same rows."""

    def __init__(self, device: torch.device, plain: bool) -> None:
        super().__init__()
        self.tables = tables(device, "step", torch.optim.SGD, lr=0.3)
        read(self.tables, batches(1)[0])
        torch.manual_seed(5)
        self.dense = torch.nn.Linear(16, 2).to(device)
        self.bags = None
        if plain:
            self.bags = torch.nn.ModuleList()
            for i, key in enumerate(KEYS):
                every = jagged({other: [[row] if other == key else [] for row in range(30)] for other in KEYS})
                values = read(self.tables, every).split([4, 8, 4], dim=1)[i]
                bag = torch.nn.EmbeddingBag.from_pretrained(values, freeze=False, mode="sum").to(device)
                self.bags.append(bag)
            del self.tables

    def forward(self, batch: Any) -> torch.Tensor:
        if self.bags is None:
            values = self.tables(batch).values()
        else:
            device = self.dense.weight.device
            values = torch.cat(
                [
                    bag(batch[key].values().to(device), batch[key].offsets()[:-1].to(device))
                    for bag, key in zip(self.bags, KEYS, strict=True)
                ],
                dim=1,
            )
        return (self.dense(values) * torch.tensor([10.0, -7.0], device=values.device)).pow(2).sum()

    def optimizer(self, lr: float = 0.3) -> Any:
        """SGD of all parameters."""
        if self.bags is None:
            named = dict(self.dense.named_parameters())
            dense = KeyedOptimizerWrapper(named, lambda parameters: torch.optim.SGD(parameters, lr=lr))
            return CombinedOptimizer([("tables", self.tables.fused_optimizer), ("dense", dense)])
        named = dict(self.named_parameters())
        return KeyedOptimizerWrapper(named, lambda parameters: torch.optim.SGD(parameters, lr=lr))

    def rows(self, key: int) -> torch.Tensor:
        """The rows of the ids below 30."""
        if self.bags is not None:
            return self.bags[key].weight.detach().cpu()
        known = rows_of(self.tables, f"t{key}")
        every = jagged({other: [[i] if other == KEYS[key] else [] for i in range(30)] for other in KEYS})
        values = read(self.tables, every).split([4, 8, 4], dim=1)[key]
        assert known
        return values


def clipped_by_torch(norm_type: float) -> Callable[[Both, Any], Any]:
    def make(model: Both, optimizer: Any) -> Callable[[], Any]:
        def step() -> Any:
            norm = clip_grad_norm_(model.parameters(), 0.5, norm_type)
            optimizer.step()
            return norm

        return step

    return make


def clipped_by_value(model: Both, optimizer: Any) -> Callable[[], Any]:
    def step() -> None:
        clip_grad_value_(model.parameters(), 0.02)
        optimizer.step()

    return step


def clipped_by_torchrec(kind: GradientClipping, norm_type: float = 2.0, **options: Any) -> Callable[[Both, Any], Any]:
    def make(model: Both, optimizer: Any) -> Callable[[], Any]:
        clipping = GradientClippingOptimizer(optimizer, kind, 0.02, norm_type, **options)

        def step() -> Any:
            clipping.step()
            return clipping.last_total_grad_norm

        return step

    return make


CLIPS = {
    "torch, 2": clipped_by_torch(2.0),
    "torch, inf": clipped_by_torch(float("inf")),
    "torch, 1": clipped_by_torch(1.0),
    "torch, value": clipped_by_value,
    "torchrec, 2": clipped_by_torchrec(GradientClipping.NORM),
    "torchrec, inf": clipped_by_torchrec(GradientClipping.NORM, float("inf")),
    "torchrec, global": clipped_by_torchrec(GradientClipping.NORM, enable_global_grad_clip=True),
    "torchrec, value": clipped_by_torchrec(GradientClipping.VALUE),
}


@pytest.mark.filterwarnings("error:.*clipped of the dense")
@pytest.mark.parametrize("name", CLIPS)
def test_tables_and_dense_parameters_are_clipped_by_one_norm(device: torch.device, name: str) -> None:
    models = [Both(device, plain) for plain in (False, True)]
    optimizers = [model.optimizer() for model in models]
    steps = [CLIPS[name](model, optimizer) for model, optimizer in zip(models, optimizers, strict=True)]
    empty = {key: [[]] for key in KEYS}  # beside f0, whose table shares a group with that of f2
    for number, batch in enumerate([*batches(4), jagged({**empty, "f0": [[1]]}), jagged(empty)]):
        norms = []
        for model, optimizer, step in zip(models, optimizers, steps, strict=True):
            optimizer.zero_grad()
            model(batch).backward()
            norms.append(step())
        if norms[0] is not None and number < 5:
            torch.testing.assert_close(norms[0], norms[1])
        for key in range(3):
            torch.testing.assert_close(models[0].rows(key), models[1].rows(key))
        torch.testing.assert_close(models[0].dense.weight, models[1].dense.weight)


def test_clipping_of_tables_alone(device: torch.device) -> None:
    collection = bags_collection(device, update="step")
    apply(collection, lr=1.0)
    clipping = GradientClippingOptimizer(collection.fused_optimizer, GradientClipping.NORM, 1.0)
    collection(single_ids([3, 4])).values().backward(torch.full((2, 4), 2.0, device=device))
    before = rows_of(collection)
    clipping.step()
    for i in (3, 4):
        torch.testing.assert_close(rows_of(collection)[i], before[i] - 1 / 8**0.5)
    collection(single_ids([3, 4])).values().backward(torch.full((2, 4), 2.0, device=device))
    norm = clip_grad_norm_(collection.parameters(), 100.0)
    torch.testing.assert_close(float(norm), 32**0.5)


def test_max_gradient_bounds_what_the_norm_left(device: torch.device) -> None:
    collection = bags_collection(device, update="step")
    apply(collection, lr=1.0, gradient_clipping=True, max_gradient=0.25)
    collection(single_ids([3])).values().backward(torch.full((1, 4), 2.0, device=device))
    before = rows_of(collection)
    clip_grad_norm_(collection.parameters(), 2.0)  # 1 for each element
    collection.fused_optimizer.step()
    assert torch.equal(rows_of(collection)[3], before[3] - 0.25)


@pytest.mark.parametrize("norm_type", [2.0, float("inf"), 1.0])
def test_norms_of_what_waits(device: torch.device, norm_type: float) -> None:
    model, plain = Both(device, plain=False), Both(device, plain=True)
    assert model.tables.grad_norm() == (0.0, {"t0": 0.0, "t1": 0.0, "t2": 0.0})
    for batch in batches(2):  # two passes
        for each in (model, plain):
            each(batch).backward()
    assert plain.bags is not None
    grads = [bag.weight.grad.cpu() for bag in plain.bags]
    expected = [float(torch.linalg.vector_norm(grad, norm_type)) for grad in grads]
    found = model.tables.grad_norm(norm_type)
    torch.testing.assert_close(list(found.tables.values()), expected)
    every = torch.cat([grad.flatten() for grad in grads])
    torch.testing.assert_close(found.total, float(torch.linalg.vector_norm(every, norm_type)))
    clip_grad_value_(model.parameters(), 0.25)
    assert model.tables.grad_norm(float("inf")).total == 0.25
    model.tables.fused_optimizer.step()
    assert model.tables.grad_norm(norm_type).total == 0.0


def test_norms_of_gradients_that_are_used_up(device: torch.device) -> None:
    collection = tables(device, "backward")
    with pytest.raises(RuntimeError, match="update='step'"):
        collection.grad_norm()


# ---- GradScaler


def scaled_step(scaler: Any, model: Both, optimizer: Any, batch: Any, clips: bool, factor: float = 1.0) -> None:
    optimizer.zero_grad()
    scaler.scale(factor * model(batch)).backward()
    if clips:
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("clips", [False, True])
def test_grad_scaler_needs_no_call(device: torch.device, clips: bool) -> None:
    models = [Both(device, plain) for plain in (False, True)]
    optimizers = [model.optimizer(0.001) for model in models]
    models[0].tables.fused_optimizer.param_groups[0]["lr"] = 0.001
    scalers = [torch.amp.GradScaler(device.type, init_scale=1024.0, growth_interval=2) for _ in models]
    for number, batch in enumerate(batches(5)):
        overflow = number == 2
        before = rows_of(models[0].tables)
        for scaler, model, optimizer in zip(scalers, models, optimizers, strict=True):
            scaled_step(scaler, model, optimizer, batch, clips, 1e38 if overflow else 1.0)
        if overflow:
            after = rows_of(models[0].tables)
            assert all(torch.equal(after[i], row) for i, row in before.items()), "the step is skipped"
        for key in range(3):
            torch.testing.assert_close(models[0].rows(key), models[1].rows(key))
        assert scalers[0].get_scale() == scalers[1].get_scale()
    assert scalers[0].get_scale() == 2048.0, "it has grown, fallen and grown"
    state = models[0].tables.fused_optimizer.state_dict()["state"]["embedding_bags.t0.weight"]
    assert state["t0.step"] == 4, "a skipped step does not count"


def test_a_scaler_that_the_tables_are_told_of_is_refused(device: torch.device) -> None:
    collection = tables(device)
    with pytest.raises(ValueError, match="update='step' a GradScaler unscales"):
        collection.set_grad_scaler(torch.amp.GradScaler("cpu"))
    collection.set_grad_scaler(None)


# ---- closures and wrappers


def test_closures(device: torch.device) -> None:
    first, then = tables(device, "step", torch.optim.Adam), tables(device, "step", torch.optim.Adam)
    for batch in batches(3):
        loss = loss_of(first, batch)
        loss.backward()
        first.fused_optimizer.step()

        def closure(batch: Any = batch) -> torch.Tensor:
            then.fused_optimizer.zero_grad()
            loss = loss_of(then, batch)
            loss.backward()
            return loss

        with torch.no_grad():
            returned = then.fused_optimizer.step(closure)
        assert torch.equal(returned, loss)
        assert_same(first, then)


def test_an_optimizer_that_calls_its_closure_often(device: torch.device) -> None:
    """LBFGS of the dense parameters: tables have the gradient of the last call alone."""
    model = Both(device, plain=False)
    dense = torch.optim.LBFGS(model.dense.parameters(), lr=0.01, max_iter=4)
    (batch,) = batches(1)
    calls: list[list[torch.Tensor]] = []

    def closure() -> torch.Tensor:
        dense.zero_grad()
        model.tables.fused_optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        calls.append([handle.grad.clone() for handle in model.tables.parameters()])
        return loss

    dense.step(closure)
    assert len(calls) > 2
    before = rows_of(model.tables)
    assert all(torch.equal(h.grad, last) for h, last in zip(model.tables.parameters(), calls[-1], strict=True))
    model.tables.fused_optimizer.step()
    assert any(not torch.equal(rows_of(model.tables)[i], row) for i, row in before.items())
    assert model.tables.fused_optimizer.state_dict()["state"]["embedding_bags.t0.weight"]["t0.step"] == 1


def wrapped(optimizer: Any) -> Any:
    """In each of TorchRec's wrappers."""
    warm = WarmupOptimizer(optimizer, [WarmupStage(WarmupPolicy.LINEAR, max_iters=3, value=0.1)], lr=0.5)
    keyed = KeyedOptimizerWrapper(warm.params, lambda parameters: warm)
    return CombinedOptimizer([("tables", GradientClippingOptimizer(keyed, GradientClipping.NORM, 1e9))])


def test_wrappers_act_on_tables_as_on_others(device: torch.device) -> None:
    """Rates of a warm-up count from the step they are set for; a norm that clips nothing changes no bit."""
    first, then = tables(device, "backward", torch.optim.Adam), tables(device, "step", torch.optim.Adam)
    stage = [WarmupStage(WarmupPolicy.LINEAR, max_iters=3, value=0.1)]
    plain, optimizer = WarmupOptimizer(first.fused_optimizer, stage, lr=0.5), wrapped(then.fused_optimizer)
    rates = []
    for batch in batches(5):
        optimizer.zero_grad()
        loss_of(first, batch).backward()
        loss_of(then, batch).backward()
        rates.append(then.fused_optimizer.param_groups[0]["lr"])
        plain.step()
        optimizer.step()
        assert not list(same_bits(first.state_dict(), then.state_dict()))
    assert len(set(rates)) > 2


# ---- what is refused, and what ends the gradients


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (
            rst.AccumulateSGD,
            {"use_accumulate": True, "accumulate_step": 2},
            r"accumulate_step is 2.*call step\(\) after",
        ),
        (rst.SparseGradients, {}, r"take_gradients\(\).*update='backward'"),
    ],
)
def test_optimizers_that_update_otherwise(
    device: torch.device, cls: type, options: dict[str, Any], message: str
) -> None:
    collection = bags_collection(device, update="step")
    with pytest.raises(ValueError, match=message):
        rst.apply_optimizer_in_backward(cls, collection.parameters(), options)
    optimizer = rst.tbe.TableOptimizer.create(cls, options)
    for make in (
        lambda: rst.tbe.TableBatchedEmbedding([rst.tbe.TableConfig("t", 9, 4)], optimizer=optimizer, update="step"),
        lambda: rst.tbe.TableBatchedEmbedding([rst.tbe.TableConfig("t", 9, 4)], update="step").set_optimizers(
            {0: optimizer}
        ),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    apply(collection, rst.AccumulateSGD, use_accumulate=True, accumulate_step=1)  # which is SGD


def test_an_unknown_update(device: torch.device) -> None:
    with pytest.raises(ValueError, match=re.escape("update is 'later', allowed are ['backward', 'step']")):
        bags_collection(device, update="later")


def test_an_optimizer_of_torch_cannot_update_tables(device: torch.device) -> None:
    model = Both(device, plain=False)
    model(batches(1)[0]).backward()
    with pytest.raises(RuntimeError, match="would change no row"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_layouts_stay_while_gradients_wait(device: torch.device) -> None:
    collection = tables(device)
    loss_of(collection, batches(1)[0]).backward()
    with pytest.raises(RuntimeError, match=r"gradients wait.*step\(\) or zero_grad\(\).*copied"):
        copy.deepcopy(collection)
    collection.fused_optimizer.step()
    twin = copy.deepcopy(collection)
    for each in (collection, twin):
        loss_of(each, batches(2)[1]).backward()
    handles(twin)["t0"].grad.zero_()
    assert handles(collection)["t0"].grad.abs().sum() > 0, "a copy has gradients of its own"
    for each in (collection, twin):
        each.fused_optimizer.step()
    assert list(same_bits(collection.state_dict(), twin.state_dict()))


def test_a_load_drops_gradients(device: torch.device) -> None:
    collection = tables(device)
    (batch,) = batches(1)
    loss_of(collection, batch).backward()
    saved = collection.state_dict()
    collection.load_state_dict(saved)
    assert handles(collection)["t0"].grad is None
    collection.fused_optimizer.step()
    assert not list(same_bits(saved, collection.state_dict()))


def test_saves_have_no_gradients(device: torch.device, tmp_path: Path) -> None:
    """A save before step() has the rows as they are; a load waits for step() or zero_grad()."""
    collection = tables(device, "step", torch.optim.Adam)
    one, other = batches(2)
    loss_of(collection, one).backward()
    collection.fused_optimizer.step()
    loss_of(collection, other).backward()
    names = ("t0", "t1", "t2")
    before = [rows_of(collection, name) for name in names]
    rst.Saver().save(collection, str(tmp_path))
    with pytest.raises(RuntimeError, match="in flight"):
        rst.Saver().load(collection, str(tmp_path))
    loaded = tables(device, "step", torch.optim.Adam)
    rst.Saver().load(loaded, str(tmp_path))
    for name, expected in zip(names, before, strict=True):
        assert all(torch.equal(rows_of(loaded, name)[i], row) for i, row in expected.items())
    assert all(handle.grad is None for handle in loaded.parameters())
    loss_of(loaded, other).backward()
    for each in (collection, loaded):
        each.fused_optimizer.step()
    for name in names:
        assert all(torch.equal(rows_of(loaded, name)[i], row) for i, row in rows_of(collection, name).items())


def test_a_cache_that_holds_too_few_batches(device: torch.device) -> None:
    """The rows of all batches between two updates are in the cache: an error says so, and leaves no trace."""
    collection = bags_collection(device, update="step", cache=4)
    apply(collection, lr=1.0)
    collection(single_ids([1, 2, 3])).values().sum().backward()
    with pytest.raises(rst.tbe.CacheTooSmallError) as error:
        collection(single_ids([4, 5]))
    assert "1 backward passes wait for step() of the optimizer" in error.value.__notes__[0]
    collection.fused_optimizer.step()
    losses = []  # kept, with their graphs: one batch fits each time all the same
    for ids in ([4, 5, 6], [1, 2, 3]) * 3:
        losses.append(collection(single_ids(ids)).values().sum())
        losses[-1].backward()
        collection.fused_optimizer.step()


def test_prefetched_batches(device: torch.device) -> None:
    """step() drops no plan that was made ahead, and bits are those without."""
    first, then = (
        tables(device, "step", torch.optim.Adam, cache=150),
        tables(device, "step", torch.optim.Adam, cache=150),
    )
    every = batches(8)
    for batch in every:
        loss_of(first, batch).backward()
        first.fused_optimizer.step()
    for number, batch in enumerate(rst.prefetch(iter(every), then, depth=2)):
        loss_of(then, batch).backward()
        then.wait_for_plans()
        planned = then._embedding.groups[0].in_flight()
        then.fused_optimizer.step()
        if 0 < number < 6:
            assert planned == 3, "this batch and two ahead"
            assert then._embedding.groups[0].in_flight() == 2, "those ahead are still there"
    assert then.cache_stats()["depth_reached"] == 2
    assert_same(first, then)


def test_gradients_that_are_not_finite(device: torch.device) -> None:
    collection = tables(device, check_finite="raise")
    (batch,) = batches(1)
    loss_of(collection, batch).backward()
    before = [handle.grad.clone() for handle in collection.parameters()]
    loss = loss_of(collection, batch) * float("inf")
    with pytest.raises(FloatingPointError, match="NaN or infinite"):
        loss.backward()
    assert all(torch.equal(h.grad, grad) for h, grad in zip(collection.parameters(), before, strict=True))
    collection.fused_optimizer.step()
    assert collection.fused_optimizer.state_dict()["state"]["embedding_bags.t0.weight"]["t0.step"] == 1
