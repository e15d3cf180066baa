"""Writes small saves with every kind of file, and makes their contents invalid while checksums stay correct."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from embeddings import embedding_of
from tables import WINDOWS, contents, delta

from rec_sdk_torch.rules import Age, Score, Share, ShowClick, Sketch
from rec_sdk_torch.saves.format.manifest import MANIFEST
from rec_sdk_torch.tbe import TableBatchedEmbedding, TableConfig
from rec_sdk_torch.tbe.config.lifecycle import TableLifecycle

LIFE = TableLifecycle(
    admission=ShowClick(2, beta=0.5),
    eviction=[Age(1000), Share(0.1)],
    every=50,
    score=Score(beta=0.5),
    keep_evicted=True,
)

SKETCH = TableLifecycle(admission=Sketch(3, bytes=200))


def make(lifecycle: TableLifecycle = LIFE, **options: Any) -> TableBatchedEmbedding:
    """Builds an embedding with an index table and a hash table that has admission and, optionally, eviction."""
    tables = [
        TableConfig("a", 30, 4, track_changes=True, lifecycle=lifecycle),
        TableConfig("b", 12, 4, hashed=False, track_changes=True),
    ]
    return embedding_of(*tables, optimizer=WINDOWS, **{"cache": 12, **options})


def train(embedding: TableBatchedEmbedding, seeds: range) -> None:
    for seed in seeds:
        rng = np.random.default_rng(seed)
        ids = torch.from_numpy(np.concatenate([rng.integers(0, 30, 5), rng.integers(0, 12, 5)]))
        clicks, times = torch.ones(10, dtype=torch.int64), torch.full((10,), seed)
        embedding(ids, torch.arange(0, 11, 5), clicks=clicks, timestamps=times).square().sum().backward()


def saved(path: Path, lifecycle: TableLifecycle = LIFE) -> list[tuple[Path, dict[str, Any]]]:
    """Writes a full save and a delta with removed ids, candidates and pending gradients.

    Returns the path and the contents of each save.
    """
    source = make(lifecycle)
    train(source, range(6))
    source.view("a").remove(source.view("a").ids()[-1:])
    train(source, range(6, 7))
    saves = [(delta(source, path), state_of(source))]
    train(source, range(7, 9))
    source.view("a").remove(source.view("a").ids()[:2])
    train(source, range(9, 11))
    return [*saves, (delta(source, path), state_of(source))]


def state_of(embedding: TableBatchedEmbedding) -> dict[str, Any]:
    """Returns the model's state for comparisons. A broken embedding would refuse the calls that read it."""
    result: dict[str, Any] = contents(embedding)
    view = embedding.view("a")
    ids = view.ids().sort().values
    waiting, counted = view.candidates()
    result["columns"] = {name: values.tolist() for name, values in view.row_columns(ids).items()}
    result["candidates"] = waiting.tolist(), {name: values.tolist() for name, values in counted.items()}
    result["clocks"] = view.clocks()
    result["sketch"] = view.sketch().tolist()
    result["evicted"] = [(rows.ids.tolist(), rows.weight.tolist()) for rows in view.pending_evicted_rows()]
    return result


def body_of(save: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((save / MANIFEST).read_text())
    return body


def write_manifest(save: Path, body: dict[str, Any]) -> None:
    """Writes a manifest with a correct checksum."""
    rest = {name: value for name, value in body.items() if name != "checksum"}

    def value(field: Any) -> str:
        """Encodes a field; a list of objects has one line per object."""
        if not isinstance(field, list) or not field or not isinstance(field[0], dict):
            return json.dumps(field, sort_keys=True)
        return "[\n  " + ",\n  ".join(json.dumps(each, sort_keys=True) for each in field) + "\n ]"

    def text(fields: dict[str, Any]) -> str:
        return "{\n" + ",\n".join(f' "{name}": {value(fields[name])}' for name in sorted(fields)) + "\n}\n"

    checksum = zlib.crc32(text(rest).encode())
    (save / MANIFEST).write_text(text({**rest, "checksum": checksum}))


def files_of(body: dict[str, Any], table: str, role: str) -> list[dict[str, Any]]:
    return [file for file in body["files"] if (file["table"], file["role"]) == (table, role)]


Header = dict[str, Any]


def change_file(save: Path, table: str, role: str, change: Callable[[Header, dict[str, np.ndarray]], None]) -> None:
    """Rewrites a table's first file of a role, after `change` has modified its header and the bytes of its tensors."""
    body = body_of(save)
    file = files_of(body, table, role)[0]
    raw = (save / file["path"]).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    data = {}
    for name, about in header.items():
        if name != "__metadata__":
            begin, end = about["data_offsets"]
            data[name] = np.frombuffer(raw[8 + length + begin : 8 + length + end], np.uint8).copy()
    change(header, data)
    offset = 0
    for name, tensor in data.items():
        header[name]["data_offsets"] = [offset, offset + tensor.nbytes]
        offset += tensor.nbytes
    text = json.dumps({name: about for name, about in header.items() if name == "__metadata__" or name in data})
    start = len(text.encode()).to_bytes(8, "little") + text.encode()
    whole = start + b"".join(data[name].tobytes() for name in data)
    (save / file["path"]).write_bytes(whole)
    file["bytes"] = len(whole)
    file["checksums"] = {"header": zlib.crc32(start), **{name: zlib.crc32(data[name].tobytes()) for name in data}}
    if data:
        file["rows"] = header[next(iter(data))]["shape"][0]
    write_manifest(save, body)


def value_paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path of every value in a manifest; of each list, only the first and the last entry."""
    if path:
        yield path
    if isinstance(value, dict):
        for name, each in value.items():
            yield from value_paths(each, (*path, name))
    elif isinstance(value, list):
        for place in sorted({0, len(value) - 1}) if value else ():
            yield from value_paths(value[place], (*path, place))


def put(body: Any, path: tuple[Any, ...], value: Any) -> None:
    for name in path[:-1]:
        body = body[name]
    body[path[-1]] = value


def get(body: Any, path: tuple[Any, ...]) -> Any:
    for name in path:
        body = body[name]
    return body
