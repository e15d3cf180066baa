"""Loads of folders that Rec SDK's savers write, in both of their layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tables
import torch
from embeddings import ADAM, embedding_of
from tables import assert_same, contents, loaded, make, refused, train
from tables import trained as trained_tables

import rec_sdk_torch as rst

STATES = ("exp_avg", "exp_avg_sq")


def write(folder: Path, array: np.ndarray) -> None:
    """Writes an array as a folder of Rec SDK's format; an empty array has no data file."""
    folder.mkdir(parents=True)
    np.array([array.itemsize, *array.shape], np.int64).tofile(folder / "slice.attribute")
    if len(array):
        array.tofile(folder / "slice.data")


def save(source: Any, path: Path, ranks: int, names: tuple[str, ...] = STATES, last: int | None = None) -> None:
    """Writes all rows of `source`, or only the `last` rows; `ranks=0` is the layout without folders of ranks."""
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
    return trained_tables(seeds, ADAM)


def without_steps(embedding: Any) -> dict[str, Any]:
    return {name: rows for name, rows in contents(embedding).items() if not name.startswith("optimizer")}


@pytest.mark.parametrize("ranks", [0, 1, 3])
def test_rows_and_states(ranks: int, tmp_path: Path) -> None:
    """Rows are loaded from the latest save in a folder or, in the layout without ranks, from the folder itself."""
    source, target = trained(), trained(range(50, 53))
    save(trained(range(1)), tmp_path / "20240101120000", ranks or 1)
    folder = tmp_path / ("20250101120000" if ranks else "merged")
    save(source, folder, ranks)
    assert rst.Saver().load(target, tmp_path if ranks else folder) == str(folder)
    assert_same(without_steps(target), without_steps(source))
    for embedding in (source, target):
        embedding.optimizers[0].step = 4  # Rec SDK does not save the step count
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
        assert now[name] == before[name] | {i: wanted[name][i] for i in last}


LIFE = {
    "lifecycle": rst.TableLifecycle(
        admission=rst.rules.Count(2), eviction=rst.rules.Age(50), bound=rst.rules.Rows(1000)
    )
}


def train_twice(target: Any, ids: torch.Tensor, times: torch.Tensor) -> None:
    """Runs a training step in which every id occurs twice, with the id's timestamp."""
    twice, stamps = ids.repeat(2), times.repeat(2)
    target(twice, torch.arange(len(twice) + 1), timestamps=stamps).sum().backward()


def table_with_lifecycle() -> Any:
    return embedding_of(rst.TableConfig("a", 60, 4, **LIFE), cache=20)


def save_with_counts(path: Path, ranks: int, source: Any, seen_by: list[tuple[list[int], list[int]]]) -> None:
    """Writes a save of `source` with counters and with the timestamps of each rank."""
    save(source, path, ranks, ("sum",))
    for rank in range(max(1, ranks)):
        folder = path / "a" / (f"rank{rank}" if ranks else "")
        ids = np.fromfile(folder / "key" / "slice.data", np.int64)
        write(folder / "admit_count", np.where(ids == 3, -1, ids + 100))
        own = seen_by[rank : rank + 1] if ranks else seen_by
        keys, times = (np.array([each for part in own for each in part[k]], np.int64) for k in (0, 1))
        write(folder / "evict_timestamp", keys)
        if len(keys):
            (folder / "evict_timestamp" / "slice.data").rename(folder / "evict_timestamp" / "slice_evict_key.data")
            times.tofile(folder / "evict_timestamp" / "slice_evict_ts.data")


SEEN = [([1, 2, 40], [500, 510, 530]), ([2, 3, 4], [505, 520, 400])]
"""The ids and times of two ranks: both have id 2, and id 40 has no row."""


@pytest.mark.parametrize("ranks", [0, 2])
def test_counts_and_timestamps(ranks: int, tmp_path: Path) -> None:
    source, target = table_with_lifecycle(), table_with_lifecycle()
    ids = torch.tensor([1, 2, 3, 4, 5])
    train_twice(source, ids, torch.full((5,), 7))
    save_with_counts(tmp_path / "save", ranks, source, SEEN)
    loaded(tmp_path / "save", target)
    view = target.view("a")
    columns = view.row_columns(ids)
    assert columns["count"].tolist() == [101, 102, 0, 104, 105]
    assert columns["timestamp"][:4].tolist() == [500, 510, 520, 400]
    assert view.clocks()["timestamp"] == 530
    assert view.evict() == 1  # evicts id 4, with timestamp 400; id 5 has no timestamp
    assert sorted(view.ids().tolist()) == [1, 2, 3, 5]


def test_counts_and_timestamps_of_an_incremental_save(tmp_path: Path) -> None:
    source, target = table_with_lifecycle(), table_with_lifecycle()
    ids = torch.tensor([1, 2, 3, 4, 5])
    train_twice(source, ids[:2], torch.full((2,), 7))
    train_twice(target, ids, torch.tensor([501, 400, 400, 600, 400]))
    save_with_counts(tmp_path / "save", 0, source, SEEN)
    before = target.view("a").row_columns(ids)["count"].tolist()
    rst.Saver().load(target, tmp_path / "save", incremental=True)
    columns = target.view("a").row_columns(ids)
    assert columns["timestamp"].tolist() == [501, 510, 520, 600, 400]
    assert columns["count"].tolist() == [101, 102, *before[2:]]
    assert target.view("a").clocks()["timestamp"] == 600


def test_rules_that_need_neither_counts_nor_timestamps(tmp_path: Path) -> None:
    source = table_with_lifecycle()
    train_twice(source, torch.arange(5), torch.full((5,), 7))
    save_with_counts(tmp_path / "save", 0, source, SEEN)
    plain = embedding_of(rst.TableConfig("a", 60, 4), optimizer=None, cache=20)
    with pytest.warns(UserWarning, match="1 optimizer states"):
        loaded(tmp_path / "save", plain)
    assert plain.view("a").row_columns(torch.arange(5)) == {}


def test_damaged_counts_and_timestamps(tmp_path: Path) -> None:
    source, target = table_with_lifecycle(), table_with_lifecycle()
    train_twice(source, torch.arange(5), torch.full((5,), 7))
    save_with_counts(tmp_path / "save", 0, source, SEEN)
    loaded(tmp_path / "save", target)
    wrong = r"has 6 counts for 5 ids|and 6 timestamps|has 7 ids and 6|has 6 ids and 7"
    for name in ("admit_count/slice", "evict_timestamp/slice_evict_key", "evict_timestamp/slice_evict_ts"):
        file = tmp_path / "save" / "a" / f"{name}.data"
        raw = file.read_bytes()
        for bad, message in ((raw[:-4], f"{file.name}: damaged"), (raw + raw[:8], wrong)):
            file.write_bytes(bad)
            refused(target, tmp_path / "save", message)
        file.write_bytes(raw)
    counts = tmp_path / "save" / "a" / "admit_count" / "slice.data"
    counts.write_bytes(counts.read_bytes()[:-8])
    with pytest.warns(UserWarning, match="has counts of 4 of 5 ids"):
        loaded(tmp_path / "save", target)
    assert target.view("a").row_columns(torch.arange(5))["count"].tolist() == [0] * 5
    assert target.view("a").row_columns(torch.tensor([2]))["timestamp"].tolist() == [510]


def test_another_optimizer_gets_weights_alone(tmp_path: Path) -> None:
    source, target = trained(), make((torch.optim.Adagrad, {"lr": 0.1}))
    save(source, tmp_path, 2)
    with pytest.warns(UserWarning, match="has 2 optimizer states, table 'a' 1: only its weights"):
        loaded(tmp_path, target)
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
    outside = "the index table 'd' has num_embeddings 60"
    for rank, first, message in (
        ("a/rank0", None, "some ids occur twice"),
        ("d/rank1", -1, outside),  # of the last table, an index table
        ("d/rank1", tables.IDS, outside),
    ):
        file = tmp_path / rank / "key" / "slice.data"
        raw = np.fromfile(file, np.int64)
        ids = raw.copy()
        ids[0] = ids[1] if first is None else first
        ids.tofile(file)
        refused(target, tmp_path, message)
        raw.tofile(file)
    wider = embedding_of(rst.TableConfig("a", 9, 8), optimizer=None, cache=4)
    refused(wider, tmp_path, "rows have 4 elements, the model has 8")
    loaded(tmp_path, target)
