"""Tables with several files of rows in one pack: the rows that a load, TableReader and a quantized copy have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from layered_saves import write_layered
from served_tables import DTYPES, make, train

from rec_sdk_torch._engine import IndexWriter
from rec_sdk_torch.checkpoint.__main__ import main
from rec_sdk_torch.export import quantize_save
from rec_sdk_torch.saves.format import index, manifest
from rec_sdk_torch.saves.format.index import index_path, write_index
from rec_sdk_torch.saves.format.manifest import read_manifest
from rec_sdk_torch.saves.format.quantized import dequantize, quantize
from rec_sdk_torch.saves.saver import Saver
from rec_sdk_torch.serving import TableReader
from rec_sdk_torch.tbe import TableBatchedEmbedding

IDS = torch.arange(1000)


def weights_of(embedding: TableBatchedEmbedding, table: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of the rows of a table, float32, and which of `IDS` they are."""
    view = embedding.view(table)
    known = view.knows(IDS) if view.config.hashed else torch.ones(len(IDS), dtype=torch.bool)
    return view.read(IDS[known], ["weight"]).parts["weight"].float(), known


@pytest.fixture
def source(tmp_path: Path) -> TableBatchedEmbedding:
    """Saved in `tmp_path / "saves"`: a full save and two deltas, with removed ids of which some came back."""
    embedding = make()
    train(embedding, range(300))
    Saver().save(embedding, tmp_path / "saves")
    for step in range(2):
        train(embedding, range(150 + step, 400))
        for table in ("a", "b"):
            embedding.view(table).remove(torch.arange(100, 200) + step)
        Saver().save(embedding, tmp_path / "saves", incremental=True)
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
    monkeypatch.setattr(manifest, "MANY_TABLES", 1)  # its copy has packs
    monkeypatch.setattr(index, "SMALL_ROWS", 0)  # and indexes
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
def test_verify_finds_what_each_new_index_repeats(
    tmp_path: Path,
    source: TableBatchedEmbedding,
    wrong: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The code that makes indexes has a fault, so the stored index equals the new one that it is compared with."""
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
