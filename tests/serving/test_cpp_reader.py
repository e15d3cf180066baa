"""The reader of saves for C++ servers: built by CMake with its example, whose answers are those of Python's reader."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import cmake
import pytest
import torch
from cpp_server import EXAMPLE, TREE, Server, check, refused, rewritten
from cpp_units import TESTS, Tree
from served_tables import DTYPES, make, train

from rec_sdk_torch.export import quantize_save
from rec_sdk_torch.saves.format.index import index_path
from rec_sdk_torch.saves.format.manifest import MANIFEST, read_manifest
from rec_sdk_torch.saves.saver import Saver
from rec_sdk_torch.serving import TableReader
from rec_sdk_torch.tbe import TableBatchedEmbedding, TableConfig, TableOptimizer


@pytest.fixture(scope="module")
def program() -> Path:
    TREE.build()
    return TREE.folder / "cpp_server"


@pytest.fixture
def servers(program: Path) -> Iterator[list[Server]]:
    """A list for the servers that a test begins, which end with it."""
    begun: list[Server] = []
    yield begun
    for server in begun:
        server.close()


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_it_answers_as_pythons_reader(tmp_path: Path, program: Path, servers: list[Server], bits: int | None) -> None:
    saves = tmp_path / "saves"
    folder = tmp_path / "small" if bits else saves
    embedding = make()
    train(embedding, range(300))
    Saver().save(embedding, saves)
    if bits:
        quantize_save(saves, folder, bits)
    servers += [Server(program, table, folder) for table in DTYPES]
    readers = [TableReader(folder, table) for table in DTYPES]
    for server, reader in zip(servers, readers, strict=True):
        check(server, reader)
    for step in range(2):
        train(embedding, range(200 + step, 450))
        for table in ("a", "b"):
            embedding.view(table).remove(torch.arange(100, 250) + step)
        Saver().save(embedding, saves, incremental=True)
        if bits:
            quantize_save(saves, folder, bits)
        for server, reader in zip(servers, readers, strict=True):
            assert server.ask("refresh") == ["later"]
            assert server.ask("refresh") == ["same"]
            assert reader.refresh()
            check(server, reader)


def test_saves_without_indexes_and_in_packs(tmp_path: Path, program: Path, servers: list[Server]) -> None:
    """Small tables of a save of many tables have no index, and share files."""
    tables = [TableConfig(f"t{n}", 500, 5, init_min=-0.5, track_changes=True) for n in range(20)]
    optimizer = TableOptimizer.create(torch.optim.SGD, {"lr": 0.1})
    embedding = TableBatchedEmbedding(tables, optimizer=optimizer, cache=50)
    for step in range(2):
        for n in (0, 7, 19):
            embedding.view(f"t{n}").write(
                torch.arange(step, 300, n + 1), {"weight": torch.randn(len(range(step, 300, n + 1)), 5)}
            )
            if step > 0:
                embedding.view(f"t{n}").remove(torch.arange(0, 100, n + 1))
        Saver().save(embedding, tmp_path, incremental=step > 0)
    for n in (0, 7, 19):
        assert not index_path(next(tmp_path.iterdir()), f"t{n}").exists()
        servers.append(Server(program, f"t{n}", tmp_path))
        check(servers[-1], TableReader(tmp_path, f"t{n}"))


def test_chains_in_several_folders(tmp_path: Path, program: Path, servers: list[Server]) -> None:
    embedding = make()
    train(embedding, range(300))
    Saver().save(embedding, tmp_path / "base")
    train(embedding, range(100, 400))
    Saver().save(embedding, tmp_path / "deltas", incremental=True)
    assert read_manifest(next((tmp_path / "deltas").iterdir())).folders == ["../base"]
    for folders in ([tmp_path / "deltas"], [tmp_path / "base", tmp_path / "deltas"]):
        servers.append(Server(program, "a", *folders))
        check(servers[-1], TableReader(folders, "a"))


def test_what_is_damaged_is_named(tmp_path: Path, program: Path) -> None:
    embedding = make()
    train(embedding, range(300))
    save = Path(Saver().save(embedding, tmp_path))
    assert "no table absent" in refused(program, "absent", tmp_path)
    assert "there is no such folder" in refused(program, "a", tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    assert "holds no save" in refused(program, "a", tmp_path / "empty")
    manifest = save / MANIFEST
    good = manifest.read_bytes()
    body, delta = json.loads(good), {"kind": "delta", "sequence": 1, "base": "0" * 32, "previous": "0" * 32}
    wrong = [
        (good.replace(b'"rows": 300', b'"rows": 301'), "checksum is wrong"),
        (good[:-3], "damaged: JSON"),
        (b"[" * 100_000, "damaged: JSON: too deep"),
        (b'{"format": "another"}', "damaged: of another program"),
        (rewritten(good, {"version": 9}), "of format version 9, this one reads up to 5"),
        (rewritten(good, {"id": None}), "damaged: JSON: no string"),
        (rewritten(good, {"previous": "0" * 32}), "damaged: a full save, number 0 of the chain"),
        (rewritten(good, {"sequence": 2**63 - 1}), "damaged: a full save, number 9223372036854775807"),
        (rewritten(good, delta), "a delta of the save 0"),
        (rewritten(good, {"files": body["files"][:1] * 200}), "has files that share bytes"),
        (rewritten(good, {"files": []}), "table a has 300 rows, its files only 0"),
        (rewritten(good, {"tables": [{**body["tables"][0], "key": "../a"}]}), "damaged: a table has the key ../a"),
        (rewritten(good, {"files": [{**body["files"][0], "path": "../x"}]}), "damaged: a file has the path ../x"),
    ]
    for text, message in wrong:
        manifest.write_bytes(text)
        said = refused(program, "a", tmp_path)
        assert message in said
        assert str(save) in said
    manifest.write_bytes(good)
    index = index_path(save, "a")
    index.write_bytes(b"x" + index.read_bytes()[1:])
    assert f"{index}: no index, or damaged" in refused(program, "a", tmp_path)
    index.unlink()
    aside = tmp_path / "aside"  # of indexes that a reader makes
    aside.mkdir()
    (file,) = (each for each in read_manifest(save).files if each.table == "a" and each.role == "rows")
    rows = save / file.path
    good = rows.read_bytes()
    for bad in (good[:-1], good.replace(b"ids", b"idz", 1), b"\xff" * 8 + good[8:]):
        rows.write_bytes(bad)
        assert f"{rows}: damaged" in refused(program, "a", tmp_path, TMPDIR=str(aside))
    rows.unlink()
    assert str(rows) in refused(program, "a", tmp_path)
    (tmp_path / "elsewhere").write_bytes(good)
    rows.symlink_to(tmp_path / "elsewhere")
    assert "a link, which is not followed" in refused(program, "a", tmp_path)
    assert not list(aside.iterdir())


def test_a_bad_delta_leaves_it_where_it_was(tmp_path: Path, program: Path, servers: list[Server]) -> None:
    embedding = make()
    train(embedding, range(300))
    Saver().save(embedding, tmp_path)
    servers.append(Server(program, "a", tmp_path))
    reader = TableReader(tmp_path, "a")
    check(servers[0], reader)
    train(embedding, range(400))
    first = Path(Saver().save(embedding, tmp_path, incremental=True))
    Saver().save(embedding, tmp_path, incremental=True)
    shutil.rmtree(first)
    assert servers[0].ask("refresh")[0].startswith("error: ")
    check(servers[0], reader)
    assert servers[0].ask("nonsense")[0].startswith("error: expected find")


def test_folders_of_other_names_are_no_saves(tmp_path: Path, program: Path, servers: list[Server]) -> None:
    embedding = make()
    train(embedding, range(300))
    save = Path(Saver().save(embedding, tmp_path))
    for name in ("20990229000000", "20991301000000", "20990101240000", "20990101006000", "2099010100000x", "2099"):
        (tmp_path / name).mkdir()
        (tmp_path / name / MANIFEST).write_text("{}")
    servers.append(Server(program, "a", tmp_path))
    check(servers[0], TableReader(tmp_path, "a"))
    save.rename(tmp_path / "20960229235959.000001")
    assert servers[0].ask("refresh") == ["later"]
    check(servers[0], TableReader(tmp_path, "a"))


def test_each_manifest_is_read_once(tmp_path: Path, program: Path, servers: list[Server]) -> None:
    """However many saves follow each other; a refresh reads the new one."""
    embedding, size = make(), 1 << 18

    def save() -> None:
        folder = Path(Saver().save(embedding, tmp_path, incremental=True))
        text = rewritten((folder / MANIFEST).read_bytes(), {"padding": "x" * size})
        (folder / MANIFEST).write_bytes(text)
        embedding.view("a").write(torch.arange(9), {"weight": torch.randn(9, 5)})

    for _ in range(8):
        save()
    servers.append(Server(program, "a", tmp_path))
    servers[0].ask("find 1")
    opened = servers[0].bytes_read()
    assert 8 <= opened / size < 9
    save()
    assert servers[0].ask("refresh") == ["later"]
    assert 1 <= (servers[0].bytes_read() - opened) / size < 2


def test_where_a_temporary_index_cannot_be(tmp_path: Path, program: Path) -> None:
    embedding = make()
    train(embedding, range(300))
    save = Path(Saver().save(embedding, tmp_path))
    index_path(save, "a").unlink()
    (tmp_path / "file").touch()
    for absent in (tmp_path / "absent", tmp_path / "file"):
        said = refused(program, "a", tmp_path, TMPDIR=str(absent))
        assert "no folder for the index of a save that has none (TMPDIR): " in said
        assert "filesystem error" not in said


def test_the_name_of_a_temporary_index_is_random(tmp_path: Path, program: Path) -> None:
    """Files of another user, of the names that processes to come might use, are not in the way."""
    embedding = make()
    train(embedding, range(300))
    save = Path(Saver().save(embedding, tmp_path / "saves"))
    index_path(save, "a").unlink()
    last = subprocess.Popen(["true"])
    last.wait()
    aside = tmp_path / "aside"
    aside.mkdir()
    taken = [aside / f"rec_sdk-index-{last.pid + later}-0" for later in range(500)]
    for path in taken:
        path.touch()
    command = [program, "a", tmp_path / "saves"]
    environment = os.environ | {"TMPDIR": str(aside)}
    subprocess.run(command, stdin=subprocess.DEVNULL, check=True, env=environment, capture_output=True)
    assert sorted(aside.iterdir()) == sorted(taken)


def test_it_is_found_where_it_is_installed(tmp_path: Path) -> None:
    """A server far from this repository, with nothing but what was installed, and a shared library."""
    shutil.copytree(EXAMPLE, tmp_path / "server")
    library = Tree("cpp-serving", TESTS.parent / "torch_npu_ext" / "serving", ["-DBUILD_SHARED_LIBS=ON"])
    library.build()
    where = tmp_path / "installed"
    subprocess.run(
        [Path(cmake.CMAKE_BIN_DIR) / "cmake", "--install", library.folder, "--prefix", where],
        check=True,
        capture_output=True,
    )
    server = Tree("cpp-installed", tmp_path / "server", [f"-Drec_sdk_serving_ROOT={where}"])
    shutil.rmtree(server.folder, ignore_errors=True)  # it is configured for another folder each time
    server.build()
    embedding = make()
    train(embedding, range(300))
    Saver().save(embedding, tmp_path / "saves")
    asked = Server(server.folder / "cpp_server", "b", tmp_path / "saves")
    check(asked, TableReader(tmp_path / "saves", "b"))
    asked.close()
