"""`python -m rec_sdk_torch.checkpoint`: export, show and verify."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tables import chain, delta, save, trained

from rec_sdk_torch.checkpoint.__main__ import main
from rec_sdk_torch.saves.format.manifest import read_manifest


@pytest.mark.parametrize("kind", ["safetensors", "npz"])
def test_export(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, _ = chain(tmp_path / "saves")
    source.view("a").remove(source.view("a").ids()[:4])
    delta(source, tmp_path / "saves")
    assert main(["export", str(tmp_path / "saves"), str(tmp_path / "out"), "--format", kind]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    for name in "abcd":
        path = tmp_path / "out" / f"{name}.{kind}"
        arrays = load_file(path) if kind == "safetensors" else np.load(path)
        ids, weight = (torch.as_tensor(arrays[part]) for part in ("ids", "weight"))
        view = source.view(name)
        assert sorted(ids.tolist()) == sorted(view.ids().tolist())
        expected = view.read(ids).parts["weight"]
        assert torch.equal(weight, expected.float() if kind == "npz" else expected)
    assert main(["export", str(tmp_path / "saves"), str(tmp_path / "out"), "--format", kind]) == 1
    assert "exists already" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "saves"), str(tmp_path / "o"), "--table", "x"]) == 1
    assert "has no tables ['x']" in capsys.readouterr().err


def test_show_and_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, folders = chain(tmp_path)
    assert main(["show", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert all(folder.name in shown for folder in folders)
    assert "a: hash table" in shown
    assert "Adagrad, step 4, lr 0.1" in shown
    assert main(["verify", str(tmp_path)]) == 0
    assert "with 4 saves" in capsys.readouterr().out
    file = folders[1] / read_manifest(folders[1]).files[0].path
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert main(["verify", str(tmp_path)]) == 1
    assert str(file) in capsys.readouterr().err
    assert main(["show", str(tmp_path / "nowhere")]) == 1
    assert "no such folder" in capsys.readouterr().err


def test_safetensors_reads_our_files(tmp_path: Path) -> None:
    source = trained(4)
    folder = save(source, tmp_path)
    for file in read_manifest(folder).files:
        tensors = load_file(folder / file.path)
        assert all(len(tensor) == file.rows for tensor in tensors.values())
        if file.role == "rows":
            assert torch.equal(source.view(file.table).read(tensors["ids"]).parts["weight"], tensors["weight"])
