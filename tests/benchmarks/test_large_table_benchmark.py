"""The benchmark of one large table in seconds: what it counts, never how long anything took."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torchrec", reason="the table is a collection's")

from benchmarks import large_table


def test_a_small_one(tmp_path: Path) -> None:
    """Loaded and served rows are compared by the benchmark itself."""
    file = tmp_path / "found.json"
    sizes = ["--rows", "50000", "--batch", "1024", "--cache", "4096", "--steps", "5"]
    assert large_table.main([*sizes, "--folder", str(tmp_path), "--json", str(file)]) == 0
    phases = json.loads(file.read_text())["phases"]
    assert list(phases) == ["insert", "steady state", "memory", "full save", "delta", "load", "serve"]
    assert (phases["insert"]["steps"], phases["insert"]["rows_in"]) == (49, 50_000)
    assert 0 < phases["steady state"]["rows_in"] < 5 * 1024
    assert 0.5 < phases["memory"]["over_bound"] < 3, "bytes of a store of few rows are those of its chunks"
    assert all(each.get("rows_per_second", 1) > 0 for each in phases.values())


def test_other_rows_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rec_sdk_torch.serving.TableReader.lookup", lambda reader, ids: ids)
    with pytest.raises(AssertionError, match="served rows are others"):
        large_table.main(["--rows", "2000", "--batch", "1000", "--cache", "1024", "--steps", "1"])
