"""The C++ reader of saves returns the same results and errors as the Python reader.

CMake builds the reader with its example, and again with sanitizers for tests of invalid saves.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cmake
import numpy as np
import pytest
import torch
from cpp_server import EXAMPLE, TREE, Server, check, refused, rewritten
from cpp_units import TESTS, Tree
from embeddings import SGD, embedding_of
from served_tables import DTYPES, make, only_save, save, saved, train

from rec_sdk_torch.export import quantize_save
from rec_sdk_torch.saves.format.errors import CheckpointError
from rec_sdk_torch.saves.format.index import index_path
from rec_sdk_torch.saves.format.manifest import MANIFEST, read_manifest
from rec_sdk_torch.serving import TableReader
from rec_sdk_torch.tbe import TableConfig


@pytest.fixture(scope="module")
def program() -> Path:
    TREE.build()
    return TREE.folder / "cpp_server"


@pytest.fixture
def servers(program: Path) -> Iterator[list[Server]]:
    """Returns a list for the servers that a test starts, and ends them with the test."""
    started: list[Server] = []
    yield started
    for server in started:
        server.close()


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_results_match_pythons_reader(tmp_path: Path, program: Path, servers: list[Server], bits: int | None) -> None:
    saves = tmp_path / "saves"
    folder = tmp_path / "small" if bits else saves
    embedding = saved(saves)
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
        save(embedding, saves, incremental=True)
        if bits:
            quantize_save(saves, folder, bits)
        for server, reader in zip(servers, readers, strict=True):
            assert server.request("refresh") == ["later"]
            assert server.request("refresh") == ["same"]
            assert reader.refresh()
            check(server, reader)


def test_saves_without_indexes_and_in_packs(tmp_path: Path, program: Path, servers: list[Server]) -> None:
    """In a save of many tables, small tables have no index and share files."""
    tables = [TableConfig(f"t{n}", 500, 5, init_min=-0.5, track_changes=True) for n in range(20)]
    embedding = embedding_of(*tables, cache=50)
    for step in range(2):
        for n in (0, 7, 19):
            ids = torch.arange(step, 300, n + 1)
            embedding.view(f"t{n}").write(ids, {"weight": torch.randn(len(ids), 5)})
            if step > 0:
                embedding.view(f"t{n}").remove(torch.arange(0, 100, n + 1))
        save(embedding, tmp_path, incremental=step > 0)
    for n in (0, 7, 19):
        assert not index_path(next(tmp_path.iterdir()), f"t{n}").exists()
        servers.append(Server(program, f"t{n}", tmp_path))
        check(servers[-1], TableReader(tmp_path, f"t{n}"))


def test_chains_in_several_folders(tmp_path: Path, program: Path, servers: list[Server]) -> None:
    embedding = saved(tmp_path / "base")
    train(embedding, range(100, 400))
    save(embedding, tmp_path / "deltas", incremental=True)
    assert read_manifest(next((tmp_path / "deltas").iterdir())).folders == ["../base"]
    for folders in ([tmp_path / "deltas"], [tmp_path / "base", tmp_path / "deltas"]):
        servers.append(Server(program, "a", *folders))
        check(servers[-1], TableReader(folders, "a"))


def refused_by_both(program: Path, folder: Path, table: str = "a", **variables: str) -> str:
    """Returns the error of the C++ reader, after checking that Python's raises one too."""
    with pytest.raises(CheckpointError):
        TableReader(folder, table)
    return refused(program, table, folder, **variables)


def test_damaged_files_are_named(tmp_path: Path, program: Path) -> None:
    save = only_save(tmp_path)
    assert "no table absent" in refused_by_both(program, tmp_path, "absent")
    assert "there is no such folder" in refused_by_both(program, tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    assert "holds no save" in refused_by_both(program, tmp_path / "empty")
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
        said = refused_by_both(program, tmp_path)
        assert message in said
        assert str(save) in said
    manifest.write_bytes(good)
    index = index_path(save, "a")
    good = index.read_bytes()
    wrong_count, of_another = good[:24] + b"\xff" * 8 + good[32:], good[:32] + b"0" * 32 + good[64:]
    for bad in (b"", good[:-16], b"x" + good[1:], wrong_count, of_another):
        index.write_bytes(bad)
        with pytest.raises(CheckpointError, match=index.name):
            TableReader(tmp_path, "a")
        assert f"{index}: " in refused(program, "a", tmp_path)
    index.unlink()
    aside = tmp_path / "aside"  # folder for the indexes that a reader writes
    aside.mkdir()
    (file,) = (each for each in read_manifest(save).files if each.table == "a" and each.role == "rows")
    rows = save / file.path
    good = rows.read_bytes()
    for bad in (good[:-1], good.replace(b"ids", b"idz", 1), b"\xff" * 8 + good[8:]):
        rows.write_bytes(bad)
        assert f"{rows}: damaged" in refused_by_both(program, tmp_path, TMPDIR=str(aside))
    rows.unlink()
    assert str(rows) in refused_by_both(program, tmp_path)
    (tmp_path / "elsewhere").write_bytes(good)
    rows.symlink_to(tmp_path / "elsewhere")
    assert "a link, which is not followed" in refused_by_both(program, tmp_path)
    assert not list(aside.iterdir())


def test_a_bad_delta_leaves_readers_unchanged(tmp_path: Path, program: Path, servers: list[Server]) -> None:
    embedding = saved(tmp_path)
    servers.append(Server(program, "a", tmp_path))
    reader = TableReader(tmp_path, "a")
    expected = reader.lookup(torch.arange(400))
    train(embedding, range(400))
    first = save(embedding, tmp_path, incremental=True)
    save(embedding, tmp_path, incremental=True)
    shutil.rmtree(first)
    assert servers[0].request("refresh")[0].startswith("error: ")
    with pytest.raises(CheckpointError):
        reader.refresh()
    assert torch.equal(reader.lookup(torch.arange(400)), expected)
    check(servers[0], reader)
    assert servers[0].request("nonsense")[0].startswith("error: expected find")


def test_folders_of_other_names_are_no_saves(tmp_path: Path, program: Path, servers: list[Server]) -> None:
    save = only_save(tmp_path)
    for name in ("20990229000000", "20991301000000", "20990101240000", "20990101006000", "2099010100000x", "2099"):
        (tmp_path / name).mkdir()
        (tmp_path / name / MANIFEST).write_text("{}")
    servers.append(Server(program, "a", tmp_path))
    check(servers[0], TableReader(tmp_path, "a"))
    save.rename(tmp_path / "20960229235959.000001")
    assert servers[0].request("refresh") == ["later"]
    check(servers[0], TableReader(tmp_path, "a"))


def test_each_manifest_is_read_once(tmp_path: Path, program: Path, servers: list[Server]) -> None:
    """Each manifest is read once, however long the chain is; a refresh reads only the new manifest."""
    embedding, size = make(), 1 << 18

    def grow() -> None:
        manifest = save(embedding, tmp_path, incremental=True) / MANIFEST
        manifest.write_bytes(rewritten(manifest.read_bytes(), {"padding": "x" * size}))
        embedding.view("a").write(torch.arange(9), {"weight": torch.randn(9, 5)})

    for _ in range(8):
        grow()
    servers.append(Server(program, "a", tmp_path))
    servers[0].request("find 1")
    opened = servers[0].bytes_read()
    assert 8 <= opened / size < 9
    grow()
    assert servers[0].request("refresh") == ["later"]
    assert 1 <= (servers[0].bytes_read() - opened) / size < 2


def test_an_unusable_folder_for_the_temporary_index_is_an_error(tmp_path: Path, program: Path) -> None:
    index_path(only_save(tmp_path), "a").unlink()
    (tmp_path / "file").touch()
    for absent in (tmp_path / "absent", tmp_path / "file"):
        message = refused(program, "a", tmp_path, TMPDIR=str(absent))
        assert "no folder for the index of a save that has none (TMPDIR): " in message
        assert "filesystem error" not in message


def test_the_name_of_a_temporary_index_is_random(tmp_path: Path, program: Path) -> None:
    """The index can be written even if another user has created files named after the next process ids."""
    index_path(only_save(tmp_path / "saves"), "a").unlink()
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


def test_an_installed_reader_can_be_linked(tmp_path: Path) -> None:
    """A server built outside this repository uses only the installed files, including a shared library."""
    shutil.copytree(EXAMPLE, tmp_path / "server")
    library = Tree("cpp-serving", TESTS.parent / "torch_npu_ext" / "serving", ["-DBUILD_SHARED_LIBS=ON"])
    library.build()
    where = tmp_path / "installed"
    install = [Path(cmake.CMAKE_BIN_DIR) / "cmake", "--install", library.folder, "--prefix", where]
    subprocess.run(install, check=True, capture_output=True)
    server = Tree("cpp-installed", tmp_path / "server", [f"-Drec_sdk_serving_ROOT={where}"])
    shutil.rmtree(server.folder, ignore_errors=True)  # each run configures the build for another folder
    server.build()
    saved(tmp_path / "saves")
    started = Server(server.folder / "cpp_server", "b", tmp_path / "saves")
    check(started, TableReader(tmp_path / "saves", "b"))
    started.close()


# ---- invalid contents with correct checksums


SANITIZED = Tree(
    "cpp-server-sanitized",
    EXAMPLE,
    ["-DCMAKE_CXX_FLAGS=-fsanitize=address,undefined -fno-sanitize-recover=all -O1", "-DCMAKE_BUILD_TYPE=None"],
)
NUMBERS = [-1, 0, 1, 3, 8, 61, 2**31, 2**32, 2**62, 2**63 - 1, -(2**63), 2**63, 10**400, 1.5]
TEXTS = ["", "x", "../a", "a/", "delta", "full", "F16", "U8", "Q8", "rows", "removed", "0" * 32]
VALUES = [*NUMBERS, *TEXTS, None, True, [], {}, "drop", "twice"]
EDGES = [-(2**63), -1, 0, 3, 480, 2**63 - 1]
IGNORED = {
    *("created", "world_size", "optimizers", "windows", "folders", "version", "checksums", "rank", "role"),
    *("num_embeddings", "capacity", "pooling", "seed", "optimizer", "parts", "columns", "clocks", "hashed", "module"),
}
"""Fields that affect no row. The C++ reader does not check them, or checks them in another way than Python's."""

STRICTER = {"bytes", "checksums"}
"""Fields that Python's reader checks only in `verify`."""


def fields(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path of every value in JSON."""
    if path:
        yield path
    named = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in named:
        yield from fields(each, (*path, name))


def changed(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Returns a copy of JSON in which one value is replaced, dropped, or repeated in its list."""
    parent = body = copy.deepcopy(body)
    for name in path[:-1]:
        parent = parent[name]
    if value == "drop":
        del parent[path[-1]]
    elif value == "twice" and isinstance(parent, list):
        parent.append(parent[path[-1]])
    else:
        parent[path[-1]] = value
    return body


class Chain:
    """A full save and a delta of one table, whose files tests change one by one and restore."""

    def __init__(self, folder: Path) -> None:
        embedding = embedding_of(TableConfig("a", 1000, 2, track_changes=True), optimizer=SGD, cache=100)
        embedding.view("a").write(torch.arange(60), {"weight": torch.randn(60, 2)})
        self.saves = [save(embedding, folder)]
        embedding.view("a").write(torch.arange(20), {"weight": torch.randn(20, 2)})
        embedding.view("a").remove(torch.arange(50, 55))
        self.saves.append(save(embedding, folder, incremental=True))
        self.manifests = [(each / MANIFEST).read_bytes() for each in self.saves]
        for each in self.saves:
            index_path(each, "a").unlink()
        self._turn = 0

    def body(self, place: int) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(self.manifests[place])
        return body

    def header(self, place: int) -> tuple[Path, bytes, int]:
        """Returns the path of a save's file of rows, its bytes, and the end of its header."""
        (file,) = (file for file in self.body(place)["files"] if file["role"] == "rows")
        raw = (self.saves[place] / file["path"]).read_bytes()
        return Path(file["path"]), raw, 8 + int.from_bytes(raw[:8], "little")

    def change_manifest(self, place: int, body: dict[str, Any]) -> None:
        (self.saves[place] / MANIFEST).write_bytes(rewritten(self.manifests[place], body))

    def change_header(self, place: int, header: Any) -> None:
        """Replaces the header of a save's file of rows, with matching length and checksum."""
        path, raw, end = self.header(place)
        text = json.dumps(header).encode()
        start = len(text).to_bytes(8, "little") + text
        (self.saves[place] / path).write_bytes(start + raw[end:])
        body = self.body(place)
        (file,) = (file for file in body["files"] if file["role"] == "rows")
        file["bytes"] = len(start) + len(raw) - end
        file["checksums"]["header"] = zlib.crc32(start)
        self.change_manifest(place, body)

    def rename(self) -> None:
        """Gives the delta a later name, so that readers open it, and removes indexes that the Python reader has
        written.
        """
        self._turn += 1
        later = self.saves[1].with_name(f"20990101010101.{self._turn:06d}")
        self.saves[1] = self.saves[1].rename(later)
        for folder in self.saves:
            index_path(folder, "a").unlink(missing_ok=True)


def difference(server: Server, folder: Path, field: tuple[Any, ...]) -> str:
    """Returns the error of the reader that refuses the latest save while the other reads it; "" if they agree.

    Compares the rows that both read.
    """
    (answer,) = server.request("refresh")
    assert answer == "later" or answer.startswith("error: /"), f"{field}: {answer or server.errors()}"
    try:
        reader = TableReader(folder, "a")
    except CheckpointError as error:
        return f"{error}" if answer == "later" and not IGNORED & set(field) else ""
    if answer == "later":
        check(server, reader)
        return ""
    return "" if STRICTER & set(field) else answer


def invalid_values(rng: np.random.Generator, field: tuple[Any, ...], tries: int) -> list[Any]:
    """Draws invalid values for a field: a random part of the general values, and all values at the limits of
    arithmetic.
    """
    values: list[Any] = [VALUES[number] for number in rng.choice(len(VALUES), tries, replace=False)]
    if field[-1] == "data_offsets":
        values += [[begin, end] for begin in EDGES for end in EDGES]
    return values + (NUMBERS if field[-1] in ("sequence", "rows", "embedding_dim") else [])


def test_invalid_contents_are_refused_by_both_readers(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    SANITIZED.build()
    chain = Chain(tmp_path)
    server = Server(SANITIZED.folder / "cpp_server", "a", tmp_path, log=tmp_path / "log")
    check(server, TableReader(tmp_path, "a"))
    rng = np.random.default_rng(pytestconfig.getoption("--day"))
    tries = len(VALUES) if pytestconfig.getoption("--full") else 2
    different = []
    for place in range(2):
        path, raw, end = chain.header(place)
        documents = (chain.body(place), chain.change_manifest), (json.loads(raw[8:end]), chain.change_header)
        for document, change in documents:
            for field in (each for each in fields(document) if each[0] not in ("checksum", "__metadata__")):
                for value in invalid_values(rng, field, tries):
                    change(place, changed(document, field, value))
                    chain.rename()
                    if said := difference(server, tmp_path, field):
                        different.append((place, field, value, said))
                    (chain.saves[place] / MANIFEST).write_bytes(chain.manifests[place])
                    (chain.saves[place] / path).write_bytes(raw)
    chain.rename()
    assert server.request("refresh") == ["later"]
    check(server, TableReader(tmp_path, "a"))
    server.close()
    assert different == [], "\n".join(map(str, different))
