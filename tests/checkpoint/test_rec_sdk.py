"""Folders as Rec SDK's savers write them, both layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tables
import torch
from tables import contents, make, train
from test_saver import refused, same

import rec_sdk_torch as rst

ADAM = (torch.optim.Adam, {"lr": 0.01})
STATES = ("exp_avg", "exp_avg_sq")


def write(folder: Path, array: np.ndarray) -> None:
    """A part: an empty one has no data."""
    folder.mkdir(parents=True)
    np.array([array.itemsize, *array.shape], np.int64).tofile(folder / "slice.attribute")
    if len(array):
        array.tofile(folder / "slice.data")


def save(source: Any, path: Path, ranks: int, names: tuple[str, ...] = STATES, last: int | None = None) -> None:
    """All rows of `source`, or the last ones; `ranks` 0: the layout without ranks."""
    for config in source.tables:
        view = source.view(config.name)
        ids = view.ids()[-last:] if last else view.ids()
        for rank in range(max(1, ranks)):
            own = ids[ids % ranks == rank] if ranks else ids
            chunk = view.read(own)
            folder = path / config.name / (f"rank{rank}" if ranks else "")
            write(folder / "key", own.numpy())
            write(folder / "embedding", chunk.parts["weight"].float().numpy())
            for number, name in enumerate(names, 1):
                write(folder / f"momentum{number}", chunk.parts[name].numpy())
    (path / "meta.ini").write_text("incremental=False\n")


def trained(seeds: range = range(4)) -> Any:
    source = make(ADAM)
    train(source, seeds)
    return source


def without_steps(embedding: Any) -> dict[str, Any]:
    return {name: rows for name, rows in contents(embedding).items() if not name.startswith("optimizer")}


@pytest.mark.parametrize("ranks", [0, 1, 3])
def test_rows_and_states(ranks: int, tmp_path: Path) -> None:
    source, target = trained(), trained(range(50, 53))
    folder = tmp_path / "20250101120000" if ranks else tmp_path
    save(trained(range(1)), tmp_path / "20240101120000", ranks or 1)
    if ranks == 0:
        folder = tmp_path / "merged"
    save(source, folder, ranks)
    found = rst.Saver().load(target, tmp_path if ranks else folder)
    assert found == str(folder)
    same(without_steps(target), without_steps(source))
    for embedding in (source, target):
        embedding.optimizers[0].step = 4  # which Rec SDK does not save
    for a, b in zip(train(source, range(4, 7)), train(target, range(4, 7)), strict=True):
        assert torch.equal(a, b)


def test_an_incremental_save_is_written_over_the_tables(tmp_path: Path) -> None:
    source, target = trained(), trained()
    train(source, range(4, 5))
    save(source, tmp_path, 2, last=3)
    before = without_steps(target)
    rst.Saver().load(target, tmp_path, incremental=True)
    now, wanted = without_steps(target), without_steps(source)
    for name in "abcd":
        last = source.view(name).ids()[-3:].tolist()
        assert {i: row for i, row in now[name].items() if i not in last} == {
            i: row for i, row in before[name].items() if i not in last
        }
        assert [now[name][i] for i in last] == [wanted[name][i] for i in last]


def test_another_optimizer_gets_weights_alone(tmp_path: Path) -> None:
    source, target = trained(), make((torch.optim.Adagrad, {"lr": 0.1}))
    save(source, tmp_path, 2)
    with pytest.warns(UserWarning, match="has 2 optimizer states, table 'a' 1: only its weights"):
        rst.Saver().load(target, tmp_path)
    ids = source.view("a").ids()
    assert torch.equal(target.view("a").read(ids).parts["weight"], source.view("a").read(ids).parts["weight"])


def test_folders_that_cannot_be_loaded(tmp_path: Path) -> None:
    source, target = trained(), trained(range(50, 53))
    save(source, tmp_path, 2)
    for file in sorted(tmp_path.glob("a/rank1/*/*")):
        raw = file.read_bytes()
        file.write_bytes(raw[:-4])
        refused(target, tmp_path, file.name)
        file.unlink()
        refused(target, tmp_path, "a/rank1")
        file.write_bytes(raw)
    (tmp_path / "c").rename(tmp_path / "x")
    refused(target, tmp_path, "has no table 'c'")
    (tmp_path / "x").rename(tmp_path / "c")
    key = tmp_path / "a/rank0/key/slice.data"
    ids = np.fromfile(key, np.int64)
    np.where(np.arange(len(ids)) == 0, ids[1], ids).tofile(key)
    refused(target, tmp_path, "some of its ids are there twice")
    ids.tofile(key)
    key = tmp_path / "d/rank1/key/slice.data"  # of the last table, an index table
    ids = np.fromfile(key, np.int64)
    for outside in (-1, tables.IDS):
        np.where(np.arange(len(ids)) == 0, outside, ids).tofile(key)
        refused(target, tmp_path, "the index table 'd' has num_embeddings 60")
    ids.tofile(key)
    wider = rst.TableBatchedEmbedding([rst.TableConfig("a", 9, 8)], cache=4)
    refused(wider, tmp_path, "rows have 4 elements, the model's 8")
    rst.Saver().load(target, tmp_path)
