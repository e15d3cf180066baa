"""A save does little while training waits for its moment, whatever the folder of saves holds."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tables import contents, make, train

import rec_sdk_torch as rst
from rec_sdk_torch.saves.format import files, folders
from rec_sdk_torch.saves.format.manifest import DELTA, FULL, MANIFEST, Manifest, read_manifest
from rec_sdk_torch.saves.save.job import SaveJob
from rec_sdk_torch.tbe import TableBatchedEmbedding


def chain(source: TableBatchedEmbedding, path: Path, saves: int) -> list[Path]:
    """A full save and deltas."""
    found = []
    for step in range(saves):
        train(source, range(step, step + 1))
        found.append(Path(rst.Saver().save(source, path, incremental=True)))
    return found


def counted(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Saves whose manifests are read from now on."""
    found: list[Path] = []

    def read(save: Path) -> Manifest:
        found.append(save)
        return read_manifest(save)

    monkeypatch.setattr(folders, "read_manifest", read)
    return found


def test_manifests_of_a_chain_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make()
    read = counted(monkeypatch)
    saves = chain(source, tmp_path, 4)
    assert not read  # this process wrote them
    monkeypatch.setattr(folders, "_links", {})  # as in one that loaded them
    later = chain(source, tmp_path, 3)
    assert sorted(read) == saves
    assert [read_manifest(each).kind for each in (*saves, *later)] == [FULL, *[DELTA] * 6]


def test_nobody_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make()
    chain(source, tmp_path, 2)
    calls: list[str] = []
    monkeypatch.setattr(files, "before", lambda call, path: calls.append(call))
    for incremental in (False, True):
        job = SaveJob(source, tmp_path, incremental)
        assert calls == ["mkdir"]
        job.run()
        calls.clear()


def _damage(manifest: Path) -> None:
    manifest.write_bytes(manifest.read_bytes()[:-20])


def _another(manifest: Path) -> None:
    """One of another save in its place, of the same length."""
    text = manifest.read_text()
    found = read_manifest(manifest.parent).id
    manifest.write_text(text.replace(found, "f" * len(found)))


CHANGES: dict[str, Callable[[Path], object]] = {
    "removed": shutil.rmtree,
    "without a manifest": lambda save: (save / MANIFEST).unlink(),
    "damaged": lambda save: _damage(save / MANIFEST),
    "another": lambda save: _another(save / MANIFEST),
    "twice": lambda save: shutil.copytree(save, save.parent / "20010101000000"),
}


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("change", CHANGES)
def test_a_chain_that_is_not_whole_any_more(change: str, place: int, tmp_path: Path) -> None:
    source = make()
    saves = chain(source, tmp_path, 3)
    CHANGES[change](saves[place])
    train(source, range(5, 6))
    saver = rst.Saver()
    assert read_manifest(Path(saver.save(source, tmp_path, incremental=True))).kind == FULL
    train(source, range(6, 7))
    assert read_manifest(Path(saver.save(source, tmp_path, incremental=True))).kind == DELTA
    if change != "twice":  # which is refused, until one of them is removed
        target = make()
        saver.load(target, tmp_path)
        assert contents(target) == contents(source)
