"""Sharded tables that hand out their gradients: each rank those of the rows that are at home there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from jagged import apply, bag_config, bags_collection, jagged, same_bits
from ranks import Place, Ranks
from torch.utils.checkpoint import checkpoint
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingEnv

import rec_sdk_torch as rst

FUSED = EmbeddingComputeKernel.FUSED.value
BAGS = ([[1, 2], [3]], [[2], [3, 4]])
"""The bags of each rank."""


def collection(device: torch.device) -> Any:
    made = bags_collection(device)
    rst.apply_optimizer_in_backward(rst.SparseGradients, made.parameters(), {})
    return made


def shard(made: Any, *tables: str) -> Any:
    plan = EmbeddingModuleShardingPlan({table: ParameterSharding("row_wise", FUSED, None) for table in tables})
    world = ShardingEnv.from_process_group(torch.distributed.group.WORLD)
    return rst.EmbCacheEmbeddingBagCollectionSharder().shard(made, plan, world, Place.device)


def gradients(rank: int, world_size: int) -> dict[int, list[float]]:
    sharded = shard(collection(Place.device), "t0")
    (sharded(jagged({"f0": BAGS[rank]})).values() * (rank + 1)).sum().backward()
    before = sharded.state_dict()["embedding_bags.t0.weight"].clone()
    taken = sharded.take_gradients()["t0"]
    mine = taken.ids[taken.ids % world_size == rank]
    assert mine.tolist() == taken.ids.tolist()
    sharded.add_to_rows("t0", taken.ids, torch.ones(len(taken.ids), 4))
    after = sharded.state_dict()["embedding_bags.t0.weight"]
    torch.testing.assert_close(after, before + 1)
    with pytest.raises(KeyError, match="have no row"):
        sharded.add_to_rows("t0", torch.tensor([900]), torch.ones(1, 4))
    return dict(zip(taken.ids.tolist(), taken.rows.cpu().tolist(), strict=True))


def test_gradients_of_all_ranks(ranks_of: Callable[[int], Ranks]) -> None:
    """They are the gradients of one process whose loss is the mean over ranks."""
    alone = collection(torch.device("cpu"))
    values = alone(jagged({"f0": [*BAGS[0], *BAGS[1]]})).values()
    (values * torch.tensor([[1.0], [1], [2], [2]])).sum().div(2).backward()
    ids, rows = alone.take_gradients()["t0"]
    found: dict[int, list[float]] = {}
    for part in ranks_of(2).run(gradients):
        assert not found.keys() & part.keys()
        found |= part
    assert found == dict(zip(ids.tolist(), rows.tolist(), strict=True))


def passes_with_inputs(rank: int, world_size: int, update: str) -> None:
    """Each table trains where its parameter is among the inputs, as on one process."""

    def made() -> Any:
        options = {"cache": 40, "update": update, "is_weighted": True}
        alone = bags_collection(Place.device, bag_config("t0"), bag_config("t1", ["f1"]), **options)
        apply(alone, torch.optim.Adagrad)
        return shard(alone, "t0", "t1")

    def loss_of(collection: Any, weights: torch.Tensor) -> torch.Tensor:
        batch = jagged({"f0": BAGS[rank], "f1": BAGS[1 - rank]})
        batch._weights = weights
        loss: torch.Tensor = collection(batch).values().pow(2).sum()
        return loss

    count = 6
    weights = torch.linspace(0.5, 1.5, count, device=Place.device, requires_grad=True)
    expected, found = made(), made()
    for step in range(3):
        loss_of(expected, weights.detach()).backward()
        expected.fused_optimizer.step()
        loss = loss_of(found, weights)
        before = found.state_dict()
        (first,) = torch.autograd.grad(loss, [weights], retain_graph=True)
        loss.backward(inputs=[weights], retain_graph=True)
        assert weights.grad is not None
        assert torch.equal(first, weights.grad)
        found.fused_optimizer.step()
        assert not list(same_bits(before, found.state_dict())), f"step {step} changes no row yet"
        loss.backward(inputs=list(found.parameters()))
        found.fused_optimizer.step()
        weights.grad = None
        assert not list(same_bits(expected.state_dict(), found.state_dict()))
    before = found.state_dict()
    (handle,) = [each for each in found.parameters() if each.table == "t1"]
    loss_of(expected, weights).backward()
    loss_of(found, weights).backward(inputs=[handle])
    for one in (expected, found):
        one.fused_optimizer.step()
    assert torch.equal(before["embedding_bags.t0.weight"], found.state_dict()["embedding_bags.t0.weight"])
    trained = (each.state_dict()["embedding_bags.t1.weight"] for each in (expected, found))
    assert torch.equal(*trained)
    with pytest.raises(RuntimeError, match=r"autograd\.grad cannot return the gradient of table 't1'"):
        torch.autograd.grad(loss_of(found, weights), [handle])


@pytest.mark.parametrize("update", ["backward", "step"])
def test_backward_passes_with_inputs(ranks_of: Callable[[int], Ranks], update: str) -> None:
    ranks_of(2).run(passes_with_inputs, update)


def checkpointed(rank: int, world_size: int, update: str) -> None:
    """Activation checkpointing reads the rows of the forward again, on all ranks, and counts ids once."""
    rules = rst.AdmitAndEvictConfig(admit_threshold=3, not_admitted_default_value=2.0)
    dense = torch.linspace(0.5, 2, 4, device=Place.device, requires_grad=True)
    states, reads = [], []
    for again in (False, True):
        alone = bags_collection(Place.device, bag_config(admit_and_evict_config=rules), cache=40, update=update)
        apply(alone, torch.optim.Adagrad)
        tables = shard(alone, "t0")
        read: list[torch.Tensor] = []

        def forward(batch: Any, tables: Any = tables, read: list[torch.Tensor] = read) -> torch.Tensor:
            rows = tables(batch).values()
            read.append(rows.detach().clone())
            loss: torch.Tensor = (rows * dense).tanh().sum()
            return loss

        for _ in range(4):
            batch = jagged({"f0": BAGS[rank]})
            (checkpoint(forward, batch, use_reentrant=False) if again else forward(batch)).backward()
            tables.fused_optimizer.step()
        states.append(tables.state_dict() | tables.home.embedding.view("t0").candidates()[1])
        reads.append(read)
    assert not list(same_bits(*states))
    plain, twice = reads
    assert len(twice) == 2 * len(plain)
    assert all(torch.equal(twice[i], plain[i // 2]) for i in range(len(twice)))


@pytest.mark.parametrize("update", ["backward", "step"])
def test_activation_checkpointing(ranks_of: Callable[[int], Ranks], update: str) -> None:
    ranks_of(2).run(checkpointed, update)
