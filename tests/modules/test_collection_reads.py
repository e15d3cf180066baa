"""Lookups without training, pins of training batches, and collections without a host store."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
from batches import jagged, numbered, single_ids
from collection_factory import (
    apply,
    bags_collection,
    capacity_collection,
    capacity_config,
    index_bag_config,
)
from counts import exact_counts
from torch.utils.checkpoint import checkpoint
from training import assert_trains, differing_tensors, output_values, read, rows_of, state_of, train, train_step

import rec_sdk_torch as rst
from rec_sdk_torch._engine import CacheTooSmallError, CapacityError


def trained(device: torch.device, **options: Any) -> rst.EmbCacheEmbeddingBagCollection:
    """Trains ids 0 to 9 of a table for which 40 ids are expected."""
    collection = apply(bags_collection(device, **options))
    train(collection, [numbered(5), numbered(5, 5)])
    return collection


@pytest.mark.parametrize("how", ["eval", "no_grad", "inference_mode"])
def test_reading_changes_nothing(device: torch.device, how: str) -> None:
    collection = trained(device, cache=5)
    stats, state = exact_counts(collection), state_of(collection)
    ids = [3, 700, -5, 3, 9]
    with contextlib.nullcontext() if how == "eval" else getattr(torch, how)():
        output = output_values(collection.train(how != "eval")(single_ids(ids)))
    assert not output.requires_grad
    known = rows_of(collection)
    assert torch.equal(output[[0, 3, 4]], torch.stack([known[i] for i in (3, 3, 9)]))
    assert exact_counts(collection) == stats
    assert collection.table_ids("t0").tolist() == list(range(10))
    assert not list(differing_tensors(state, state_of(collection)))
    # Reads of unknown ids return the initial values that training would start from.
    assert torch.equal(train_step(collection.train(), single_ids([-5, 700])), output[[2, 1]])


def test_reading_does_not_change_the_victims(device: torch.device) -> None:
    """Lookups in evaluation do not affect which victims the cache chooses for a training batch."""
    plain, disturbed = (trained(device, cache=6) for _ in range(2))
    rng = np.random.default_rng(0)
    for _ in range(8):
        batch = single_ids(rng.integers(0, 10, 4).tolist())
        read(disturbed, single_ids(rng.integers(0, 20, 15).tolist()))
        train_step(plain, batch)
        train_step(disturbed, batch)
    assert exact_counts(plain) == exact_counts(disturbed)
    assert plain.cache_stats()["rows_out"] > 0
    assert not list(differing_tensors(plain.state_dict(), disturbed.state_dict()))


def test_reading_a_bag_larger_than_the_cache(device: torch.device) -> None:
    collection = trained(device, cache=5)
    ids = list(range(-500, 500))
    rows = read(collection, single_ids(ids))
    assert torch.equal(rows[500:510], torch.stack([rows_of(collection)[i] for i in range(10)]))
    whole = read(collection, jagged({"f0": [ids, ids[:3]]}))
    torch.testing.assert_close(whole[0].double(), rows.double().sum(0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(whole[1], rows[:3].sum(0), rtol=1e-6, atol=1e-6)
    assert collection.cache_stats()["new_rows"] == 10
    assert_trains(collection)


def test_weights_of_a_read_in_chunks(device: torch.device) -> None:
    collection = bags_collection(device, is_weighted=True)
    ids, weights = [[3, 700], [9], [], [-5, 3, 8]], [[1.0, 2.0], [3.0], [], [4.0, 5.0, 6.0]]
    batch = jagged({"f0": ids}, {"f0": weights})
    whole = read(collection, batch)
    for group in collection.embedding.groups:
        group.chunk = 2
    assert torch.equal(read(collection, batch), whole)


def test_abandoned_forwards_leak_no_pins(device: torch.device) -> None:
    collection = apply(bags_collection(device, cache=5))
    for start in range(0, 50, 5):
        output = collection(numbered(5, start))
        del output
    assert_trains(collection, ids=[1, 2, 50])


def test_forwards_in_flight_share_the_cache(device: torch.device) -> None:
    collection = apply(bags_collection(device, cache=6))
    first, second = collection(numbered(3)), collection(numbered(3, start=2))
    with pytest.raises(CacheTooSmallError, match=r"'t0'.*2 distinct rows.*6 slots \(5 pinned") as error:
        collection(numbered(2, start=10))
    assert "cache=" in str(error.value)
    before = read(collection, single_ids(range(5)))
    second.values().sum().backward()
    first.values().sum().backward()
    after = read(collection, single_ids(range(5)))
    steps = torch.tensor([0.5, 0.5, 1.0, 0.5, 0.5])
    torch.testing.assert_close(after, before - steps[:, None], rtol=1e-6, atol=1e-6)
    train_step(collection, numbered(6, start=10))


def test_backward_twice_raises(device: torch.device) -> None:
    collection = apply(bags_collection(device, cache=4))
    for retain in (False, True):
        output = collection(numbered(4))
        loss = output.values().sum()
        loss.backward(retain_graph=retain)
        before = collection.state_dict()
        with pytest.raises(RuntimeError, match=r"once per forward.*Add the losses.*detach\(\)"):
            loss.backward()
        assert not list(differing_tensors(before, collection.state_dict()))
        assert collection.fused_optimizer.state_dict()["state"]["embedding_bags.t0.weight"]["t0.step"] == 1 + retain
        del output, loss
    assert_trains(collection)


def test_pins_end_with_the_backward(device: torch.device) -> None:
    """The backward pass releases the pins, even while the forward's output or an error's traceback is still
    referenced.
    """
    collection = apply(bags_collection(device, cache=4))
    kept: list[Any] = []
    for start in range(0, 12, 4):
        kept.append(collection(numbered(4, start)).values())
        kept[-1].sum().backward()
    (group,) = collection.fused_optimizer.param_groups
    group["lr"] = float("nan")
    kept.append(collection(numbered(4, start=20)).values())
    with pytest.raises(ValueError, match="lr is nan") as error:
        kept[-1].sum().backward()
    group["lr"] = 0.5
    train_step(collection, numbered(4, start=30))
    assert error.traceback
    assert len(kept) == 4


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(device: torch.device, reentrant: bool) -> None:
    """The forward pass runs twice; the update runs once."""
    collection = apply(bags_collection(device, cache=3))
    scale = torch.full((1,), 2.0, device=device, requires_grad=True)
    before = read(collection, single_ids([0, 1, 2]))
    output = checkpoint(lambda s: collection(numbered(3)).values() * s, scale, use_reentrant=reentrant)
    output.sum().backward()
    torch.testing.assert_close(before - read(collection, single_ids([0, 1, 2])), torch.ones(3, 4))
    assert_trains(collection)


def test_autocast(device: torch.device) -> None:
    """Under autocast, tables return float32; gradients from a bfloat16 layer arrive as float32 and are applied."""
    collection = apply(bags_collection(device))
    dense = torch.nn.Linear(4, 1, bias=False).to(device)
    torch.nn.init.constant_(dense.weight, 0.25)
    before = read(collection, numbered(1))
    with torch.autocast(device.type, dtype=torch.bfloat16):
        rows = collection(numbered(1)).values()
        assert rows.dtype == torch.float32
        loss = dense(rows)
        assert loss.dtype == torch.bfloat16
        loss.sum().backward()
    torch.testing.assert_close(before - read(collection, numbered(1)), torch.full((1, 4), 0.125))


def test_hash_collection_trains_up_to_its_capacity(device: torch.device) -> None:
    collection = apply(capacity_collection(device, capacity_config(num_embeddings=6)))
    assert not collection.is_weighted()
    assert collection.cache_sizes == {"t0": 6}
    train(collection, [numbered(3, -3), numbered(3)])
    before = collection.state_dict()
    with pytest.raises(CapacityError, match=r"'t0'.*6.*17"):
        collection(single_ids([0, 17]))
    assert not list(differing_tensors(before, collection.state_dict()))
    # an evaluation lookup inserts no id, so it needs no capacity
    assert read(collection, single_ids([17])).shape == (1, 4)
    assert_trains(collection, ids=[-3, 2, 2, 0])
    assert collection.cache_stats()["rows_out"] == 0


def test_hash_collection_weighted(device: torch.device) -> None:
    collection = rst.HashEmbeddingBagCollection([capacity_config()], True, device)
    assert collection.is_weighted()
    rows = read(collection, jagged({"f0": [[1], [2]]}, {"f0": [[1.0], [1.0]]}))
    both = read(collection, jagged({"f0": [[1, 2]]}, {"f0": [[2.0, -0.5]]}))
    torch.testing.assert_close(both[0], 2 * rows[0] - 0.5 * rows[1])


def test_hash_collection_loads_no_more_than_its_capacity(device: torch.device) -> None:
    source = apply(bags_collection(device))
    train_step(source, numbered(7))
    collection = apply(capacity_collection(device, capacity_config(num_embeddings=6)))
    train_step(collection, numbered(2, 50))
    before = collection.state_dict()
    with pytest.raises(RuntimeError, match=r"7 ids, table 't0' has a capacity of 6"):
        collection.load_state_dict(source.state_dict())
    assert not list(differing_tensors(before, collection.state_dict()))
    assert_trains(collection)


def test_hash_collection_takes_index_tables(device: torch.device) -> None:
    collection = apply(capacity_collection(device, index_bag_config(num_embeddings=6)))
    assert collection.state_dict()["embedding_bags.t0.weight"].shape == (6, 4)
    assert_trains(collection)
