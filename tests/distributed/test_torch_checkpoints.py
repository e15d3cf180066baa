"""torch.distributed.checkpoint takes a plain tensor for one that all ranks have; those of sharded tables are not."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from jagged import jagged
from ranks import Ranks
from sharded_model import Model, Scenario, bags_of, rows, shard
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.nn.parallel import DistributedDataParallel

from rec_sdk_torch.runtime.rank_rows import note_rank_rows, refuse_rank_rows

Start = Callable[[int], Ranks]
MIXED = Scenario(sharding=("row_wise", "row_wise", "table_wise"), optimizer=torch.optim.Adagrad)
BF16 = Scenario(sharding=("table_wise", "data_parallel", "row_wise"), dtype=MIXED.dtype.__class__.BF16)
EVEN = Scenario(index_rows=30, ids=30, optimizer=torch.optim.Adagrad)


def trained(rank: int, world_size: int, scenario: Scenario) -> Any:
    model = shard(Model(scenario, seed=3), scenario, world_size)
    for step in range(2):
        model(jagged(*bags_of(scenario, step, world_size)[rank]))[0].backward()
    return model


def full(rank: int, world_size: int, scenario: Scenario, offload: bool) -> Any:
    """(rows of this rank, the full state dict, whether another sharded model that loads it has these rows)."""
    model, fresh = trained(rank, world_size, scenario), shard(Model(scenario, seed=4), scenario, world_size)
    state = get_model_state_dict(model.module, options=StateDictOptions(full_state_dict=True, cpu_offload=offload))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=offload)
    set_model_state_dict(fresh.module, dict(state), options=options)
    found, expected = fresh.state_dict(), model.state_dict()
    same = found.keys() == expected.keys() and all(torch.equal(found[key], part) for key, part in expected.items())
    return rows(model.module.sparse), {key: part.cpu() for key, part in state.items()}, same


@pytest.mark.parametrize("scenario", [MIXED, BF16], ids=["mixed", "bf16"])
@pytest.mark.parametrize("offload", [False, True])
def test_a_full_state_dict_has_whole_tables(ranks_of: Start, scenario: Scenario, offload: bool) -> None:
    results = ranks_of(2).run(full, scenario, offload)
    alone = Model(scenario, seed=5)
    for rank, (_, state, same) in enumerate(results):
        assert same
        if offload and rank:
            assert state == {}
            continue
        assert state.keys() == alone.state_dict().keys()
        alone.load_state_dict(state)
        for table, found in rows(alone.sparse).items():
            expected = {i: row for of_rank, _, _ in results for i, row in of_rank[table].items()}
            assert len(expected) > 10
            assert found.keys() == expected.keys()
            assert all(torch.equal(row[:4], expected[i][:4]) for i, row in found.items()), table


def outcome(call: Callable[[], Any]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "no error"


def one_for_all(rank: int, world_size: int, path: str) -> tuple[list[str], list[str], bool]:
    """(what saves and loads raise, files of the saves, whether the rows are as before)."""
    model = trained(rank, world_size, EVEN)
    state, before = model.state_dict(), rows(model.module.sparse)
    alike = {key: torch.zeros_like(part) for key, part in state.items() if ".t1." in key}
    dcp.save(alike, checkpoint_id=f"{path}/alike")
    given: list[dict[str, Any]] = [
        {"model": model},
        state,
        {"nested": [{key: part.detach() for key, part in state.items()}]},
        {"optimizer": model.module.sparse.fused_optimizer},
    ]
    calls = [functools.partial(dcp.save, each, checkpoint_id=f"{path}/{n}") for n, each in enumerate(given)]
    async_save = functools.partial(dcp.async_save, process_group=dist.new_group(backend="gloo"))
    calls += [functools.partial(async_save, each, checkpoint_id=f"{path}/{n}") for n, each in enumerate(given)]
    writer = dcp.FileSystemWriter(f"{path}/staged")
    calls.append(functools.partial(async_save, {"model": model}, storage_writer=writer))
    calls.append(functools.partial(dcp.load, {key: state[key] for key in alike}, checkpoint_id=f"{path}/alike"))
    found = [outcome(call) for call in calls]
    files = [name for folder, _, names in os.walk(path) for name in names if "alike" not in folder]
    after = rows(model.module.sparse)
    same = all(torch.equal(row, after[table][i]) for table, values in before.items() for i, row in values.items())
    return found, files, same


def test_rows_of_one_rank_are_not_saved_for_all(ranks_of: Start, tmp_path: Path) -> None:
    for rank, (messages, files, same) in enumerate(ranks_of(2).run(one_for_all, str(tmp_path))):
        assert len(messages) == 10
        for message in messages:
            assert f"have the rows of rank {rank} of 2, and torch.distributed.checkpoint takes one rank's" in message
        assert files == []
        assert same


def by_rank(rank: int, world_size: int, path: str) -> bool:
    """Whether tables come back where keys name the rank, in the background and into the state dict of another model."""
    source, target = trained(rank, world_size, EVEN), shard(Model(EVEN, seed=4), EVEN, world_size)
    index = {key: part for key, part in source.state_dict().items() if ".t1." in key}
    named = {f"rank{rank}": {"model": index}}
    dcp.async_save(named, checkpoint_id=path, process_group=dist.new_group(backend="gloo")).result()
    state = {key: part for key, part in target.state_dict().items() if key in index}
    dcp.load({f"rank{rank}": {"model": state}}, checkpoint_id=path)
    target.load_state_dict(state, strict=False)
    return all(torch.equal(target.state_dict()[key], part) for key, part in index.items())


def test_keys_may_name_the_rank(ranks_of: Start, tmp_path: Path) -> None:
    assert ranks_of(2).run(by_rank, str(tmp_path)) == [True, True]


def not_sharded(rank: int, world_size: int, path: str) -> str:
    model = DistributedDataParallel(Model(EVEN, seed=3))
    return outcome(lambda: dcp.save(model.state_dict(), checkpoint_id=path))


def test_tables_that_each_rank_has_by_itself(ranks_of: Start, tmp_path: Path) -> None:
    for rank, message in enumerate(ranks_of(2).run(not_sharded, str(tmp_path))):
        assert f"rows of rank {rank} of 2" in message


@pytest.mark.parametrize(("key", "fine"), [("rank1.t", True), ("rank10.t", False), ("t1", False), ("a.rank1", True)])
def test_which_keys_name_a_rank(key: str, fine: bool) -> None:
    weight = torch.ones(3, 2)
    note_rank_rows([weight], 1, 12)
    message = outcome(lambda: refuse_rank_rows({key: weight[1:]}))
    assert message == "no error" if fine else message.startswith(f"key {key!r} and 0 others have the rows of rank 1")
    refuse_rank_rows({key: weight.clone()})
