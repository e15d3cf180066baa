"""Saves of sharded collections, read by as many ranks, by others, and by one process; and the other way round."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jagged import jagged
from ranks import Place, Ranks
from sharded_model import Model, Scenario, bags_of, concatenated, shard

import rec_sdk_torch as rst
from rec_sdk_torch.saves.format import manifest
from rec_sdk_torch.saves.format.manifest import DELTA, read_manifest
from rec_sdk_torch.saves.owners import owners_of
from rec_sdk_torch.tbe.rows.table_view import TableView

Start = Callable[[int], Ranks]
Rows = dict[str, dict[int, bytes]]
WINDOW = {"use_accumulate": True, "accumulate_step": 3}
SCENARIOS = [
    Scenario(optimizer=torch.optim.Adagrad, cache=29),
    Scenario(kind="sequences", optimizer=torch.optim.Adam, sharding=("row_wise", "table_wise", "row_wise")),
    Scenario(
        optimizer=rst.AccumulateAdagrad,
        options=WINDOW,
        cache=31,
        steps=5,
        sharding=("table_wise", "row_wise", "row_wise"),
    ),
    Scenario(kind="hash", optimizer=torch.optim.SGD),
    Scenario(
        init_fn=torch.nn.init.normal_, optimizer=torch.optim.Adagrad, sharding=("row_wise", "row_wise", "table_wise")
    ),
    Scenario(
        optimizer=rst.AccumulateAdam,
        options=WINDOW,
        cache=40,
        steps=5,
        sharding=("data_parallel", "data_parallel", "row_wise"),
    ),
    Scenario(
        optimizer=torch.optim.Adagrad,
        rules={"admit_threshold": 3, "evict_idle_steps": 3, "evict_step_interval": 2},
        sharding=("data_parallel", "row_wise", "data_parallel"),
        sizes=((1, 2),),
        steps=5,
    ),
    Scenario(
        optimizer=torch.optim.Adagrad,
        rules={"admit_threshold": 3, "evict_idle_steps": 3, "evict_step_interval": 2},
        sharding=("row_wise", "row_wise", "table_wise"),
        sizes=((1, 2),),
        steps=5,
    ),
]

COPIES = dataclasses.replace(SCENARIOS[0], cache=60, sharding=("data_parallel", "data_parallel", "row_wise"))


def name_of(scenario: Scenario) -> str:
    more = ("-init_fn" if scenario.init_fn else "") + ("-life" if scenario.rules else "")
    more += "-replicas" * ("data_parallel" in scenario.sharding)
    return f"{scenario.kind}-{scenario.optimizer.__name__}{more}"


def held(model: torch.nn.Module) -> Rows:
    """Rows, states, pending gradients, steps and what is counted of ids, at home in this process."""
    result: Rows = {}
    for owner in owners_of(model):
        with owner.embedding.exclusive():
            for name in owner.configs:
                view = owner.embedding.view(name)
                rows = result.setdefault(name, {})
                for ids in owner.ids(view):
                    chunk = view.read(torch.from_numpy(ids))
                    flat = torch.cat([part.contiguous().view(torch.uint8) for part in chunk.parts.values()], 1)
                    rows.update({int(i): row.numpy().tobytes() for i, row in zip(ids, flat, strict=True)})
                waiting = result.setdefault(f"{name}.window", {})
                for ids, sums in view.window_rows():
                    waiting.update({int(i): row.numpy().tobytes() for i, row in zip(ids, sums, strict=True)})
                result |= counted(name, view)
                optimizer = owner.embedding.layout.optimizer_of(name)
                assert optimizer is not None
                result[f"{name}.step"] = {optimizer.step: b""}
            windows = owner.embedding.layout.windows
            result["counts"] = {length: bytes([count]) for length, count in windows.items() if count}
    return result


def counted(name: str, view: TableView) -> Rows:
    """The numbers that admission and eviction go by: of rows, of candidates, and the clocks."""
    if view.config.life is None:
        return {}
    result: Rows = {
        f"{name}.clocks": {place: repr(clock).encode() for place, clock in enumerate(view.clocks().items())}
    }
    waiting = view.candidates()
    for kind, ids, columns in (("columns", view.ids(), view.row_columns(view.ids())), ("candidates", *waiting)):
        values = {column: of.tolist() for column, of in columns.items()}
        each = [repr({column: of[place] for column, of in values.items()}).encode() for place in range(len(ids))]
        result[f"{name}.{kind}"] = dict(zip(ids.tolist(), each, strict=True))
    return result


def joined(scenario: Scenario, parts: list[Rows]) -> Rows:
    """The rows of all ranks, which have each id once, or all of a table that is data_parallel."""
    copies = {f"t{place}" for place, sharding in enumerate(scenario.sharding) if sharding == "data_parallel"}
    result: Rows = {}
    for part in parts:
        for name, rows in part.items():
            known = result.setdefault(name, {})
            if name.partition(".")[0] in copies:
                assert not known or known == rows, name
                result[name] = rows
                continue
            assert name.endswith((".clocks", ".step", "counts")) or not known.keys() & rows.keys(), name
            known.update(rows)
    return result


def train(model: Any, scenario: Scenario, steps: range, rank: int, world_size: int) -> None:
    for step in steps:
        model(jagged(*bags_of(scenario, step, world_size)[rank]))[0].backward()


def save(rank: int, world_size: int, scenario: Scenario, path: str) -> Rows:
    model = shard(Model(scenario, 3), scenario, world_size)
    train(model, scenario, range(scenario.steps), rank, world_size)
    rst.Saver(rank).save(model, path)
    return held(model)


def load(rank: int, world_size: int, scenario: Scenario, path: str) -> Rows:
    model = shard(Model(scenario, 3), scenario, world_size)
    train(model, scenario, range(50, 52), rank, world_size)  # other rows, which go
    rst.Saver().load(model, path)
    return held(model)


def alone(scenario: Scenario, path: Path, steps: int | None = None) -> tuple[Any, Rows]:
    """The model of one process that loaded the save; `steps`: that was trained and saved instead."""
    model = Model(scenario, 3)
    if steps is None:
        rst.Saver().load(model, path)
    else:
        for step in range(steps):
            model(concatenated(bags_of(scenario, step, 2)))[0].backward()
        rst.Saver().save(model, path)
    return model, held(model)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=name_of)
def test_any_number_of_ranks_loads_what_any_saved(ranks_of: Start, tmp_path: Path, scenario: Scenario) -> None:
    paths: dict[str, Rows] = {}
    for world_size in (2, 4):
        path = str(tmp_path / f"of{world_size}")
        paths[path] = joined(scenario, ranks_of(world_size).run(save, scenario, path))
    single = tmp_path / "alone"
    paths[str(single)] = alone(scenario, single, scenario.steps)[1]
    for path, expected in paths.items():
        found = [joined(scenario, ranks_of(world_size).run(load, scenario, path)) for world_size in (2, 4)]
        for rows in (*found, alone(scenario, Path(path))[1]):
            assert rows.keys() == expected.keys()
            for name in expected:
                assert rows[name] == expected[name], (path, name)
    assert any(expected["t0"] for expected in paths.values())
    if scenario.rules:
        assert all(expected[f"t0.{kind}"] for expected in paths.values() for kind in ("columns", "candidates"))
    if scenario.options:
        assert all(expected["counts"] and expected["t0.window"] for expected in paths.values())


def cached_after_load(
    rank: int, world_size: int, scenario: Scenario, path: str, listed: dict[str, list[int]]
) -> tuple[dict[str, list[int]], dict[str, int], dict[str, list[int]]]:
    """The ids of each table in the cache after a load; how many `warm` brings to an empty one, and which."""
    model, cold = (shard(Model(scenario, 3), scenario, world_size) for _ in range(2))
    rst.Saver().load(model, path)
    rst.Saver().load(cold, path, warm=False)
    assert not any(cached_ids(cold).values())
    came = {name: cold.module.sparse.warm(name, torch.tensor(ids)) for name, ids in listed.items()}
    return cached_ids(model), came, cached_ids(cold)


def cached_ids(model: Any) -> dict[str, list[int]]:
    found = {}
    for owner in owners_of(model):
        with owner.embedding.exclusive():
            found |= {name: owner.embedding.view(name).cached().by_heat()[0].tolist() for name in owner.configs}
    return found


@pytest.mark.parametrize("scenario", [SCENARIOS[0], SCENARIOS[3], COPIES], ids=name_of)
def test_rows_of_a_cache_go_to_their_homes(ranks_of: Start, tmp_path: Path, scenario: Scenario) -> None:
    """The caches of all ranks together have the rows that the cache of one process had."""
    model, _ = alone(scenario, tmp_path, scenario.steps)
    before = cached_ids(model)
    for world_size in (2, 4):
        parts = ranks_of(world_size).run(cached_after_load, scenario, str(tmp_path), before)
        for warmed, came, by_hand in parts:
            assert by_hand == warmed
            assert came == {name: len(ids) for name, ids in warmed.items()}
        for name, ids in before.items():
            at_home = [warmed[name] for warmed, _, _ in parts]
            assert set().union(*at_home) == set(ids), "each has room for its part of them"


def load_alone(rank: int, world_size: int, scenario: Scenario, path: str) -> Rows:
    model = shard(Model(scenario, 3), scenario, world_size)
    with pytest.warns(UserWarning, match=f"'t1' has num_embeddings {scenario.index_rows}, what is loaded 31"):
        rst.Saver().load(model, path)
    return held(model)


@pytest.mark.parametrize("rows", [12, 50])
@pytest.mark.parametrize("scenario", [SCENARIOS[0], SCENARIOS[2], COPIES], ids=name_of)
def test_an_index_table_of_another_size(ranks_of: Start, tmp_path: Path, scenario: Scenario, rows: int) -> None:
    """It takes the rows that both have, with pending gradients; other tables take all."""
    other = dataclasses.replace(scenario, index_rows=rows)
    saved = joined(scenario, ranks_of(2).run(save, scenario, str(tmp_path)))
    expected = {name: {i: row for i, row in saved[name].items() if i < rows} for name in saved if name[:2] == "t1"}
    assert len(expected["t1"]) == min(rows, 31)
    for world_size in (2, 4):
        found = joined(other, ranks_of(world_size).run(load_alone, other, str(tmp_path)))
        for name, values in saved.items():
            some = {i: row for i, row in found[name].items() if name != "t1" or i < 31}
            assert some == expected.get(name, values), name


def resume(rank: int, world_size: int, scenario: Scenario, path: str) -> None:
    """A model that goes on after a load comes to the same bits."""
    straight = shard(Model(scenario, 3), scenario, world_size)
    train(straight, scenario, range(4), rank, world_size)
    rst.Saver().save(straight, path)
    again = shard(Model(scenario, 3), scenario, world_size)
    rst.Saver().load(again, path)
    for model in (straight, again):
        train(model, scenario, range(4, 8), rank, world_size)
    assert held(again) == held(straight)


@pytest.mark.parametrize("scenario", [*SCENARIOS[:3], *SCENARIOS[-3:]], ids=name_of)
def test_training_goes_on_alike(ranks_of: Start, tmp_path: Path, scenario: Scenario) -> None:
    ranks_of(2).run(resume, scenario, str(tmp_path))


def save_deltas(rank: int, world_size: int, scenario: Scenario, paths: list[str], packed: bool) -> list[Rows]:
    """Four saves, the first of which is not a delta, in these folders. `packed`: as saves of many tables are."""
    many = manifest.MANY_TABLES
    manifest.MANY_TABLES = 1 if packed else many
    try:
        return _save_deltas(rank, world_size, scenario, paths)
    finally:
        manifest.MANY_TABLES = many


def _save_deltas(rank: int, world_size: int, scenario: Scenario, paths: list[str]) -> list[Rows]:
    model, seen = shard(Model(scenario, 3), scenario, world_size), []
    for step, path in enumerate(paths):
        train(model, scenario, range(step, step + 1), rank, world_size)
        view = owners_of(model)[0].embedding.view("t2")
        if rank == step % world_size and view.count() > 2:
            view.remove(view.ids()[:2])
        rst.Saver().save(model, path, incremental=True)
        seen.append(held(model))
    return seen


@pytest.mark.parametrize("kind", ["files", "packs", "folders"])
@pytest.mark.parametrize("scenario", [SCENARIOS[0], COPIES, SCENARIOS[-1]], ids=name_of)
def test_deltas_of_ranks(ranks_of: Start, tmp_path: Path, scenario: Scenario, kind: str) -> None:
    """Deltas are in one folder with the save that they follow, or in others."""
    packed, names_of_folders = kind == "packs", "bddd" if kind == "folders" else "bbbb"
    paths = [str(tmp_path / name) for name in names_of_folders]
    of_ranks = ranks_of(2).run(save_deltas, dataclasses.replace(scenario, tracked=True), paths, packed)
    folders = sorted(tmp_path.glob("*/*"), key=lambda folder: folder.name)
    assert [folder.parent.name for folder in folders] == list(names_of_folders)
    assert [read_manifest(folder).kind == DELTA for folder in folders] == [False, True, True, True]
    if packed:
        names = {file.path for folder in folders for file in read_manifest(folder).files}
        assert names == {"pack-00000-00000", "pack-00001-00000"}
    for number, folder in enumerate(folders):
        expected = joined(scenario, [seen[number] for seen in of_ranks])
        assert joined(scenario, ranks_of(4).run(load, scenario, str(folder))) == expected
        assert alone(scenario, folder)[1] == expected


def fail_on_one(rank: int, world_size: int, scenario: Scenario, path: str) -> tuple[str, ...]:
    """The errors of the calls when a file cannot be written, read, or read a second time, by rank 1 alone."""
    from rec_sdk_torch.saves.format import files
    from rec_sdk_torch.saves.load import reading

    model = shard(Model(scenario, 3), scenario, world_size)
    train(model, scenario, range(2), rank, world_size)
    before, verify, texts = files.before, reading.TensorReader.verify, []

    def fail(*_: Any) -> None:
        if rank == 1:
            raise OSError("planted")

    files.before = fail
    try:
        rst.Saver().save(model, path)
    except (OSError, rst.CheckpointError) as error:
        texts.append(str(error))
    finally:
        files.before = before
    state = held(model)
    rst.Saver().save(model, path)
    train(model, scenario, range(2, 3), rank, world_size)
    state = held(model)
    reading.TensorReader.verify = fail  # type: ignore[method-assign, assignment]
    try:
        rst.Saver().load(model, path)
    except (OSError, rst.CheckpointError) as error:
        texts.append(str(error))
    finally:
        reading.TensorReader.verify = verify  # type: ignore[method-assign]
    assert held(model) == state
    open_file = reading.open_file
    reading.open_file = fail if rank == 1 else open_file
    try:
        rst.Saver().load(model, path)
    except (OSError, rst.CheckpointError) as error:
        texts.append(str(error))
    finally:
        reading.open_file = open_file
    assert held(model) == state, "no rank has the rows of the save"
    train(model, scenario, range(3, 4), rank, world_size)
    return tuple(texts)


def test_what_fails_on_one_rank_fails_on_all(ranks_of: Start, tmp_path: Path) -> None:
    others, own = ranks_of(2).run(fail_on_one, SCENARIOS[0], str(tmp_path))
    assert own == ("planted",) * 3
    assert len(others) == 3
    assert all("rank 1 of 2: OSError: planted" in text for text in others)
    assert len(list(tmp_path.iterdir())) == 1


def mixed(rank: int, world_size: int, path: str) -> str:
    """A model of which one collection is sharded, and another is each rank's own."""
    model = shard(Model(SCENARIOS[0], 3), SCENARIOS[0], world_size)
    model.module.own = rst.TableBatchedEmbedding([rst.TableConfig("own", 9, 4)], cache=9, device=Place.device)
    own = model.module.own.view("own")
    ids = torch.tensor([3, 4])
    own.write(ids, {"weight": torch.full((2, 4), 1.0 + rank)})
    with pytest.raises(ValueError, match="are not sharded") as raised:
        rst.Saver().save(model, path)
    alone = rst.Saver().save(model.module.own, f"{path}/own{rank}")
    rst.Saver().save(model.module.sparse, f"{path}/sparse")
    own.write(ids, {"weight": torch.zeros(2, 4)})
    rst.Saver().load(model.module.own, alone)
    assert (own.read(ids).parts["weight"] == 1.0 + rank).all()
    return str(raised.value)


def test_tables_of_each_rank_are_not_saved_as_one(ranks_of: Start, tmp_path: Path) -> None:
    for text in ranks_of(2).run(mixed, str(tmp_path)):
        assert text.startswith("tables ['own'] are not sharded, so that each of 2 ranks has rows of its own")
