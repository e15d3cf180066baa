"""Incremental saves (deltas): their contents, and chains of deltas."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tables
import torch
from embeddings import SGD, embedding_of
from tables import ADAGRAD, WINDOWS, assert_same, contents, delta, loaded, make, refused, save, train, trained, written

from rec_sdk_torch.rules import Age, Rows
from rec_sdk_torch.saves.format.manifest import DELTA, FULL, REMOVED, ROWS, read_manifest
from rec_sdk_torch.saves.format.tensors import TensorReader
from rec_sdk_torch.saves.save.base_saves import base_saves_of
from rec_sdk_torch.serving import TableReader
from rec_sdk_torch.tbe import Pooling, TableBatchedEmbedding, TableConfig, TableLifecycle


def ids_in(folder: Path, table: str, role: str) -> list[int]:
    found: list[int] = []
    for file in read_manifest(folder).files_of(table, role):
        with TensorReader(folder / file.path) as reader:
            found += reader.read("ids").tolist()
    return sorted(found)


@pytest.mark.parametrize("optimizer", [ADAGRAD, WINDOWS], ids=str)
@pytest.mark.parametrize("cache", [9, 60])
def test_random_sequences_of_changes_and_saves(
    optimizer: Any, cache: int, tmp_path: Path, device: Any, request: pytest.FixtureRequest
) -> None:
    """Training, removals, writes and saves in random order: each save restores the tables as they were."""
    for seed in range(4) if request.config.getoption("--full") else [request.config.getoption("--day") % 4]:
        random = np.random.default_rng(seed)
        path = tmp_path / str(seed)
        source = make(optimizer, cache=cache, device=device)
        snapshots = {}
        for step in range(30):
            action = random.choice(["train", "train", "remove", "write", "save"])
            table = source.view(random.choice(list("abcd")))
            ids = torch.from_numpy(random.choice(tables.IDS, 5, replace=False))
            if action == "train":
                train(source, range(100 * seed + step, 100 * seed + step + 1))
            elif action == "remove" and not source.layout.window_open():
                table.remove(ids)
            elif action == "write":
                weights = torch.full((5, table.config.embedding_dim), float(step)).to(table.config.weight_dtype)
                table.write(ids, {"weight": weights})
            elif action == "save":
                snapshots[delta(source, path)] = contents(source)
        kinds = [read_manifest(folder).kind for folder in snapshots]
        assert kinds == [FULL, *[DELTA] * (len(kinds) - 1)]
        assert len(kinds) > 2
        for folder, expected in snapshots.items():
            assert_same(loaded(folder, optimizer=optimizer, cache=29, device=device), expected)


def test_a_delta_has_what_changed(tmp_path: Path) -> None:
    source = trained(6)
    delta(source, tmp_path)
    source(torch.tensor([3, 3, 4, 5, 6, 6, 7, 8]), torch.arange(9)[[0, 2, 4, 6, 8]]).sum().backward()
    removed = int(source.view("a").ids()[0])
    source.view("a").remove(torch.tensor([removed]))
    changed = delta(source, tmp_path)
    assert ids_in(changed, "a", ROWS) == sorted({3} - {removed})
    assert ids_in(changed, "a", REMOVED) == [removed]
    assert ids_in(changed, "b", ROWS) == [4, 5]
    assert ids_in(changed, "d", ROWS) == [7, 8]
    nothing = delta(source, tmp_path)
    assert not [name for name in "abcd" if ids_in(nothing, name, ROWS) or ids_in(nothing, name, REMOVED)]
    assert_same(loaded(tmp_path), source)


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_delta_reads_changed_rows_only(in_flight: bool, tmp_path: Path) -> None:
    """A delta of a table with 60,000 rows reads only the versions of changed rows.

    A delta requested while batches are in flight also reads rows that had changed before its base save.
    """
    rows = 60_000
    fields: dict[str, Any] = {"pooling": Pooling.SUM, "track_changes": True}
    configs = [TableConfig(name, rows, 4, hashed=name == "a", **fields) for name in "ab"]
    source = embedding_of(*configs, cache=1000)
    for name in "ab":
        source.view(name).write(torch.arange(rows), {"weight": torch.zeros(rows, 4)})
    group, _ = source.layout.find_table("a")

    def step(ids: torch.Tensor) -> torch.Tensor:
        return source(ids.repeat(2), torch.arange(2 * len(ids) + 1))

    before, changed, waiting = torch.arange(50, 90), torch.arange(10, 40), None
    step(before).sum().backward()
    if in_flight:
        waiting = step(before)
    delta(source, tmp_path)
    base_save = base_saves_of(source)[0]
    if waiting is not None:
        waiting.sum().backward()
    step(changed).sum().backward()
    expected = sorted({*changed.tolist(), *(before.tolist() if in_flight else [])})
    for table_number in range(2):
        ids, looked_at = group.engine.saves.changed_ids(table_number, base_save.versions[0])
        assert ids.tolist() == expected
        assert looked_at == len(expected)
    assert ids_in(delta(source, tmp_path), "a", ROWS) == expected
    assert_same(loaded(tmp_path, embedding_of(*configs, cache=1000)), source)


def test_a_reinserted_id_is_a_new_row(tmp_path: Path) -> None:
    source = trained(4)
    delta(source, tmp_path)
    view = source.view("a")
    ids, weight = view.ids()[:3], {"weight": torch.ones(1, 4)}
    view.remove(ids)
    assert ids_in(delta(source, tmp_path), "a", REMOVED) == sorted(ids.tolist())
    view.write(ids[:1], weight)
    assert ids_in(delta(source, tmp_path), "a", REMOVED) == []
    view.remove(ids[:1])
    view.write(ids[:1], weight)
    third = delta(source, tmp_path)
    assert ids_in(third, "a", REMOVED) == ids[:1].tolist() == ids_in(third, "a", ROWS)
    assert_same(loaded(tmp_path), source)


def aging() -> TableBatchedEmbedding:
    lifecycle = TableLifecycle(eviction=Age(20), bound=Rows(100))
    return embedding_of(
        TableConfig("t", 100, 4, pooling=Pooling.NONE, track_changes=True, lifecycle=lifecycle), optimizer=SGD, cache=50
    )


@pytest.mark.parametrize(
    ("column", "expected"), [("count", [7, 8, 9] + [1] * 7), ("timestamp", [0, 1, 2, 3] + [4] * 6)]
)
def test_columns_that_change_between_batches_are_in_the_next_delta(
    column: str, expected: list[int], tmp_path: Path
) -> None:
    """Two changes without a batch: a user writes counters, or an eviction lowers timestamps after the clock was
    set back.
    """
    source, ids = aging(), torch.arange(10)
    source(ids, torch.arange(11), timestamps=ids).sum().backward()
    delta(source, tmp_path)
    view = source.view("t")
    if column == "count":
        view.write_row_columns(ids[:3], {"count": torch.tensor([7, 8, 9])})
    else:
        view.set_clocks({"timestamp": 4})
        assert view.evict() == 0
        view.set_clocks({"timestamp": 8})
    assert written(source, tmp_path).kind == DELTA
    assert loaded(tmp_path, aging()).view("t").row_columns(ids)[column].tolist() == expected


def test_a_removal_is_in_one_delta(tmp_path: Path) -> None:
    """The log of removed ids is kept for a base save in another folder, but a delta must read only its newest part."""
    source = trained(4)
    for folder in ("one", "other"):
        delta(source, tmp_path / folder)
    ids = source.view("a").ids()[:3]
    source.view("a").remove(ids)
    source.view("a").write(ids[:1], {"weight": torch.ones(1, 4)})
    assert ids_in(delta(source, tmp_path / "one"), "a", REMOVED) == sorted(ids.tolist())
    assert ids_in(delta(source, tmp_path / "one"), "a", REMOVED) == []
    for folder in ("one", "other"):
        delta(source, tmp_path / folder)
        assert_same(loaded(tmp_path / folder), source)


def test_a_full_save_replaces_a_delta_without_base(tmp_path: Path) -> None:
    source = trained()

    def kind(where: str = "a") -> str:
        return written(source, tmp_path / where).kind

    assert [kind(), kind()] == [FULL, DELTA]
    assert [kind("b"), kind("b"), kind()] == [DELTA, DELTA, DELTA]  # each folder has its own base save
    source.load_state_dict(make().state_dict())  # the load removes all ids at once
    assert [kind(), kind()] == [FULL, DELTA]
    save(source, tmp_path / "a")
    assert kind() == DELTA  # a delta of that full save
    for folder in ("a", "b"):
        shutil.rmtree(tmp_path / folder)
    assert kind() == FULL  # the save that a delta would follow has been removed
    for number in range(5):
        save(source, tmp_path / f"c{number}")
    assert written(source, tmp_path / "a").folders == ["../c4"]  # too many folders to have a base save in each


@pytest.mark.parametrize("place", [0, 1])
def test_a_delta_can_follow_in_one_of_two_collections_alone(place: int, tmp_path: Path) -> None:
    source, target = (torch.nn.ModuleList([make(seed=1), make(seed=2)]) for _ in range(2))
    for each in source:
        train(each, range(3))
    kinds = [written(source, tmp_path).kind for _ in range(2)]
    source[place].load_state_dict(make().state_dict())  # the load removes all ids at once
    kinds += [written(source, tmp_path).kind for _ in range(2)]
    assert kinds == [FULL, DELTA, FULL, DELTA]
    loaded(tmp_path, target)
    for each, its in zip(source, target, strict=True):
        assert_same(its, each)


def test_tables_that_keep_no_changes(tmp_path: Path) -> None:
    source = make(track_changes=False)
    with pytest.raises(ValueError, match=r"tables \['a', 'b', 'c', 'd'\] do not track changes.*is_incremental=True"):
        delta(source, tmp_path)
    assert not os.listdir(tmp_path)


def test_chains_with_a_save_missing(tmp_path: Path) -> None:
    source, folders = tables.chain(tmp_path / "saves")
    target = trained(range(70, 72))
    for folder in folders[:3]:
        folder.rename(tmp_path / "away")
        refused(target, tmp_path / "saves", "which is not in")
        (tmp_path / "away").rename(folder)
    shutil.copytree(folders[0], tmp_path / "other" / folders[0].name)
    shutil.copytree(folders[3], tmp_path / "other" / folders[3].name)
    refused(target, tmp_path / "other", "a delta of the save")
    assert_same(loaded(tmp_path / "saves", target), source)


def test_the_log_of_removed_ids_has_each_id_once(tmp_path: Path) -> None:
    """The log's size depends on the number of distinct ids, not of removals.

    It is freed once all folders' saves have them.
    """
    source = make()
    view, ids = source.view("a"), torch.arange(405)

    def come_and_leave(times: int, ids: torch.Tensor) -> None:
        for _ in range(times):
            view.write(ids, {"weight": torch.zeros(len(ids), 4)})
            view.remove(ids)

    for folder in ("other", "one"):  # the log keeps ids removed between the two saves, for the first folder
        delta(source, tmp_path / folder)
        come_and_leave(1, ids)
    come_and_leave(10, ids[:400])
    before = view.memory()["column_bytes"]
    come_and_leave(100, ids[:400])
    assert view.memory()["column_bytes"] == before
    view.write(ids[:5], {"weight": torch.zeros(5, 4)})
    for folder in ("one", "other"):
        assert ids_in(delta(source, tmp_path / folder), "a", REMOVED) == list(range(405))
    view.remove(ids[:1])
    assert ids_in(delta(source, tmp_path / "one"), "a", REMOVED) == [0]
    assert view.memory()["column_bytes"] <= before - 3 * 16 * 400
    delta(source, tmp_path / "other")
    group, table = source.layout.find_table("a")
    assert len(group.engine.saves.removed_ids(table, 0)[0]) == 0


def test_is_incremental_of_a_collection(tmp_path: Path) -> None:
    jagged, batches = pytest.importorskip("collection_factory"), pytest.importorskip("batches")
    config = jagged.bag_config(is_incremental=True)
    collections = (jagged.bags_collection(torch.device("cpu"), config) for _ in range(2))
    source, target = (jagged.apply(each, torch.optim.Adagrad, lr=0.1) for each in collections)
    for ids in ([[1], [2, 5]], [[3, 1], [7]]):
        source(batches.jagged({"f0": ids})).values().sum().backward()
        delta(source, tmp_path)
    loaded(tmp_path, target)
    assert_same(target.embedding, source.embedding)


@pytest.mark.parametrize("change", [{"weight_dtype": torch.float16}, {"hashed": True, "num_embeddings": 90}], ids=str)
def test_a_delta_follows_no_save_of_other_tables(change: dict[str, Any], tmp_path: Path) -> None:
    """If a save is loaded into tables of another dtype or into hash tables, the next save begins a new chain."""
    config = TableConfig("t", 60, 4, hashed=False, track_changes=True)
    source, target = (embedding_of(each, optimizer=SGD, cache=60) for each in (config, replace(config, **change)))
    source.view("t").write(torch.arange(60), {"weight": torch.rand(60, 4)})
    delta(source, tmp_path)
    loaded(tmp_path, target)
    for kind, value in ((FULL, 1.0), (DELTA, 0.0)):
        target.view("t").write(torch.arange(5), {"weight": torch.full((5, 4), value)})
        assert written(target, tmp_path).kind == kind
    weights = target.view("t").read(torch.arange(60)).parts["weight"]
    assert torch.equal(TableReader(tmp_path, "t").lookup(torch.arange(60)), weights)
