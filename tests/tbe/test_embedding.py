"""Guarantees of the table-batched embedding that the oracle does not cover."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from embeddings import ADAM, SGD, embedding_of, windowed

from rec_sdk_torch.tbe import BatchHint, Pooling, TableConfig, TableOptimizer


def sgd() -> TableOptimizer:
    return TableOptimizer.create(*SGD)


def table(name: str, dim: int = 4, **fields: object) -> TableConfig:
    return TableConfig(name, 50, dim, **{"pooling": Pooling.SUM, **fields})  # type: ignore[arg-type]


IDS = torch.tensor([5, -3, 5, 9, 11, -3])
OFFSETS = torch.tensor([0, 2, 3, 5, 6])  # two features, two samples


def test_weights_survive_an_optimizer_that_comes_late(device: torch.device) -> None:
    embedding = embedding_of(table("a"), table("b"), optimizer=None, cache=10, device=device, seed=3)
    embedding.eval()
    before = embedding(IDS, OFFSETS)
    embedding.view("a").write(torch.tensor([5]), {"weight": torch.full((1, 4), 7.0)})
    embedding.set_optimizers({0: sgd(), 1: sgd()})
    embedding.train()
    after = embedding(IDS, OFFSETS)
    assert torch.equal(after[1, :4].cpu(), torch.full((4,), 7.0)), "the row that was written"
    assert torch.equal(after[:, 4:].cpu(), before[:, 4:].cpu()), "initial weights are those that were read"
    with pytest.raises(RuntimeError, match="table 'a' has an optimizer already"):
        embedding.set_optimizers({0: sgd()})


def test_an_optimizer_whose_states_do_not_fit_is_refused(device: torch.device) -> None:
    """The cache must hold two batches of 25 samples; it does with SGD, but not with the states of Adagrad."""
    tables, hint = [table("a"), table("b")], BatchHint(batch_size=25)
    embedding = embedding_of(*tables, optimizer=None, cache=f"{2 * 50 * 16}B", batch_hint=hint, device=device, seed=3)
    before = embedding.eval()(IDS, OFFSETS)
    with pytest.raises(ValueError, match="two batches of the 2 tables need 3200"):
        embedding.set_optimizers(dict.fromkeys((0, 1), TableOptimizer.create(torch.optim.Adagrad, {"lr": 0.1})))
    embedding.set_optimizers(dict.fromkeys((0, 1), sgd()))
    assert torch.equal(embedding.train()(IDS, OFFSETS), before)


def test_training_without_optimizer_names_the_call(device: torch.device) -> None:
    embedding = embedding_of(table("a"), table("b"), optimizer=None, cache=10, device=device)
    embedding.set_optimizers({0: sgd()})
    with pytest.raises(RuntimeError, match=r"\['b'\].*apply_optimizer_in_backward"):
        embedding(IDS, OFFSETS)


def test_the_first_batches_of_two_threads(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both threads train, although the second thread starts while the first still creates the shared autograd leaf."""
    embedding = embedding_of(table("a"), optimizer=SGD, cache=10, device=device)
    before = embedding.eval()(IDS[:2], torch.tensor([0, 1, 2]))
    embedding.train()
    make, made, second, outputs = embedding.layout.edges.anchor, [], threading.Event(), []

    def slowly(device: torch.device) -> torch.Tensor:
        made.append(make(device))
        if len(made) > 1:
            second.set()
        second.wait(0.3)
        return made[-1]

    monkeypatch.setattr(embedding.layout.edges, "anchor", slowly)
    threads = [
        threading.Thread(target=lambda i=i: outputs.append(embedding(IDS[i : i + 1], torch.tensor([0, 1]))))
        for i in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for output in outputs:
        output.sum().backward()
    assert len(made) == 1
    after = embedding.eval()(IDS[:2], torch.tensor([0, 1, 2]))
    assert bool((after != before).all())


@pytest.mark.parametrize(
    ("offsets", "problem"),
    [
        ([-3, 2, 3, 5, 6], "must start at 0, got -3"),
        ([1, 2, 3, 5, 6], "must start at 0, got 1"),
        ([0, 2, 9, 5, 6], "must not decrease"),
        ([0, 2, 3, 5, 9], "must end at the number of ids, 6, got 9"),
    ],
)
@pytest.mark.parametrize("weighted", [False, True])
def test_invalid_offsets_are_refused(offsets: list[int], problem: str, weighted: bool, device: torch.device) -> None:
    configs = [table("a", 4), table("b", 8)]  # in two groups, each of which selects its weights from the batch's
    embedding = embedding_of(*configs, optimizer=SGD, cache=10, device=device)
    weights = torch.ones(6, device=device) if weighted else None
    with pytest.raises(ValueError, match=problem):
        embedding(IDS, torch.tensor(offsets), weights)


def test_sequence_tables_of_several_dims_have_no_joined_output(device: torch.device) -> None:
    configs = [table("a", 4, pooling=Pooling.NONE), table("b", 8, pooling=Pooling.NONE)]
    embedding = embedding_of(*configs, optimizer=SGD, cache=10, device=device)
    with pytest.raises(ValueError, match=r"dims \[4, 8\] cannot be joined"):
        embedding(IDS, OFFSETS)
    assert embedding.view("a").count() == 0, "refused before any id came in"


def test_init_fn_of_a_hash_table_fills_new_rows_once(device: torch.device) -> None:
    calls: list[int] = []

    def numbered(weight: torch.Tensor) -> None:
        weight.copy_(torch.arange(len(weight))[:, None] + 100.0 * len(calls))
        calls.append(len(weight))

    config = table("a", pooling=Pooling.NONE, init_fn=numbered)
    embedding = embedding_of(config, optimizer=(torch.optim.SGD, {"lr": 0.0}), cache=2, device=device)
    first = embedding(torch.tensor([1, 2]), torch.tensor([0, 2]))
    first.sum().backward()
    assert first[:, 0].tolist() == [0.0, 1.0]
    second = embedding(torch.tensor([3, 2]), torch.tensor([0, 2]))
    second.sum().backward()
    assert second[:, 0].tolist() == [100.0, 1.0], "row 2 is not drawn again"
    third = embedding(torch.tensor([1, 3]), torch.tensor([0, 2]))
    assert third[:, 0].tolist() == [0.0, 100.0], "rows that left come back as they were"
    assert calls == [2, 1]


def test_init_fn_of_an_index_table_gets_the_whole_weight(device: torch.device) -> None:
    shapes = []

    def fill(weight: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(weight.shape))
        return torch.arange(weight.numel(), dtype=torch.float32).view_as(weight)

    config = table("a", hashed=False, init_fn=fill, pooling=Pooling.NONE)
    embedding = embedding_of(config, optimizer=SGD, cache=5, device=device)
    rows = embedding(torch.tensor([49, 0]), torch.tensor([0, 2]))
    assert shapes == [(50, 4)]
    assert rows[0].tolist() == [196.0, 197.0, 198.0, 199.0]
    assert rows[1].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_sequence_rows_come_in_feature_order_across_groups(device: torch.device) -> None:
    fast = TableOptimizer.create(torch.optim.Adagrad, {"lr": 0.1})
    tables = [table(name, pooling=Pooling.NONE) for name in ("a", "b", "c")]
    embedding = embedding_of(*tables, optimizer=None, cache=10, device=device, seed=1)
    embedding.set_optimizers(dict(enumerate((sgd(), fast, sgd()))))
    ids, offsets = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([0, 1, 2, 3, 3, 4, 5])
    rows = embedding(ids, offsets)
    assert len(embedding.groups) == 2
    for index, name in enumerate("abc"):
        single = embedding_of(tables[index], optimizer=None, cache=10, device=device, seed=1).eval()
        begin, end = int(offsets[2 * index]), int(offsets[2 * index + 2])
        expected = single(ids[begin:end], offsets[2 * index : 2 * index + 3] - begin)
        assert torch.equal(rows[begin:end], expected), name


@pytest.mark.parametrize("optimizers", [1, 2])
def test_gradient_that_is_not_finite_names_the_tables_of_the_output(device: torch.device, optimizers: int) -> None:
    """All features share one output tensor, whether their tables are in one group or in two."""
    tables = [table(name, pooling=Pooling.NONE) for name in "ab"]
    embedding = embedding_of(*tables, optimizer=None, device=device, cache=10, check_finite="raise")
    embedding.set_optimizers(dict(enumerate([sgd(), sgd()] if optimizers == 2 else [sgd()] * 2)))
    rows = embedding(IDS, OFFSETS)
    grad = torch.ones_like(rows)
    grad[-1, 0] = torch.nan
    with pytest.raises(FloatingPointError, match=r"\['a', 'b'\]"):
        rows.backward(grad)
    assert not embedding.layout.in_flight()


def test_compiled_model_trains_the_same(device: torch.device) -> None:
    model = torch.nn.Module()
    model.embedding = embedding_of(table("a"), table("b"), optimizer=SGD, cache=10, device=device, seed=4)
    model.dense = torch.nn.Linear(8, 1, device=device)
    model.forward = lambda: model.dense(torch.relu(model.embedding(IDS, OFFSETS))).sum()  # type: ignore[method-assign]
    twin = torch.nn.Module()
    twin.embedding, twin.dense = copy.deepcopy(model.embedding), copy.deepcopy(model.dense)
    twin.forward = lambda: twin.dense(torch.relu(twin.embedding(IDS, OFFSETS))).sum()  # type: ignore[method-assign]
    compiled = torch.compile(twin, backend="eager")
    for _ in range(3):
        loss, again = model(), compiled()
        assert torch.equal(loss, again)
        loss.backward()
        again.backward()


def test_second_derivatives_are_refused(device: torch.device) -> None:
    """A backward pass with create_graph trains as usual; differentiating its result raises an error."""
    embedding = embedding_of(table("a"), table("b"), optimizer=SGD, cache=10, device=device)
    twin = copy.deepcopy(embedding)
    weights = torch.rand(len(IDS)).to(device).requires_grad_()
    loss = embedding(IDS, OFFSETS, weights).pow(2).sum()
    (expected,) = torch.autograd.grad(twin(IDS, OFFSETS, weights).pow(2).sum(), weights)
    (grad,) = torch.autograd.grad(loss, weights, create_graph=True)
    assert torch.equal(grad, expected)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()
    assert torch.equal(embedding.eval()(IDS, OFFSETS), twin.eval()(IDS, OFFSETS))


def test_a_copy_trains_identically_and_independently(device: torch.device) -> None:
    embedding = embedding_of(table("a"), table("b"), optimizer=ADAM, cache=4, device=device)
    embedding(IDS, OFFSETS).sum().backward()
    twin = copy.deepcopy(embedding)
    assert twin.optimizers[0] is twin.optimizers[1], "one optimizer for both tables, as before"
    for _ in range(2):
        embedding(IDS, OFFSETS).pow(2).sum().backward()
    assert twin.optimizers[0] is not None
    assert twin.optimizers[0].step == 1
    for _ in range(2):
        twin(IDS, OFFSETS).pow(2).sum().backward()
    assert torch.equal(embedding.eval()(IDS, OFFSETS), twin.eval()(IDS, OFFSETS))


def test_open_window_refuses_copies(device: torch.device) -> None:
    embedding = embedding_of(table("a"), table("b"), optimizer=windowed("SGD", 2, lr=0.1), cache=10, device=device)
    embedding(IDS, OFFSETS).sum().backward()
    with pytest.raises(RuntimeError, match="accumulation window is open"):
        copy.deepcopy(embedding)
    embedding(IDS, OFFSETS).sum().backward()
    copy.deepcopy(embedding)


class AfterCall:
    """A lock that runs `call` before it is acquired; `call` may acquire the same lock."""

    def __init__(self, lock: Any, call: Callable[[], None]) -> None:
        self._lock, self._call = lock, call

    def __enter__(self) -> None:
        self._call()
        self._lock.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._lock.__exit__(*error)


def update(monkeypatch: pytest.MonkeyPatch, output: torch.Tensor) -> None:
    monkeypatch.undo()
    with torch.enable_grad():
        output.sum().backward()


def test_gradients_of_sample_weights_are_of_the_rows_that_were_looked_up(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the batch's planning and its lookup, another batch updates the rows, as another thread might.

    In the second case, the update runs after the lookup.
    """
    embedding = embedding_of(table("a"), optimizer=SGD, cache=10, device=device, seed=3)
    ids, offsets = torch.tensor([5, 9]), torch.tensor([0, 1, 2])
    for planned_first in (True, False):
        weights = torch.ones(2, device=device, requires_grad=True)
        earlier = embedding(ids, offsets, torch.ones(2, device=device))
        if planned_first:
            locks = embedding.layout.locks
            launch = AfterCall(locks.launch, functools.partial(update, monkeypatch, earlier))
            monkeypatch.setattr(locks, "launch", launch)
        output = embedding(ids, offsets, weights)
        rows = output.detach().clone()
        if not planned_first:
            earlier.sum().backward()
        output.sum().backward()
        assert weights.grad is not None
        torch.testing.assert_close(weights.grad, rows.sum(1))
