"""Saves with rows quantized to 8 and 4 bits: compared with PyTorch's own quantized rows, and with deltas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from embeddings import embedding_of
from served_tables import DTYPES, make, save, saved, train

from rec_sdk_torch.checkpoint.__main__ import main
from rec_sdk_torch.export import quantize_save
from rec_sdk_torch.saves.format.errors import CheckpointError
from rec_sdk_torch.saves.format.manifest import read_manifest
from rec_sdk_torch.saves.format.quantized import dequantize, quantize
from rec_sdk_torch.saves.saver import Saver
from rec_sdk_torch.saves.serve import quantize as quantize_module
from rec_sdk_torch.serving import TableReader
from rec_sdk_torch.tbe import TableConfig, TableLifecycle

UNPACK = {8: "embedding_bag_byte_unpack", 4: "embedding_bag_4bit_unpack"}


def rows_of(kind: str) -> np.ndarray:
    rows = np.random.default_rng(3).normal(size=(200, 6)).astype(np.float32)
    if kind == "offset":
        rows = rows * np.float32(1e-3) + np.float32(100)
    if kind.startswith("1e"):
        rows = rows * np.float32(kind)
    if kind == "constant":
        rows[:] = rows[:, :1]
    return np.concatenate([rows, np.zeros((1, 6), np.float32)])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kind", ["normal", "offset", "constant", "1e4", "1e-4", "1e-6", "1e-8", "1e-30"])
def test_each_weight_is_within_half_a_step(bits: int, kind: str) -> None:
    rows = rows_of(kind)
    packed = quantize(rows, bits)
    found = dequantize(packed, bits, 6)
    parameters = packed[:, -8:].copy().view(np.float32) if bits == 8 else packed[:, -4:].copy().view(np.float16)
    scale = parameters[:, :1].astype(np.float64)
    rounding = np.abs(rows).max() * 2.0**-23  # rounding of the result to float32
    assert (np.abs(found - rows.astype(np.float64)) <= scale / 2 + rounding).all()
    wide = rows.astype(np.float64)
    step = (wide.max(axis=1) - wide.min(axis=1)) / (2**bits - 1)
    assert (scale[:, 0] >= step).all()
    if bits == 8:
        assert (scale[:, 0] <= step * (1 + 2.0**-22)).all()
    else:  # see docs/serving.md
        least = 2.0**-24
        of_range = (15 * step + np.abs(wide.min(axis=1)) / 1024 + least) / 15
        assert (scale[:, 0] <= of_range * (1 + 1 / 1024) + least).all()
    theirs = getattr(torch.ops.quantized, UNPACK[bits])(torch.from_numpy(packed))
    torch.testing.assert_close(torch.from_numpy(found), theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bits", [8, 4])
def test_weights_that_cannot_be_quantized(bits: int) -> None:
    for wrong in (np.nan, np.inf):
        with pytest.raises(ValueError, match="not finite"):
            quantize(np.array([[0.0, wrong]], np.float32), bits)
    large = np.array([[0.0, 3e38]], np.float32)
    if bits == 8:
        assert np.array_equal(dequantize(quantize(large, 8), 8, 2)[:, 0], [0.0])
    else:
        with pytest.raises(ValueError, match="the range of a row exceeds"):
            quantize(large, 4)
    for wide in [-3e38, 3e38], [-1e38, 3.4e38], [-3.4e38, 3.4e38]:
        with pytest.raises(ValueError, match="the range of a row exceeds"):
            quantize(np.array([wide], np.float32), bits)


def test_a_range_within_float32_gives_finite_numbers() -> None:
    row = np.array([[-1e38, 2e38]], np.float32)
    np.testing.assert_allclose(dequantize(quantize(row, 8), 8, 2), row, rtol=1e-2)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_reader_follows_quantized_saves(tmp_path: Path, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize_module, "_CHUNK_ROWS", 64)
    embedding = saved(tmp_path / "saves")
    first = quantize_save(tmp_path / "saves", tmp_path / "small", bits)
    assert [table.rows for table in first.tables] == [300, 300, 1000]
    assert all(0 < table.relative_error < 1 / 2**bits for table in first.tables)
    readers = [TableReader(tmp_path / "small", name, default=0.1) for name in DTYPES]
    whole = [TableReader(tmp_path / "saves", name, default=0.1) for name in DTYPES]
    ids, errors = torch.cat([torch.arange(1000), torch.tensor([-5, 10**12])]), []
    for _ in range(3):
        for reader, plain in zip(readers, whole, strict=True):
            weights, found = reader.find(ids)
            expected, known = plain.find(ids)
            expected = torch.where(known[:, None], expected.float(), torch.tensor(0.1))
            assert reader.bits == bits
            assert reader.dtype == weights.dtype == torch.float32
            assert torch.equal(found, known)
            rows = expected[known].numpy()
            served = dequantize(quantize(rows, bits), bits, 5)
            errors.append(float(np.abs(served - rows.astype(np.float64)).max()))
            assert torch.equal(weights[known], torch.from_numpy(served))
            assert torch.equal(weights[~known], expected[~known])
            assert len(reader) == len(plain)
        train(embedding, range(200, 400))
        embedding.view("a").remove(torch.arange(100, 150))
        save(embedding, tmp_path / "saves", incremental=True)
        assert not readers[0].refresh(), "a copy is not there yet"
        again = quantize_save(tmp_path / "saves", tmp_path / "small", bits)
        assert len(again.written) == 1
        assert not quantize_save(tmp_path / "saves", tmp_path / "small", bits).written
        assert all(reader.refresh() for reader in [*readers, *whole])
    assert max(table.max_error for table in first.tables) == max(errors[: len(DTYPES)])


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path / "saves")
    paths = [str(tmp_path / "saves"), str(tmp_path / "small")]
    assert main(["quantize", *paths, "--bits", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[1].startswith("  a: 300 rows, 2100 bytes, max abs error ")
    assert main(["quantize", *paths, "--bits", "4"]) == 0
    assert "exists already" in capsys.readouterr().out
    assert main(["quantize", *paths]) == 1
    assert "not a copy of 8 bits of this save" in capsys.readouterr().err
    assert main(["quantize", str(tmp_path / "small"), str(tmp_path / "smaller")]) == 1
    assert "are quantized already" in capsys.readouterr().err
    assert main(["verify", str(tmp_path / "small")]) == 0
    assert main(["show", str(tmp_path / "small")]) == 0
    assert "Q4" in capsys.readouterr().out
    assert main(["export", str(tmp_path / "small"), str(tmp_path / "out")]) == 1
    assert "for serving only" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="have 4 bits, for serving only"):
        Saver().load(make(), tmp_path / "small")
    wrong: tuple[Any, ...] = (2, "8")
    for bits in wrong:
        with pytest.raises(ValueError, match=f"bits is {bits!r}, expected 8 or 4"):
            quantize_save(tmp_path / "saves", tmp_path / "none", bits)


def test_deltas_of_other_bits_are_refused(tmp_path: Path) -> None:
    """A delta with plain rows, or with another number of bits, is in the folder of quantized saves."""
    embedding = saved(tmp_path / "saves")
    quantize_save(tmp_path / "saves", tmp_path / "small", 8)
    train(embedding, range(100))
    delta = save(embedding, tmp_path / "saves", incremental=True)
    delta.rename(tmp_path / "small" / delta.name)
    with pytest.raises(CheckpointError, match="a delta of the save"):
        TableReader(tmp_path / "small", "a")


def test_a_delta_that_refers_to_evicted_rows_of_the_base(tmp_path: Path) -> None:
    """The plain delta refers to evicted rows of the previous save, which a quantized copy lacks."""
    table = TableConfig("t", 100, 4, track_changes=True, lifecycle=TableLifecycle(keep_evicted=True))
    embedding = embedding_of(table, cache=50)
    for removed in (range(3), range(3, 5)):
        embedding(torch.arange(20), torch.arange(21)).sum().backward()
        embedding.view("t").remove(torch.tensor(removed))
        plain = save(embedding, tmp_path / "saves", incremental=True)
    assert read_manifest(plain).tables[0].evicted_before == [3]
    quantize_save(tmp_path / "saves", tmp_path / "small", 8)
    reader = TableReader(tmp_path / "small", "t")
    assert reader.find(torch.arange(20))[1].tolist() == [i in range(3) or i >= 5 for i in range(20)]
    assert main(["verify", str(tmp_path / "small")]) == 0


def test_an_interrupted_call_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    embedding = make()
    embedding.view("a").write(torch.arange(3), {"weight": torch.full((3, 5), torch.inf)})
    save(embedding, tmp_path / "saves")
    with pytest.raises(CheckpointError, match=r"rows 0 to 2: .* not finite"):
        quantize_save(tmp_path / "saves", tmp_path / "small")
    assert not list((tmp_path / "small").iterdir())
    assert read_manifest(next((tmp_path / "saves").iterdir())).kind == "full"
