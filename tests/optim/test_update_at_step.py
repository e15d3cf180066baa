"""update="step": backward passes aggregate gradients, and step() of the fused optimizer updates the rows once.

The reference is torch with dense parameters that have the same weights, or tables updated in the backward pass.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import jagged, single_ids
from collection_factory import apply, bags_collection, sequence_config, sequences_collection
from embeddings import one_table
from stepped_tables import Both, assert_same, batches, handles, loss_of, step, step_of, tables
from torch.nn.utils import clip_grad_norm_
from training import differing_tensors, read, rows_of

import rec_sdk_torch as rst

# ---- when rows are updated


def rows_known(collection: Any, before: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the state dict without the rows whose ids are missing in the state dict `before`."""
    state = collection.state_dict()
    for name in [name for name in state if name.endswith(".ids")]:
        weight = name.replace(".ids", ".weight")
        known = torch.isin(state[name], before[name])
        state[name], state[weight] = state[name][known], state[weight][known]
    return dict(state)


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad])
def test_step_updates_have_the_bits_of_backward_updates(device: torch.device, optimizer: type, looks: bool) -> None:
    first, then = tables(device, "backward", optimizer), tables(device, "step", optimizer)
    for batch in batches(6):
        loss_of(first, batch).backward()
        before = then.state_dict()
        loss_of(then, batch).backward()
        assert not list(differing_tensors(before, rows_known(then, before))), "a backward pass changes no row"
        if looks:
            assert all(handle.grad is not None for handle in then.parameters())
        then.fused_optimizer.step()
        assert_same(first, then)
        assert all(handle.grad is None for handle in then.parameters()), "the gradients are used up"
        then.fused_optimizer.step()  # this step has no effect, since no backward pass preceded it
        then.fused_optimizer.zero_grad()
        assert_same(first, then)


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("passes", [2, 3])
def test_several_backward_passes_are_one_window(device: torch.device, passes: int, looks: bool) -> None:
    """Gradients are summed as in windows of Accumulate classes, bit for bit, even if they are read in between."""
    window = {"use_accumulate": True, "accumulate_step": passes}
    first = tables(device, "backward", rst.AccumulateAdagrad, **window)
    then = tables(device, "step", torch.optim.Adagrad)
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
    with pytest.raises(RuntimeError, match="second time"):  # torch's own error, because the graph was not retained
        output.sum().backward()
    then.fused_optimizer.step()
    for table in ("t0", "t1", "t2"):
        for i, row in rows_of(first, table).items():
            torch.testing.assert_close(rows_of(then, table)[i], row)
    assert step_of(then) == 1


def test_a_backward_pass_through_a_forward_that_was_updated(device: torch.device) -> None:
    collection = tables(device)
    loss = loss_of(collection, batches(1)[0])
    loss.backward(retain_graph=True)
    collection.fused_optimizer.zero_grad()
    loss.backward(retain_graph=True)  # as in torch, dropped gradients are not included
    collection.fused_optimizer.step()
    once = tables(device)
    step(once, batches(1)[0])
    assert_same(once, collection)
    with pytest.raises(RuntimeError, match=r"updated by step\(\).*look the batch up again"):
        loss.backward()
    assert_same(once, collection)


def test_sequences_and_features_that_are_not_part_of_the_loss(device: torch.device) -> None:
    made = []
    for update in ("backward", "step"):
        configs = [sequence_config(f"t{i}", [f"f{i}"]) for i in range(2)]
        collection = apply(sequences_collection(device, *configs, update=update), torch.optim.Adam)
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
    """Gradients of per-sample weights are computed from the rows that the forward read.

    This holds even if updates run before the forward, or between forward and backward.
    """
    collection = apply(bags_collection(device, update="step", is_weighted=True))

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


# ---- gradients that are dropped, set, or missing


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
            step(collection, other)
        assert_same(first, then)


@pytest.mark.parametrize("again", [False, True])
def test_a_table_without_a_gradient_is_left_out(device: torch.device, again: bool) -> None:
    """A table without a gradient is unchanged, like a dense parameter; a later backward pass gives it a gradient."""
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
    with pytest.raises(RuntimeError, match=r"gradients are pending.*frozen"):
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
    collection.zero_grad()  # the frozen table has no gradient to drop
    collection.thaw()


def test_gradients_set_by_the_user_are_applied(device: torch.device) -> None:
    collection = apply(bags_collection(device, update="step"), lr=1.0)
    (handle,) = collection.parameters()
    collection(single_ids([3, 4, 3])).values().sum().backward()
    before = rows_of(collection)
    assert torch.equal(handle.grad.cpu().sort(0).values, torch.tensor([[1.0], [2.0]]).expand(2, 4))
    handle.grad = handle.grad * 2
    handle.grad.add_(1)
    handle.grad.data.mul_(0.5)  # autograd's version counters do not show this change
    odd: list[tuple[Any, type[Exception], str]] = [
        (torch.zeros(3, 4, device=device), ValueError, r"a gradient of shape \(3, 4\).*expected"),
        ([1], TypeError, "its gradient is a list, expected a tensor"),
        (torch.zeros(2, 4).to_sparse(), ValueError, "its gradient is torch.sparse_coo, expected a dense tensor"),
        (torch.zeros(2, 4, device="meta"), ValueError, "its gradient is on the meta device"),
    ]
    for value, error, message in odd:
        with pytest.raises(error, match=f"table 't0': {message}"):
            handle.grad = value
    collection.fused_optimizer.step()
    for i, change in ((3, 2.5), (4, 1.5)):
        assert torch.equal(rows_of(collection)[i], before[i] - change)
    with pytest.raises(ValueError, match="no gradient is pending"):
        handle.grad = torch.zeros(2, 4, device=device)


def test_gradients_that_are_changed_between_backward_passes(device: torch.device) -> None:
    collection = apply(bags_collection(device, update="step"), lr=1.0)
    (handle,) = collection.parameters()
    collection(single_ids([3, 4])).values().sum().backward()
    before = rows_of(collection)
    handle.grad.mul_(0.5)
    collection(single_ids([4, 5])).values().sum().backward()
    collection.fused_optimizer.step()
    now = rows_of(collection)
    for i, change in ((3, 0.5), (4, 1.5)):
        assert torch.equal(now[i], before[i] - change)


# ---- refusals, and the end of gradients


def test_set_grad_scaler_is_refused(device: torch.device) -> None:
    collection = tables(device)
    with pytest.raises(ValueError, match="update='step' a GradScaler unscales"):
        collection.set_grad_scaler(torch.amp.GradScaler("cpu"))
    collection.set_grad_scaler(None)


WINDOW = {"use_accumulate": True, "accumulate_step": 2}
OTHERWISE: list[tuple[type, dict[str, Any], str]] = [
    (rst.AccumulateSGD, WINDOW, r"accumulate_step is 2.*call step\(\) after"),
    (rst.SparseGradients, {}, r"take_gradients\(\).*update='backward'"),
]


@pytest.mark.parametrize(("cls", "options", "message"), OTHERWISE)
def test_unsupported_optimizers_are_refused(
    device: torch.device, cls: type, options: dict[str, Any], message: str
) -> None:
    collection = bags_collection(device, update="step")
    for make in (
        lambda: rst.apply_optimizer_in_backward(cls, collection.parameters(), options),
        lambda: one_table(device, optimizer=(cls, options), update="step"),
        lambda: one_table(device, optimizer=None, update="step").set_optimizers(
            {0: rst.tbe.TableOptimizer.create(cls, options)}
        ),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    apply(collection, rst.AccumulateSGD, use_accumulate=True, accumulate_step=1)  # equivalent to SGD


def test_an_unknown_update(device: torch.device) -> None:
    with pytest.raises(ValueError, match=re.escape("update is 'no_such', allowed are ['backward', 'step']")):
        bags_collection(device, update="no_such")


def test_lbfgs_cannot_update_tables(device: torch.device) -> None:
    model = Both(device, plain=False)
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure() -> torch.Tensor:
        loss: torch.Tensor = model(batches(1)[0])
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match=r"table 't0': add_ .* \(LBFGS\) are for the dense modules"):
        optimizer.step(closure)


def test_an_optimizer_of_torch_cannot_update_tables(device: torch.device) -> None:
    model = Both(device, plain=False)
    model(batches(1)[0]).backward()
    with pytest.raises(RuntimeError, match="would change no row"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_layouts_are_kept_while_gradients_are_pending(device: torch.device) -> None:
    collection = tables(device)
    loss_of(collection, batches(1)[0]).backward()
    with pytest.raises(RuntimeError, match=r"gradients are pending.*step\(\) or zero_grad\(\).*copied"):
        copy.deepcopy(collection)
    collection.fused_optimizer.step()
    twin = copy.deepcopy(collection)
    for each in (collection, twin):
        loss_of(each, batches(2)[1]).backward()
    handles(twin)["t0"].grad.zero_()
    assert handles(collection)["t0"].grad.abs().sum() > 0, "a copy has gradients of its own"
    for each in (collection, twin):
        each.fused_optimizer.step()
    assert list(differing_tensors(collection.state_dict(), twin.state_dict()))


def test_a_load_drops_gradients(device: torch.device) -> None:
    collection = tables(device)
    (batch,) = batches(1)
    loss_of(collection, batch).backward()
    saved = collection.state_dict()
    collection.load_state_dict(saved)
    assert handles(collection)["t0"].grad is None
    collection.fused_optimizer.step()
    assert not list(differing_tensors(saved, collection.state_dict()))


def test_saves_have_no_gradients(device: torch.device, tmp_path: Path) -> None:
    """A save before step() contains the rows without the pending update; loads are refused until step() or
    zero_grad().
    """
    collection = tables(device, "step", torch.optim.Adam)
    one, other = batches(2)
    step(collection, one)
    loss_of(collection, other).backward()
    before = collection.state_dict()
    rst.Saver().save(collection, str(tmp_path))
    with pytest.raises(RuntimeError, match="in flight"):
        rst.Saver().load(collection, str(tmp_path))
    loaded = tables(device, "step", torch.optim.Adam)
    rst.Saver().load(loaded, str(tmp_path))
    assert not list(differing_tensors(before, loaded.state_dict()))
    assert all(handle.grad is None for handle in loaded.parameters())
    loss_of(loaded, other).backward()
    for each in (collection, loaded):
        each.fused_optimizer.step()
    assert not list(differing_tensors(collection.state_dict(), loaded.state_dict()))


def test_a_cache_that_holds_too_few_batches(device: torch.device) -> None:
    """The rows of all batches between two updates must fit into the cache. Otherwise an error explains this, and
    nothing changes.
    """
    collection = apply(bags_collection(device, update="step", cache=4), lr=1.0)
    collection(single_ids([1, 2, 3])).values().sum().backward()
    with pytest.raises(rst.tbe.CacheTooSmallError) as error:
        collection(single_ids([4, 5]))
    assert "1 backward passes are pending for step() of the optimizer" in error.value.__notes__[0]
    collection.fused_optimizer.step()
    losses = []  # keeps the outputs' graphs, although only one batch fits at a time
    for ids in ([4, 5, 6], [1, 2, 3]) * 3:
        losses.append(collection(single_ids(ids)).values().sum())
        losses[-1].backward()
        collection.fused_optimizer.step()


def test_prefetched_batches(device: torch.device) -> None:
    """step() drops no prefetched plan, and results are bit-identical to training without prefetching."""
    first, then = (tables(device, "step", torch.optim.Adam, cache=150) for _ in range(2))
    every = batches(8)
    for batch in every:
        step(first, batch)
    for number, batch in enumerate(rst.prefetch(iter(every), then, depth=2)):
        loss_of(then, batch).backward()
        then.wait_for_plans()
        planned = then.embedding.groups[0].in_flight()
        then.fused_optimizer.step()
        if 0 < number < 6:
            assert planned == 3, "this batch and two ahead"
            assert then.embedding.groups[0].in_flight() == 2, "those ahead are still there"
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
    assert step_of(collection) == 1
