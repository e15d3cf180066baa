"""The benchmark of all optimizers: it runs, knows every one, and counts the bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torchrec")

from benchmarks import optimizers
from rec_sdk_torch.formulas import SPECS
from rec_sdk_torch.tbe import TableOptimizer

TINY = ["--rows", "50", "--lookups", "80", "--dims", "4", "8", "--rounds", "1", "--copy-bytes", "4096"]


def test_every_case_runs(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert optimizers.main([*TINY, "--json", str(path)]) == 0
    results = json.loads(path.read_text())["results"]
    assert {(result["optimizer"], result["dim"]) for result in results} == {
        (name, dim) for name in optimizers.CASES for dim in (4, 8)
    }
    assert all(result["over_copy_bound"] > 0 for result in results)


def test_every_kernel_has_a_case() -> None:
    specs = [TableOptimizer.create(case.cls, {"lr": 0.1, **case.options}).spec for case in optimizers.CASES.values()]
    assert {spec.kernel for spec in specs} == {spec.kernel for spec in SPECS}


def test_bytes_of_a_step() -> None:
    """One row in each of 4 tables: 80 ids, 80 outputs and gradients, one weight read, one record read and written."""
    narrow = optimizers.Steps(optimizers.CASES["Adam, bf16 states"], 1, 8, 80)
    assert narrow.bytes == 80 * 8 + 2 * 80 * 32 + 4 * (32 + 2 * (32 + 16 + 16))
    wide = optimizers.Steps(optimizers.CASES["Adam, bf16 weights"], 1, 8, 80)
    assert wide.bytes == 80 * 8 + 2 * 80 * 32 + 4 * (16 + 2 * (16 + 32 + 32))
