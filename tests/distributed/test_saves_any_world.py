"""Saves of sharded collections: loaded by any number of ranks or by one process, and vice versa."""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from collection_factory import bags_collection
from ranks import Place, Start, error_of, on_ranks
from sharded_model import (
    Model,
    Scenario,
    assert_rows,
    assert_same,
    bags_of,
    concatenated,
    rows,
    shard_tables,
    sharded,
    train,
)
from torchrec import EmbeddingBagConfig

import rec_sdk_torch as rst
from rec_sdk_torch.saves.format import files, manifest
from rec_sdk_torch.saves.format.manifest import DELTA, read_manifest
from rec_sdk_torch.saves.load import save_reader
from rec_sdk_torch.saves.owners import table_owners
from rec_sdk_torch.serving import TableReader
from rec_sdk_torch.tbe.rows.table_view import TableView

Bytes = dict[str, dict[int, bytes]]
ROW, TABLE, ALL = "row_wise", "table_wise", "data_parallel"
ADAGRAD, ADAM = torch.optim.Adagrad, torch.optim.Adam
LIFE = {"admit_threshold": 3, "evict_idle_steps": 3, "evict_step_interval": 2}
WINDOW: dict[str, Any] = {"options": {"use_accumulate": True, "accumulate_step": 3}, "steps": 5}
LIVES: dict[str, Any] = {"optimizer": ADAGRAD, "rules": LIFE, "sizes": ((1, 2),), "steps": 5}
SCENARIOS = [
    Scenario(optimizer=ADAGRAD, cache=29),
    Scenario("sequences", (ROW, TABLE, ROW), optimizer=ADAM),
    Scenario("bags", (TABLE, ROW, ROW), optimizer=rst.AccumulateAdagrad, cache=31, **WINDOW),
    Scenario("hash"),
    Scenario("bags", (ROW, ROW, TABLE), optimizer=ADAGRAD, init_fn=torch.nn.init.normal_),
    Scenario("bags", (ALL, ALL, ROW), optimizer=rst.AccumulateAdam, cache=40, **WINDOW),
    Scenario("bags", (ALL, ROW, ALL), **LIVES),
    Scenario("bags", (ROW, ROW, TABLE), **LIVES),
]

SKETCHED = Scenario(rules={"admit_threshold": 3, "sketch_bytes": 400})
COPIES = dataclasses.replace(SCENARIOS[0], cache=60, sharding=(ALL, ALL, ROW))


def name_of(scenario: Scenario) -> str:
    more = "-init_fn" * bool(scenario.init_fn) + "-life" * bool(scenario.rules)
    more += "-replicas" * (ALL in scenario.sharding)
    return f"{scenario.kind}-{scenario.optimizer.__name__}{more}"


def owned_rows(model: torch.nn.Module) -> Bytes:
    """Returns the rows, states, pending gradients, step counts and id counters that this process owns."""
    result: Bytes = {}
    for owner in table_owners(model):
        with owner.embedding.exclusive():
            for name in owner.configs:
                view = owner.embedding.view(name)
                of_table = result.setdefault(name, {})
                for ids in owner.ids(view):
                    chunk = view.read(torch.from_numpy(ids))
                    flat = torch.cat([part.contiguous().view(torch.uint8) for part in chunk.parts.values()], 1)
                    of_table.update({int(i): row.numpy().tobytes() for i, row in zip(ids, flat, strict=True)})
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


def counted(name: str, view: TableView) -> Bytes:
    """Returns the state of admission and eviction: counters of rows and candidates, and the clocks."""
    if view.config.lifecycle is None:
        return {}
    result: Bytes = {
        f"{name}.clocks": {place: repr(clock).encode() for place, clock in enumerate(view.clocks().items())}
    }
    if len(sketch := view.sketch()):
        result[f"{name}.sketch"] = {0: bytes(sketch.tolist())}
    waiting = view.candidates()
    for kind, ids, columns in (("columns", view.ids(), view.row_columns(view.ids())), ("candidates", *waiting)):
        values = {column: of.tolist() for column, of in columns.items()}
        each = [repr({column: of[place] for column, of in values.items()}).encode() for place in range(len(ids))]
        result[f"{name}.{kind}"] = dict(zip(ids.tolist(), each, strict=True))
    return result


def joined(scenario: Scenario, parts: list[Bytes]) -> Bytes:
    """Merges the rows of all ranks; each id occurs once, or on every rank if its table is data_parallel."""
    copies = {f"t{place}" for place, sharding in enumerate(scenario.sharding) if sharding == ALL}
    result: Bytes = {}
    for part in parts:
        for name, values in part.items():
            known = result.setdefault(name, {})
            if name.partition(".")[0] in copies:
                assert not known or known == values, name
                result[name] = values
                continue
            assert name.endswith((".clocks", ".step", "counts")) or not known.keys() & values.keys(), name
            known.update(values)
    return result


def save(rank: int, world_size: int, scenario: Scenario, path: str) -> Bytes:
    model = train(sharded(scenario), scenario, range(scenario.steps))
    rst.Saver(rank).save(model, path)
    return owned_rows(model)


def load(rank: int, world_size: int, scenario: Scenario, path: str) -> Bytes:
    model = train(sharded(scenario), scenario, range(50, 52))  # the load replaces these rows
    rst.Saver().load(model, path)
    return owned_rows(model)


def run_alone(scenario: Scenario, path: Path, steps: int | None = None) -> tuple[Any, Bytes]:
    """Returns a model of one process: trained for `steps` and then saved, or, without `steps`, loaded from the save."""
    model = Model(scenario, 3)
    if steps is None:
        rst.Saver().load(model, path)
    else:
        for step in range(steps):
            model(concatenated(bags_of(scenario, step, 2)))[0].backward()
        rst.Saver().save(model, path)
    return model, owned_rows(model)


def saved_by(ranks_of: Start, count: int, scenario: Scenario, path: Path) -> Bytes:
    """Saves with `count` ranks, or one process; returns the saved rows."""
    if count == 1:
        return run_alone(scenario, path, scenario.steps)[1]
    return joined(scenario, ranks_of(count).run(save, scenario, str(path)))


def loaded_by(ranks_of: Start, count: int, scenario: Scenario, path: Path) -> Bytes:
    """Loads with `count` ranks, or one process; returns the loaded rows."""
    if count == 1:
        return run_alone(scenario, path)[1]
    return joined(scenario, ranks_of(count).run(load, scenario, str(path)))


ON_FOUR = (0, 2, 5, 7)
"""Scenarios that also four ranks save and load: plain ones, windows, replicas, and admission."""


@pytest.mark.parametrize("scenario", SCENARIOS, ids=name_of)
def test_saves_load_on_any_number_of_ranks(ranks_of: Start, tmp_path: Path, scenario: Scenario) -> None:
    """Loading with the same number of ranks is tested by `test_training_continues_with_the_same_bits`."""
    four = SCENARIOS.index(scenario) in ON_FOUR
    for saved, loaded in ((1, [2]), (2, [1, 4] if four else [1]), *([(4, [2])] if four else [])):
        path = tmp_path / str(saved)
        expected = saved_by(ranks_of, saved, scenario, path)
        for count in loaded:
            assert_same(loaded_by(ranks_of, count, scenario, path), expected, f"{saved} to {count}")
        for kind in [
            "",
            *([".columns", ".candidates"] if scenario.rules else []),
            *([".window"] * bool(scenario.options)),
        ]:
            assert expected[f"t0{kind}"], kind
        assert bool(expected["counts"]) == bool(scenario.options)


def cached_after_load(
    rank: int, world_size: int, scenario: Scenario, path: str, listed: dict[str, list[int]]
) -> tuple[dict[str, list[int]], dict[str, int], dict[str, list[int]]]:
    """Loads a save; returns the cached ids of each table, then the number of ids that `warm` adds to an empty cache
    and those ids.

    """
    model, cold = sharded(scenario), sharded(scenario)
    rst.Saver().load(model, path)
    rst.Saver().load(cold, path, warm=False)
    assert not any(cached_ids(cold).values())
    fetched = {name: cold.module.sparse.warm(name, torch.tensor(ids)) for name, ids in listed.items()}
    return cached_ids(model), fetched, cached_ids(cold)


def cached_ids(model: Any) -> dict[str, list[int]]:
    found = {}
    for owner in table_owners(model):
        with owner.embedding.exclusive():
            found |= {name: owner.embedding.view(name).cached().by_heat()[0].tolist() for name in owner.configs}
    return found


@pytest.mark.parametrize("scenario", [SCENARIOS[0], SCENARIOS[3], COPIES], ids=name_of)
def test_cached_rows_are_warmed_on_their_owner_ranks(ranks_of: Start, tmp_path: Path, scenario: Scenario) -> None:
    """After a load, the caches of all ranks together hold the rows that one process had cached before the save."""
    model, _ = run_alone(scenario, tmp_path, scenario.steps)
    before = cached_ids(model)
    parts = ranks_of(2).run(cached_after_load, scenario, str(tmp_path), before)
    for warmed, fetched, by_hand in parts:
        assert by_hand == warmed
        assert fetched == {name: len(ids) for name, ids in warmed.items()}
    for name, ids in before.items():
        owns = [warmed[name] for warmed, _, _ in parts]
        assert set().union(*owns) == set(ids), "each has room for its part of them"


def load_other_size(rank: int, world_size: int, scenario: Scenario, path: str) -> Bytes:
    model = sharded(scenario)
    with pytest.warns(UserWarning, match=f"'t1' has num_embeddings {scenario.index_rows}, what is loaded 31"):
        rst.Saver().load(model, path)
    return owned_rows(model)


@pytest.mark.parametrize("scenario", [SCENARIOS[0], SCENARIOS[2], COPIES], ids=name_of)
def test_an_index_table_of_another_size(ranks_of: Start, tmp_path: Path, scenario: Scenario) -> None:
    """The index table loads the rows that exist in both sizes, with their pending gradients; other tables load all."""
    saved = saved_by(ranks_of, 2, scenario, tmp_path)
    for rows_now, world_size in ((12, 2), (50, 4)):
        other = dataclasses.replace(scenario, index_rows=rows_now)
        expected = {name: {i: row for i, row in saved[name].items() if i < rows_now} for name in saved if "t1" in name}
        assert len(expected["t1"]) == min(rows_now, 31)
        found = joined(other, ranks_of(world_size).run(load_other_size, other, str(tmp_path)))
        for name, values in saved.items():
            some = {i: row for i, row in found[name].items() if name != "t1" or i < 31}
            assert some == expected.get(name, values), name


@on_ranks(2)
@pytest.mark.parametrize("scenario", [*SCENARIOS[:3], *SCENARIOS[-3:], SKETCHED], ids=name_of)
def test_training_continues_with_the_same_bits(tmp_path: Path, scenario: Scenario) -> None:
    """Training continues after a load with the same bits."""
    straight, again = train(sharded(scenario), scenario, range(4)), sharded(scenario)
    rst.Saver().save(straight, tmp_path)
    rst.Saver().load(again, tmp_path)
    for model in (straight, again):
        train(model, scenario, range(4, 8))
    assert_same(owned_rows(again), owned_rows(straight))


def save_deltas(rank: int, world_size: int, scenario: Scenario, paths: list[str], packed: bool) -> list[Bytes]:
    """Writes four saves into these folders, all but the first as deltas. `packed`: all tables share one file, the
    format otherwise used for many tables.
    """
    model, seen = sharded(scenario), []
    for step, path in enumerate(paths):
        train(model, scenario, range(step, step + 1))
        view = table_owners(model)[0].embedding.view("t2")
        if rank == step % world_size and view.count() > 2:
            view.remove(view.ids()[:2])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(manifest, "MANY_TABLES", 1 if packed else manifest.MANY_TABLES)
            rst.Saver().save(model, path, incremental=True)
        seen.append(owned_rows(model))
    return seen


@pytest.mark.parametrize(
    ("scenario", "kind"),
    [
        *((SCENARIOS[0], kind) for kind in ("files", "packs", "folders")),
        *((COPIES, kind) for kind in ("files", "packs")),
        (SCENARIOS[-1], "folders"),
    ],
    ids=lambda each: each if isinstance(each, str) else name_of(each),
)
def test_deltas_of_ranks(ranks_of: Start, tmp_path: Path, scenario: Scenario, kind: str) -> None:
    """Each delta is in the folder of the save before it, or in another folder."""
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
        assert_same(run_alone(scenario, folder)[1], expected)
    assert_same(loaded_by(ranks_of, 4, scenario, folder), expected)


def fail(*_: Any) -> None:
    if Place.rank == 1:
        raise OSError("planted")


@on_ranks(2)
def test_an_error_on_one_rank_is_raised_on_all(rank: int, tmp_path: Path) -> None:
    """On rank 1 only, a file cannot be written, cannot be read, or cannot be read a second time."""
    scenario, message = SCENARIOS[0], "OSError: planted" if rank == 1 else "rank 1 of 2: OSError: planted"
    model, saver = train(sharded(scenario), scenario, range(2)), rst.Saver()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "before_change", fail)
        assert message in error_of(lambda: saver.save(model, tmp_path))
    saver.save(model, tmp_path)
    train(model, scenario, range(2, 3))
    state = owned_rows(model)
    for owner, name in ((save_reader.TensorReader, "verify"), (save_reader, "open_file")):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(owner, name, fail)
            assert message in error_of(lambda: saver.load(model, tmp_path))
        assert_same(owned_rows(model), state, "no rank has the rows of the save")
    train(model, scenario, range(3, 4))
    assert len(list(tmp_path.iterdir())) == 1


@on_ranks(2)
def test_unsharded_tables_beside_sharded_ones_are_refused(rank: int, tmp_path: Path) -> None:
    """One collection of the model is sharded; another is unsharded and differs on each rank."""
    model = sharded(SCENARIOS[0])
    model.module.own = rst.TableBatchedEmbedding([rst.TableConfig("own", 9, 4)], cache=9, device=Place.device)
    own = model.module.own.view("own")
    ids = torch.tensor([3, 4])
    own.write(ids, {"weight": torch.full((2, 4), 1.0 + rank)})
    with pytest.raises(
        ValueError, match=r"^tables \['own'\] are not sharded, so that each of 2 ranks has rows of its own"
    ):
        rst.Saver().save(model, tmp_path)
    run_alone = rst.Saver().save(model.module.own, tmp_path / f"own{rank}")
    rst.Saver().save(model.module.sparse, tmp_path / "sparse")
    own.write(ids, {"weight": torch.zeros(2, 4)})
    rst.Saver().load(model.module.own, run_alone)
    assert (own.read(ids).parts["weight"] == 1.0 + rank).all()


# ---- training and serving after a save


ON: dict[str, Any] = {"cache": 60, "sizes": ((2, 1),), "ids": 200}
OPEN = Scenario("bags", (ROW, TABLE, ROW), optimizer=rst.AccumulateAdagrad, options=WINDOW["options"], **ON, seed=4)


def test_rows_of_all_ranks_are_served(ranks_of: Start, tmp_path: Path) -> None:
    scenario = SCENARIOS[0]
    before = saved_by(ranks_of, 2, scenario, tmp_path)
    for table in ("t0", "t1", "t2"):
        reader = TableReader(tmp_path, table)
        weights, found = reader.find(torch.tensor(list(before[table])))
        assert found.all(), table
        expected = [np.frombuffer(row, np.float32)[: reader.embedding_dim] for row in before[table].values()]
        assert np.array_equal(weights.numpy(), np.stack(expected)), table


@on_ranks(2)
def test_ranks_train_on_while_they_save(tmp_path: Path) -> None:
    """Ranks train at different speeds; the save contains the state at the moment it was started."""
    source, target = train(sharded(OPEN), OPEN, range(4)), sharded(OPEN, 4)
    then = rows(source.module.sparse)
    future = rst.Saver().save(source, tmp_path, background=True)
    train(source, OPEN, range(4, 9))
    future.result(timeout=60)
    later = rows(source.module.sparse)
    rst.Saver().load(target, tmp_path)
    found = rows(target.module.sparse)
    assert_rows({table: {i: found[table][i] for i in values} for table, values in then.items()}, then)
    assert any(not torch.equal(row, later[table][i]) for table, values in then.items() for i, row in values.items())


@on_ranks(2)
def test_each_rank_may_remove_the_folder_before_it_saves(rank: int, world_size: int, tmp_path: Path) -> None:
    """Each rank removes the folder before it saves; the last rank does so while the others are already saving."""
    model, path = sharded(SCENARIOS[0]), tmp_path / "saves"
    if rank == world_size - 1:
        until = time.monotonic() + 0.3
        while not os.path.exists(path) and time.monotonic() < until:
            time.sleep(0.01)
    shutil.rmtree(path, ignore_errors=True)
    saved = rst.Saver().save(model, path)
    assert [str(folder) for folder in path.iterdir() if folder.is_dir()] == [saved]
    assert rst.Saver.get_latest_load_path(path) == saved


@on_ranks(2)
def test_smaller_tables_load_the_rows_that_fit(rank: int, world_size: int) -> None:
    large, small = (
        shard_tables(
            bags_collection(
                Place.device,
                EmbeddingBagConfig(name="t0", num_embeddings=count, embedding_dim=4, feature_names=["f0"]),
            )
        )
        for count in (15, 9)
    )
    given = large.state_dict()
    with pytest.warns(UserWarning, match="the others are left out"):
        small.load_state_dict(given)
    ids, weights = small.state_dict().values()
    assert ids.tolist() == list(range(rank, 9, world_size))
    assert torch.equal(weights, list(given.values())[1][: len(ids)])
    assert int(small.local_shard.embedding.view("t0").ids().max()) < 9, "rows that no lookup can read take memory"
