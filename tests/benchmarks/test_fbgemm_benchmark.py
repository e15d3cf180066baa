"""The benchmark of FBGEMM's options: it runs, and notices results that differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import fbgemm

pytest.importorskip("fbgemm_gpu")

TINY = ["--rows", "200", "--lookups", "512", "--rounds", "2"]


def test_every_option_runs(tmp_path: Path) -> None:
    assert fbgemm.main([*TINY, "--json", str(tmp_path / "out.json")]) == 0
    cases = json.loads((tmp_path / "out.json").read_text())["cases"]
    assert [case["case"] for case in cases] == list(fbgemm.CASES)
    assert all(case["ratio"] > 0 for case in cases)


def test_results_that_differ_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    make = fbgemm.make
    monkeypatch.setattr(fbgemm, "make", lambda module, *rest: _shifted(make(module, *rest), module is fbgemm.fbgemm))
    with pytest.raises(AssertionError, match="not close"):
        fbgemm.main([*TINY, "--cases", "EXACT_SGD"])


def _shifted(module: torch.nn.Module, wrong: bool) -> torch.nn.Module:
    if wrong:
        module.split_embedding_weights()[0].add_(1)
    return module
