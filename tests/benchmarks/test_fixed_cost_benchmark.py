"""The benchmark of the fixed cost of a step: it runs, and its contenders train the same batch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("torchrec")

from benchmarks import fixed_cost


def test_every_case_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    tiny = ["--tables", "1", "3", "--lookups", "7", "--optimizers", "sgd", "--steps", "1", "--json", str(path)]
    assert fixed_cost.main(tiny) == 0
    results = json.loads(path.read_text())["results"]
    assert [(result["tables"], result["lookups"]) for result in results] == [(1, 7), (3, 7)]
    ours = {"pooled", "sequence", "TorchRec pooled", "TorchRec sequence"}
    assert all(ours <= result["microseconds"].keys() for result in results)
    assert "pooled: target 150 us" in capsys.readouterr().out


def test_lookups_are_divided_among_the_tables() -> None:
    batches = fixed_cost.Batches(3, 7)
    batch = batches.jagged()
    assert batch.values().numel() == 7
    assert batch.length_per_key() == batches.of_features == [3, 3, 1]
    assert batch.stride() == batches.samples == 3
    assert not torch.equal(batches.ids(), batches.ids()), "a new batch in each step"
