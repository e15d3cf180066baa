"""Folders of saves that contain pipes, folders, links, or names that do not match the clock."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import test_rec_sdk
from embeddings import ADAM
from tables import assert_same, loaded, make, refused, save, trained, written

import rec_sdk_torch as rst
from rec_sdk_torch.checkpoint.__main__ import main
from rec_sdk_torch.saves.format import folders
from rec_sdk_torch.saves.format.errors import CheckpointError
from rec_sdk_torch.saves.format.index import index_path
from rec_sdk_torch.saves.format.manifest import FULL, MANIFEST
from rec_sdk_torch.serving import TableReader


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    """Fails a test after 30 seconds, because opening a pipe without a writer would block forever."""

    def raise_late(*_: Any) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, raise_late)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def link(file: Path) -> None:
    """Moves a file elsewhere and puts a link to it in its place, so that the contents stay correct."""
    elsewhere = file.parent.parent / f"{file.name} elsewhere"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)


def replaced_by(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        file.unlink()
        make(file)

    return change


KINDS: dict[str, tuple[Callable[[Path], None], str]] = {
    "pipe": (replaced_by(os.mkfifo), "no plain file"),
    "folder": (replaced_by(os.mkdir), "no plain file"),
    "link": (link, "a link, which is not followed"),
    "dangling link": (replaced_by(lambda file: file.symlink_to("/nowhere/at/all")), "a link, which is not followed"),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    model = trained()
    return save(model, tmp_path_factory.mktemp("source")), model


@pytest.fixture
def copied(source: tuple[Path, Any], tmp_path: Path) -> Path:
    """Copies the save to a folder that the test may change."""
    return Path(shutil.copytree(source[0], tmp_path / "copy" / source[0].name))


@pytest.fixture(scope="module")
def target() -> Any:
    """Builds a model with other rows; refused loads must leave it unchanged."""
    return trained(range(50, 52))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [MANIFEST, "a/rank-00000/layer-0/rows-00000.safetensors"])
def test_other_objects_in_place_of_a_file_are_refused(name: str, kind: str, copied: Path, target: Any) -> None:
    change, message = KINDS[kind]
    change(copied / name)
    message = f"{message}|holds no save" if kind == "dangling link" and name == MANIFEST else message
    refused(target, copied, message)
    assert main(["verify", str(copied)]) == 1
    with pytest.raises(CheckpointError, match=message):
        TableReader(copied, "a")


@pytest.mark.parametrize("name", ["a", "a/rank-00000", "a/rank-00000/layer-0"])
def test_a_folder_of_a_save_that_is_a_link(name: str, copied: Path, target: Any, tmp_path: Path) -> None:
    inner = copied / name
    inner.rename(tmp_path / "inner")
    inner.symlink_to(tmp_path / "inner")
    refused(target, copied, "rows-00000.safetensors: cannot be opened: a link, which is not followed")
    with pytest.raises(CheckpointError, match="a link, which is not followed"):
        TableReader(copied, "a")


def test_a_link_to_a_whole_save_is_followed(source: tuple[Path, Any], tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(source[0])
    assert_same(loaded(tmp_path / "latest"), source[1])


@pytest.mark.parametrize("kind", KINDS)
def test_other_objects_in_place_of_an_index_are_refused(kind: str, copied: Path) -> None:
    KINDS[kind][0](index_path(copied, "a"))
    with pytest.raises(CheckpointError, match="index2-a: no plain file; remove it to have the index rebuilt"):
        TableReader(copied, "a")
    assert main(["verify", str(copied)]) == 1
    loaded(copied)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["slice.attribute", "slice.data"])
def test_other_objects_in_place_of_a_rec_sdk_file_are_refused(name: str, kind: str, tmp_path: Path) -> None:
    test_rec_sdk.save(test_rec_sdk.trained(), tmp_path / "save", 2)
    change, message = KINDS[kind]
    change(tmp_path / "save/a/rank1/key" / name)
    refused(make(ADAM), tmp_path / "save", message)


def test_a_folder_that_cannot_be_read(target: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    refused(target, tmp_path / "file", "file: there is no such folder")
    refused(target, tmp_path / ("x" * 300), "cannot be read: File name too long")
    with pytest.raises(CheckpointError, match="File name too long"):
        TableReader(tmp_path / ("x" * 300), "a")


# ---- names of saves


class Clock:
    """A clock that stands still until it is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.time = datetime(2026, 11, 23, 10, 45, 0, 123456, tzinfo=UTC)
        monkeypatch.setattr(folders, "now", lambda: self.time)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def next_save(path: Path) -> str:
    """Creates a save with the next name; returns the name."""
    name = folders.next_name(path)
    assert folders.is_timestamp(name)
    (path / name).mkdir()
    (path / name / MANIFEST).touch()
    assert folders.latest_save(path).name == name
    return name


def test_a_name_is_the_time(clock: Clock, tmp_path: Path) -> None:
    """Names are times, even with nine saves per second; the first save in a second has 14 digits, as in Rec SDK."""
    names = []
    for _ in range(90):
        names.append(next_save(tmp_path))
        whole = datetime.strptime((names[-1] + ".000000")[:21], "%Y%m%d%H%M%S.%f").replace(tzinfo=UTC)
        assert timedelta() <= clock.time - whole < timedelta(seconds=1 if len(names[-1]) == 14 else 0.001)
        clock.time += timedelta(seconds=1 / 9)
    assert names == sorted(set(names))
    assert names[0] == "20261123104500"
    assert sum(len(name) == 14 for name in names) in (10, 11)


@pytest.mark.filterwarnings("error")
def test_saves_in_one_microsecond(clock: Clock, tmp_path: Path) -> None:
    assert [next_save(tmp_path) for _ in range(4)] == [
        "20261123104500",
        "20261123104500.123456",
        "20261123104500.123457",
        "20261123104500.123458",
    ]


def test_names_increase_when_the_clock_goes_back(clock: Clock, tmp_path: Path) -> None:
    next_save(tmp_path)
    clock.time -= timedelta(hours=1)
    message = "the save 20261123104500 is named by a future time, the clock says 20261123094500"
    with pytest.warns(UserWarning, match=message):
        assert next_save(tmp_path) == "20261123104500.000001"
    clock.time += timedelta(hours=2)
    assert next_save(tmp_path) == "20261123114500"


@pytest.mark.filterwarnings("ignore:.*another optimizer")
def test_a_save_after_one_that_no_delta_can_follow_is_named_behind_it(clock: Clock, tmp_path: Path) -> None:
    """The save in folder a that the model loads has another optimizer, so the save in folder b is full, with a
    later name.
    """
    source, model = trained(1), trained(1, ADAM)
    for _ in range(2):
        save(source, tmp_path / "a")
    assert written(loaded(tmp_path / "a", model), tmp_path / "b").kind == FULL
    assert folders.latest_save([tmp_path / "a", tmp_path / "b"]).parent.name == "b"


def test_other_names_are_ignored(clock: Clock, tmp_path: Path) -> None:
    """Folders that are not saves are not loaded, and do not affect the names of later saves."""
    for name in ("99991231235959", "99991231235959.999999", "20261123104500", "x", "20261123104500.12"):
        (tmp_path / name).mkdir()
    assert next_save(tmp_path) == "20261123104500.123456"


def test_the_last_possible_name(clock: Clock, tmp_path: Path) -> None:
    for name in ("99991231235959", "99991231235959.999998"):
        (tmp_path / name).mkdir()
        (tmp_path / name / MANIFEST).touch()
    with pytest.warns(UserWarning, match="named by a future time"):
        assert next_save(tmp_path) == "99991231235959.999999"
    with pytest.raises(CheckpointError, match="no name is later"), pytest.warns(UserWarning, match="future time"):
        folders.next_name(tmp_path)


def test_names_of_saves() -> None:
    good = ["20261123104500", "20261123104500.000000", "20261123104500.999999"]
    bad = ["2026", "latest", "2026112310450x", "20261323104500", "\u0662\u0660261123104500", "20261123104500\n", ""]
    bad += [f"20261123104500{end}" for end in (".", ".12", ".1234567", "x123456", ".12345x")] + ["2026112310450.123456"]
    assert all(map(rst.Saver.is_timestamp_format, good))
    assert not any(map(rst.Saver.is_timestamp_format, bad))
