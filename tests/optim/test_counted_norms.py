"""`collection.grad_norm()`: with updates in the backward pass, it equals the norm of pending gradients under
`update="step"`.

"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from batches import jagged, single_ids
from collection_factory import apply, bags_collection, capacity_collection, sequence_config, sequences_collection
from stepped_tables import assert_same, batches, loss_of, tables
from torch.nn.utils import get_total_norm

import rec_sdk_torch as rst

INF = math.inf


def counting(device: torch.device, optimizer: type = torch.optim.SGD, **options: Any) -> Any:
    collection = tables(device, "backward", optimizer, **options)
    collection.count_grad_norms()
    return collection


def counting_bags(device: torch.device, cache: int = 40, **options: Any) -> Any:
    collection = apply(bags_collection(device, cache=cache), lr=0.1, **options)
    collection.count_grad_norms()
    return collection


def assert_norms(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found.tables, expected.tables, rtol=1e-6, atol=0)
    torch.testing.assert_close(found.total, expected.total, rtol=1e-6, atol=0)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad])
def test_counted_norms_equal_norms_of_pending_gradients(device: torch.device, optimizer: type) -> None:
    counted, plain = counting(device, optimizer), tables(device, "backward", optimizer)
    stepped = tables(device, "step", optimizer)
    assert counted.grad_norm() == (0.0, dict.fromkeys(("t0", "t1", "t2"), 0.0)), "no update came"
    for batch in batches(4):
        for each in (counted, plain, stepped):
            loss_of(each, batch).backward()
        assert_norms(counted.grad_norm(), stepped.grad_norm())
        assert counted.grad_norm(INF) == stepped.grad_norm(INF), "the largest is exact"
        grads = [handle.grad for handle in stepped.parameters()]
        torch.testing.assert_close(counted.grad_norm().total, float(get_total_norm(grads)), rtol=1e-5, atol=0)
        stepped.fused_optimizer.step()
    assert_same(counted, plain)


def test_norms_are_of_gradients_before_they_are_clipped(device: torch.device) -> None:
    collection = counting_bags(device, gradient_clipping=True, max_gradient=0.5)
    collection(single_ids([3, 4, 3])).values().sum().backward()
    assert collection.grad_norm() == (math.sqrt(20), {"t0": math.sqrt(20)})
    assert collection.grad_norm(INF) == (2.0, {"t0": 2.0})


@pytest.mark.parametrize("hits", [1, 33, 129, 3000])
def test_a_row_that_many_lookups_hit_has_one_sum(device: torch.device, hits: int) -> None:
    collection = apply(sequences_collection(device, sequence_config(embedding_dim=20)), lr=0.1)
    collection.count_grad_norms()
    out = collection(single_ids([5] * hits + [6]))["f0"].values()
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(hits))
    out.backward(grad.to(device))
    rows = torch.stack([grad[:hits].double().sum(0), grad[hits].double()])
    for p in (2.0, INF):
        expected = float(torch.linalg.vector_norm(rows, p))
        assert collection.grad_norm(p).total == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("cache", [2, 40])
def test_a_window_has_the_norm_of_its_sum(device: torch.device, cache: int) -> None:
    """The norm includes rows that the cache has spilled. Until a window ends, the norm is the previous window's."""
    collection = apply(
        bags_collection(device, cache=cache), rst.AccumulateSGD, lr=0.1, use_accumulate=True, accumulate_step=2
    )
    collection.count_grad_norms()
    found = []
    for ids in ([1, 2], [2, 3], [4, 5], [6, 7]):
        collection(single_ids(ids)).values().sum().backward()
        found.append((collection.grad_norm().total, collection.grad_norm(INF).total))
    first, second = (math.sqrt(4 * (1 + 4 + 1)), 2.0), (math.sqrt(4 * 4), 1.0)
    assert found == [(0.0, 0.0), first, first, second]


@pytest.mark.parametrize("window", [1, 3])
def test_the_size_of_the_cache_changes_no_bit(device: torch.device, window: int) -> None:
    every = batches(9, ids=200)
    # magnitudes whose sum would round differently in another order
    of_samples = torch.logspace(-6, 6, 5, device=device)[:, None]
    options: dict[str, Any] = {"use_accumulate": True, "accumulate_step": window}
    found: list[list[Any]] = []
    for cache in (30, 33, 1000):
        collection = counting(device, rst.AccumulateAdagrad, cache=cache, **options)
        found.append([])
        for batch in every:
            (collection(batch).values() * of_samples).pow(2).sum().backward()
            found[-1].append(collection.grad_norm())
    assert found[0] == found[1] == found[2]


def test_frozen_tables_have_no_norm(device: torch.device) -> None:
    collection = counting(device)
    one, other = batches(2)
    loss_of(collection, one).backward()
    assert collection.grad_norm().tables["t1"] > 0
    collection.freeze("t1")
    assert collection.grad_norm().tables["t1"] == 0
    loss_of(collection, other).backward()
    found = collection.grad_norm()
    assert (found.tables["t0"] > 0, found.tables["t1"]) == (True, 0.0)
    collection.thaw()
    loss_of(collection, one).backward()
    assert collection.grad_norm().tables["t1"] > 0


def test_a_table_outside_the_loss_has_no_norm(device: torch.device) -> None:
    configs = [sequence_config(f"t{i}", [f"f{i}"]) for i in range(2)]
    collection = apply(sequences_collection(device, *configs), lr=0.1)
    collection.count_grad_norms()
    batch = jagged({"f0": [[1]], "f1": [[2]]})
    out = collection(batch)
    (out["f0"].values().sum() + out["f1"].values().sum()).backward()
    assert min(collection.grad_norm().tables.values()) > 0
    collection(batch)["f1"].values().sum().backward()
    assert collection.grad_norm().tables == {"t0": 0.0, "t1": 2.0}


@pytest.mark.parametrize("bad", [math.nan, INF, -INF])
def test_numbers_that_are_not_finite_show(device: torch.device, bad: float) -> None:
    collection = counting_bags(device)
    out = collection(single_ids([3, 4])).values()
    grad = torch.ones_like(out)
    grad[1, 2] = bad
    out.backward(grad)
    for p in (2.0, INF):
        found = collection.grad_norm(p).total
        assert math.isnan(found) if math.isnan(bad) else found == INF


def test_loss_scaling_is_undone_and_a_skipped_update_keeps_the_norms(device: torch.device) -> None:
    collection = counting_bags(device)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)
    collection.set_grad_scaler(scaler)
    scaler.scale(torch.zeros((), device=device))
    (collection(single_ids([3])).values().sum() * 1024.0).backward()
    assert collection.grad_norm().total == 2.0
    (collection(single_ids([3, 4])).values().sum() * INF).backward()
    assert collection.skipped_updates == 1
    assert collection.grad_norm().total == 2.0


def test_threads_do_not_change_norms(device: torch.device) -> None:
    before, found = torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        collection = counting(device)
        for batch in batches(3):
            loss_of(collection, batch).backward()
        found.append((collection.grad_norm(), collection.grad_norm(INF)))
    torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]


def test_copies_count_norms_and_counting_can_end(device: torch.device) -> None:
    collection = counting(device)
    batch = batches(1)[0]
    loss_of(collection, batch).backward()
    twin = copy.deepcopy(collection)
    assert twin.grad_norm().total == 0, "it has made no update"
    loss_of(collection, batch).backward()
    loss_of(twin, batch).backward()
    assert twin.grad_norm() == collection.grad_norm()
    collection.count_grad_norms(False)
    with pytest.raises(RuntimeError, match=r"call count_grad_norms\(\) before it, or make the tables with update='"):
        collection.grad_norm()
    collection.count_grad_norms()
    collection.count_grad_norms()
    assert collection.grad_norm().total == 0


def test_counting_where_it_is_unsupported_is_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="with update='step' no norms need to be recorded"):
        tables(device, "step").count_grad_norms()
    with pytest.raises(ValueError, match=r"norm_type is 1.0, allowed are \[2.0, inf\]"):
        counting(device).grad_norm(1.0)


def test_tables_that_hand_their_gradients_out(device: torch.device) -> None:
    collection = bags_collection(device)
    rst.apply_optimizer_in_backward(rst.SparseGradients, collection.parameters(), {})
    collection.count_grad_norms()
    collection(single_ids([3])).values().sum().backward()
    with pytest.raises(
        RuntimeError, match=r"tables \['t0'\] make no updates: take_gradients\(\) returns their gradients"
    ):
        collection.grad_norm()


def test_hash_tables(device: torch.device) -> None:
    collection = apply(capacity_collection(device), lr=0.1)
    collection.count_grad_norms()
    collection(single_ids([-5, 2**60, -5])).values().sum().backward()
    assert collection.grad_norm(INF).tables == {"t0": 2.0}
    assert collection.grad_norm().total == math.sqrt(20)
