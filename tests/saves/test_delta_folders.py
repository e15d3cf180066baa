"""Deltas in another folder than their base save: which save each delta follows, and how loads find that save.

The part of a save for which training waits does little work, whatever the folders contain.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tables
import torch
from tables import assert_same, chain, contents, delta, loaded, make, refused, save, train, trained, written

import rec_sdk_torch as rst
from rec_sdk_torch.checkpoint.__main__ import main
from rec_sdk_torch.saves.format import files, folders
from rec_sdk_torch.saves.format.manifest import CACHED, DELTA, FULL, MANIFEST, Manifest, read_manifest
from rec_sdk_torch.saves.save.job import SaveJob
from rec_sdk_torch.serving import TableReader


def full(source: Any, path: Path) -> Manifest:
    return written(source, path, incremental=False)


@pytest.fixture
def two_folders(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "base", tmp_path / "deltas" / "of model"


def base_and_delta(two_folders: tuple[Path, Path]) -> tuple[Any, Manifest, Manifest]:
    """Returns a model, its full save in the first folder, and its delta in the second."""
    source = trained()
    first = full(source, two_folders[0])
    train(source, range(3, 4))
    return source, first, written(source, two_folders[1])


@pytest.mark.parametrize("background", [False, True], ids=["", "in the background"])
def test_a_folder_of_bases_and_one_of_deltas(background: bool, two_folders: tuple[Path, Path]) -> None:
    """Each delta follows the model's last save in either folder; each base save begins a new chain."""
    source, (base, deltas) = make(), two_folders
    found = []
    for step in range(2):
        train(source, range(10 * step, 10 * step + 3))
        found.append(full(source, base))
        for more in (4, 5):
            train(source, range(10 * step + more, 10 * step + more + 1))
            source.view("a").remove(source.view("a").ids()[:2])
            if background:
                job = rst.Saver().save(source, deltas, incremental=True, background=True)
                found.append(read_manifest(Path(job.result(60))))
            else:
                found.append(written(source, deltas))
    assert [each.kind for each in found] == [FULL, DELTA, DELTA] * 2
    assert [each.previous for each in found] == [None, found[0].id, found[1].id, None, found[3].id, found[4].id]
    assert [each.folders for each in found] == [[], *[["../../base"]] * 2] * 2
    for each in found:
        assert each.kind == FULL or sum(file.rows for file in each.files if file.role != CACHED) <= 34
    for paths in ((deltas,), (base, deltas), (deltas, base)):
        assert_same(loaded(paths), source)
    two_steps = loaded(base)
    rst.Saver().load(two_steps, deltas, incremental=True)  # the order of calls in scripts for Rec SDK
    assert_same(two_steps, source)


def test_a_folder_with_a_complete_chain_is_independent(two_folders: tuple[Path, Path]) -> None:
    a, b = two_folders
    source, first, second = base_and_delta(two_folders)
    train(source, range(4, 5))
    third = written(source, a)
    assert (second.previous, third.previous) == (first.id, first.id)
    assert (third.sequence, third.folders) == (1, [])
    train(source, range(5, 6))
    assert written(source, b).previous == third.id  # follows the last save in any folder, since b depends on a anyway
    assert_same(loaded(b), source)
    train(source, range(6, 7))
    assert written(source, a).previous == third.id
    shutil.rmtree(b)
    assert_same(loaded(a), source)


def test_two_folders_that_each_begin_with_a_full_save_do_not_need_each_other(two_folders: tuple[Path, Path]) -> None:
    source, folders_of_both = make(), list(two_folders)
    for path in folders_of_both:
        train(source, range(2))
        full(source, path)
    for step in range(3):
        for path in folders_of_both:
            train(source, range(step, step + 1))
            assert written(source, path).folders == []
    shutil.rmtree(two_folders[0])
    assert_same(loaded(two_folders[1]), source)


@pytest.mark.parametrize("lost", ["deltas", "one of two deltas", "base"])
def test_deltas_after_earlier_saves_were_removed(lost: str, two_folders: tuple[Path, Path]) -> None:
    """As in users' scripts, the folder of deltas is removed before each save, or only the latest delta is kept."""
    (base, deltas), (source, first, _) = two_folders, base_and_delta(two_folders)
    source.view("a").remove(source.view("a").ids()[:2])
    delta(source, deltas)
    shutil.rmtree({"deltas": deltas, "base": base}.get(lost) or min(deltas.iterdir()))
    train(source, range(5, 6))
    now = written(source, deltas)
    assert (now.kind, now.previous) == ((FULL, None) if lost == "base" else (DELTA, first.id))
    assert_same(loaded(deltas), source)


def test_a_delta_after_a_load_follows_what_was_loaded(two_folders: tuple[Path, Path], tmp_path: Path) -> None:
    _, _, last = base_and_delta(two_folders)
    resumed = loaded(two_folders, cache=9)
    train(resumed, range(4, 5))
    now = written(resumed, tmp_path / "third")
    assert (now.kind, now.previous, now.sequence) == (DELTA, last.id, 2)
    assert sum(file.rows for file in now.files if file.role != CACHED) <= 32
    assert sorted(now.folders) == ["../base", "../deltas/of model"]
    assert_same(loaded(tmp_path / "third"), resumed)
    train(resumed, range(5, 6))
    again = written(resumed, tmp_path / "third")
    assert (again.previous, again.folders) == (now.id, now.folders)


def test_folders_that_move(two_folders: tuple[Path, Path], tmp_path: Path) -> None:
    """If both folders are moved together, loads still find the base save. If only one folder is moved, both must be
    passed, unless the model has already read the moved one.

    """
    (base, deltas), (source, first, _) = two_folders, base_and_delta(two_folders)
    whole = tmp_path / "elsewhere" / "and there"
    shutil.copytree(tmp_path, whole, ignore=shutil.ignore_patterns("elsewhere"))
    base.rename(tmp_path / "away")
    assert_same(loaded(whole / "deltas" / "of model"), source)
    target = trained(range(70, 72))
    wrong = f"{first.id}, which is not in {deltas}, {base}; {base}: there is no such folder; if it is elsewhere, pass"
    refused(target, deltas, wrong)
    with pytest.raises(rst.CheckpointError, match="which is not in"):
        TableReader(deltas, "a")
    assert main(["verify", str(deltas)]) == 1
    now, latest = tmp_path / "away", next(deltas.iterdir())
    for paths in ((now, deltas), (now, latest), (next(now.iterdir()), latest)):
        assert_same(loaded(paths), source)
    assert TableReader([now, deltas], "a").find(source.view("a").ids())[1].all()
    assert main(["verify", str(now), str(deltas)]) == 0
    for path in (now, deltas):
        loaded(path, target)
    train(target, range(4, 5))
    following = written(target, deltas)  # the delta records the base save's new location
    assert (following.kind, following.folders) == (DELTA, ["../../away"])
    assert_same(loaded(deltas), target)


def test_the_latest_of_several_folders_is_loaded(
    two_folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later save has a later name than earlier saves in all folders, even within the same second."""
    source, empty = make(), tmp_path / "empty"
    empty.mkdir()
    clock = folders.now()
    monkeypatch.setattr(folders, "now", lambda: clock)
    found: list[str] = []
    for step, place in enumerate((0, 1, 1, 0, 1)):
        train(source, range(step, step + 1))
        found.append(rst.Saver().save(source, two_folders[place], incremental=step != 3))
        for paths in ((*two_folders, empty), (empty, *reversed(two_folders))):
            if all(each.exists() for each in paths):
                assert rst.Saver.get_latest_load_path(paths) == found[-1]
                assert_same(loaded(paths), source)
    names = [Path(each).name for each in found]
    assert names == sorted(set(names))
    with pytest.raises(rst.CheckpointError, match="nowhere: there is no such folder"):
        loaded([two_folders[0], tmp_path / "nowhere"])
    with pytest.raises(rst.CheckpointError, match=r"empty, .*empty: holds no save"):
        loaded([empty, empty])
    with pytest.raises(ValueError, match="path is empty"):
        loaded([], source)


def test_a_part_of_a_model_does_not_follow_a_save_of_the_whole(two_folders: tuple[Path, Path]) -> None:
    model = torch.nn.ModuleList([make(seed=1), make(seed=2)])
    for each in model:
        train(each, range(3))
    base, deltas = two_folders
    whole = full(model, base)
    assert [written(model[0], deltas).kind for _ in range(2)] == [FULL, DELTA]
    now = written(model, deltas)
    assert (now.kind, now.previous) == (DELTA, whole.id)
    target = loaded(deltas, torch.nn.ModuleList([make(seed=3), make(seed=4)]))
    for each, its in zip(model, target, strict=True):
        assert_same(its, each)


def test_copies_of_a_save_in_other_folders(two_folders: tuple[Path, Path], tmp_path: Path) -> None:
    """A copy of a save in another folder can replace the original; two copies in one folder are ambiguous and
    refused.
    """
    (base, deltas), (source, _, _) = two_folders, base_and_delta(two_folders)
    shutil.copytree(base, tmp_path / "copy")
    assert_same(loaded([tmp_path / "copy", deltas]), source)
    shutil.copytree(next(base.iterdir()), base / "20010101000000")
    refused(make(), deltas, "the same save as")
    assert written(source, deltas).kind == FULL


def _write(save: Path, body: dict[str, Any]) -> None:
    """Writes a manifest with a correct checksum."""
    manifest = read_manifest(save)
    for name, value in body.items():
        object.__setattr__(manifest, name, value)
    (save / MANIFEST).write_bytes(manifest.to_bytes())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (["/"], r"folders\[0\] is '/', expected a path relative to the folder"),
        (["a\0b"], "expected a path relative to the folder"),
        ([""], "expected a path relative to the folder"),
        ([7], "expected a string"),
        ("x", "expected a list"),
        (["x" * 300], "which is not in .*File name too long"),
        (["../nowhere", "../base"], None),
    ],
)
def test_folders_of_a_manifest(value: Any, message: str | None, two_folders: tuple[Path, Path]) -> None:
    deltas = two_folders[0].parent / "deltas"
    source, _, _ = base_and_delta((two_folders[0], deltas))
    _write(next(deltas.iterdir()), {"folders": value})
    if message is None:
        assert_same(loaded(deltas), source)
    else:
        refused(make(), deltas, message)


def test_the_version_says_that_other_folders_are_needed(two_folders: tuple[Path, Path]) -> None:
    """Without a newer format version, former versions would report that the base save is missing beside the delta."""
    (base, deltas), (source, _, _) = two_folders, base_and_delta(two_folders)
    full(source, base)
    saves = *sorted(base.iterdir()), *deltas.iterdir()
    assert [json.loads((each / MANIFEST).read_text())["version"] for each in saves] == [1, 1, 3]
    save = saves[-1]
    body = (save / MANIFEST).read_text().replace('"version": 3', '"version": 2')
    checksum = json.loads(body)["checksum"]
    plain = body.replace(f'\n "checksum": {checksum},', "")
    (save / MANIFEST).write_text(body.replace(str(checksum), str(zlib.crc32(plain.encode()))))
    refused(make(), deltas, "it follows saves in other folders, which requires format version 3")
    _write(saves[0], {"folders": [".."]})
    refused(make(), saves[0], "a full save follows no other save")


def test_the_command_shows_where_a_base_is(two_folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    (base, deltas), (_, first, _) = two_folders, base_and_delta(two_folders)
    assert main(["show", str(base), str(deltas)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "full" in lines[0]
    assert f"delta number 1 after {first.id[:8]} with ../../base  id" in lines[1]
    assert main(["export", str(deltas), str(base.parent / "out")]) == 0
    assert len(os.listdir(base.parent / "out")) == 4


def test_a_reader_follows_both_folders(two_folders: tuple[Path, Path]) -> None:
    source, ids = trained(), torch.arange(tables.IDS)
    full(source, two_folders[0])
    reader, alone = TableReader(list(two_folders[:1]), "b"), None
    two_folders[1].mkdir(parents=True)
    both = TableReader(two_folders, "b")
    for step, place in enumerate((1, 1, 0, 1, 0)):
        train(source, range(step, step + 1))
        save(source, two_folders[place], incremental=place == 1)
        alone = alone or TableReader(two_folders[1], "b")
        expected = source.view("b").read(ids).parts["weight"]
        assert both.refresh()
        assert torch.equal(both.lookup(ids), expected)
        assert (reader if place == 0 else alone).refresh() is (step > 0)
        assert torch.equal((reader if place == 0 else alone).lookup(ids), expected)


def load_if_complete(path: Path) -> Any:
    """Returns a model with the save loaded, or None if a save of its chain has been removed."""
    try:
        return loaded(path)
    except rst.CheckpointError as error:
        return None if "which is not in" in str(error) else pytest.fail(str(error))


def test_random_saves_over_folders(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Random sequences of training, removals, full saves and deltas in any of three folders, some of which are removed.

    The last save, and each save whose chain is complete, restores the tables as they were when it was written.
    """
    for seed in range(8) if request.config.getoption("--full") else [request.config.getoption("--day") % 8]:
        random = np.random.default_rng(seed)
        paths = [tmp_path / str(seed) / name for name in ("a", "b", "c/d")]
        source, then, kinds = make(), {}, []
        for step in range(40):
            action = random.choice(["train", "remove", "full", "delta", "delta", "lose", "load"])
            path = paths[random.integers(3)]
            one = sorted(then)[random.integers(len(then))] if then else None
            if action == "train":
                train(source, range(100 * seed + step, 100 * seed + step + 1))
            elif action == "remove":
                source.view("a").remove(torch.from_numpy(random.choice(tables.IDS, 5, replace=False)))
            elif action in ("full", "delta"):
                folder = save(source, path, incremental=action == "delta")
                then[folder] = contents(source)
                kinds.append(read_manifest(folder).kind)
                assert_same(load_if_complete(folder), then[folder])
            elif action == "lose" and one is not None and random.integers(2):
                shutil.rmtree(one)
                del then[one]
            elif action == "load" and one is not None:
                source = load_if_complete(one) or source
        assert {FULL, DELTA} <= set(kinds)
        found = {folder: load_if_complete(folder) for folder in then}
        for folder, target in found.items():
            if target is not None:
                assert_same(target, then[folder])
        assert any(target is not None for target in found.values())


# ---- file reads at the start of a save


def record_reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Returns a list to which every save is added whose manifest is read from now on."""
    found: list[Path] = []

    def read(save: Path) -> Manifest:
        found.append(save)
        return read_manifest(save)

    monkeypatch.setattr(folders, "read_manifest", read)
    return found


def test_manifests_of_a_chain_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = record_reads(monkeypatch)
    source, saves = chain(tmp_path)
    assert not read  # no manifest is read, since this process wrote them
    monkeypatch.setattr(folders, "_links", {})  # emulates a process that has not written these saves
    assert [written(source, tmp_path).kind for _ in range(3)] == [DELTA] * 3
    assert sorted(read) == saves


def test_training_does_not_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, _ = chain(tmp_path, 2)
    calls: list[str] = []
    monkeypatch.setattr(files, "before_change", lambda call, path: calls.append(call))
    for incremental in (False, True):
        job = SaveJob(source, tmp_path, incremental)
        assert calls == ["mkdir"]
        job.run()
        calls.clear()


def replace_manifest(manifest: Path) -> None:
    """Replaces a manifest by the manifest of a save with another id, of the same length."""
    found = read_manifest(manifest.parent).id
    manifest.write_text(manifest.read_text().replace(found, "f" * len(found)))


CHANGES: dict[str, Callable[[Path], object]] = {
    "removed": shutil.rmtree,
    "without a manifest": lambda save: (save / MANIFEST).unlink(),
    "damaged": lambda save: (save / MANIFEST).write_bytes((save / MANIFEST).read_bytes()[:-20]),
    "another": lambda save: replace_manifest(save / MANIFEST),
    "twice": lambda save: shutil.copytree(save, save.parent / "20010101000000"),
}


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("change", CHANGES)
def test_an_incomplete_chain_is_not_extended(change: str, place: int, tmp_path: Path) -> None:
    source, saves = chain(tmp_path, 3)
    CHANGES[change](saves[place])
    for step, kind in ((5, FULL), (6, DELTA)):
        train(source, range(step, step + 1))
        assert written(source, tmp_path).kind == kind
    if change != "twice":  # a chain with two copies of a save is refused until one is removed
        assert_same(loaded(tmp_path), source)
