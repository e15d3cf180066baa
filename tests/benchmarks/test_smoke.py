"""Every benchmark in the table runs within seconds; its result rows and their counts are checked, but not times."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchrec", reason="tables are collections")
pytest.importorskip("fbgemm_gpu", reason="it is a rival")

import forked_python
from row_checks import CHECKS

from benchmarks import NAMES, find, planning, variants
from benchmarks.workload import FORMS, OPTIMIZERS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "benchmarks" / "README.md", *ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
ELSEWHERE = {"npu", "npu_scalar"}
"""Benchmarks that need an emulated NPU, or a minute of a compiler: tests/emulator and tests/test_scalar_budget.py."""
POWER_LAW_AND_UNIFORM = ("power law 1.05", "uniform")
BYTES = 2000 * (8 + 2 * 64 * 4)
ROWS: dict[str, list[tuple[tuple[str, ...], Iterable[Any]]]] = {
    "background_saves": [
        (("save", "rows"), [("delta of 0.001", 3), ("delta of 0.01", 30), ("delta of 0.1", 300), ("full", 3000)]),
        (("beside",), [("a save",), ("numpy",), ("nothing",)]),
    ],
    "checkpoint": [
        (("what", "rows", "bytes"), [("save", 2000, BYTES), ("load", 2000, BYTES)]),
        (("share", "rows"), [(0.001, 2), (0.01, 20), (0.1, 200)]),
    ],
    "cpu": [
        (("form", "optimizer", "distribution"), product(("sequence", "pooled"), OPTIMIZERS, POWER_LAW_AND_UNIFORM))
    ],
    "cuda": [
        (
            ("alpha", "optimizer", "ratio"),
            [
                *((1.05, optimizer, ratio) for optimizer in ("adam", "sgd") for ratio in (1.0, 0.5)),
                *((0.0, optimizer, 1.0) for optimizer in ("adam", "sgd")),
            ],
        )
    ],
    "disk_store": [(("ids", "steps"), [("insert", 20), ("uniform", 3), ("skewed", 3)])],
    "end_to_end": [(("contender", "whole", "trained"), [("cached", True, 800)])],
    "fbgemm": [(("case",), zip(variants.FBGEMM_CASES))],
    "fixed_cost": [(("tables", "lookups"), [(1, 7), (3, 7)])],
    "large_table": [(("phase",), zip(("insert", "steady state", "memory", "full save", "delta", "load", "serve")))],
    "many_tables": [(("phase",), zip(("construct", "first step", "bytes", "step", "save", "load")))],
    "new_rows": [
        (("table", "D", "cache"), [(f"{kind} tables", 8, cache) for cache in (1.0, 0.1) for kind in ("hash", "index")])
    ],
    "optimizers": [(("optimizer", "dim"), product(variants.OPTIMIZER_CASES, [8]))],
    "planning": [(("rule", "lookups"), product(planning.RULES, ("all known", "a tenth new")))],
    "prefetch": [(("cache", "depth"), product((0.1, 1.0), (0, 1, 2, 4)))],
    "rounding": [
        (
            ("kind", "dtype", "optimizer"),
            product(("update of 64 rows", "step of a collection"), variants.DTYPES, variants.FORMS),
        )
    ],
    "serving": [(("deltas", "correct"), [(0, True), (1, True), (2, True)])],
    "sharded_step": [(("form", "sharding", "correct"), product(FORMS, ("row_wise", "table_wise"), (True,)))],
    "sharding": [
        (("ids", "ranks"), product(POWER_LAW_AND_UNIFORM, (1, 2))),
        (("devices", "local_size"), [(8, 1), (1024, 1), (1024, 8), (1024, 16), (1024, 32)] * 2),
    ],
}
"""The columns that identify a row of each benchmark, and their values."""


def numbers(value: Any) -> Iterator[float]:
    """Yields all numbers in a row."""
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from numbers(each)
    elif isinstance(value, int | float):
        yield value


QUICK = {
    "cuda": ["--device", "cpu", "--ratios", "1.0", "0.5"],
    "end_to_end": ["--models", "sequence", "--contenders", "cached"],
}
"""Arguments besides --quick."""


@pytest.mark.parametrize("name", sorted(set(NAMES) - ELSEWHERE))
def test_a_quick_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.timing.CONTEXT", forked_python.CONTEXT)
    threads, path, command = torch.get_num_threads(), tmp_path / "results.json", find(name)
    more = ["--folder", str(tmp_path)] if "folder" in command.options else []
    assert command.main(["--quick", *QUICK.get(name, []), *more, "--json", str(path)]) == 0
    assert torch.get_num_threads() == threads
    assert {file.name for file in tmp_path.iterdir()} <= {path.name, ".lock"}, "saves are removed"
    results = json.loads(path.read_text())
    assert (results["schema"], results["benchmark"], results["options"]["mode"]) == (3, name, "quick")
    for key in ("cpu", "cores", "caches", "memory_bytes", "isa", "torch_threads", "load_average", "malloc", "packages"):
        assert results["machine"][key] is not None
    rows = results["rows"]
    for row in rows:
        assert all(math.isfinite(number) for number in numbers(row))
        assert row.get("phase") == "bytes" or row.get("ratio", 1) > 0, "memory of the process need not grow"
    assert {target["met"] for target in results["targets"]} <= {True, False, None}
    for columns, expected in ROWS[name]:
        found = [tuple(row[column] for column in columns) for row in rows if row.keys() >= set(columns)]
        assert found == [tuple(each) for each in expected]
    CHECKS.get(name, lambda rows: None)(rows)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_pages_have_options_that_exist(page: Path) -> None:
    for name, line in re.findall(r"python -m benchmarks ([a-z_]+)((?:[^\n`\\]|\\\n)*)", page.read_text()):
        words = shlex.split(line.replace("\\\n", " ").partition("   ")[0], posix=True)
        find(name).parse([word for word in words if word != "..."])
