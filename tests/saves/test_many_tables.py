"""Saves of many tables need no more files, syncs and threads than saves of few tables, and have the same contents."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import odd_saves
import pytest
import tables
import torch
from embeddings import embedding_of
from tables import ADAGRAD, WINDOWS, assert_same, delta, loaded, refused, save, trained

import rec_sdk_torch as rst
from rec_sdk_torch.checkpoint.__main__ import main
from rec_sdk_torch.rules import Count
from rec_sdk_torch.saves.format import files, manifest, tensors
from rec_sdk_torch.saves.format.folders import chain_of
from rec_sdk_torch.saves.format.index import SMALL_ROWS, index_path
from rec_sdk_torch.saves.format.manifest import MANIFEST, MANY_TABLES, PACKED_VERSION, read_manifest
from rec_sdk_torch.saves.format.tensors import TensorReader
from rec_sdk_torch.saves.load import save_reader
from rec_sdk_torch.saves.load.loader import check_fit
from rec_sdk_torch.saves.load.save_reader import match_tables, verify_files, verify_tables
from rec_sdk_torch.saves.owners import table_owners
from rec_sdk_torch.serving import TableReader
from rec_sdk_torch.tbe import Pooling, TableBatchedEmbedding, TableConfig
from rec_sdk_torch.tbe.config.lifecycle import TableLifecycle

LIFE = TableLifecycle(admission=Count(2))


def make(count: int, optimizer: Any = ADAGRAD, lifecycle: TableLifecycle | None = None) -> TableBatchedEmbedding:
    """Builds `count` hash tables of 12 ids."""
    configs = [
        TableConfig(f"t{i}", 12, 4, pooling=Pooling.SUM, track_changes=True, lifecycle=lifecycle) for i in range(count)
    ]
    return embedding_of(*configs, optimizer=optimizer, cache=12)


def train(source: TableBatchedEmbedding, first: int) -> None:
    """Runs a training step with six ids of each table, two of which occur twice."""
    count = len(source.tables)
    ids = torch.tensor([0, 1, 2, 3, 0, 1]).add(first).repeat(count)
    source(ids, torch.arange(0, 6 * count + 1, 6)).square().sum().backward()


@pytest.fixture
def packs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes saves of few tables use packs, as saves of many tables do."""
    monkeypatch.setattr(manifest, "MANY_TABLES", 1)


# ---- numbers of calls, files and threads


def calls_of(work: Callable[[], Any]) -> Counter[str]:
    """Counts the calls that change or open files, and the threads that are started."""
    found: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "before_change", lambda call, path: found.update([call]))
        for owner, name in ((os, "fsync"), (os, "open"), (threading.Thread, "start")):
            patch.setattr(owner, name, counting(found, name, getattr(owner, name)))
        work()
    return found


def counting(found: Counter[str], name: str, call: Any) -> Any:
    def counted(*given: Any, **options: Any) -> Any:
        found[name] += 1
        return call(*given, **options)

    return counted


def saves_and_loads(
    count: int, path: Path, optimizer: Any, lifecycle: TableLifecycle | None
) -> dict[str, Counter[str]]:
    source, target = make(count, optimizer, lifecycle), make(count, optimizer, lifecycle)
    saver, found = rst.Saver(), {}
    for first in range(3):
        train(source, first)
    found["full"] = calls_of(lambda: saver.save(source, path))
    for config in source.tables:  # a delta with rows, removed ids, and pending gradients
        source.view(config.name).remove(torch.tensor([0]))
    train(source, 1)
    found["delta"] = calls_of(lambda: saver.save(source, path, incremental=True))
    train(source, 4)
    found["in the background"] = calls_of(lambda: saver.save(source, path, incremental=True, background=True).result())
    found["load"] = calls_of(lambda: saver.load(target, path))
    found["verify"] = calls_of(lambda: main(["verify", str(path)]))
    assert_same(target, source)
    return found


@pytest.mark.parametrize(
    ("optimizer", "lifecycle"),
    [(ADAGRAD, None), (WINDOWS, None), (ADAGRAD, LIFE)],
    ids=["rows", "windows", "candidates"],
)
def test_the_work_does_not_grow_with_the_tables(
    optimizer: Any, lifecycle: TableLifecycle | None, tmp_path: Path
) -> None:
    few, many = (saves_and_loads(n, tmp_path / str(n), optimizer, lifecycle) for n in (MANY_TABLES, 2 * MANY_TABLES))
    assert many == few
    for kind in ("full", "delta", "in the background"):
        assert many[kind]["fsync"] <= 6, many
        assert many[kind]["create"] == 2, "a pack and the manifest"
        assert many[kind]["write"] == 2
    assert many["load"]["fsync"] == 0
    assert many["load"]["open"] <= 4 * 3, "of each save its manifest and its pack, and their folders"


class Counted(list[Any]):
    """A list that counts how often it is iterated over."""

    walks = 0

    def __iter__(self) -> Any:
        Counted.walks += 1
        return super().__iter__()


def test_no_list_is_searched_for_each_table(tmp_path: Path) -> None:
    """Tables and files of manifests are looked up by name, not searched for in lists."""
    walks = []
    for count in (MANY_TABLES, 3 * MANY_TABLES):
        source = make(count)
        train(source, 0)
        delta(source, tmp_path / str(count))
        train(source, 1)
        folder = delta(source, tmp_path / str(count))
        chain = chain_of(folder)
        for _, each in chain:
            each.__dict__.update(tables=Counted(each.tables), files=Counted(each.files))
        target = make(count)
        target.tables = Counted(target.tables)
        Counted.walks = 0
        owners = table_owners(target)
        verify_files(chain)
        verify_tables(chain)
        check_fit(match_tables(owners, chain))
        walks.append(Counted.walks)
    assert walks[0] == walks[1] > 0


MOST_CALLS = {"save": 430, "load": 750}
"""The largest number of calls of Python and C for a table with Adagrad that tracks changes."""


def python_calls(work: Callable[[], Any]) -> Counter[str]:
    """Counts the calls of Python and C functions and, separately, the calls that parse a header."""
    found: Counter[str] = Counter()

    def note(frame: Any, event: str, _: object) -> None:
        if event in ("call", "c_call"):
            found["all"] += 1
            found["headers"] += event == "call" and frame.f_code is TensorReader._parse.__code__

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


def test_a_table_costs_the_same_calls_among_many(tmp_path: Path) -> None:
    """Each header is read once, and tensors of one shape are decoded together."""
    calls: list[dict[str, float]] = []
    for count in (MANY_TABLES, 3 * MANY_TABLES):
        source, target, path = make(count), make(count), tmp_path / str(count)
        train(source, 0)
        target.view("t0").count()
        decoded = tensors._parse_tensors.cache_info().misses
        saving = python_calls(partial(save, source, path))
        loading = python_calls(partial(loaded, path, target))
        assert loading["headers"] == 2 * count  # one file of rows and one list of cached rows per table
        assert tensors._parse_tensors.cache_info().misses - decoded <= 2
        calls.append({"save": saving["all"] / count, "load": loading["all"] / count})
    for name, most in MOST_CALLS.items():
        assert calls[1][name] < 1.02 * calls[0][name], calls
        assert calls[1][name] < most, calls


def test_manifests_do_not_use_the_slow_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own encoder, which an indent requires, would take a tenth of a save of many tables."""
    source = make(MANY_TABLES)
    train(source, 0)

    def refuse(*given: Any, **options: Any) -> Any:
        raise AssertionError("the encoder in Python is used")

    monkeypatch.setattr("json.encoder._make_iterencode", refuse)
    folder = delta(source, tmp_path)
    monkeypatch.undo()
    lines = (folder / MANIFEST).read_text().splitlines()
    assert sum(line.startswith("  {") for line in lines) == MANY_TABLES + 1 + len(read_manifest(folder).files)


def test_a_thread_reads_ahead_where_rows_are_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows are read without a thread, since starting a thread takes longer than reading them."""
    source, started = trained(), list[str]()
    save(source, tmp_path)

    class Noted(save_reader.Pool):
        def __init__(self, name: str) -> None:
            started.append(name)
            super().__init__(name)

    monkeypatch.setattr(save_reader, "Pool", Noted)
    assert_same(loaded(tmp_path), source)
    assert started == []
    monkeypatch.setattr("rec_sdk_torch.tbe.rows.table_chunks.CHUNK_BYTES", 100)
    assert_same(loaded(tmp_path), source)
    assert len(started) == 4, "one for each table"


# ---- contents of saves


@pytest.mark.usefixtures("packs")
def test_tables_of_every_kind_share_a_pack(tmp_path: Path) -> None:
    source = tables.make(WINDOWS)
    for step in range(4):
        tables.train(source, range(step, step + 1))
        folder = delta(source, tmp_path)
        assert_same(loaded(tmp_path, optimizer=WINDOWS), source)
    assert sorted(each.name for each in folder.iterdir()) == [MANIFEST, "pack-00000-00000"]
    assert json.loads((folder / MANIFEST).read_text())["version"] == PACKED_VERSION
    assert all(file.offset is not None for file in read_manifest(folder).files)


@pytest.mark.usefixtures("packs")
def test_files_that_are_large_and_packs_that_are_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors larger than a write buffer are written separately; smaller tensors share a buffer."""
    monkeypatch.setattr("rec_sdk_torch.saves.format.tensors.WRITE_BYTES", 1500)
    monkeypatch.setattr("rec_sdk_torch.saves.save.rank_writer.MAX_PACKED_BYTES", 3000)
    monkeypatch.setattr("rec_sdk_torch.saves.save.rank_writer.MAX_FILE_BYTES", 6000)
    monkeypatch.setattr("rec_sdk_torch.tbe.rows.snapshot.CHUNK_BYTES", 100)
    source = trained(8, WINDOWS)
    folder = save(source, tmp_path)
    found = read_manifest(folder).files
    kinds = [(file.path, file.bytes > 1500) for file in found if file.offset is not None]
    assert len(dict(kinds)) > 1
    assert any(kinds[i : i + 2] == [(path, False), (path, True)] for i, (path, _) in enumerate(kinds))
    assert any(file.offset is None for file in found)
    sizes = Counter[str]()
    for file in found:
        sizes[file.path] += file.bytes
        if file.offset is not None:
            length = (folder / file.path).read_bytes()[file.offset :][:8]
            assert (file.offset + 8 + int.from_bytes(length, "little")) % 64 == 0
    assert {path: (folder / path).stat().st_size for path in sizes} == sizes, "no byte is without a checksum"
    assert_same(loaded(tmp_path, optimizer=WINDOWS), source)


@pytest.mark.usefixtures("packs")
def test_small_tables_have_no_index_and_are_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers serve small tables without writing an index, so the folder may be read-only.

    Larger tables have an index.
    """
    source = tables.make()
    for step in range(3):
        tables.train(source, range(step, step + 1))
        if step == 1:
            source.view("a").remove(source.view("a").ids()[:3])
        delta(source, tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert not [path for path in before if path.name.startswith("index")]
    for name in "abcd":
        reader, ids = TableReader(tmp_path, name), torch.arange(60)
        known = source.view(name).knows(ids)
        rows, found = reader.find(ids)
        assert torch.equal(found, known)
        assert torch.equal(rows[known], source.view(name).read(ids[known]).parts["weight"])
    assert sorted(tmp_path.rglob("*")) == before
    monkeypatch.setattr("rec_sdk_torch.saves.format.index.SMALL_ROWS", 59)
    folder = save(source, tmp_path)
    assert [index_path(folder, key).exists() for key in "abcd"] == [False, True, False, True]
    assert SMALL_ROWS > 59
    assert main(["verify", str(tmp_path)]) == 0
    assert main(["export", str(tmp_path), str(tmp_path / "out")]) == 0
    with TensorReader(tmp_path / "out" / "b.safetensors") as reader:
        assert torch.equal(reader.read("weight"), source.view("b").read(reader.read("ids")).parts["weight"])


def test_a_manifest_without_packs_is_of_version_1(tmp_path: Path) -> None:
    """The manifest's text and checksum equal what the json module produces."""
    folder = save(trained(2, WINDOWS), tmp_path)
    raw = (folder / MANIFEST).read_bytes()
    body = json.loads(raw)
    assert body["version"] == 1
    assert not any("offset" in file for file in body["files"])
    odd_saves.write_manifest(folder, body)
    assert (folder / MANIFEST).read_bytes() == raw


# ---- errors


@pytest.mark.usefixtures("packs")
def test_invalid_offsets_in_a_pack_are_refused(tmp_path: Path) -> None:
    source, target = trained(), tables.make()
    folder = save(source, tmp_path)
    body = odd_saves.body_of(folder)
    first, second, *others = body["files"]
    size = (folder / first["path"]).stat().st_size
    alone = {name: value for name, value in first.items() if name != "offset"}
    moved = {**first, **{name: second[name] for name in ("offset", "bytes", "checksums", "rows")}}
    for change, message in (
        ({"files": [{**first, "offset": -1}, second]}, "offset is -1, expected a number from 0"),
        ({"files": [{**first, "offset": "0"}, second]}, "offset is '0', expected an int"),
        ({"files": [{**first, "offset": 1}, second]}, "at bytes 1 and [0-9]+, which overlap"),
        ({"files": [{**first, "offset": size}, second]}, "damaged, it ends at byte"),
        ({"files": [{**first, "offset": 2**62}, second]}, "damaged, it ends at byte"),
        ({"files": [{**first, "offset": second["offset"]}, second]}, "which overlap"),
        ({"files": [{**first, "offset": 1, "bytes": first["bytes"] - 1}, second]}, "damaged, its header"),
        ({"files": [alone, second]}, "damaged, it has [0-9]+ bytes, expected"),
        ({"files": [moved]}, "files are missing|expected"),
        ({"version": 1}, "requires format version 2"),
    ):
        files_of = change.get("files", [first, second])
        odd_saves.write_manifest(folder, body | change | {"files": [*files_of, *others]})
        refused(target, folder, message)
    odd_saves.write_manifest(folder, body)
    assert_same(loaded(folder, target), source)
