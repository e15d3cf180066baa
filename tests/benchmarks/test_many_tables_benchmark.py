"""The benchmark of many tables in seconds: what it counts, never how long anything took."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("torchrec", reason="both models are collections")

from benchmarks import many_tables

SIZES = ["--tables", "20", "--rows", "50", "--dim", "8", "--rounds", "2", "--steps", "2"]


def test_a_small_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Loaded rows are compared by the benchmark itself."""
    file = tmp_path / "found.json"
    assert many_tables.main([*SIZES, "--folder", str(tmp_path), "--json", str(file)]) == 0
    phases = json.loads(file.read_text())["phases"]
    names = ["construct", "first step", "bytes", "step", "save", "load"]
    assert {name: list(each) for name, each in phases.items()} == dict.fromkeys(
        ("ours", "torchrec", "ours_to_torchrec"), names
    )
    assert all(phases[name][phase] > 0 for name in ("ours", "torchrec") for phase in names if phase != "bytes")
    lines = capsys.readouterr().out.splitlines()
    assert [line[:12].strip() for line in lines] == ["", *names]
    assert list(tmp_path.iterdir()) == [file], "saves are removed"


def test_other_rows_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_tables.Ours, "load", lambda model, path: torch.manual_seed(0))
    with pytest.raises(AssertionError, match="ours: loaded rows are others"):
        many_tables.main(SIZES)
