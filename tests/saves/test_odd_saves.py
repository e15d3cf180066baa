"""Saves with correct checksums but invalid contents: loads raise `CheckpointError` and leave the model unchanged.

Keys and paths that lead out of the save's folder are refused; nothing outside is read or written.
"""

from __future__ import annotations

import copy
import itertools
import json
import random
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import odd_saves
import pytest
from odd_saves import LIFE, SKETCH, Header, body_of, change_file, files_of, make, state_of, train, write_manifest
from tables import assert_same, refused

import rec_sdk_torch as rst
from rec_sdk_torch.checkpoint.__main__ import main
from rec_sdk_torch.saves.format.errors import CheckpointError
from rec_sdk_torch.saves.format.index import index_path
from rec_sdk_torch.saves.format.manifest import MANIFEST
from rec_sdk_torch.saves.format.tensors import TensorReader
from rec_sdk_torch.saves.serve.export import export
from rec_sdk_torch.serving import TableReader
from rec_sdk_torch.tbe import TableLifecycle

DEEP: Any = json.loads("[" * 40 + "]" * 40)
NUMBERS = (-1, -3, 1.5, True, 10**15, 10**30, float("nan"), float("inf"))
ODD = [None, "3", "", [], {}, [None], {"x": 1}, DEEP, "/../../../x", *NUMBERS]
NAMES = {
    name: [f"{name}/{other}" for other in ("..", "../x", "\0", "é")]
    for name in ("key", "path", "table", "role", "id", "name")
}

LARGE = 10**15
OTHERS: dict[Any, tuple[Any, ...]] = {
    "options": (1.5, LARGE, True),
    "timestamp": (-1, -3, LARGE),
    "batches": (LARGE,),
    "steps": (LARGE,),
    "step": (LARGE,),
    "role": ("3",),
}
"""Values that are allowed: files with unknown roles are ignored."""


def load(target: Any, save: Path) -> list[str]:
    """Loads a save; returns the messages of the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rst.Saver().load(target, save)
    return [str(each.message) for each in caught]


def odd_values(path: tuple[Any, ...], whole: Any, few: int) -> list[Any]:
    """Returns the invalid values to try at a path of a manifest: all if `few` is 0, else one, drawn with the
    seed `few`.
    """
    found = [odd for odd in [*ODD, *NAMES.get(str(path[-1]), ())] if odd != odd_saves.get(whole, path)]
    return found if not few else random.Random(f"{few} {path}").sample(found, 1)


def load_with_odd_values(save: Path, saved: Any, target: Any, few: int) -> int:
    """Loads `save` with each value of its manifest replaced; returns the number of refused loads.

    After a load that is not refused, the target has the saved contents, or warnings name what was left out.
    """
    whole, refused = body_of(save), 0
    original, before = (save / MANIFEST).read_bytes(), state_of(target)
    del whole["checksum"]
    for path in odd_saves.value_paths(whole):
        for odd in odd_values(path, whole, few):
            body = copy.deepcopy(whole)
            odd_saves.put(body, path, odd)
            write_manifest(save, body)
            where = f"{path} = {str(odd)[:40]}"
            try:
                caught = load(target, save)
            except CheckpointError:
                refused += 1
                continue
            except Exception as error:
                raise AssertionError(f"{where}: {error!r}") from error
            before = state_of(target)
            if not caught and odd not in OTHERS.get(path[-1], ()) and odd not in OTHERS.get(path[-2:][0], ()):
                assert_same(before, saved)
        assert_same(state_of(target), before)
    (save / MANIFEST).write_bytes(original)
    return refused


@pytest.mark.parametrize(("lifecycle", "least"), [(LIFE, (80, 1300)), (SKETCH, (70, 1000))], ids=["counters", "sketch"])
def test_every_value_of_a_manifest(
    lifecycle: TableLifecycle, least: tuple[int, int], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    saves = odd_saves.saved(tmp_path, lifecycle)
    target = make(lifecycle)
    train(target, range(50, 53))
    full, day = map(request.config.getoption, ("--full", "--day"))
    refused = [load_with_odd_values(save, saved, target, 0 if full else 1 + day) for save, saved in saves]
    assert min(refused) > least[full]
    rst.Saver().load(target, tmp_path)
    assert_same(state_of(target), saves[-1][1])


# ---- contents of files


def drop(name: str) -> Any:
    def change(header: Header, data: dict[str, np.ndarray]) -> None:
        del data[name]

    return change


def typed(name: str, dtype: str, size: int, *shape: int) -> Any:
    """Returns a function that replaces a tensor by zeros of another dtype or shape; an element has `size` bytes."""

    def change(header: Header, data: dict[str, np.ndarray]) -> None:
        rows = header[name]["shape"][0]
        header[name] |= {"dtype": dtype, "shape": [rows, *shape]}
        data[name] = np.zeros(rows * int(np.prod(shape, dtype=np.int64)) * size, np.uint8)

    return change


def value(name: str, number: float, place: int = 0) -> Any:
    """Returns a function that changes one element of a tensor."""

    def change(header: Header, data: dict[str, np.ndarray]) -> None:
        kinds = {"I64": np.int64, "F64": np.float64, "F32": np.float32, "U8": np.uint8}
        data[name].view(kinds[header[name]["dtype"]])[place] = number

    return change


def change_metadata(**changes: str) -> Any:
    def change(header: Header, data: dict[str, np.ndarray]) -> None:
        header["__metadata__"] |= changes

    return change


def more(name: str, dtype: str, size: int) -> Any:
    def change(header: Header, data: dict[str, np.ndarray]) -> None:
        rows = header["ids"]["shape"][0]
        header[name] = {"dtype": dtype, "shape": [rows]}
        data[name] = np.zeros(rows * size, np.uint8)

    return change


def twice(header: Header, data: dict[str, np.ndarray]) -> None:
    ids = data["ids"].view(np.int64)
    ids[0] = ids[1]


A, B, REMOVED = ("a", "rows"), ("b", "rows"), ("a", "removed")
CANDIDATES, EVICTED, WINDOW = ("a", "candidates"), ("a", "evicted"), ("a", "window")
FILES: dict[str, tuple[tuple[str, str], Any, str]] = {
    "no state": (A, drop("state.sum"), r"has no tensor 'state\.sum'"),
    "no weight": (B, drop("weight"), "has no tensor 'weight'"),
    "no ids": (A, drop("ids"), "has no tensor 'ids'"),
    "no column": (A, drop("column.count"), r"has no tensor 'column\.count'"),
    "a column more": (A, more("column.age", "I64", 8), r"has tensors \['column\.age'\]"),
    "a weight of three dimensions": (A, typed("weight", "F32", 4, 2, 2), r"weight is torch\.float32 .*, 2, 2"),
    "a weight of int64": (A, typed("weight", "I64", 8, 4), r"weight is torch\.int64"),
    "a weight of another type": (A, typed("weight", "F16", 2, 4), r"weight is torch\.float16"),
    "a complex weight": (A, typed("weight", "C64", 8, 4), "dtype is 'C64'"),
    "ids of float64": (A, typed("ids", "F64", 8), r"ids is torch\.float64"),
    "ids of two dimensions": (A, typed("ids", "I64", 8, 1), "ids is torch.int64 .*, 1"),
    "a column of two dimensions": (A, typed("column.count", "I64", 8, 1), r"column\.count is torch\.int64 "),
    "a count of float64": (A, typed("column.count", "F64", 8), r"column\.count is torch\.float64"),
    "a score of int64": (A, typed("column.score", "I64", 8), r"column\.score is torch\.int64"),
    "a state of int64": (B, typed("state.sum", "I64", 8, 4), r"state\.sum is torch\.int64"),
    "a negative count": (A, value("column.count", -1), r"column\.count has the value -1"),
    "a count beyond": (A, value("column.clicks", 2**32), r"column\.clicks has the value 4294967296"),
    "a score of nan": (A, value("column.score", float("nan")), r"column\.score has the value nan"),
    "ids twice": (A, twice, "occur twice in the layer"),
    "ids of an index table twice": (B, twice, "occur twice in the layer"),
    "an id beyond an index table": (B, value("ids", 12), r"\(such as 12\) are out of range for the index table 'b'"),
    "an id before an index table": (B, value("ids", -1), r"\(such as -1\) are out of range for the index table 'b'"),
    "another id": (A, value("ids", 99), "had [0-9]+ rows when|has gradients but no row"),
    "the file of another table": (A, change_metadata(table="b"), "'table': 'b'"),
    "the file of another save": (A, change_metadata(save="0" * 32), "'save': '0000"),
    "removed ids of float64": (REMOVED, typed("ids", "F64", 8), r"ids is torch\.float64"),
    "a removed id less": (REMOVED, value("ids", 99), "had [0-9]+ rows when it was saved, its files have"),
    "a candidate twice": (CANDIDATES, twice, "occur twice in the layer"),
    "a candidate without a count": (CANDIDATES, drop("column.count"), r"has no tensor 'column\.count'"),
    "a candidate never seen": (CANDIDATES, value("column.count", 0), r"column\.count has the value 0"),
    "a candidate of a negative count": (CANDIDATES, value("column.count", -5), "has the value -5"),
    "candidates of float64": (CANDIDATES, typed("ids", "F64", 8), r"ids is torch\.float64"),
    "a row that left for no reason": (EVICTED, value("reason", 7), "reason has the value 7, which is out of range"),
    "a row that left of a negative count": (EVICTED, value("column.count", -1), "has the value -1"),
    "rows that left without states": (EVICTED, drop("state.sum"), r"has no tensor 'state\.sum'"),
    "sums of another width": (WINDOW, typed("sums", "F32", 4, 4), r"sums is torch\.float32 "),
    "sums of float64": (("b", "window"), typed("sums", "F64", 8, 8), r"sums is torch\.float64 "),
    "a gradient of no row": (WINDOW, value("ids", 99), "id 99 of table 'a' has gradients but no row"),
    "a gradient twice": (WINDOW, twice, "occur twice in the layer"),
}


class Changed:
    """A folder of saves for tests to modify, and a model that must stay unchanged by refused loads.

    Attributes:
        save: the latest save, a delta.
        saved: contents of the latest save.
        target: the model, whose rows differ from the save's.
    """

    def __init__(self, path: Path, lifecycle: TableLifecycle = LIFE) -> None:
        self.save, self.saved = odd_saves.saved(path, lifecycle)[-1]
        self.target = make(lifecycle)
        train(self.target, range(50, 53))
        self._before = state_of(self.target)
        self._files = {file: file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}

    def restore(self) -> None:
        for file, raw in self._files.items():
            if not file.is_file() or file.read_bytes() != raw:
                file.write_bytes(raw)

    def refused(self, message: str, save: Path | None = None) -> None:
        with pytest.raises(CheckpointError, match=message):
            rst.Saver().load(self.target, save or self.save)
        assert_same(state_of(self.target), self._before)


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Changed]:
    changed = Changed(tmp_path_factory.mktemp("saves"))
    yield changed
    load(changed.target, changed.save)
    assert_same(state_of(changed.target), changed.saved)
    train(changed.target, range(60, 61))


@pytest.fixture
def odd(saves: Changed) -> Iterator[Changed]:
    yield saves
    saves.restore()


@pytest.mark.parametrize("case", FILES)
def test_invalid_contents_of_files_are_refused(case: str, odd: Changed) -> None:
    (table, role), change, message = FILES[case]
    change_file(odd.save, table, role, change)
    odd.refused(message)
    assert main(["verify", str(odd.save)]) == 1


def test_an_id_that_is_a_row_and_a_candidate(odd: Changed) -> None:
    file = files_of(body_of(odd.save), "a", "rows")[0]
    with TensorReader(odd.save / file["path"]) as reader:
        row = int(reader.read("ids")[0])
    change_file(odd.save, "a", "candidates", value("ids", row))
    odd.refused(f"id {row} of table 'a' is a row and also a candidate for admission")


@pytest.mark.parametrize(("table", "role"), [("a", "rows"), ("b", "rows"), ("a", "removed")])
def test_a_file_that_the_manifest_lacks(table: str, role: str, odd: Changed) -> None:
    for save in sorted(odd.save.parent.iterdir()):
        body = body_of(save)
        found = files_of(body, table, role)
        body["files"] = [file for file in body["files"] if file not in found]
        write_manifest(save, body)
        if body["kind"] == "full" and found:
            odd.refused("its files only 0: files are missing", save)
            with pytest.raises(CheckpointError, match="files are missing"):
                TableReader(save, table)
        elif found and table == "a":  # not for index tables, whose rows are all in the full save
            odd.refused("rows when it was saved, its files have|has gradients but no row", save)
        odd.restore()


def test_files_exchanged_between_tables(odd: Changed) -> None:
    body = body_of(odd.save)
    for file in body["files"]:
        file["table"] = "b" if file["role"] == "removed" else file["table"]
    write_manifest(odd.save, body)
    odd.refused("'table': 'a'")


@pytest.mark.parametrize("place", [MANIFEST, "header"])
def test_json_that_is_nested_deeply(place: str, odd: Changed) -> None:
    text = b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    if place == MANIFEST:
        (odd.save / MANIFEST).write_bytes(text)
    else:
        body = body_of(odd.save)
        raw = len(text).to_bytes(8, "little") + text
        file = files_of(body, "a", "rows")[0]
        (odd.save / file["path"]).write_bytes(raw)
        file |= {"bytes": len(raw), "checksums": {"header": zlib.crc32(raw)}}
        write_manifest(odd.save, body)
    odd.refused("damaged")


# ---- sketches

OF_SKETCHES = sorted({*range(-4, 6), 16, 17, 2**31, 2**53, 2**53 + 1, 2**62, -(2**63), 2**63 - 1})
"""Values that replace each number of a sketch."""


@pytest.fixture(scope="module")
def sketches(tmp_path_factory: pytest.TempPathFactory) -> Changed:
    return Changed(tmp_path_factory.mktemp("sketches"), SKETCH)


@pytest.fixture
def sketched(sketches: Changed) -> Iterator[Changed]:
    yield sketches
    sketches.restore()


def set_number(save: Path, place: int, number: int) -> tuple[int, list[int]]:
    """Changes a number in the header of a saved sketch; returns the number's previous value and the sketch's state."""
    found = []

    def change(header: Header, data: dict[str, np.ndarray]) -> None:
        numbers = data["sketch"][:64].view(np.int64)
        before, numbers[place] = int(numbers[place]), number
        found.append((before, data["sketch"][32:].tolist()))

    change_file(save, "a", "sketch", change)
    return found[0]


def test_invalid_numbers_of_a_sketch_are_refused(sketched: Changed) -> None:
    """Each value is refused unless it is valid; then the sketch has the state in the file."""
    refused, target = 0, make(SKETCH)
    # valid: rank numbers of a sketch without an owner, and counts of lookups
    can_be = {0: range(-2, 1), 7: range(2**53 + 1)}
    for place, number in itertools.product(range(8), OF_SKETCHES):
        before, state = set_number(sketched.save, place, number)
        if number == before or number in can_be.get(place, ()):
            load(target, sketched.save)
            assert state_of(target)["sketch"] == state
        else:
            sketched.refused("the sketch of table 'a' has")
            refused += 1
        sketched.restore()
    assert refused > 100


@pytest.mark.parametrize("size", [0, 1, 31, 32, 63, 64, -1])
def test_a_sketch_of_another_size(size: int, sketched: Changed) -> None:
    def change(header: Header, data: dict[str, np.ndarray]) -> None:
        data["sketch"] = data["sketch"][:size]
        header["sketch"]["shape"] = [len(data["sketch"])]

    change_file(sketched.save, "a", "sketch", change)
    sketched.refused("the sketch of table 'a' has")
    assert main(["verify", str(sketched.save)]) == 1


# ---- paths out of the folder


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return odd_saves.saved(tmp_path_factory.mktemp("saves"))[0][0]


@pytest.fixture
def nested_save(full: Path, tmp_path: Path) -> Path:
    """Copies a save, without its indexes, into deeply nested folders.

    Additional folders make paths with `..` after a key resolve.
    """
    save = tmp_path / "above" / "saves" / full.name
    shutil.copytree(full, save)
    for key in "ab":
        index_path(save, key).unlink()
    for name in ("index2-", "index2-a", "index2-.."):
        (save / name).mkdir()
    return save


def file_contents(path: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() if file.is_file() else b"" for file in path.rglob("*")}


def check_nothing_is_accessed(save: Path, table: str, tmp_path: Path, message: str) -> None:
    (tmp_path / "out").mkdir()
    before = file_contents(tmp_path)
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
    assert file_contents(tmp_path) == before


KEYS = ("/../../../x", "/../../a", "../x", "a/b", "a/../../x", "..", ".", "", "a.0", "a.01", "a b", "a\n", "x" * 300)
PATHS = (
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
)


@pytest.mark.parametrize("key", KEYS)
def test_keys_out_of_the_folder_are_refused(key: str, nested_save: Path, tmp_path: Path) -> None:
    body = body_of(nested_save)
    for table in body["tables"]:
        table["key"] = key if table["key"] == "a" else table["key"]
    for file in body["files"]:
        file["table"] = key if file["table"] == "a" else file["table"]
    write_manifest(nested_save, body)
    check_nothing_is_accessed(
        nested_save, key, tmp_path, r"damaged: tables\[0\]\.key is .*, expected the name of a table"
    )


@pytest.mark.parametrize("path", PATHS)
def test_paths_out_of_the_folder_are_refused(path: str, nested_save: Path, tmp_path: Path) -> None:
    """The paths lead to valid files outside the folder, so reading them would succeed."""
    body = body_of(nested_save)
    (file,) = files_of(body, "a", "rows")
    outside = tmp_path / "above" / "outside" / "rows"
    outside.parent.mkdir()
    shutil.copyfile(nested_save / file["path"], outside)
    file["path"] = path.format(outside=outside)
    write_manifest(nested_save, body)
    check_nothing_is_accessed(
        nested_save, "a", tmp_path, r"damaged: files\[[0-9]+\]\.path is .*, expected the path of a file in"
    )


def test_an_export_through_a_link(full: Path, tmp_path: Path) -> None:
    (tmp_path / "a.npz").symlink_to(tmp_path / "nowhere")
    (tmp_path / "a.safetensors").symlink_to(tmp_path / "nowhere")
    for kind in ("npz", "safetensors"):
        with pytest.raises(FileExistsError):
            export(full, tmp_path, kind)
    assert not (tmp_path / "nowhere").exists()


def test_an_index_with_too_many_rows_is_refused(tmp_path: Path) -> None:
    """The manifest states 2**63 - 1 rows, but the file has few; no index of the stated size may be allocated."""
    delta = odd_saves.saved(tmp_path)[1][0]
    index_path(delta, "a").unlink()
    body = body_of(delta)
    (file,) = files_of(body, "a", "removed")
    file["rows"] = 2**63 - 1
    write_manifest(delta, body)
    with pytest.raises(CheckpointError, match=r"ids is torch\.int64 .*, expected"):
        TableReader(delta, "a")
