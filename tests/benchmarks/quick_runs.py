"""Quick runs of the benchmarks, each made once in a process of tests."""

from __future__ import annotations

import importlib
import json
import tempfile
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import warm
from torch.multiprocessing.spawn import start_processes

from benchmarks.runner import Benchmark

QUICK = {
    "cpu": ["--sections", "step", "plan", "policy", "growth", "--growth-rows", "2000", "4000"],
    "cuda": ["--device", "cpu", "--ratios", "1.0", "0.8", "0.5"],
    "end_to_end": ["--models", "sequence", "--contenders", "cached"],
}
"""Arguments beside --quick."""


def benchmark(name: str) -> Benchmark:
    found: Benchmark = importlib.import_module(f"benchmarks.{name}").BENCHMARK
    return found


@cache
def quick(name: str) -> dict[str, Any]:
    """The JSON of a run."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        more = ["--folder", folder] if "folder" in benchmark(name).options else []
        with pytest.MonkeyPatch.context() as patch:  # ranks that need not import torch, see warm.py
            spawn = partial(start_processes, start_method=warm.CONTEXT.get_start_method())
            patch.setattr("benchmarks.sharding.spawn", spawn)
            assert benchmark(name).main(["--quick", *QUICK.get(name, []), *more, "--json", str(path)]) == 0
        saved = [file for file in Path(folder).iterdir() if file.name not in (path.name, ".lock")]
        assert not saved, "saves are removed"
        results: dict[str, Any] = json.loads(path.read_text())
        return results
