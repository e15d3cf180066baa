"""Every benchmark in seconds: the rows of its report, what they count and compare, never how long anything took."""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import math
import re
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchrec", reason="tables are collections")
pytest.importorskip("fbgemm_gpu", reason="it is a rival")

from benchmarks import fbgemm, fixed_cost, many_tables, optimizers, rounding
from benchmarks.runner import Benchmark, Option, Target, table
from rec_sdk_torch.formulas import SPECS
from rec_sdk_torch.tbe import TableOptimizer

ROOT = Path(__file__).resolve().parents[2]
NAMES = sorted(path.stem for path in ROOT.glob("benchmarks/*.py") if "\nBENCHMARK = " in path.read_text())
PAGES = [ROOT / "benchmarks" / "README.md", *ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]

Row = dict[str, Any]


def benchmark(name: str) -> Benchmark:
    found: Benchmark = importlib.import_module(f"benchmarks.{name}").BENCHMARK
    return found


@functools.cache
def quick(name: str) -> dict[str, Any]:
    """The JSON of a run."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        more = ["--folder", folder] if "folder" in benchmark(name).options else []
        assert benchmark(name).main(["--quick", *more, "--json", str(path)]) == 0
        saved = [file for file in Path(folder).iterdir() if file.name not in (path.name, ".lock")]
        assert not saved, "saves are removed"
        results: dict[str, Any] = json.loads(path.read_text())
        return results


def column(name: str, *keys: str) -> list[tuple[Any, ...]]:
    """The values of all rows that have the first of the keys."""
    return [tuple(row[key] for key in keys) for row in quick(name)["rows"] if keys[0] in row]


def numbers(value: Any) -> Iterator[float]:
    """All numbers in a row."""
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from numbers(each)
    elif isinstance(value, int | float):
        yield value


@pytest.mark.parametrize("name", NAMES)
def test_a_quick_run(name: str) -> None:
    threads = torch.get_num_threads()
    results = quick(name)
    assert torch.get_num_threads() == threads
    assert (results["schema"], results["benchmark"], results["options"]["mode"]) == (3, name, "quick")
    for key in ("cpu", "cores", "caches", "memory_bytes", "isa", "torch_threads", "load_average", "malloc", "packages"):
        assert results["machine"][key] is not None
    for row in results["rows"]:
        assert all(math.isfinite(number) for number in numbers(row))
        assert row.get("ratio", 1) > 0
    for target in results["targets"]:
        assert target["met"] in (True, False, None)
        assert target["rows"] > 0, target["target"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_pages_have_options_that_exist(page: Path) -> None:
    for name, line in re.findall(r"python -m benchmarks\.([a-z_]+)((?:[^\n`\\]|\\\n)*)", page.read_text()):
        if name in NAMES:
            words = shlex.split(line.replace("\\\n", " ").partition("   ")[0], posix=True)
            benchmark(name).parse([word for word in words if word != "..."])


# ---- rows and their numbers


def test_rounding_has_every_case() -> None:
    kinds = ("update of 64 rows", "step of a collection")
    cases = itertools.product(kinds, rounding.DTYPES, rounding.OPTIMIZERS)
    assert column("rounding", "kind", "dtype", "optimizer") == list(cases)


def test_optimizers_has_every_kernel() -> None:
    assert column("optimizers", "optimizer", "dim") == list(itertools.product(optimizers.CASES, (4, 8)))
    specs = [TableOptimizer.create(case.cls, case.keywords).spec for case in optimizers.CASES.values()]
    assert {spec.kernel for spec in specs} == {spec.kernel for spec in SPECS}


def test_bytes_of_an_optimizers_step() -> None:
    """One row in each of 4 tables: 80 ids, 80 outputs and gradients, one weight read, one record read and written."""
    narrow = optimizers.Steps(optimizers.CASES["Adam, bf16 states"], 1, 8, 80)
    assert narrow.bytes == 80 * 8 + 2 * 80 * 32 + 4 * (32 + 2 * (32 + 16 + 16))
    wide = optimizers.Steps(optimizers.CASES["Adam, bf16 weights"], 1, 8, 80)
    assert wide.bytes == 80 * 8 + 2 * 80 * 32 + 4 * (16 + 2 * (16 + 32 + 32))


def test_lookups_of_a_small_step_are_divided_among_the_tables() -> None:
    assert column("fixed_cost", "tables", "lookups") == [(1, 7), (3, 7)]
    contenders = {"pooled", "sequence", "TorchRec pooled", "TorchRec sequence", "FBGEMM pooled"}
    assert all(contenders <= row.keys() for row in quick("fixed_cost")["rows"])
    batches = fixed_cost.Batches(3, 7)
    batch = batches.jagged()
    assert batch.values().numel() == 7
    assert batch.length_per_key() == batches.of_features == [3, 3, 1]
    assert batch.stride() == batches.samples == 3
    assert not torch.equal(batches.ids(), batches.ids()), "a new batch in each step"


def test_many_tables_have_every_phase() -> None:
    phases = ["construct", "first step", "bytes", "step", "save", "load"]
    assert [phase for (phase,) in column("many_tables", "phase")] == phases
    assert all(row["ours"] > 0 < row["torchrec"] for row in quick("many_tables")["rows"] if row["phase"] != "bytes")


def test_a_large_table_grows() -> None:
    phases = {row["phase"]: row for row in quick("large_table")["rows"]}
    assert list(phases) == ["insert", "steady state", "memory", "full save", "delta", "load", "serve"]
    assert (phases["insert"]["steps"], phases["insert"]["rows_in"]) == (49, 50_000)
    assert 0 < phases["steady state"]["rows_in"] < 5 * 1024
    assert 0.5 < phases["memory"]["over_bound"] < 3, "bytes of a store of few rows are those of its chunks"


def test_saves_and_stores_count_their_rows() -> None:
    assert column("disk_store", "ids", "steps") == [("insert", 20), ("uniform", 3), ("skewed", 3)]
    inserted, uniform, skewed = (rows for (rows,) in column("disk_store", "rows_in_per_step"))
    assert (inserted, uniform > skewed > 0) == (250, True)
    whole = [("save", 2000, 2000 * (8 + 2 * 64 * 4)), ("load", 2000, 2000 * (8 + 2 * 64 * 4))]
    assert column("checkpoint", "what", "rows", "bytes") == whole
    deltas = column("checkpoint", "share", "rows")
    assert deltas == [(0.001, 2), (0.01, 20), (0.1, 200)]
    saves = [("delta of 0.001", 3), ("delta of 0.01", 30), ("delta of 0.1", 300), ("full", 3000)]
    assert column("background_saves", "save", "rows") == saves
    assert column("background_saves", "beside") == [("a save",), ("numpy",), ("nothing",)]
    assert column("serving", "deltas", "correct") == [(0, True), (1, True), (2, True)]


def test_every_option_of_fbgemm_runs() -> None:
    assert [case for (case,) in column("fbgemm", "case")] == list(fbgemm.CASES)


# ---- results that differ


def test_other_weights_than_fbgemms_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    make = fbgemm.make

    def shifted(module: Any, *rest: Any) -> Any:
        made = make(module, *rest)
        if module is fbgemm.fbgemm:
            made.split_embedding_weights()[0].add_(1)
        return made

    monkeypatch.setattr(fbgemm, "make", shifted)
    with pytest.raises(AssertionError, match="not close"):
        benchmark("fbgemm").main(["--quick", "--cases", "EXACT_SGD"])


def test_other_loaded_rows_end_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_tables.Ours, "load", lambda model, path: None)
    with pytest.raises(AssertionError, match="Ours: loaded rows are others"):
        benchmark("many_tables").main(["--quick"])


def test_other_served_rows_end_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rec_sdk_torch.serving.TableReader.lookup", lambda reader, ids: ids)
    with pytest.raises(AssertionError, match="served rows are others"):
        benchmark("large_table").main(["--quick", "--rows", "2000", "--batch", "1000", "--cache", "1024"])


# ---- the runner


def test_targets_judge_the_median_and_the_worst() -> None:
    rows = [{"ratio": ratio, "kind": kind} for ratio, kind in ((1.0, "a"), (1.2, "a"), (3.0, "a"), (9.0, "b"))]

    def met(**bounds: Any) -> bool | None:
        found: bool | None = Target("x", "ratio", {"kind": "a"}, **bounds).judge(rows)["met"]
        return found

    assert [met(median=1.2), met(median=1.1), met(worst=3.0), met(worst=2.9)] == [True, False, True, False]
    assert [met(median=1.2, worst=2.9), met(median=1.2, worst=1.0, at_least=True)] == [False, True]
    assert [met(), met(worst=1.1, at_least=True)] == [None, False]
    nothing = Target("x", "none", worst=1.0).judge(rows)
    assert (nothing["met"], nothing["worst"], nothing["rows"]) == (None, None, 0)


def test_a_row_that_differs_is_the_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[Row] = [{"name": "a", "correct": True}, {"name": "b", "figures": {"x": 1}, "correct": {"c": [1]}}]
    assert Benchmark(lambda options: rows, {}).main([]) == 0
    rows[1]["correct"] = {"lookup": {"c": False}}
    assert Benchmark(lambda options: rows, {}).main([]) == 1
    assert "a         yes" in capsys.readouterr().out


def test_modes_and_defaults(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = {"rows": Option(5, quick=2, full=9), "on": Option(True), "dims": Option([1, 2], quick=[1])}
    command = Benchmark(lambda given: [], options)
    parsed = [command.parse(words) for words in ([], ["--quick"], ["--full", "--no-on"], ["--rows", "3", "--dims"])]
    found = [(each.rows, each.on, each.dims) for each in parsed]
    assert found == [(5, True, [1, 2]), (2, True, [1]), (9, False, [1, 2]), (3, True, [])]
    for wrong in (["--rows", "0"], ["--json", str(tmp_path)], ["--json", str(tmp_path / "none" / "x.json")]):
        with pytest.raises(SystemExit):
            command.parse(wrong)
    assert "0 is not allowed; at least 1 is" in capsys.readouterr().err


def test_a_table_shows_texts_and_numbers() -> None:
    rows = [{"table": "t", "name": "a", "count": 12345, "more": {}}, {"name": "b", "share": 0.123456, "none": None}]
    assert table(rows, "t").splitlines() == [
        "t: name   count   share",
        "-------  ------  ------",
        "a        12,345       -",
        "b             -  0.1235",
    ]
