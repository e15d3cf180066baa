"""TorchRec's own collections through `get_default_hybrid_sharders`: on the host they are TorchRec's, on other devices
tables of this package with the numbers of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Place, Ranks
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import rec_sdk_torch as rst
from rec_sdk_torch.distributed.sharded import ShardedCollection

Start = Callable[[int], Ranks]
SHARDING = {"t_user": "data_parallel", "t_item": "table_wise", "t_seen": "row_wise"}


class Model(torch.nn.Module):
    """Written for TorchRec alone."""

    def __init__(self, device: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        user = EmbeddingBagConfig(name="t_user", num_embeddings=13, embedding_dim=8, feature_names=["user"])
        item = EmbeddingBagConfig(
            name="t_item", num_embeddings=40, embedding_dim=8, feature_names=["item"], pooling=PoolingType.MEAN
        )
        seen = EmbeddingConfig(name="t_seen", num_embeddings=40, embedding_dim=4, feature_names=["seen"])
        self.bags = EmbeddingBagCollection(tables=[user, item], device=torch.device(device))
        self.rows = EmbeddingCollection(tables=[seen], device=torch.device(device))

    def forward(self, batch: KeyedJaggedTensor) -> torch.Tensor:
        pooled, seen = self.bags(batch).values(), self.rows(batch)["seen"].values()
        return pooled.tanh().pow(2).sum() + seen.tanh().sum()


def batch_of(step: int, ranks: list[int]) -> KeyedJaggedTensor:
    """The batch of these ranks, three samples each."""
    parts = []
    for rank in ranks:
        generator = torch.Generator().manual_seed(100 * step + rank)
        parts.append({key: torch.randint(0, 13, (3, 2), generator=generator) for key in ("user", "item", "seen")})
    values = torch.cat([part[key].flatten() for key in ("user", "item", "seen") for part in parts])
    return KeyedJaggedTensor(["user", "item", "seen"], values, lengths=torch.full((3 * 3 * len(ranks),), 2))


def sharded(world_size: int, made_on: str = "cpu", constrained: bool = True) -> DistributedModelParallel:
    model = Model(made_on)
    for tables in (model.bags, model.rows):
        apply_optimizer_in_backward(torch.optim.Adagrad, tables.parameters(), {"lr": 0.1, "eps": 1e-8})
    world = torch.distributed.group.WORLD
    env = ShardingEnv.from_process_group(world)
    sharders = rst.get_default_hybrid_sharders()
    constraints = {name: ParameterConstraints(sharding_types=[kind]) for name, kind in SHARDING.items()}
    topology = Topology(world_size, "npu", local_world_size=world_size)
    planner = EmbeddingShardingPlanner(topology, constraints=constraints if constrained else None)
    return DistributedModelParallel(model, env, Place.device, planner.collective_plan(model, sharders, world), sharders)


def train(rank: int, world_size: int) -> Any:
    """(losses, weights of this rank by table and id)."""
    model = sharded(world_size)
    assert all(isinstance(part, ShardedCollection) for part in (model.module.bags, model.module.rows))
    losses = []
    for step in range(5):
        loss = model(batch_of(step, [rank]))
        loss.backward()
        losses.append(loss.item())
    state = {**model.module.bags.state_dict(), **model.module.rows.state_dict()}
    weights = {}
    for name in SHARDING:
        (key,) = [key for key in state if key.endswith(f".{name}.weight")]
        weights[name] = dict(zip(state[key.replace("weight", "ids")].tolist(), state[key].cpu(), strict=True))
    return losses, weights


def alone(world_size: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = Model("cpu")
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, eps=1e-8)
    losses = []
    for step in range(5):
        optimizer.zero_grad()
        loss = model(batch_of(step, list(range(world_size))))
        (loss / world_size).backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name.split(".")[-2]: weight.detach() for name, weight in model.named_parameters()}


def test_they_train_as_in_one_process(ranks_of: Start, device: torch.device) -> None:
    if device.type in ("cpu", "cuda"):
        pytest.skip("TorchRec's own sharders do it there")
    results = ranks_of(2).run(train)
    losses, weights = alone(2)
    found_losses = [sum(each) for each in zip(*(found for found, _ in results), strict=True)]
    assert found_losses == pytest.approx(losses, rel=1e-5)
    for name, expected in weights.items():
        found = [result[1][name] for result in results]
        if name == "t_user":
            assert all(torch.equal(found[0][i], found[1][i]) for i in range(13)), "the bits of all ranks"
        assert sorted(found[0] | found[1]) == list(range(len(expected)))
        for i, row in (found[0] | found[1]).items():
            torch.testing.assert_close(row, expected[i], rtol=1e-5, atol=1e-6, msg=f"{name} {i}")


def apart(rank: int, world_size: int) -> list[torch.Tensor]:
    """Weights that each rank drew by itself, before a step: a replica has rank 0's."""
    seed = torch.manual_seed
    torch.manual_seed = lambda _: seed(7 + rank)  # type: ignore[assignment]
    try:
        model = sharded(world_size)
    finally:
        torch.manual_seed = seed
    state = model.module.bags.state_dict()
    (key,) = [key for key in state if key.endswith(".t_user.weight")]
    return [state[key].cpu(), Model("cpu").bags.embedding_bags["t_user"].weight.detach()]


def test_replicas_begin_with_the_rows_of_the_first_rank(ranks_of: Start, device: torch.device) -> None:
    if device.type in ("cpu", "cuda"):
        pytest.skip("TorchRec's own sharders do it there")
    (first, own), (second, _) = ranks_of(2).run(apart)
    assert torch.equal(first, second)
    assert not torch.equal(first, own)


def theirs(rank: int, world_size: int) -> str:
    return type(sharded(world_size, constrained=False).module.bags).__name__


def test_on_the_host_they_are_torchrecs(ranks_of: Start, device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("the sharders of this package do it there")
    assert ranks_of(2).run(theirs) == [ShardedEmbeddingBagCollection.__name__] * 2
