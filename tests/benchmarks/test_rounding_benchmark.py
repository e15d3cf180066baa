"""The benchmark of stochastic rounding: it runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torchrec")

from benchmarks import rounding

TINY = ["--rows", "64", "--step-rows", "500", "--dims", "8", "--rounds", "1"]


def test_every_case_runs(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert rounding.main([*TINY, "--json", str(path)]) == 0
    results = json.loads(path.read_text())["results"]
    found = {(result["kind"], result["dtype"], result["optimizer"]) for result in results}
    kinds = ("update of 64 rows", "step of a collection")
    assert found == {(kind, dtype, name) for kind in kinds for dtype in rounding.DTYPES for name in rounding.OPTIMIZERS}
    assert all(result["ratio"] > 0 for result in results)
