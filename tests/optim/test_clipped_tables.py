"""update="step": clipping, scalers, closures and wrappers treat tables like dense parameters.

The reference is torch with dense parameters that have the same weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from batches import jagged, single_ids
from collection_factory import apply, bags_collection
from stepped_tables import KEYS, Both, assert_same, batches, loss_of, step_of, tables
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torchrec.optim import CombinedOptimizer, KeyedOptimizerWrapper, WarmupOptimizer, WarmupPolicy, WarmupStage
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from training import differing_tensors, rows_of

import rec_sdk_torch as rst

# ---- clipping, together with dense parameters


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
    empty = {key: [[]] for key in KEYS}  # f0 and f2 share a group, f1 is in another
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


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_cache_size_and_prefetching_change_no_bit(device: torch.device, passes: int) -> None:
    """Gradients are ordered by id, so their norm is summed in the same order whatever the cache size."""
    every, made, norms = batches(12, ids=200), [], []
    for cache, depth in ((60, 0), (75, 0), (90, 2), (1000, 3)):
        collection = tables(device, "step", torch.optim.Adagrad, cache=cache)
        norms.append([])
        for number, batch in enumerate(rst.prefetch(iter(every), collection, depth=depth) if depth else every):
            loss_of(collection, batch).backward()
            if number % passes == passes - 1:
                norms[-1].append(clip_grad_norm_(collection.parameters(), 3.0))
                collection.fused_optimizer.step()
        made.append(collection)
    for collection, of_collection in zip(made[1:], norms[1:], strict=True):
        assert all(torch.equal(one, other) for one, other in zip(norms[0], of_collection, strict=True))
        assert_same(made[0], collection)


def test_max_gradient_applies_after_norm_clipping(device: torch.device) -> None:
    collection = apply(bags_collection(device, update="step"), lr=1.0, gradient_clipping=True, max_gradient=0.25)
    collection(single_ids([3])).values().backward(torch.full((1, 4), 2.0, device=device))
    before = rows_of(collection)
    clip_grad_norm_(collection.parameters(), 2.0)  # clips each of the four elements to 1
    collection.fused_optimizer.step()
    assert torch.equal(rows_of(collection)[3], before[3] - 0.25)


@pytest.mark.parametrize("norm_type", [2.0, float("inf"), 1.0])
def test_norms_of_pending_gradients(device: torch.device, norm_type: float) -> None:
    model, plain = Both(device, plain=False), Both(device, plain=True)
    assert model.tables.grad_norm() == (0.0, {"t0": 0.0, "t1": 0.0, "t2": 0.0})
    for batch in batches(2):  # two backward passes
        for each in (model, plain):
            each(batch).backward()
    assert plain.bags is not None
    grads = [bag.weight.grad.cpu() for bag in plain.bags]
    expected = [float(torch.linalg.vector_norm(grad, norm_type)) for grad in grads]
    found = model.tables.grad_norm(norm_type)
    torch.testing.assert_close(list(found.tables.values()), expected, rtol=1e-6, atol=0)
    every = torch.cat([grad.flatten() for grad in grads])
    torch.testing.assert_close(found.total, float(torch.linalg.vector_norm(every, norm_type)), rtol=1e-6, atol=0)
    clip_grad_value_(model.parameters(), 0.25)
    assert model.tables.grad_norm(float("inf")).total == 0.25
    model.tables.fused_optimizer.step()
    assert model.tables.grad_norm(norm_type).total == 0.0


def test_norms_after_updates_in_backward_are_refused(device: torch.device) -> None:
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
    """LBFGS trains the dense parameters. Tables are updated only with the gradient of the closure's last call."""
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
    assert step_of(model.tables) == 1


def wrapped(optimizer: Any) -> Any:
    """Wraps the optimizer in each of TorchRec's wrappers."""
    warm = WarmupOptimizer(optimizer, [WarmupStage(WarmupPolicy.LINEAR, max_iters=3, value=0.1)], lr=0.5)
    keyed = KeyedOptimizerWrapper(warm.params, lambda parameters: warm)
    return CombinedOptimizer([("tables", GradientClippingOptimizer(keyed, GradientClipping.NORM, 1e9))])


def test_wrappers_treat_tables_like_dense_parameters(device: torch.device) -> None:
    """A warm-up's rate applies from the step for which it is set. Clipping to a norm that gradients do not reach leaves
    results bit-identical.
    """
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
        assert not list(differing_tensors(first.state_dict(), then.state_dict()))
    assert len(set(rates)) > 2
