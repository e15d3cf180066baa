"""What a sharded collection tells of its tables; the reference is the collection that it was made of."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from jagged import jagged
from ranks import Ranks
from sharded_model import Model, Scenario, bags_of, shard

Start = Callable[[int], Ranks]


def ask(rank: int, world_size: int, kind: str, dims: tuple[int, int, int]) -> dict[str, Any]:
    scenario = Scenario(kind=kind, weighted=kind == "bags", dims=dims)
    tables = Model(scenario, 0).sparse
    model = shard(Model(scenario, 0), scenario, world_size)
    sharded = model.module.sparse
    for step in range(2):
        model(jagged(*bags_of(scenario, step, world_size)[rank]))[0].backward()
    shown = {name for name in dir(tables) if not name.startswith("_")}
    assert shown - set(dir(sharded)) == set()
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
    prefix = f"{sharded.home._handles_name}"
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
