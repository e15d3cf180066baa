"""The end-to-end benchmark in seconds: what it trains and reports, never how long anything took."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchrec", reason="the models have TorchRec's inputs")

from benchmarks import end_to_end
from benchmarks.whole_models import CONTENDERS, PROBLEMS, criteo_shape, train_one
from benchmarks.workload import CRITEO_SIZES

QUICK = end_to_end.parsed(["--quick"])


def trained(model: str, contender: str) -> dict[str, Any]:
    if contender == "fbgemm":
        pytest.importorskip("fbgemm_gpu", reason="it is the rival")
    return train_one(QUICK, model, 64, contender)


@pytest.mark.parametrize("model", PROBLEMS)
def test_contenders_learn_alike(model: str) -> None:
    """Ours have the same bits with small caches and large ones, and the rivals come out near them."""
    runs = {name: trained(model, name) for name in CONTENDERS}
    assert {run["trained"] for run in runs.values()} == {800}
    assert all(run["whole"] and run["samples_per_second"] > 0 for run in runs.values())
    assert runs["cached"]["auc"] == runs["resident"]["auc"]
    assert runs["cached"]["cache"]["unique_misses"] > runs["resident"]["cache"]["unique_misses"] >= 0
    for run in runs.values():
        assert run["auc"] == pytest.approx(runs["resident"]["auc"], abs=0.1)


def test_ids_are_spread_over_their_table() -> None:
    problem = criteo_shape(500, seed=1, most_rows=2**40)
    assert [rows for rows, _ in problem.tables.values()] == list(CRITEO_SIZES)
    for name, (rows, _) in problem.tables.items():
        ids = problem.data.features[name].values
        assert 0 <= int(ids.min()) <= int(ids.max()) < rows
        if rows > 10_000:
            assert ids.unique().diff().float().mean() > rows / 1000, "rows that are often looked up are neighbours"


def run(contender: str, number: int, rate: float, **changes: Any) -> dict[str, Any]:
    given = {"contender": contender, "round": number, "samples_per_second": rate, "auc": 0.75, "whole": True}
    return {**given, "trained": 100, "table_bytes": 3 << 20, **changes}


def test_ratios_are_of_rounds() -> None:
    runs = [run("torch", 0, 10.0), run("cached", 0, 20.0), run("cached", 1, 30.0), run("torch", 1, 30.0)]
    runs += [run("cached", 2, 90.0), run("torch", 2, 30.0), run("torchrec", 1, 3.0, whole=False, trained=64)]
    cached, torchs, torchrecs = end_to_end.summary(runs)
    assert cached["cached_over"] == 1
    assert (torchs["cached_over"], torchs["samples_per_second"]) == (2, 30)
    assert torchs["resident_over"] is None
    assert torchrecs["cached_over"] == 10
    lines = end_to_end.table([cached, torchs, torchrecs]).splitlines()
    assert lines[3] == "| torch | 30 | 2.00x |  | 0.7500 | 3 |"
    assert lines[4] == "| torchrec | 3 | 10.00x |  | 0.7500 after 64 samples | 3 |"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A contender has a process of its own."""
    file = tmp_path / "found.json"
    command = ["--quick", "--models", "sequence", "--contenders", "cached", "--json", str(file)]
    assert end_to_end.main(command) == 0
    assert "| cached |" in capsys.readouterr().out
    (result,) = json.loads(file.read_text())["results"]
    assert math.isclose(result["summary"][0]["auc"], train_one(QUICK, "sequence", 64, "cached")["auc"])


def test_a_contender_that_fails_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert end_to_end.main(["--quick", "--models", "sequence", "--contenders", "cached"]) == 1
    assert "cached took no part" in capsys.readouterr().err
