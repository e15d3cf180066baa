"""Training and serving after a save of ranks, on another number of them. Loads are in test_saves_any_world."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from jagged import bags_collection, jagged
from ranks import Place, Ranks
from sharded_model import Model, Scenario, bags_of, concatenated, rows, shard
from torchrec import EmbeddingBagConfig
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingEnv, ShardingType

import rec_sdk_torch as rst
from rec_sdk_torch.serving import TableReader

ROW, TABLE = "row_wise", "table_wise"
ADAGRAD = Scenario(optimizer=torch.optim.Adagrad, cache=60, sizes=((2, 1),), ids=200, seed=3)
WINDOW = Scenario(
    optimizer=rst.AccumulateAdagrad,
    options={"use_accumulate": True, "accumulate_step": 3},
    sharding=(ROW, TABLE, ROW),
    cache=60,
    sizes=((2, 1),),
    ids=200,
    seed=4,
)


def go(rank: int, world_size: int, scenario: Scenario, path: str, first: int, last: int) -> Any:
    """Loads what is there, trains steps first to last on one batch for all ranks, saves; the rank's rows."""
    model = shard(Model(scenario, seed=3), scenario, world_size)
    if first:
        rst.Saver().load(model, path)
    for step in range(first, last):
        loss, _ = model(jagged(*bags_of(scenario, step, world_size)[rank]))
        loss.backward()
    rst.Saver().save(model, path)
    return rows(model.module.sparse), model.module.sparse.fused_optimizer.state_dict()["state"]


def alone(scenario: Scenario, path: Path, steps: range, world_size: int) -> Any:
    model = Model(scenario, seed=3)
    rst.Saver().load(model, path)
    for step in steps:
        loss, _ = model(concatenated(bags_of(scenario, step, world_size)))
        (loss / world_size).backward()
    return model


def together(results: list[Any]) -> dict[str, dict[int, torch.Tensor]]:
    joined: dict[str, dict[int, torch.Tensor]] = {}
    for of_rank, _ in results:
        for table, values in of_rank.items():
            assert not joined.setdefault(table, {}).keys() & values.keys(), "a row is at home on one rank"
            joined[table].update(values)
    return joined


def padded(row: torch.Tensor) -> torch.Tensor:
    """With the zeros that a state begins with, where a rank has not met the row of an index table."""
    return torch.nn.functional.pad(row, (0, 8 - len(row)))


def check(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    for table, values in expected.items():
        assert found[table].keys() == values.keys(), table
        for i, row in values.items():
            a, b = padded(found[table][i]), padded(row)
            assert torch.allclose(a, b, 1e-5, 1e-6), (table, i)


@pytest.mark.parametrize(("saved", "loaded"), [(2, 4), (4, 2)])
def test_an_open_window_goes_on_over_other_ranks(
    saved: int, loaded: int, ranks_of: Callable[[int], Ranks], tmp_path: Path
) -> None:
    ranks_of(saved).run(go, WINDOW, str(tmp_path), 0, 4)
    reference = alone(WINDOW, tmp_path, range(4, 8), loaded)
    check(together(ranks_of(loaded).run(go, WINDOW, str(tmp_path), 4, 8)), rows(reference.sparse))


def test_rows_of_all_ranks_are_served(ranks_of: Callable[[int], Ranks], tmp_path: Path) -> None:
    before = together(ranks_of(2).run(go, ADAGRAD, str(tmp_path), 0, 4))
    for table, values in before.items():
        reader = TableReader(tmp_path, table)
        weights, found = reader.find(torch.tensor(list(values)))
        assert found.all(), table
        assert torch.equal(weights, torch.stack([row[: reader.embedding_dim] for row in values.values()])), table


def by_rank(rank: int, world_size: int, path: str) -> bool:
    """torch.distributed.checkpoint with the rank in the keys, as docs/torch.md says."""
    source, target = (shard(Model(ADAGRAD, seed=seed), ADAGRAD, world_size) for seed in (3, 4))
    for step in range(3):
        source(jagged(*bags_of(ADAGRAD, step, world_size)[rank]))[0].backward()
    dcp.save({f"rank{rank}.{key}": value for key, value in source.state_dict().items()}, checkpoint_id=path)
    reader = dcp.FileSystemReader(path)
    sizes = reader.read_metadata().state_dict_metadata
    mine = {key: each for key, each in sizes.items() if key.startswith(f"rank{rank}.")}
    state = {key: torch.empty(each.size, dtype=each.properties.dtype) for key, each in mine.items()}
    dcp.load(state, storage_reader=reader)
    target.load_state_dict({key.split(".", 1)[1]: value for key, value in state.items()})
    found, expected = target.state_dict(), source.state_dict()
    return len(expected) > 3 and all(torch.equal(found[key], value) for key, value in expected.items())


def test_torch_distributed_checkpoint_by_rank(ranks_of: Callable[[int], Ranks], tmp_path: Path) -> None:
    assert all(ranks_of(2).run(by_rank, str(tmp_path)))


def in_background(rank: int, world_size: int, path: str) -> bool:
    """Ranks train on while they save, each at its own pace; the save has the moment it began. Whether rows changed."""
    source, target = (shard(Model(WINDOW, seed=seed), WINDOW, world_size) for seed in (3, 4))
    for step in range(4):
        source(jagged(*bags_of(WINDOW, step, world_size)[rank]))[0].backward()
    then = rows(source.module.sparse)
    future = rst.Saver().save(source, path, background=True)
    for step in range(4, 9):
        source(jagged(*bags_of(WINDOW, step, world_size)[rank]))[0].backward()
    future.result(timeout=60)
    later = rows(source.module.sparse)
    rst.Saver().load(target, path)
    found = rows(target.module.sparse)
    assert found.keys() == then.keys()
    for table, values in then.items():
        assert values.keys() <= found[table].keys(), table
        assert all(torch.equal(padded(found[table][i]), padded(row)) for i, row in values.items()), table
    return any(not torch.equal(row, later[table][i]) for table, values in then.items() for i, row in values.items())


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_train_on_while_they_save(world_size: int, ranks_of: Callable[[int], Ranks], tmp_path: Path) -> None:
    assert all(ranks_of(world_size).run(in_background, str(tmp_path)))


def remove_and_save(rank: int, world_size: int, path: str) -> str:
    """As scripts do: each rank removes the folder, the last one when the others save already."""
    model = shard(Model(ADAGRAD, seed=3), ADAGRAD, world_size)
    if rank == world_size - 1:
        until = time.monotonic() + 0.3
        while not os.path.exists(path) and time.monotonic() < until:
            time.sleep(0.01)
    shutil.rmtree(path, ignore_errors=True)
    return rst.Saver().save(model, path)


def test_each_rank_may_remove_the_folder_before_it_saves(ranks_of: Callable[[int], Ranks], tmp_path: Path) -> None:
    path = tmp_path / "saves"
    first, second = ranks_of(2).run(remove_and_save, str(path))
    assert first == second
    assert [str(folder) for folder in path.iterdir() if folder.is_dir()] == [first]
    assert rst.Saver.get_latest_load_path(path) == first


def rows_of_a_larger_table(rank: int, world_size: int) -> None:
    sharder, made = rst.EmbCacheEmbeddingBagCollectionSharder(), []
    by_rows: Any = ParameterSharding(ShardingType.ROW_WISE.value, EmbeddingComputeKernel.FUSED.value)
    plan = EmbeddingModuleShardingPlan({"t0": by_rows})
    env = ShardingEnv.from_process_group(torch.distributed.group.WORLD)
    for count in (15, 9):
        config = EmbeddingBagConfig(name="t0", num_embeddings=count, embedding_dim=4, feature_names=["f0"])
        collection = bags_collection(Place.device, config)
        made.append(sharder.shard(collection, plan, env, Place.device))
    given = made[0].state_dict()
    with pytest.warns(UserWarning, match="the others are left out"):
        made[1].load_state_dict(given)
    ids, weights = made[1].state_dict().values()
    assert ids.tolist() == list(range(rank, 9, world_size))
    assert torch.equal(weights, list(given.values())[1][: len(ids)])
    kept = made[1].home.embedding.view("t0").ids()
    assert int(kept.max()) < 9, "rows that no lookup can read take memory"


def test_ranks_take_the_rows_that_fit(ranks_of: Callable[[int], Ranks]) -> None:
    ranks_of(2).run(rows_of_a_larger_table)
