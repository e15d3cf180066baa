"""Saves with impossible contents and right checksums: the C++ reader, under sanitizers, against Python's."""

from __future__ import annotations

import copy
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cpp_server import EXAMPLE, Server, check, rewritten
from cpp_units import Tree

from rec_sdk_torch.saves.format.errors import CheckpointError
from rec_sdk_torch.saves.format.index import index_path
from rec_sdk_torch.saves.format.manifest import MANIFEST
from rec_sdk_torch.saves.saver import Saver
from rec_sdk_torch.serving import TableReader
from rec_sdk_torch.tbe import TableBatchedEmbedding, TableConfig, TableOptimizer

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
"""Fields that decide on no row, which the C++ reader does not check, or not as Python's does."""

STRICTER = {"bytes", "checksums"}
"""Fields that Python's reader leaves to `verify`."""


def fields(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in JSON."""
    if path:
        yield path
    named = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in named:
        yield from fields(each, (*path, name))


def changed(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy of JSON in which one value is another, is missing, or is there twice in its list."""
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
    """A full save and a delta of one table. Its files may be changed one by one, and are put back."""

    def __init__(self, folder: Path) -> None:
        optimizer = TableOptimizer.create(torch.optim.SGD, {"lr": 0.1})
        table = TableConfig("a", 1000, 2, track_changes=True)
        embedding, saver = TableBatchedEmbedding([table], optimizer=optimizer, cache=100), Saver()
        embedding.view("a").write(torch.arange(60), {"weight": torch.randn(60, 2)})
        self.saves = [Path(saver.save(embedding, folder))]
        embedding.view("a").write(torch.arange(20), {"weight": torch.randn(20, 2)})
        embedding.view("a").remove(torch.arange(50, 55))
        self.saves.append(Path(saver.save(embedding, folder, incremental=True)))
        self.manifests = [(save / MANIFEST).read_bytes() for save in self.saves]
        for save in self.saves:
            index_path(save, "a").unlink()
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
        """Replaces the header of a save's file of rows; length and checksum fit."""
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
        """Gives the delta a later name, so that readers open it, and drops indexes that Python made."""
        self._turn += 1
        later = self.saves[1].with_name(f"20990101010101.{self._turn:06d}")
        self.saves[1] = self.saves[1].rename(later)
        for save in self.saves:
            index_path(save, "a").unlink(missing_ok=True)


def difference(server: Server, folder: Path, field: tuple[Any, ...]) -> str:
    """Returns the error of the reader that refuses the latest save while the other reads it; "" if they agree.

    Compares the rows that both read.
    """
    (answer,) = server.ask("refresh")
    assert answer == "later" or answer.startswith("error: /"), f"{field}: {answer or server.errors()}"
    try:
        reader = TableReader(folder, "a")
    except CheckpointError as error:
        return f"{error}" if answer == "later" and not IGNORED & set(field) else ""
    if answer == "later":
        check(server, reader)
        return ""
    return "" if STRICTER & set(field) else answer


def impossible(rng: np.random.Generator, field: tuple[Any, ...], tries: int) -> list[Any]:
    """Values for a field: some of all, and all those that its arithmetic may not be made for."""
    values: list[Any] = [VALUES[number] for number in rng.choice(len(VALUES), tries, replace=False)]
    if field[-1] == "data_offsets":
        values += [[begin, end] for begin in EDGES for end in EDGES]
    return values + (NUMBERS if field[-1] in ("sequence", "rows", "embedding_dim") else [])


def test_impossible_contents(tmp_path: Path, pytestconfig: pytest.Config) -> None:
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
                for value in impossible(rng, field, tries):
                    change(place, changed(document, field, value))
                    chain.rename()
                    if said := difference(server, tmp_path, field):
                        different.append((place, field, value, said))
                    (chain.saves[place] / MANIFEST).write_bytes(chain.manifests[place])
                    (chain.saves[place] / path).write_bytes(raw)
    chain.rename()
    assert server.ask("refresh") == ["later"]
    check(server, TableReader(tmp_path, "a"))
    server.close()
    assert different == [], "\n".join(map(str, different))
