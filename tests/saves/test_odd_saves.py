"""Saves with right checksums and odd contents: a `CheckpointError`, and the model as it was, or what was saved."""

from __future__ import annotations

import copy
import itertools
import json
import random
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import odd_saves
import pytest
from odd_saves import (
    LIFE,
    SKETCH,
    Header,
    body_of,
    change_file,
    files_of,
    get,
    make,
    places,
    put,
    state_of,
    train,
    write_manifest,
)
from test_saver import same

import rec_sdk_torch as rst
from rec_sdk_torch.checkpoint.__main__ import main
from rec_sdk_torch.saves.format.errors import CheckpointError
from rec_sdk_torch.saves.format.manifest import MANIFEST
from rec_sdk_torch.saves.format.tensors import TensorReader
from rec_sdk_torch.serving import TableReader
from rec_sdk_torch.tbe import TableLife

DEEP: Any = json.loads("[" * 40 + "]" * 40)
ODD = [
    None,
    -1,
    -3,
    "3",
    "",
    1.5,
    True,
    [],
    {},
    [None],
    {"x": 1},
    10**15,
    10**30,
    float("nan"),
    float("inf"),
    DEEP,
    "/../../../x",
]
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
"""Values that may be there: files of other roles than those that are known are passed over."""


def load(target: Any, save: Path) -> list[str]:
    """The warnings of the load."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        rst.Saver().load(target, save)
    return [str(each.message) for each in told]


def odd_values(path: tuple[Any, ...], whole: Any, few: int) -> list[Any]:
    """Some of those that a place is tried with, or all: `few` 0."""
    found = [odd for odd in [*ODD, *NAMES.get(str(path[-1]), ())] if odd != get(whole, path)]
    return found if not few else random.Random(f"{few} {path}").sample(found, 1)


def tried(save: Path, saved: Any, target: Any, few: int) -> int:
    """Loads `save` with each value of its manifest odd; how many of the loads were refused.

    After others the target has what was saved, or they have said what they leave out.
    """
    whole, refused = body_of(save), 0
    original, before = (save / MANIFEST).read_bytes(), state_of(target)
    del whole["checksum"]
    for path in places(whole):
        for odd in odd_values(path, whole, few):
            body = copy.deepcopy(whole)
            put(body, path, odd)
            write_manifest(save, body)
            where = f"{path} = {str(odd)[:40]}"
            try:
                told = load(target, save)
            except CheckpointError:
                refused += 1
                continue
            except Exception as error:
                raise AssertionError(f"{where}: {error!r}") from error
            before = state_of(target)
            if not told and odd not in OTHERS.get(path[-1], ()) and odd not in OTHERS.get(path[-2:][0], ()):
                same(before, saved)
        same(state_of(target), before)
    (save / MANIFEST).write_bytes(original)
    return refused


@pytest.mark.parametrize(("life", "least"), [(LIFE, (80, 1300)), (SKETCH, (70, 1000))], ids=["counters", "sketch"])
def test_every_value_of_a_manifest(
    life: TableLife, least: tuple[int, int], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    saves = odd_saves.saved(tmp_path, life)
    target = make(life=life)
    train(target, range(50, 53))
    full, day = map(request.config.getoption, ("--full", "--day"))
    refused = [tried(save, saved, target, 0 if full else 1 + day) for save, saved in saves]
    assert min(refused) > least[full]
    rst.Saver().load(target, tmp_path)
    same(state_of(target), saves[-1][1])


# ---- files


def drop(name: str) -> Any:
    def change(header: Header, data: dict[str, np.ndarray]) -> None:
        del data[name]

    return change


def typed(name: str, dtype: str, size: int, *shape: int) -> Any:
    """Zeros of another type or shape, `size` bytes each."""

    def change(header: Header, data: dict[str, np.ndarray]) -> None:
        rows = header[name]["shape"][0]
        header[name] |= {"dtype": dtype, "shape": [rows, *shape]}
        data[name] = np.zeros(rows * int(np.prod(shape, dtype=np.int64)) * size, np.uint8)

    return change


def value(name: str, number: float, place: int = 0) -> Any:
    """One element of a tensor is another number."""

    def change(header: Header, data: dict[str, np.ndarray]) -> None:
        kinds = {"I64": np.int64, "F64": np.float64, "F32": np.float32, "U8": np.uint8}
        data[name].view(kinds[header[name]["dtype"]])[place] = number

    return change


def about(**changes: str) -> Any:
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


FILES: dict[str, tuple[str, str, Any, str]] = {
    "no state": ("a", "rows", drop("state.sum"), r"has no tensor 'state\.sum'"),
    "no weight": ("b", "rows", drop("weight"), "has no tensor 'weight'"),
    "no ids": ("a", "rows", drop("ids"), "has no tensor 'ids'"),
    "no column": ("a", "rows", drop("column.count"), r"has no tensor 'column\.count'"),
    "a column more": ("a", "rows", more("column.age", "I64", 8), r"has tensors \['column\.age'\]"),
    "a weight of three dimensions": (
        "a",
        "rows",
        typed("weight", "F32", 4, 2, 2),
        r"weight is torch\.float32 .*, 2, 2",
    ),
    "a weight of int64": ("a", "rows", typed("weight", "I64", 8, 4), r"weight is torch\.int64"),
    "a weight of another type": ("a", "rows", typed("weight", "F16", 2, 4), r"weight is torch\.float16"),
    "a complex weight": ("a", "rows", typed("weight", "C64", 8, 4), "dtype is 'C64'"),
    "ids of float64": ("a", "rows", typed("ids", "F64", 8), r"ids is torch\.float64"),
    "ids of two dimensions": ("a", "rows", typed("ids", "I64", 8, 1), "ids is torch.int64 .*, 1"),
    "a column of two dimensions": ("a", "rows", typed("column.count", "I64", 8, 1), r"column\.count is torch\.int64 "),
    "a count of float64": ("a", "rows", typed("column.count", "F64", 8), r"column\.count is torch\.float64"),
    "a score of int64": ("a", "rows", typed("column.score", "I64", 8), r"column\.score is torch\.int64"),
    "a state of int64": ("b", "rows", typed("state.sum", "I64", 8, 4), r"state\.sum is torch\.int64"),
    "a negative count": ("a", "rows", value("column.count", -1), r"column\.count has the value -1"),
    "a count beyond": ("a", "rows", value("column.clicks", 2**32), r"column\.clicks has the value 4294967296"),
    "a score of nan": ("a", "rows", value("column.score", float("nan")), r"column\.score has the value nan"),
    "ids twice": ("a", "rows", twice, "are there twice in the layer"),
    "ids of an index table twice": ("b", "rows", twice, "are there twice in the layer"),
    "an id beyond an index table": (
        "b",
        "rows",
        value("ids", 12),
        r"\(such as 12\) are no rows of the index table 'b'",
    ),
    "an id before an index table": (
        "b",
        "rows",
        value("ids", -1),
        r"\(such as -1\) are no rows of the index table 'b'",
    ),
    "another id": ("a", "rows", value("ids", 99), "had [0-9]+ rows when|has gradients and no row"),
    "the file of another table": ("a", "rows", about(table="b"), "'table': 'b'"),
    "the file of another save": ("a", "rows", about(save="0" * 32), "'save': '0000"),
    "removed ids of float64": ("a", "removed", typed("ids", "F64", 8), r"ids is torch\.float64"),
    "a removed id less": ("a", "removed", value("ids", 99), "had [0-9]+ rows when it was saved, its files have"),
    "a candidate twice": ("a", "candidates", twice, "are there twice in the layer"),
    "a candidate without a count": ("a", "candidates", drop("column.count"), r"has no tensor 'column\.count'"),
    "a candidate never seen": ("a", "candidates", value("column.count", 0), r"column\.count has the value 0"),
    "a candidate of a negative count": ("a", "candidates", value("column.count", -5), "has the value -5"),
    "candidates of float64": ("a", "candidates", typed("ids", "F64", 8), r"ids is torch\.float64"),
    "a row that left for no reason": ("a", "evicted", value("reason", 7), "reason has the value 7, which cannot be"),
    "a row that left of a negative count": ("a", "evicted", value("column.count", -1), "has the value -1"),
    "rows that left without states": ("a", "evicted", drop("state.sum"), r"has no tensor 'state\.sum'"),
    "sums of another width": ("a", "window", typed("sums", "F32", 4, 4), r"sums is torch\.float32 "),
    "sums of float64": ("b", "window", typed("sums", "F64", 8, 8), r"sums is torch\.float64 "),
    "a gradient of no row": ("a", "window", value("ids", 99), "id 99 of table 'a' has gradients and no row"),
    "a gradient twice": ("a", "window", twice, "are there twice in the layer"),
}


class Changed:
    """A folder of saves that is changed, and a model that must not be changed by what is refused.

    Attributes:
        save: the latest, a delta.
        saved: what it has.
        target: a model with other rows.
    """

    def __init__(self, path: Path, life: TableLife = LIFE) -> None:
        self.save, self.saved = odd_saves.saved(path, life)[-1]
        self.target = make(life=life)
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
        same(state_of(self.target), self._before)


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Changed]:
    changed = Changed(tmp_path_factory.mktemp("saves"))
    yield changed
    load(changed.target, changed.save)
    same(state_of(changed.target), changed.saved)
    train(changed.target, range(60, 61))


@pytest.fixture
def odd(saves: Changed) -> Iterator[Changed]:
    yield saves
    saves.restore()


@pytest.mark.parametrize("case", FILES)
def test_what_files_hold(case: str, odd: Changed) -> None:
    table, role, change, message = FILES[case]
    change_file(odd.save, table, role, change)
    odd.refused(message)
    assert main(["verify", str(odd.save)]) == 1


def test_an_id_that_is_a_row_and_a_candidate(odd: Changed) -> None:
    file = files_of(body_of(odd.save), "a", "rows")[0]
    with TensorReader(odd.save / file["path"]) as reader:
        row = int(reader.read("ids")[0])
    change_file(odd.save, "a", "candidates", value("ids", row))
    odd.refused(f"id {row} of table 'a' is a row, and waits to be admitted")


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
        elif found and table == "a":  # all rows of an index table are in its full save
            odd.refused("rows when it was saved, its files have|has gradients and no row", save)
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

NUMBERS = sorted({*range(-4, 6), 16, 17, 2**31, 2**53, 2**53 + 1, 2**62, -(2**63), 2**63 - 1})


@pytest.fixture
def sketched(tmp_path: Path) -> Changed:
    return Changed(tmp_path, SKETCH)


def set_number(save: Path, place: int, number: int) -> tuple[int, list[int]]:
    """Sets a number before the cells of the sketch; the number before, and the state of the sketch then."""
    found = []

    def change(header: Header, data: dict[str, np.ndarray]) -> None:
        numbers = data["sketch"][:64].view(np.int64)
        before, numbers[place] = int(numbers[place]), number
        found.append((before, data["sketch"][32:].tolist()))

    change_file(save, "a", "sketch", change)
    return found[0]


def test_every_number_of_a_sketch(sketched: Changed) -> None:
    """Each is refused, but for those that can be: the sketch is then that of the file."""
    refused, target = 0, make(life=SKETCH)
    can_be = {0: range(-2, 1), 7: range(2**53 + 1)}  # homes of one rank, counts of lookups
    for place, number in itertools.product(range(8), NUMBERS):
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
