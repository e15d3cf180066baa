"""Saves of strangers whose keys and paths lead out of their folder: refused, and nothing is read or written there."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import odd_saves
import pytest
from odd_saves import body_of, make, write_manifest
from test_saver import refused

from rec_sdk_torch.checkpoint.__main__ import main
from rec_sdk_torch.saves.format.errors import CheckpointError
from rec_sdk_torch.saves.format.index import index_path
from rec_sdk_torch.saves.serve.export import export
from rec_sdk_torch.serving import TableReader


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return odd_saves.saved(tmp_path_factory.mktemp("saves"))[0][0]


@pytest.fixture
def strangers(full: Path, tmp_path: Path) -> Path:
    """A save deep enough for what leads out of it, without indexes, with folders that make `..` behind a key work."""
    save = tmp_path / "above" / "saves" / full.name
    shutil.copytree(full, save)
    for key in "ab":
        index_path(save, key).unlink()
    for name in ("index-", "index-a", "index-.."):
        (save / name).mkdir()
    return save


def everything(path: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() if file.is_file() else b"" for file in path.rglob("*")}


def nothing_is_taken(save: Path, table: str, tmp_path: Path, message: str) -> None:
    (tmp_path / "out").mkdir()
    before = everything(tmp_path)
    attempts: list[Callable[[], Any]] = [
        lambda: TableReader(save, table),
        lambda: TableReader(save.parent, table, follow=100.0),
        lambda: export(save, tmp_path / "out", "npz"),
        lambda: export(save, tmp_path / "out", tables=[table]),
    ]
    for attempt in attempts:
        with pytest.raises(CheckpointError, match=message):
            attempt()
    for command in ("show", "verify"):
        assert main([command, str(save)]) == 1
    assert main(["export", str(save), str(tmp_path / "out")]) == 1
    refused(make(), save, message)
    assert everything(tmp_path) == before


@pytest.mark.parametrize(
    "key",
    ["/../../../x", "/../../a", "../x", "a/b", "a/../../x", "..", ".", "", "a.0", "a.01", "a b", "a\n", "x" * 300],
)
def test_keys(key: str, strangers: Path, tmp_path: Path) -> None:
    body = body_of(strangers)
    for table in body["tables"]:
        table["key"] = key if table["key"] == "a" else table["key"]
    for file in body["files"]:
        file["table"] = key if file["table"] == "a" else file["table"]
    write_manifest(strangers, body)
    nothing_is_taken(strangers, key, tmp_path, r"damaged: tables\[0\]\.key is .*, expected the name of a table")


@pytest.mark.parametrize(
    "path",
    [
        "{outside}",
        "../../outside/rows",
        "a/../../../outside/rows",
        "..",
        "",
        ".",
        "./a",
        "a//b",
        "a/",
        "a/.",
        "\0",
        "é",
    ],
)
def test_paths(path: str, strangers: Path, tmp_path: Path) -> None:
    """The paths lead to what is right, so that reading it would do."""
    body = body_of(strangers)
    (file,) = odd_saves.files_of(body, "a", "rows")
    outside = tmp_path / "above" / "outside" / "rows"
    outside.parent.mkdir()
    shutil.copyfile(strangers / file["path"], outside)
    file["path"] = path.format(outside=outside)
    write_manifest(strangers, body)
    nothing_is_taken(strangers, "a", tmp_path, r"damaged: files\[[0-9]+\]\.path is .*, expected the path of a file in")


def test_an_export_through_a_link(full: Path, tmp_path: Path) -> None:
    (tmp_path / "a.npz").symlink_to(tmp_path / "nowhere")
    (tmp_path / "a.safetensors").symlink_to(tmp_path / "nowhere")
    for kind in ("npz", "safetensors"):
        with pytest.raises(FileExistsError):
            export(full, tmp_path, kind)
    assert not (tmp_path / "nowhere").exists()


def test_rows_that_an_index_could_not_have(tmp_path: Path) -> None:
    """The file has few rows; the index is made with room for all of them."""
    delta = odd_saves.saved(tmp_path)[1][0]
    index_path(delta, "a").unlink()
    body = body_of(delta)
    (file,) = odd_saves.files_of(body, "a", "removed")
    file["rows"] = 2**63 - 1
    write_manifest(delta, body)
    with pytest.raises(CheckpointError, match=r"ids is torch\.int64 .*, expected"):
        TableReader(delta, "a")
