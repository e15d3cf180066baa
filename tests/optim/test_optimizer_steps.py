"""The step and the states of the tables' optimizer, saved and loaded exactly.

The reference are numbers: a step that float32 cannot hold, and states that are functions of the id.
"""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from jagged import apply, bag_config, bags_collection, jagged, train_step
from torchrec import EmbeddingBagConfig

BEYOND_FLOAT32 = 2**24 + 1
T0, T1 = "embedding_bags.t0.weight", "embedding_bags.t1.weight"


def adam(device: torch.device, rows: int = 9) -> Any:
    """A hash table t0 and an index table t1 of `rows` rows."""
    index = EmbeddingBagConfig(num_embeddings=rows, embedding_dim=4, name="t1", feature_names=["f1"])
    collection = bags_collection(device, bag_config(), index, cache=9)
    apply(collection, torch.optim.Adam, lr=0.1)
    return collection


BATCH = jagged({"f0": [[1, 2], [3]], "f1": [[1, 2], [3]]})


def state_with_steps(collection: Any, step: torch.Tensor) -> dict[str, Any]:
    state = collection.fused_optimizer.state_dict()
    for param, table in ((T0, "t0"), (T1, "t1")):
        state["state"][param] = {**state["state"][param], f"{table}.step": step}
    return state


def steps(collection: Any) -> list[int]:
    state = collection.fused_optimizer.state_dict()["state"]
    return [int(state[T0]["t0.step"]), int(state[T1]["t1.step"])]


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
@pytest.mark.parametrize("through", ["memory", "torch.save"])
def test_step_beyond_float32(device: torch.device, dtype: torch.dtype, through: str) -> None:
    """The step that Adam's bias correction counts with, in a save of a long training."""
    source, target = adam(device), adam(device)
    train_step(source, BATCH)
    source.fused_optimizer.load_state_dict(state_with_steps(source, torch.tensor(BEYOND_FLOAT32, dtype=dtype)))
    assert steps(source) == [BEYOND_FLOAT32] * 2
    state = source.fused_optimizer.state_dict()
    if through == "torch.save":
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
    target.load_state_dict(source.state_dict())
    target.fused_optimizer.load_state_dict(state)
    assert steps(target) == [BEYOND_FLOAT32] * 2
    train_step(target, BATCH)
    assert steps(target) == [BEYOND_FLOAT32 + 1] * 2


@pytest.mark.parametrize("step", [torch.tensor(7.0), torch.tensor(7), torch.tensor([7.0])[0]])
def test_steps_of_older_saves(device: torch.device, step: torch.Tensor) -> None:
    """TorchRec's and torch's own are float32 scalars."""
    collection = adam(device)
    train_step(collection, BATCH)
    collection.fused_optimizer.load_state_dict(state_with_steps(collection, step))
    assert steps(collection) == [7, 7]


@pytest.mark.parametrize("step", [1.5, -1.0, float("nan"), float("inf")])
def test_steps_that_are_none(device: torch.device, step: float) -> None:
    collection = adam(device)
    train_step(collection, BATCH)
    with pytest.raises(ValueError, match=r"t0\.step"):
        collection.fused_optimizer.load_state_dict(state_with_steps(collection, torch.tensor(step)))
    assert steps(collection) == [1, 1]


@pytest.mark.parametrize("rows", [5_000, pytest.param(1_000_000, marks=pytest.mark.full)])
def test_states_of_many_rows(device: torch.device, rows: int) -> None:
    """A hash table and an index table; ids in another order than the table has them, and most rows not cached."""
    collection = adam(device, rows)
    train_step(collection, BATCH)
    ids = torch.arange(rows).flip(0) * 3 + 1
    weight = torch.arange(rows, dtype=torch.float32).flip(0)[:, None].expand(rows, 4)
    collection.load_state_dict({"embedding_bags.t0.ids": ids, T0: weight, T1: weight})
    values = collection.fused_optimizer.state_dict()["state"]
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
    first, second = torch.arange(rows * 4.0).view(rows, 4), -torch.arange(rows * 4.0).view(rows, 4)
    values[T0] = {"t0.ids": ids[order], "t0.momentum1": first, "t0.exp_avg_sq": second, "t0.step": torch.tensor(3)}
    values[T1] = {"t1.momentum1": second, "t1.exp_avg_sq": first, "t1.step": torch.tensor(3)}
    collection.fused_optimizer.load_state_dict({"state": values})
    found, places = collection.fused_optimizer.state_dict()["state"], rows - 1 - order
    assert torch.equal(found[T0]["t0.ids"], ids.flip(0))
    assert torch.equal(found[T0]["t0.momentum1"][places], first)
    assert torch.equal(found[T0]["t0.exp_avg_sq"][places], second)
    assert torch.equal(found[T1]["t1.momentum1"], second)
    assert torch.equal(found[T1]["t1.exp_avg_sq"], first)
    assert torch.equal(collection.state_dict()[T0], weight.flip(0))
    assert torch.equal(collection.state_dict()[T1], weight)
