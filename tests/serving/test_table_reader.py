"""TableReader against the live table that was saved: full saves, deltas, removed ids, damage."""

from __future__ import annotations

import gc
import shutil
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from served_tables import DTYPES, make, train

from rec_sdk_torch._engine import IndexWriter, same_index
from rec_sdk_torch.saves.format import index
from rec_sdk_torch.saves.format.errors import CheckpointError
from rec_sdk_torch.saves.format.index import index_path
from rec_sdk_torch.saves.format.manifest import read_manifest
from rec_sdk_torch.saves.saver import Saver
from rec_sdk_torch.saves.serve import table_reader
from rec_sdk_torch.serving import TableReader
from rec_sdk_torch.tbe import TableBatchedEmbedding


def check(reader: TableReader, embedding: TableBatchedEmbedding) -> None:
    """Every row, in an order of its own, with ids that are not there between."""
    view = embedding.view(reader._name)
    ids = torch.cat([torch.arange(1000), torch.tensor([-(2**63), 2**63 - 1, 10**12])])  # removed ones too
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(1))]
    known = view.knows(ids) if view.config.hashed else (ids >= 0) & (ids < 1000)
    expected = torch.full((len(ids), 5), 0.5, dtype=DTYPES[view.config.name])
    expected[known] = view.read(ids[known], ["weight"]).parts["weight"]
    weights, found = reader.find(ids)
    assert torch.equal(found, known)
    assert weights.dtype == reader.dtype == DTYPES[view.config.name]
    assert torch.equal(weights, expected)
    arrays, flags = reader.find(ids.numpy())
    assert np.array_equal(arrays, expected.float().numpy().astype(arrays.dtype))
    assert np.array_equal(flags, known.numpy())
    assert len(reader) == view.count()


@pytest.mark.parametrize("table", DTYPES)
def test_rows_of_full_saves_and_deltas(tmp_path: Path, table: str) -> None:
    embedding = make()
    train(embedding, range(300))
    Saver().save(embedding, tmp_path)
    reader = TableReader(tmp_path, table, default=0.5)
    check(reader, embedding)
    train(embedding, range(200, 500))
    if table != "c":
        embedding.view(table).remove(torch.arange(100, 250))
    assert not reader.refresh(), "no later save"
    Saver().save(embedding, tmp_path, incremental=True)
    assert reader.refresh()
    check(reader, embedding)
    train(embedding, range(100, 120))  # removed ids come back
    Saver().save(embedding, tmp_path, incremental=True)
    assert reader.refresh()
    check(reader, embedding)
    check(TableReader(tmp_path, table, default=0.5), embedding)
    Saver().save(embedding, tmp_path)
    assert reader.refresh()
    check(reader, embedding)
    assert reader.save == max(path for path in tmp_path.iterdir() if path.name[0].isdigit())


def test_shapes_and_types(tmp_path: Path) -> None:
    embedding = make()
    train(embedding, range(50))
    Saver().save(embedding, tmp_path)
    reader = TableReader(tmp_path, "a")
    ids = torch.arange(6).view(2, 3)
    assert reader.lookup(ids).shape == (2, 3, 5)
    assert torch.equal(reader.lookup(ids.int()), reader.lookup(ids))
    assert reader.lookup(ids.numpy()[:, ::2]).shape == (2, 2, 5)
    assert reader.lookup(torch.empty(0, dtype=torch.int64)).shape == (0, 5)
    assert np.array_equal(reader.lookup(np.array([10**9])), np.zeros((1, 5), np.float32))
    with pytest.raises(TypeError, match="expected integers"):
        reader.lookup(torch.rand(3))
    with pytest.raises(TypeError, match="expected integers"):
        reader.lookup([1, 2])  # type: ignore[call-overload]


def test_a_save_without_index_gets_one(tmp_path: Path) -> None:
    embedding = make()
    train(embedding, range(300))
    save = Path(Saver().save(embedding, tmp_path))
    made = index_path(save, "a").read_bytes()
    index_path(save, "a").unlink()
    check(TableReader(tmp_path, "a", default=0.5), embedding)
    assert index_path(save, "a").read_bytes() == made


def test_an_index_is_written_by_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "_PIECE", 7)
    monkeypatch.setattr(index, "_WINDOW", 64)
    embedding = make()
    train(embedding, range(300))
    Saver().save(embedding, tmp_path)
    for table in DTYPES:
        check(TableReader(tmp_path, table, default=0.5), embedding)


def _unhash(value: int) -> int:
    """The id whose place in an index is this number modulo the capacity."""
    mask = (1 << 64) - 1

    def unshift(x: int, bits: int) -> int:
        result = x
        for _ in range(64 // bits):
            result = x ^ (result >> bits)
        return result

    x = unshift(value, 31) * pow(0x94D049BB133111EB, -1, 1 << 64) & mask
    x = unshift(x, 27) * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & mask
    x = (unshift(x, 30) - 0x9E3779B97F4A7C15) & mask
    return x - (1 << 64) if x >> 63 else x


SAVE = "0" * 32


def _index(path: Path, ids: np.ndarray, removed: np.ndarray, window: int) -> int:
    """Writes an index of `removed` and then of `ids` in two files; the rounds that it took."""
    writer = IndexWriter(str(path), len(ids) + len(removed), SAVE, window)
    for _ in range(writer.rounds):
        writer.remove(removed)
        writer.add(ids[:100], 0, 0)
        writer.add(ids[100:], 1, 7)
        writer.end_round()
    writer.finish()
    return int(writer.rounds)


@pytest.mark.parametrize("crowded", [0, 14, 40], ids=["spread", "crowded", "crowded over a window"])
def test_an_index_is_written_by_windows(tmp_path: Path, crowded: int) -> None:
    """`crowded` ids have their home at the end of each of four windows: they go on in the next, and in the first."""
    rng = np.random.default_rng(crowded)
    ids = rng.integers(-(2**63), 2**63 - 1, 300)
    homes = [16 * window + 15 for window in (63, 0, 7, 8)]
    ids[: 4 * crowded] = [_unhash(1024 * at + home) for home in homes for at in range(crowded)]
    ids = rng.permutation(ids)
    removed = np.concatenate([ids[::3], rng.integers(0, 2**40, 30)])  # the first come back
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert _index(whole, ids, removed, 1 << 24) == 1
    assert _index(parts, ids, removed, 16) == 64
    assert same_index(str(whole), str(parts), SAVE)
    assert same_index(str(parts), str(whole), SAVE)
    parts.unlink()
    _index(parts, ids, removed[::-1], 16)
    assert same_index(str(whole), str(parts), SAVE)
    parts.unlink()
    _index(parts, ids[::-1], removed, 16)
    assert not same_index(str(whole), str(parts), SAVE)


def test_what_is_damaged_is_named(tmp_path: Path) -> None:
    embedding = make()
    train(embedding, range(300))
    save = Path(Saver().save(embedding, tmp_path))
    with pytest.raises(CheckpointError, match="no table 'absent', only"):
        TableReader(tmp_path, "absent")
    with pytest.raises(CheckpointError):
        TableReader(tmp_path / "absent", "a")
    index = index_path(save, "a")
    good = index.read_bytes()
    wrong_count, of_another = good[:24] + b"\xff" * 8 + good[32:], good[:32] + b"0" * 32 + good[64:]
    for bad in (b"", good[:-16], b"x" + good[1:], wrong_count, of_another):
        index.unlink()
        index.write_bytes(bad)
        with pytest.raises(CheckpointError, match=index.name):
            TableReader(tmp_path, "a")
    entries = np.frombuffer(good, np.uint32).copy()
    entries[16 + 3 :: 4] = 10**9  # rows that are not there
    index.unlink()
    index.write_bytes(entries.tobytes())
    with pytest.raises(CheckpointError, match=index.name):
        TableReader(tmp_path, "a").lookup(torch.arange(300))
    index.write_bytes(good)
    rows = save / next(file.path for file in read_manifest(save).files if file.table == "a" and file.role == "rows")
    rows.write_bytes(rows.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=rows.name):
        TableReader(tmp_path, "a")


def test_a_bad_delta_leaves_the_reader_where_it_was(tmp_path: Path) -> None:
    embedding = make()
    train(embedding, range(300))
    Saver().save(embedding, tmp_path)
    reader = TableReader(tmp_path, "a", default=0.5)
    expected = reader.lookup(torch.arange(400))
    train(embedding, range(400))
    first = Path(Saver().save(embedding, tmp_path, incremental=True))
    Saver().save(embedding, tmp_path, incremental=True)
    shutil.rmtree(first)
    with pytest.raises(CheckpointError):
        reader.refresh()
    assert torch.equal(reader.lookup(torch.arange(400)), expected)


def test_lookups_see_one_moment_while_a_thread_follows(tmp_path: Path) -> None:
    """All rows of a save have the number of that save: a lookup never sees two."""
    ids = torch.arange(1000)
    embedding = make()

    def set_all(number: float) -> None:
        embedding.view("a").write(ids, {"weight": torch.full((1000, 5), number)})

    set_all(0.0)
    Saver().save(embedding, tmp_path)
    seen: set[float] = set()
    wrong: list[torch.Tensor] = []
    stop = threading.Event()

    def look(reader: TableReader) -> None:
        while not stop.is_set():
            numbers = reader.lookup(ids).unique()
            seen.add(float(numbers[-1]))
            if len(numbers) > 1:
                wrong.append(numbers)

    with TableReader(tmp_path, "a", follow=0.01) as reader:
        thread = threading.Thread(target=look, args=(reader,))
        thread.start()
        for number in range(1, 6):
            set_all(float(number))
            Saver().save(embedding, tmp_path, incremental=True)
            deadline = time.monotonic() + 10
            while number not in seen and time.monotonic() < deadline:
                time.sleep(0.01)
        stop.set()
        thread.join()
    assert not wrong
    assert seen >= {1.0, 2.0, 3.0, 4.0, 5.0}


def test_an_error_of_the_disk_does_not_end_the_thread_that_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Saver().save(make(), tmp_path)
    asked: list[tuple[Path, ...]] = []

    def away_once(paths: tuple[Path, ...]) -> Path:
        asked.append(paths)
        if len(asked) == 1:
            raise OSError("the disk is away")
        reader._ended.set()
        return reader.save

    reader = TableReader(tmp_path, "a")
    monkeypatch.setattr(table_reader, "latest_save", away_once)
    with pytest.warns(UserWarning, match="'a' stays at .*the disk is away"):
        table_reader._follow(weakref.ref(reader), reader._ended, 0.001)
    assert asked == [(tmp_path,)] * 2


def test_a_reader_that_is_dropped_does_not_follow(tmp_path: Path) -> None:
    Saver().save(make(), tmp_path)
    reader = TableReader(tmp_path, "a", follow=1000.0)
    thread, dropped = reader._thread, weakref.ref(reader)
    assert thread is not None
    del reader
    gc.collect()
    assert dropped() is None
    thread.join(60)
    assert not thread.is_alive()
