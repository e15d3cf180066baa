"""Answers of a sharded collection about its tables; the reference is the collection that it was made of."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from jagged import jagged
from ranks import Ranks
from sharded_model import KEYS, Model, Scenario, bags_of, shard
from torch.fx.experimental.proxy_tensor import make_fx
from torchrec import KeyedJaggedTensor

Start = Callable[[int], Ranks]

OF_ONE_PROCESS = {"checked_bags", "feature_keys", "id_signals", "output_names"}
"""Attributes of a collection in one process that other rooms read; a sharded collection has them at `home`."""


def ask(rank: int, world_size: int, kind: str, dims: tuple[int, int, int]) -> dict[str, Any]:
    scenario = Scenario(kind=kind, weighted=kind == "bags", dims=dims)
    tables = Model(scenario, 0).sparse
    model = shard(Model(scenario, 0), scenario, world_size)
    sharded = model.module.sparse
    for step in range(2):
        model(jagged(*bags_of(scenario, step, world_size)[rank]))[0].backward()
    shown = {name for name in dir(tables) if not name.startswith("_")}
    assert shown - set(dir(sharded)) == OF_ONE_PROCESS
    for name in ("embedding_names_by_table", "is_weighted", "need_indices", "skipped_updates"):
        expected, found = getattr(tables, name, None), getattr(sharded, name)
        if expected is not None:
            assert (found() if callable(found) else found) == (expected() if callable(expected) else expected), name
    configs = "embedding_configs" if kind == "sequences" else "embedding_bag_configs"
    names = [config.name for config in getattr(sharded, configs)()]
    assert names == [config.name for config in getattr(tables, configs)()]
    with pytest.raises(ValueError, match="embedding dims") if len(set(dims)) > 1 else contextlib.nullcontext():
        assert sharded.embedding_dim() == dims[0]
    with pytest.raises(RuntimeError, match="cannot be shared with other processes"):
        model.module.share_memory()
    with sharded.exclusive():
        state = sharded.state_dict()
    with pytest.raises(KeyError, match="no table is named 'other'"):
        sharded.table_ids("other")
    ids = {name: sharded.table_ids(name) for name in names}
    prefix = f"{sharded.home.handles_name}"
    assert all(sorted(ids[name].tolist()) == sorted(state[f"{prefix}.{name}.ids"].tolist()) for name in names)
    return {name: each.tolist() for name, each in ids.items()}


@pytest.mark.parametrize(("kind", "dims"), [("bags", (4, 4, 4)), ("hash", (4, 8, 4)), ("sequences", (4, 4, 4))])
def test_sharded_tables_tell_what_unsharded_ones_do(ranks_of: Start, kind: str, dims: tuple[int, int, int]) -> None:
    first, second = ranks_of(2).run(ask, kind, dims)
    for name, found in first.items():
        assert found
        assert not set(found) & set(second[name]), "each id has one home"
    if kind != "hash":
        assert sorted(first["t1"] + second["t1"]) == list(range(31)), "an index table has all of its rows"


class FromTensors(torch.nn.Module):
    """A module that torch.jit and ONNX can give a batch to."""

    def __init__(self, tables: Any) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.tables(KeyedJaggedTensor(list(KEYS), ids, lengths=lengths)).values()
        return output


TENSORS = torch.tensor([1, 2, 3, 4]), torch.tensor([1, 1, 1, 1])
TRACERS: dict[str, Callable[[torch.nn.Module], Any]] = {
    "jit.trace": lambda model: torch.jit.trace(model, TENSORS),
    "jit.script": torch.jit.script,
    "ONNX": lambda model: torch.onnx.export(model, TENSORS, io.BytesIO(), dynamo=False),
    "make_fx": lambda model: make_fx(model)(*TENSORS),
    "export": lambda model: torch.export.export(model, TENSORS),
    "strict export": lambda model: torch.export.export(model, TENSORS, strict=True),
    "fullgraph": lambda model: torch.compile(model, fullgraph=True, backend="eager")(*TENSORS),
}


def trace(rank: int, world_size: int, way: str) -> None:
    model = shard(Model(Scenario(), 0), Scenario(), world_size)
    tables = FromTensors(model.module.sparse)
    expected = tables.eval()(*TENSORS)
    with pytest.raises(RuntimeError, match=r"embedding tables cannot be traced.*export the dense part"):
        TRACERS[way](tables)
    torch._dynamo.reset()
    assert torch.equal(tables(*TENSORS), expected), "it stays usable"


@pytest.mark.parametrize("way", TRACERS)
def test_tracers_of_sharded_tables_say_the_way_out(ranks_of: Start, way: str) -> None:
    ranks_of(2).run(trace, way)


def nodes(rank: int, world_size: int) -> list[Any]:
    model = shard(Model(Scenario(), 0), Scenario(), world_size).module
    graph = torch.fx.symbolic_trace(torch.nn.Sequential(model.sparse)).graph
    return [node.target for node in graph.nodes if node.op == "call_module"]


def test_a_sharded_collection_is_one_node(ranks_of: Start) -> None:
    assert ranks_of(2).run(nodes) == [["0"]] * 2
