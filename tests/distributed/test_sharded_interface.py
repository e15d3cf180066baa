"""A sharded collection keeps all options (listed in option_cases.py) and the interface of the unsharded collection."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from batches import jagged
from collection_factory import apply, bag_config, bags_collection
from option_cases import OPTIONS, WORLD_SIZE, expected, make_collection, observed
from ranks import Place, Start, on_ranks
from sharded_model import KEYS, Model, Scenario, shard_tables, sharded, train
from torch.fx.experimental.proxy_tensor import make_fx
from torchrec import KeyedJaggedTensor

import rec_sdk_torch as rst
from rec_sdk_torch.distributed.local_shard import _local_config
from rec_sdk_torch.distributed.placement import RowWise
from rec_sdk_torch.tbe import TableConfig

# ---- options


@on_ranks(WORLD_SIZE)
@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_shards(rank: int, name: str) -> None:
    found = observed(name, shard_tables(make_collection(name, rst)).local_shard.embedding)
    wanted = expected(OPTIONS[name], OPTIONS[name].shard, rank, Place.device)
    assert found == wanted, f"{name} is {found!r} on rank {rank}, not {wanted!r}"


@on_ranks(2)
@pytest.mark.parametrize(("depth", "slots"), [(0, 40), (1, 80), (2, 80)])
def test_a_share_of_a_small_table_holds_a_batch_of_all_ranks(rank: int, depth: int, slots: int) -> None:
    """All ranks' batches have 80 rows of each table, so a rank's shard of t0 needs 40 cached rows per batch.

    A tenth of t0, the configured cache size, would be only 16 rows.
    """
    configs = bag_config("t0", ["f0"], num_embeddings=160), bag_config("t1", ["f1"], num_embeddings=2000)
    collection = bags_collection(Place.device, *configs, cache=0.1)
    apply(collection)
    tables = shard_tables(collection)
    each = [[[(40 * rank + 80 * step + i) % 160] for i in range(40)] for step in range(5)]
    batches = [jagged({"f0": ids, "f1": ids}) for ids in each]
    for batch in rst.prefetch(iter(batches), tables, depth=depth) if depth else batches:
        tables(batch).wait().values().sum().backward()
    assert tables.cache_sizes == {"t0": slots, "t1": max(40 * (depth + 1), 100)}


@pytest.mark.parametrize("bounds", [{}, {"init_min": 0.0}, {"init_min": -0.25, "init_max": 0.5}], ids=str)
@pytest.mark.parametrize("initializer", rst.InitializerType)
def test_initial_weights_of_a_part(initializer: rst.InitializerType, bounds: dict[str, float]) -> None:
    table = TableConfig("t", 100, 4, initializer_type=initializer, **bounds)
    part = _local_config(table, RowWise(0, 2), 2)
    assert part.num_embeddings == 50
    assert (part.initializer_kind, part.init_range) == (table.initializer_kind, table.init_range)


# ---- the interface


OF_ONE_PROCESS = {"checked_bags", "feature_keys", "id_signals", "output_names"}
"""Attributes of an unsharded collection that other folders read; for a sharded collection they are in `home`."""


def compare_interfaces(rank: int, world_size: int, kind: str, dims: tuple[int, int, int]) -> dict[str, Any]:
    scenario = Scenario(kind=kind, weighted=kind == "bags", dims=dims)
    tables, model = Model(scenario, 0).sparse, train(sharded(scenario, 0), scenario, range(2))
    divided = model.module.sparse
    shown = {name for name in dir(tables) if not name.startswith("_")}
    assert shown - set(dir(divided)) == OF_ONE_PROCESS
    for name in ("embedding_names_by_table", "is_weighted", "need_indices", "skipped_updates"):
        expected, found = getattr(tables, name, None), getattr(divided, name)
        if expected is not None:
            assert (found() if callable(found) else found) == (expected() if callable(expected) else expected), name
    configs = "embedding_configs" if kind == "sequences" else "embedding_bag_configs"
    names = [config.name for config in getattr(divided, configs)()]
    assert names == [config.name for config in getattr(tables, configs)()]
    with pytest.raises(ValueError, match="embedding dims") if len(set(dims)) > 1 else contextlib.nullcontext():
        assert divided.embedding_dim() == dims[0]
    with pytest.raises(RuntimeError, match="cannot be shared with other processes"):
        model.module.share_memory()
    with divided.exclusive():
        state = divided.state_dict()
    with pytest.raises(KeyError, match="no table is named 'other'"):
        divided.table_ids("other")
    ids = {name: divided.table_ids(name) for name in names}
    prefix = f"{divided.local_shard.handles_name}"
    assert all(sorted(ids[name].tolist()) == sorted(state[f"{prefix}.{name}.ids"].tolist()) for name in names)
    return {name: each.tolist() for name, each in ids.items()}


@pytest.mark.parametrize(("kind", "dims"), [("bags", (4, 4, 4)), ("hash", (4, 8, 4)), ("sequences", (4, 4, 4))])
def test_sharded_tables_have_the_unsharded_interface(ranks_of: Start, kind: str, dims: tuple[int, int, int]) -> None:
    first, second = ranks_of(2).run(compare_interfaces, kind, dims)
    for name, found in first.items():
        assert found
        assert not set(found) & set(second[name]), "each id has one home"
    if kind != "hash":
        assert sorted(first["t1"] + second["t1"]) == list(range(31)), "an index table has all of its rows"


class FromTensors(torch.nn.Module):
    """A module that torch.jit can call with tensors."""

    def __init__(self, tables: Any) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.tables(KeyedJaggedTensor(list(KEYS), ids, lengths=lengths)).values()
        return output


TENSORS = torch.tensor([1, 2, 3, 4]), torch.tensor([1, 1, 1, 1])
TRACERS: dict[str, Callable[[torch.nn.Module], Any]] = {
    "jit.trace": lambda model: torch.jit.trace(model, TENSORS),
    "make_fx": lambda model: make_fx(model)(*TENSORS),
    "fullgraph": lambda model: torch.compile(model, fullgraph=True, backend="eager")(*TENSORS),
}


@on_ranks(2)
@pytest.mark.parametrize("way", TRACERS)
def test_tracing_sharded_tables_names_the_alternative(way: str) -> None:
    tables = FromTensors(sharded(Scenario(), 0).module.sparse)
    expected = tables.eval()(*TENSORS)
    with pytest.raises(RuntimeError, match=r"embedding tables cannot be traced.*export the dense part"):
        TRACERS[way](tables)
    torch._dynamo.reset()
    assert torch.equal(tables(*TENSORS), expected), "it stays usable"


@on_ranks(2)
def test_a_sharded_collection_is_one_node() -> None:
    graph = torch.fx.symbolic_trace(torch.nn.Sequential(sharded(Scenario(), 0).module.sparse)).graph
    assert [node.target for node in graph.nodes if node.op == "call_module"] == ["0"]
