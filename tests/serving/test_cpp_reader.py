"""The reader of saves for C++ servers: built by CMake with its example, whose answers are those of Python's reader."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path

import cmake
import numpy as np
import pytest
import torch
from cpp_units import TESTS, Tree
from served_tables import DTYPES, make, train

from rec_sdk_torch.checkpoint.index import index_path
from rec_sdk_torch.checkpoint.manifest import MANIFEST, read_manifest
from rec_sdk_torch.checkpoint.saver import Saver
from rec_sdk_torch.export import quantize_save
from rec_sdk_torch.serving import TableReader
from rec_sdk_torch.tbe import TableBatchedEmbedding, TableConfig, TableOptimizer

EXAMPLE = TESTS.parent / "examples" / "cpp_server"
TREE = Tree("cpp-server", EXAMPLE, ["-DCMAKE_COMPILE_WARNING_AS_ERROR=ON"])
IDS = np.array([*range(0, 460, 7), -(2**63), 2**63 - 1, 10**12, 999])


@pytest.fixture(scope="module")
def program() -> Path:
    TREE.build()
    return TREE.folder / "cpp_server"


class Server:
    """A C++ server of one table, asked line by line."""

    def __init__(self, program: Path, table: str, *folders: Path) -> None:
        pipe = subprocess.PIPE
        command = [str(program), table, *map(str, folders)]
        self._run = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)

    def ask(self, question: str, lines: int = 1) -> list[str]:
        assert self._run.stdin
        assert self._run.stdout
        self._run.stdin.write(question + "\n")
        self._run.stdin.flush()
        answers: list[str] = []
        while len(answers) < lines and not (answers and answers[-1].startswith("error")):  # an error is one line
            answers.append(self._run.stdout.readline().rstrip("\n"))
        return answers

    def close(self) -> None:
        self._run.communicate()
        assert self._run.returncode == 0


@pytest.fixture
def servers(program: Path) -> Iterator[list[Server]]:
    """A list for the servers that a test begins, which end with it."""
    begun: list[Server] = []
    yield begun
    for server in begun:
        server.close()


def check(server: Server, reader: TableReader) -> None:
    """Asks for ids, some of which are no rows, and for their sum and mean."""
    weights, found = reader.find(torch.from_numpy(IDS))
    ids = " ".join(map(str, IDS))
    lines = [line.split() for line in server.ask(f"find {ids}", len(IDS))]
    assert [line[0] for line in lines] == [str(int(there)) for there in found]
    assert np.array_equal(np.array([line[1:] for line in lines], np.float32), weights.float().numpy())
    for pooling in ("sum", "mean"):
        (line,) = server.ask(f"{pooling} {ids}")
        expected = reader.lookup_pooled(IDS, np.array([0, len(IDS)]), pooling=pooling)
        assert np.array_equal(np.array([line.split()[1:]], np.float32), expected)


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


def refused(program: Path, *arguments: str | Path, **variables: str) -> str:
    finished = subprocess.run(
        [program, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | variables,
    )
    assert finished.returncode == 1, finished.stderr
    return finished.stderr


def rewritten(text: bytes, change: dict[str, object]) -> bytes:
    """A manifest with other fields and the right checksum."""
    body = json.loads(text) | change
    del body["checksum"]
    plain = (json.dumps(body, indent=1, sort_keys=True) + "\n").encode()
    place = plain.index(b'\n "created": ')
    return plain[:place] + b'\n "checksum": %d,' % zlib.crc32(plain) + plain[place:]


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
    wrong = [
        (good.replace(b'"rows": 300', b'"rows": 301'), "checksum is wrong"),
        (good[:-3], "damaged: JSON"),
        (b"[" * 100_000, "damaged: JSON: too deep"),
        (b'{"format": "another"}', "damaged: of another program"),
        (rewritten(good, {"version": 9}), "of format version 9, this one reads up to 4"),
        (rewritten(good, {"id": None}), "damaged: JSON: no string"),
        (rewritten(good, {"previous": "0" * 32}), "a delta of the save 0"),
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
