"""Tables that return their gradients to the user: FBGEMM's optimizer NONE, for all kinds of tables."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from batches import jagged, random_bags, single_ids
from collection_factory import apply, bag_config, bags_collection
from torch.distributed.optim import _apply_optimizer_in_backward as torchs_apply
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.modules.embedding_configs import DataType
from torchrec.optim import CombinedOptimizer
from torchrec.optim import apply_optimizer_in_backward as torchrecs_apply
from training import differing_tensors, read, rows_of, train_step

import rec_sdk_torch as rst


def with_sparse_gradients(device: torch.device, *configs: Any, **options: Any) -> Any:
    collection = bags_collection(device, *configs, **options)
    rst.apply_optimizer_in_backward(rst.SparseGradients, collection.parameters(), {})
    return collection


@pytest.mark.parametrize("cache", [5, 40])
def test_gradients_match_a_sparse_embedding(device: torch.device, cache: int) -> None:
    """The reference is torch.nn.EmbeddingBag(sparse=True); there are several backward passes, and the cache
    spills rows.
    """
    config = EmbeddingBagConfig(20, 4, "t0", feature_names=["f0"])
    collection = with_sparse_gradients(device, config, cache=cache)
    before = collection.state_dict()
    weight = torch.nn.Parameter(before["embedding_bags.t0.weight"].cpu().double())
    rng = np.random.default_rng(0)
    for _ in range(2):
        for _ in range(4):
            bags = random_bags(rng, ["f0"], 20, batch_size=2, longest=2)
            factor = float(rng.normal())
            train_step(collection, jagged(bags), factor)
            ids = [i for bag in bags["f0"] for i in bag]
            rows = torch.nn.functional.embedding(torch.tensor(ids, dtype=torch.int64), weight, sparse=True)
            (factor * rows.sum()).backward()
        (found,) = collection.take_gradients().values()
        assert found.rows.device.type == device.type
        sparse, expected = found.sparse(20).cpu(), weight.grad.coalesce()
        assert torch.equal(sparse.indices(), expected.indices())
        torch.testing.assert_close(sparse.values().double(), expected.values(), rtol=1e-6, atol=1e-6)
        weight.grad = None
    assert collection.take_gradients()["t0"].ids.tolist() == []
    assert not list(differing_tensors(before, collection.state_dict()))
    assert float(collection.fused_optimizer.state_dict()["state"]["embedding_bags.t0.weight"]["t0.step"]) == 0


def test_a_users_optimizer_matches_the_fused_one(device: torch.device) -> None:
    """SGD written by hand trains three tables, of which two are hash tables and one has another width."""
    configs = [bag_config(), bag_config("t1", ["f1"]), bag_config("t2", ["f2"], embedding_dim=8)]
    by_hand, fused = with_sparse_gradients(device, *configs, cache=6), bags_collection(device, *configs, cache=40)
    apply(fused)
    rng = np.random.default_rng(1)
    for _ in range(5):
        batch = jagged(random_bags(rng, ["f0", "f1", "f2"], 9, batch_size=2, longest=2))
        for collection in (by_hand, fused):
            train_step(collection, batch, factor=0.75)
        taken = by_hand.take_gradients()
        assert list(taken) == ["t0", "t1", "t2"]
        for table, gradient in taken.items():
            by_hand.add_to_rows(table, gradient.ids, -0.5 * gradient.rows)
    for table in ("t0", "t1", "t2"):
        ours, theirs = rows_of(by_hand, table), rows_of(fused, table)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[i], theirs[i]) for i in ours)


@pytest.mark.parametrize("entry", [rst.apply_optimizer_in_backward, torchs_apply, torchrecs_apply])
def test_every_entry_point_and_a_bound(device: torch.device, entry: Any) -> None:
    collection = bags_collection(device, bag_config(), bag_config("t1", ["f1"]))
    first, second = collection.parameters()
    entry(rst.SparseGradients, [first], {})
    rst.apply_optimizer_in_backward(rst.SparseGradients, [second], {"gradient_clipping": True, "max_gradient": 0.75})
    train_step(collection, jagged({"f0": [[1, 2]], "f1": [[3]]}), factor=-2.0)
    found = collection.take_gradients()
    assert {name: gradient.rows.unique().tolist() for name, gradient in found.items()} == {"t0": [-2.0], "t1": [-0.75]}
    assert found["t0"].ids.sort().values.tolist() == [1, 2]
    optimizer = CombinedOptimizer([collection.fused_optimizer])
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())


def test_tables_with_and_without_an_optimizer_together(device: torch.device) -> None:
    collection = bags_collection(device, bag_config(), bag_config("t1", ["f1"]))
    with pytest.raises(RuntimeError, match="no table collects its gradients"):
        collection.take_gradients()
    first, second = collection.parameters()
    rst.apply_optimizer_in_backward(rst.SparseGradients, [first], {})
    rst.apply_optimizer_in_backward(torch.optim.SGD, [second], {"lr": 0.5})
    batch = jagged({"f0": [[1]], "f1": [[1]]})
    before = read(collection, batch)
    train_step(collection, batch)
    moved = before - read(collection, batch)
    torch.testing.assert_close(moved, torch.tensor([[0.0] * 4 + [0.5] * 4]))
    assert list(collection.take_gradients()) == ["t0"]


def test_invalid_uses_are_refused(device: torch.device) -> None:
    collection = with_sparse_gradients(device)
    train_step(collection, single_ids([1, 2]))
    with pytest.raises(RuntimeError, match="accumulation window is open"):
        copy.deepcopy(collection)
    collection.take_gradients()
    before = rows_of(collection)
    ones = torch.ones(2, 4)
    with pytest.raises(KeyError, match=r"'t0': 1 ids have no row .such as 7."):
        collection.add_to_rows("t0", torch.tensor([1, 7]), ones)
    with pytest.raises(ValueError, match="'t0': 1 ids are duplicates"):
        collection.add_to_rows("t0", torch.tensor([1, 1]), ones)
    with pytest.raises(ValueError, match=r"'t0': change has shape \(2, 3\), expected \(2, 4\)"):
        collection.add_to_rows("t0", torch.tensor([1, 2]), ones[:, :3])
    assert all(torch.equal(row, before[i]) for i, row in rows_of(collection).items())
    with pytest.raises(TypeError, match="unknown keyword lr"):
        rst.apply_optimizer_in_backward(rst.SparseGradients, bags_collection(device).parameters(), {"lr": 0.5})
    dense = EmbeddingBagCollection(tables=[EmbeddingBagConfig(8, 4, "t0", feature_names=["f0"])])
    rst.apply_optimizer_in_backward(rst.SparseGradients, dense.parameters(), {})
    with pytest.raises(RuntimeError, match="for embedding tables"):
        train_step(dense, single_ids([1]))


def test_weights_of_16_bits_round_once(device: torch.device) -> None:
    collection = with_sparse_gradients(
        device, bag_config(data_type=DataType.BF16, weight_init_min=1.0, weight_init_max=1.0)
    )
    train_step(collection, single_ids([1]))
    (gradient,) = collection.take_gradients().values()
    collection.add_to_rows("t0", gradient.ids, gradient.rows / 64)
    assert rows_of(collection)[1].tolist() == [1 + 1 / 64] * 4
