"""State dicts of the table-batched embedding, with its tables by name.

A module that loads a state dict must have outputs bit-identical to the source's.
"""

from __future__ import annotations

from typing import Any

import embeddings
import numpy as np
import pytest
import torch
from embeddings import embedding_of, windowed

from rec_sdk_torch.tbe import InitializerType, Pooling, TableBatchedEmbedding, TableConfig

IDS = 20


def tables(pooled: bool) -> list[TableConfig]:
    """Returns configs of hash tables a and c and index tables b and d, in several groups by dim or data type."""

    def table(name: str, hashed: bool, dim: int, dtype: torch.dtype) -> TableConfig:
        pooling = Pooling.SUM if pooled else Pooling.NONE
        kind = InitializerType.UNIFORM
        return TableConfig(name, IDS, dim, pooling=pooling, hashed=hashed, weight_dtype=dtype, initializer_type=kind)

    return [
        table("a", True, 4, torch.float32),
        table("b", False, 8 if pooled else 4, torch.float32),
        table("c", True, 4, torch.float16),
        table("d", False, 4, torch.bfloat16),
    ]


def make(device: torch.device, pooled: bool, seed: int = 0, cache: int = 5, **options: Any) -> TableBatchedEmbedding:
    return embedding_of(*tables(pooled), cache=cache, device=device, seed=seed, **options)


def train(embedding: TableBatchedEmbedding, seeds: range) -> list[torch.Tensor]:
    batches = (torch.from_numpy(np.random.default_rng(seed).integers(0, IDS, 16)) for seed in seeds)
    return embeddings.train(embedding, *batches, bag=2, square=True)


def read(embedding: TableBatchedEmbedding) -> torch.Tensor:
    """Returns every row of every table, including ids that hash tables do not contain."""
    embedding.eval()
    out = embedding(torch.arange(IDS).repeat(4), torch.arange(4 * IDS + 1))
    embedding.train()
    return out


KINDS = pytest.mark.parametrize("pooled", [True, False], ids=["pooled", "sequence"])


@KINDS
def test_keys_shapes_and_values(device: torch.device, pooled: bool) -> None:
    embedding = make(device, pooled)
    train(embedding, range(4))
    state = embedding.state_dict()
    known = {name: len(embedding.table_ids(name)) for name in "ac"}
    assert {name: (tuple(value.shape), value.dtype) for name, value in state.items()} == {
        "a.ids": ((known["a"],), torch.int64),
        "a.weight": ((known["a"], 4), torch.float32),
        "b.weight": ((IDS, 8 if pooled else 4), torch.float32),
        "c.ids": ((known["c"],), torch.int64),
        "c.weight": ((known["c"], 4), torch.float16),
        "d.weight": ((IDS, 4), torch.bfloat16),
    }
    rows = read(embedding).cpu()
    parts = rows.split([t.embedding_dim for t in tables(pooled)], 1) if pooled else rows.split(IDS)
    for part, name in zip(parts, "abcd", strict=True):
        ids = state.get(f"{name}.ids", torch.arange(IDS))
        assert torch.equal(part[ids], state[f"{name}.weight"].float()), name
    assert state["a.ids"].tolist() == sorted(embedding.table_ids("a").tolist())
    assert state["a.ids"].tolist() != embedding.table_ids("a").tolist(), "ids arrived in another order"


@KINDS
@pytest.mark.parametrize("place", ["fresh", "trained"])
def test_round_trip(device: torch.device, pooled: bool, place: str) -> None:
    source, target = make(device, pooled), make(device, pooled, cache=11)
    train(source, range(4))
    if place == "trained":
        train(target, range(10, 13))
    state = {name: value.clone() for name, value in source.state_dict().items()}
    assert list(target.load_state_dict(state)) == [[], []]
    assert torch.equal(read(source), read(target))
    again = target.state_dict()
    assert list(again) == list(state)
    for name in "ac":
        order, expected = again[f"{name}.ids"].argsort(), state[f"{name}.ids"].argsort()
        assert torch.equal(again[f"{name}.ids"][order], state[f"{name}.ids"][expected])
        assert torch.equal(again[f"{name}.weight"][order], state[f"{name}.weight"][expected])
    for name in "bd":
        assert torch.equal(again[f"{name}.weight"], state[f"{name}.weight"])


@KINDS
def test_saved_weights_are_a_copy(device: torch.device, pooled: bool) -> None:
    embedding = make(device, pooled, cache=IDS)
    train(embedding, range(2))
    state = embedding.state_dict()
    before = {name: value.clone() for name, value in state.items()}
    train(embedding, range(2, 6))
    assert before
    assert all(torch.equal(state[name], before[name]) for name in before)


@KINDS
def test_inside_a_module(device: torch.device, pooled: bool) -> None:
    """Keys have the module's prefix; entries of other parts of the module are left alone."""
    models = []
    for _ in range(2):
        model = torch.nn.Module()
        model.tables, model.dense = make(device, pooled), torch.nn.Linear(2, 1)
        models.append(model)
    train(models[0].tables, range(3))
    state = models[0].state_dict()
    names = {"a.ids", "a.weight", "b.weight", "c.ids", "c.weight", "d.weight"}
    assert set(state) == {f"tables.{name}" for name in names} | {"dense.weight", "dense.bias"}
    models[1].load_state_dict(state)
    assert torch.equal(read(models[0].tables), read(models[1].tables))
    assert torch.equal(models[0].dense.weight, models[1].dense.weight)


@KINDS
def test_missing_and_unexpected_keys(device: torch.device, pooled: bool) -> None:
    """Missing and unexpected keys raise torch's errors; with strict=False the tables in the state are loaded."""
    source, target = make(device, pooled), make(device, pooled, seed=1)
    train(source, range(3))
    state = dict(source.state_dict())
    before = read(target)
    for missing in ("a.weight", "b.weight"):
        less = {name: value for name, value in state.items() if name != missing}
        with pytest.raises(RuntimeError, match=f'Missing key.*"{missing}"'):
            target.load_state_dict(less)
        assert torch.equal(read(target), before), "nothing is loaded"
    more = {**state, "b.ids": torch.arange(IDS), "e.weight": torch.zeros(1)}
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"b.ids".*"e.weight"|Unexpected key.*"e.weight".*"b.ids"'):
        target.load_state_dict(more)
    assert torch.equal(read(target), before), "nothing is loaded"
    del more["a.weight"]
    result = target.load_state_dict(more, strict=False)
    assert (result.missing_keys, sorted(result.unexpected_keys)) == (["a.weight"], ["b.ids", "e.weight"])
    after, expected = target.state_dict(), source.state_dict()
    assert len(after["a.ids"]) == 0, "the table that was not loaded"
    assert all(torch.equal(after[name], expected[name]) for name in ("b.weight", "d.weight"))


@KINDS
def test_wrong_shapes(device: torch.device, pooled: bool) -> None:
    """The error message names the entry, and nothing is loaded."""
    source, target = make(device, pooled), make(device, pooled, seed=1)
    train(source, range(3))
    state, before = dict(source.state_dict()), read(target)
    for name, value in {
        "d.weight": state["d.weight"][:, 1:],
        "c.weight": state["c.weight"][:, 1:],
        "c.ids": state["c.ids"].float(),
        "a.ids": state["a.ids"][1:],
    }.items():
        with pytest.raises(RuntimeError, match=rf"{name[0]}\.(weight|ids).*(shape|ids)"):
            target.load_state_dict({**state, name: value})
        assert torch.equal(read(target), before)


@KINDS
def test_training_continues_from_a_state_dict(device: torch.device, pooled: bool) -> None:
    """With SGD, which has no states, training continues as in the source. Pending gradients of a window are dropped."""
    optimizer = windowed("SGD", 2, lr=0.1)
    source, target = (make(device, pooled, cache=cache, optimizer=optimizer) for cache in (6, 9))
    train(source, range(4))
    train(target, range(20, 23))
    target.load_state_dict(source.state_dict())
    for one, other in zip(train(source, range(4, 8)), train(target, range(4, 8)), strict=True):
        assert torch.equal(one, other)


def test_meta_device_has_shapes() -> None:
    state = make(torch.device("meta"), True).state_dict()
    assert {name: (value.device.type, tuple(value.shape)) for name, value in state.items()} == {
        "a.ids": ("meta", (0,)),
        "a.weight": ("meta", (0, 4)),
        "b.weight": ("meta", (IDS, 8)),
        "c.ids": ("meta", (0,)),
        "c.weight": ("meta", (0, 4)),
        "d.weight": ("meta", (IDS, 4)),
    }
