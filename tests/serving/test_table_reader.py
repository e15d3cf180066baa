"""TableReader, compared with the live table that was saved: saves, deltas, removed ids, layers, pooled lookups."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from embeddings import embedding_of
from layered_saves import write_layered
from served_tables import DTYPES, make, only_save, save, saved, train
from threads import threads

import rec_sdk_torch  # noqa: F401  # its operators
from rec_sdk_torch._engine import IndexWriter, same_index
from rec_sdk_torch.checkpoint.__main__ import main
from rec_sdk_torch.export import quantize_save
from rec_sdk_torch.saves.format import index, manifest
from rec_sdk_torch.saves.format.errors import CheckpointError
from rec_sdk_torch.saves.format.index import index_path, write_index
from rec_sdk_torch.saves.format.manifest import read_manifest
from rec_sdk_torch.saves.format.quantized import dequantize, quantize
from rec_sdk_torch.saves.saver import Saver
from rec_sdk_torch.saves.serve import table_reader
from rec_sdk_torch.serving import TableReader
from rec_sdk_torch.tbe import TableBatchedEmbedding, TableConfig


def check(reader: TableReader, embedding: TableBatchedEmbedding) -> None:
    """Compares every row, in random order, with unknown ids in between."""
    view = embedding.view(reader._name)
    ids = torch.cat([torch.arange(1000), torch.tensor([-(2**63), 2**63 - 1, 10**12])])  # removed ids too
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
    embedding = saved(tmp_path)
    reader = TableReader(tmp_path, table, default=0.5)
    check(reader, embedding)
    train(embedding, range(200, 500))
    if table != "c":
        embedding.view(table).remove(torch.arange(100, 250))
    assert not reader.refresh(), "no later save"
    save(embedding, tmp_path, incremental=True)
    assert reader.refresh()
    check(reader, embedding)
    train(embedding, range(100, 120))  # removed ids return
    save(embedding, tmp_path, incremental=True)
    assert reader.refresh()
    check(reader, embedding)
    check(TableReader(tmp_path, table, default=0.5), embedding)
    save(embedding, tmp_path)
    assert reader.refresh()
    check(reader, embedding)
    assert reader.save == max(path for path in tmp_path.iterdir() if path.name[0].isdigit())


def test_shapes_and_types(tmp_path: Path) -> None:
    saved(tmp_path, range(50))
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
    embedding = saved(tmp_path)
    index = index_path(next(tmp_path.iterdir()), "a")
    made = index.read_bytes()
    index.unlink()
    check(TableReader(tmp_path, "a", default=0.5), embedding)
    assert index.read_bytes() == made


def test_an_index_is_written_by_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "_CHUNK_IDS", 7)
    monkeypatch.setattr(index, "_WINDOW", 64)
    embedding = saved(tmp_path)
    for table in DTYPES:
        check(TableReader(tmp_path, table, default=0.5), embedding)


def _unhash(value: int) -> int:
    """Returns the id that hashes to `value`."""
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
    """Writes an index of `removed` and then of `ids` in two files; returns the number of rounds."""
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
    """`crowded` ids hash to the end of each of four windows. They overflow into the next window; from the last window,
    into the first.

    """
    rng = np.random.default_rng(crowded)
    ids = rng.integers(-(2**63), 2**63 - 1, 300)
    capacity = 688  # of 430 ids: 300, and 130 that are removed
    ends = [687, 19, 159, 179]  # of the last window, which has 8 entries, and of windows of 20
    ids[: 4 * crowded] = [_unhash((end << 64) // capacity + 1 + at) for end in ends for at in range(crowded)]
    ids = rng.permutation(ids)
    removed = np.concatenate([ids[::3], rng.integers(0, 2**40, 30)])  # some removed ids return
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert _index(whole, ids, removed, 1 << 24) == 1
    assert _index(parts, ids, removed, 20) == 35
    assert same_index(str(whole), str(parts), SAVE)
    assert same_index(str(parts), str(whole), SAVE)
    parts.unlink()
    _index(parts, ids, removed[::-1], 20)
    assert same_index(str(whole), str(parts), SAVE)
    parts.unlink()
    _index(parts, ids[::-1], removed, 20)
    assert not same_index(str(whole), str(parts), SAVE)


def test_lookups_see_one_save_while_a_thread_follows(tmp_path: Path) -> None:
    """All rows of a save have the number of the save as their weights, so one lookup must return only one number."""
    ids = torch.arange(1000)
    embedding = make()

    def set_all(number: float) -> None:
        embedding.view("a").write(ids, {"weight": torch.full((1000, 5), number)})

    set_all(0.0)
    save(embedding, tmp_path)
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
            save(embedding, tmp_path, incremental=True)
            deadline = time.monotonic() + 10
            while number not in seen and time.monotonic() < deadline:
                time.sleep(0.01)
        stop.set()
        thread.join()
    assert not wrong
    assert seen >= {1.0, 2.0, 3.0, 4.0, 5.0}


def test_a_disk_error_does_not_end_the_following_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(make(), tmp_path)
    calls: list[tuple[Path, ...]] = []

    def fail_once(paths: tuple[Path, ...]) -> Path:
        calls.append(paths)
        if len(calls) == 1:
            raise OSError("the disk is away")
        reader._ended.set()
        return reader.save

    reader = TableReader(tmp_path, "a")
    monkeypatch.setattr(table_reader, "latest_save", fail_once)
    with pytest.warns(UserWarning, match="'a' stays at .*the disk is away"):
        table_reader._follow(weakref.ref(reader), reader._ended, 0.001)
    assert calls == [(tmp_path,)] * 2


def test_a_dropped_reader_stops_following(tmp_path: Path) -> None:
    save(make(), tmp_path)
    reader = TableReader(tmp_path, "a", follow=1000.0)
    thread, dropped = reader._thread, weakref.ref(reader)
    assert thread is not None
    del reader
    gc.collect()
    assert dropped() is None
    thread.join(60)
    assert not thread.is_alive()


# ---- several files of rows in one pack, as a save written during training may have


IDS = torch.arange(1000)


def weights_of(embedding: TableBatchedEmbedding, table: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the float32 weights of a table's rows, and a mask of the `IDS` that have rows."""
    view = embedding.view(table)
    known = view.knows(IDS) if view.config.hashed else torch.ones(len(IDS), dtype=torch.bool)
    return view.read(IDS[known], ["weight"]).parts["weight"].float(), known


@pytest.fixture
def source(tmp_path: Path) -> TableBatchedEmbedding:
    """Saves a full save and two deltas in `tmp_path / "saves"`, with removed ids of which some return."""
    embedding = saved(tmp_path / "saves")
    for step in range(2):
        train(embedding, range(150 + step, 400))
        for table in ("a", "b"):
            embedding.view(table).remove(torch.arange(100, 200) + step)
        save(embedding, tmp_path / "saves", incremental=True)
    return embedding


@pytest.mark.parametrize("packed", [True, False])
def test_loads_and_readers_have_the_same_rows(tmp_path: Path, source: TableBatchedEmbedding, packed: bool) -> None:
    folder = write_layered(tmp_path / "saves", tmp_path / "layered", packed=packed)
    files = [file for file in read_manifest(folder).files if (file.table, file.role) == ("a", "rows")]
    assert [file.layer for file in files] == [0, 1, 2]
    assert len({file.path for file in files}) == (1 if packed else 3)
    loaded = make()
    Saver().load(loaded, folder)
    for table in DTYPES:
        expected, known = weights_of(source, table)
        reader = TableReader(folder, table)
        assert torch.equal(reader.find(IDS)[1], known)
        assert torch.equal(reader.lookup(IDS[known]).float(), expected)
        assert torch.equal(weights_of(loaded, table)[0], expected)
    assert main(["verify", str(folder)]) == 0


@pytest.mark.parametrize("bits", [8, 4])
def test_a_quantized_copy_of_layers(
    tmp_path: Path, source: TableBatchedEmbedding, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "MANY_TABLES", 1)  # makes the copy use packs
    monkeypatch.setattr(index, "SMALL_ROWS", 0)  # makes the copy's tables have indexes
    folder = write_layered(tmp_path / "saves", tmp_path / "layered", packed=True)
    copy = quantize_save(folder, tmp_path / "small", bits).save
    assert {file.path for file in read_manifest(copy).files} == {"pack-00000-00000"}
    assert index_path(copy, "a").exists()
    for table in DTYPES:
        rows, known = weights_of(source, table)
        reader = TableReader(copy, table)
        assert torch.equal(reader.find(IDS)[1], known)
        assert np.array_equal(reader.lookup(IDS[known]).numpy(), dequantize(quantize(rows.numpy(), bits), bits, 5))
    assert main(["verify", str(copy)]) == 0


add = IndexWriter.add


@pytest.mark.parametrize("wrong", ["files", "rows", "removed"])
def test_verify_finds_faults_that_a_new_index_repeats(
    tmp_path: Path,
    source: TableBatchedEmbedding,
    wrong: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The code that writes indexes has a fault, so the stored index equals the index that `verify` writes for
    comparison.
    """
    folder = write_layered(tmp_path / "saves", tmp_path / "layered", packed=True)
    saved = read_manifest(folder)
    with monkeypatch.context() as patch:
        if wrong == "removed":
            patch.setattr(IndexWriter, "remove", lambda writer, ids: add(writer, ids, 0, 0))
        else:
            files, more = (lambda file: 0, 0) if wrong == "files" else (lambda file: file, 1)
            patch.setattr(IndexWriter, "add", lambda writer, ids, file, row: add(writer, ids, files(file), row + more))
        write_index(folder, saved, "a")
        assert main(["verify", str(folder)]) == 1
    assert f"{index_path(folder, 'a')}: damaged" in capsys.readouterr().err
    index_path(folder, "a").unlink()
    expected, known = weights_of(source, "a")
    assert torch.equal(TableReader(folder, "a").lookup(IDS[known]).float(), expected)
    assert main(["verify", str(folder)]) == 0


# ---- pooled lookups: bit-identical to the operator on the rows from `lookup`, with any number of threads


BAGS = 3000


def pooled(rows: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None, mean: bool) -> torch.Tensor:
    """Calls the lookup operator for rows that are each looked up once."""
    dim = rows.shape[1]
    out = torch.full((len(offsets) - 1, dim), torch.nan)
    slots = torch.arange(len(rows), dtype=torch.int32)
    columns, means = torch.zeros(1, dtype=torch.int64), torch.tensor([mean])
    torch.ops.rec_sdk.lookup_pooled(rows, slots, offsets, weights, columns, means, 0, out)
    return out


def bags(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draws ids (some without rows), offsets and weights for empty bags, short bags and two long bags."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 7, (BAGS,), generator=draw)
    lengths[:3] = lengths[-2:] = 0
    lengths[100], lengths[2000] = 5000, 777
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    count = int(offsets[-1])
    return torch.randint(-20, 400, (count,), generator=draw), offsets, torch.rand(count, generator=draw)


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("dim", [5, 64, 200])
def test_bags_have_the_bits_of_the_operator(tmp_path: Path, bits: int | None, dim: int) -> None:
    tables = [TableConfig(name, 1000, dim, weight_dtype=dtype, init_min=-0.1) for name, dtype in DTYPES.items()]
    embedding = embedding_of(*tables, cache=200)
    for name, dtype in DTYPES.items():
        embedding.view(name).write(torch.arange(300), {"weight": torch.randn(300, dim).to(dtype)})
    folder = tmp_path / "saves"
    save(embedding, folder)
    if bits is not None:
        folder = quantize_save(folder, tmp_path / "small", bits).save
    ids, offsets, weights = bags(dim)
    for name in DTYPES:
        reader = TableReader(folder, name, default=0.1)
        rows = reader.lookup(ids)
        for pooling in ("sum", "mean"):
            for factors in (None, weights):
                expected = pooled(rows, offsets, factors, pooling == "mean")
                for count in (1, 3):
                    with threads(count):
                        assert torch.equal(reader.lookup_pooled(ids, offsets, factors, pooling), expected)
        array = reader.lookup_pooled(ids.numpy(), offsets.int().numpy(), weights.numpy(), pooling="mean")
        assert isinstance(array, np.ndarray)
        assert np.array_equal(array, expected.numpy())
        assert reader.lookup_pooled(ids[:0], torch.zeros(3, dtype=torch.int64)).tolist() == [[0.0] * dim] * 2
        assert reader.lookup_pooled(ids[:0], torch.zeros(1, dtype=torch.int64)).shape == (0, dim)


def test_wrong_arguments(tmp_path: Path) -> None:
    save(make(), tmp_path)
    reader = TableReader(tmp_path, "c")
    ids, offsets = torch.tensor([1, 2, 3]), torch.tensor([0, 1, 3])
    for wrong in ([0, 1], [1, 3], [0, 2, 1, 3], []):
        with pytest.raises(ValueError, match="ascend from 0 to the number of ids, 3"):
            reader.lookup_pooled(ids, torch.tensor(wrong, dtype=torch.int64))
    with pytest.raises(ValueError, match="expected 'sum' or 'mean'"):
        reader.lookup_pooled(ids, offsets, pooling="max")
    with pytest.raises(ValueError, match=r"expected floats \[3\]"):
        reader.lookup_pooled(ids, offsets, torch.ones(2))
    with pytest.raises(ValueError, match="one dimension"):
        reader.lookup_pooled(ids[None], offsets)
    with pytest.raises(TypeError, match="offsets are"):
        reader.lookup_pooled(ids, offsets.float())


@pytest.mark.parametrize("count", [1, 4])
def test_a_damaged_index_is_named_by_every_thread(tmp_path: Path, count: int) -> None:
    index = index_path(only_save(tmp_path), "a")
    entries = np.frombuffer(index.read_bytes(), np.uint32).copy()
    entries[16 + 3 :: 4] = 10**9  # ids without a row
    index.write_bytes(entries.tobytes())
    ids, offsets, _ = bags(1)
    reader = TableReader(tmp_path, "a")
    with threads(count), pytest.raises(CheckpointError, match=index.name):
        reader.lookup_pooled(ids, offsets)
    with pytest.raises(CheckpointError, match=index.name):
        reader.lookup(torch.arange(300))
