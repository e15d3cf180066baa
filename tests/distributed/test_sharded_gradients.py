"""Sharded tables compared with one process: gradients, checkpointing, stochastic rounding, variable batch sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from batches import expanded, jagged, variable_batch
from collection_factory import apply, bag_config, bags_collection
from ranks import Place, Start, on_ranks
from sharded_model import KEYS, Scenario, assert_rows, assert_same, rows, shard_tables, sharded, united
from torch.utils.checkpoint import checkpoint
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import DataType
from training import differing_tensors, rows_of

import rec_sdk_torch as rst

BAGS = ([[1, 2], [3]], [[2], [3, 4]])
"""The bags of each rank."""


def collection(device: torch.device) -> Any:
    made = bags_collection(device)
    rst.apply_optimizer_in_backward(rst.SparseGradients, made.parameters(), {})
    return made


def gradients(rank: int, world_size: int) -> dict[int, list[float]]:
    tables = shard_tables(collection(Place.device))
    (tables(jagged({"f0": BAGS[rank]})).values() * (rank + 1)).sum().backward()
    before = tables.state_dict()["embedding_bags.t0.weight"].clone()
    taken = tables.take_gradients()["t0"]
    assert set((taken.ids % world_size).tolist()) == {rank}
    tables.add_to_rows("t0", taken.ids, torch.ones(len(taken.ids), 4))
    torch.testing.assert_close(tables.state_dict()["embedding_bags.t0.weight"], before + 1)
    with pytest.raises(KeyError, match="have no row"):
        tables.add_to_rows("t0", torch.tensor([900]), torch.ones(1, 4))
    return dict(zip(taken.ids.tolist(), taken.rows.cpu().tolist(), strict=True))


def test_gradients_equal_one_process(ranks_of: Start) -> None:
    """The gradients equal the gradients of one process whose loss is the mean over ranks."""
    alone = collection(torch.device("cpu"))
    values = alone(jagged({"f0": [*BAGS[0], *BAGS[1]]})).values()
    (values * torch.tensor([[1.0], [1], [2], [2]])).sum().div(2).backward()
    ids, rows = alone.take_gradients()["t0"]
    found: dict[int, list[float]] = {}
    for part in ranks_of(2).run(gradients):
        assert not found.keys() & part.keys()
        found |= part
    assert found == dict(zip(ids.tolist(), rows.tolist(), strict=True))


@on_ranks(2)
@pytest.mark.parametrize("update", ["backward", "step"])
def test_backward_passes_with_inputs(rank: int, update: str) -> None:
    """A table is trained only if its parameter is among the `inputs` of the backward pass, as in one process."""

    def made() -> Any:
        options = {"cache": 40, "update": update, "is_weighted": True}
        alone = bags_collection(Place.device, bag_config("t0"), bag_config("t1", ["f1"]), **options)
        apply(alone, torch.optim.Adagrad)
        return shard_tables(alone)

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
        assert not list(differing_tensors(before, found.state_dict())), f"step {step} changes no row yet"
        loss.backward(inputs=list(found.parameters()))
        found.fused_optimizer.step()
        weights.grad = None
        assert not list(differing_tensors(expected.state_dict(), found.state_dict()))
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


@on_ranks(2)
@pytest.mark.parametrize("update", ["backward", "step"])
def test_activation_checkpointing(rank: int, update: str) -> None:
    """On all ranks, the recomputation reads the same rows as the forward pass and does not count ids again."""
    rules = rst.AdmitAndEvictConfig(admit_threshold=3, not_admitted_default_value=2.0)
    dense = torch.linspace(0.5, 2, 4, device=Place.device, requires_grad=True)
    states, reads = [], []
    for again in (False, True):
        alone = bags_collection(Place.device, bag_config(admit_and_evict_config=rules), cache=40, update=update)
        apply(alone, torch.optim.Adagrad)
        tables = shard_tables(alone)
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
        states.append(tables.state_dict() | tables.local_shard.embedding.view("t0").candidates()[1])
        reads.append(read)
    assert not list(differing_tensors(*states))
    plain, twice = reads
    assert len(twice) == 2 * len(plain)
    assert all(torch.equal(twice[i], plain[i // 2]) for i in range(len(twice)))


# ---- stochastic rounding: bit-identical on any number of ranks if the summed gradients are equal


IDS, STEPS = 23, 6
KINDS = {DataType.BF16: torch.bfloat16, DataType.FP16: torch.float16, DataType.FP32: torch.float32}


def rounding_collection(device: torch.device, kind: DataType, seed: int, rounds: bool = True) -> Any:
    """Builds a hash table and an index table; if weights are float32, the cache is bfloat16."""
    made = bags_collection(
        device,
        bag_config("t0", data_type=kind),
        EmbeddingBagConfig(name="t1", num_embeddings=IDS, embedding_dim=4, feature_names=["f1"], data_type=kind),
        seed=seed,
        stochastic_rounding=rounds,
        cache_dtype=torch.bfloat16 if kind is DataType.FP32 else None,
    )
    rst.apply_optimizer_in_backward(torch.optim.SGD, made.parameters(), {"lr": 0.01})
    return made


def bags(step: int, rank: int) -> dict[str, list[list[int]]]:
    rng = np.random.default_rng([step, rank])
    return {key: [rng.integers(0, IDS, 3).tolist() for _ in range(4)] for key in ("f0", "f1")}


def train_sharded(rank: int, world_size: int, kind: DataType, sharding: tuple[str, str]) -> dict[str, Any]:
    """Trains and returns the rows of this rank."""
    origin = rounding_collection(Place.device, kind, seed=5 + rank)  # sharding keeps the seed of rank 0
    tables = shard_tables(origin, sharding, [0])
    for step in range(STEPS):
        tables(jagged(bags(step, rank))).values().sum().backward()
    assert all(tables.state_dict()[f"embedding_bags.{name}.weight"].dtype is KINDS[kind] for name in ("t0", "t1"))
    return {table: rows_of(tables, table) for table in ("t0", "t1")}


def train_alone(kind: DataType, world_size: int, rounds: bool = True) -> dict[str, dict[int, torch.Tensor]]:
    """Trains with the mean loss over ranks. Gradients are sums of halves or quarters, so they are exact."""
    alone = rounding_collection(torch.device("cpu"), kind, seed=5, rounds=rounds)
    for step in range(STEPS):
        of_ranks = [bags(step, rank) for rank in range(world_size)]
        whole = {key: [bag for batch in of_ranks for bag in batch[key]] for key in ("f0", "f1")}
        alone(jagged(whole)).values().sum().div(world_size).backward()
    return {table: rows_of(alone, table) for table in ("t0", "t1")}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("sharding", "world_size"), [(("row_wise", "row_wise"), 4), (("table_wise", "row_wise"), 2)], ids=str
)
def test_rounding_has_the_bits_of_one_process(
    ranks_of: Start, kind: DataType, sharding: tuple[str, str], world_size: int
) -> None:
    expected, nearest = train_alone(kind, world_size), train_alone(kind, world_size, rounds=False)
    found = united(ranks_of(world_size).run(train_sharded, kind, sharding), ("row_wise",) * 2)
    assert_same(found, expected)
    for table, by_id in expected.items():
        assert any(not torch.equal(nearest[table][i], row) for i, row in by_id.items()), "it rounds at random"


# ---- variable batch sizes: the same results as if every sample had its own bags


ROW, TABLE = "row_wise", "table_wise"


@on_ranks(2, 4)
@pytest.mark.parametrize(
    ("scenario", "depth"),
    [
        (Scenario(optimizer=torch.optim.Adagrad, options={"eps": 1e-2}), 0),
        (Scenario(sharding=(ROW, TABLE, ROW), dims=(4, 8, 4), cache=30), 2),
    ],
    ids=["row_wise", "mixed_prefetched"],
)
def test_the_output_equals_the_expanded_batch(rank: int, scenario: Scenario, depth: int) -> None:
    results: list[tuple[list[Any], Any]] = []
    for form in (lambda batch: batch, expanded):
        model = sharded(scenario)
        batches = [
            form(variable_batch(np.random.default_rng([rank, step]), KEYS, 31, scenario.weighted)) for step in range(4)
        ]
        outputs = []
        for batch in rst.prefetch(iter(batches), model, depth=depth) if depth else batches:
            loss, values = model(batch)
            loss.backward()
            outputs.append(values)
        results.append((outputs, rows(model.module.sparse)))
    (outputs, found), (wanted, expected) = results
    torch.testing.assert_close(outputs, wanted, rtol=1e-5, atol=1e-6)
    assert_rows(found, expected, rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_a_batch_without_inverse_indices(rank: int) -> None:
    """All ranks raise an error and can continue training."""
    model, batch = sharded(Scenario()), variable_batch(np.random.default_rng(0), KEYS, 31)
    bare = KeyedJaggedTensor(
        list(KEYS), batch.values(), lengths=batch.lengths(), stride_per_key_per_rank=batch.stride_per_key_per_rank()
    )
    with pytest.raises(ValueError, match="pooled outputs need inverse_indices"):
        model(bare if rank == 0 else batch)
    model(batch)[0].backward()
