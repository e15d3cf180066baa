"""Every benchmark in seconds: the rows of its report, what they count and compare, never how long anything took."""

from __future__ import annotations

import itertools
import json
import math
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchrec", reason="tables are collections")
pytest.importorskip("fbgemm_gpu", reason="it is a rival")

from quick_runs import QUICK, benchmark, quick

from benchmarks import end_to_end, fbgemm, fixed_cost, many_tables, optimizers, prefetch, rounding
from benchmarks.prefetch import Trainer
from benchmarks.runner import Benchmark, Option, Target, table
from benchmarks.whole_models import CONTENDERS, PROBLEMS, criteo_shape, train_one
from benchmarks.workload import CRITEO_SIZES
from rec_sdk_torch.formulas import SPECS
from rec_sdk_torch.tbe import TableOptimizer

ROOT = Path(__file__).resolve().parents[2]
NAMES = sorted(path.stem for path in ROOT.glob("benchmarks/*.py") if "\nBENCHMARK = " in path.read_text())
ELSEWHERE = {"npu", "npu_scalar"}
"""Benchmarks that need an emulated NPU, or a minute of a compiler: tests/emulator and tests/test_scalar_budget.py."""
PAGES = [ROOT / "benchmarks" / "README.md", *ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]

Row = dict[str, Any]


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


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ELSEWHERE])
def test_a_quick_run(name: str) -> None:
    threads = torch.get_num_threads()
    results = quick(name)
    assert torch.get_num_threads() == threads
    assert (results["schema"], results["benchmark"], results["options"]["mode"]) == (3, name, "quick")
    for key in ("cpu", "cores", "caches", "memory_bytes", "isa", "torch_threads", "load_average", "malloc", "packages"):
        assert results["machine"][key] is not None
    for row in results["rows"]:
        assert all(math.isfinite(number) for number in numbers(row))
        assert row.get("phase") == "bytes" or row.get("ratio", 1) > 0, "memory of the process need not grow"
    assert {target["met"] for target in results["targets"]} <= {True, False, None}


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


# ---- prefetch

DEPTHS, ROUNDS, STEPS, LOOKUPS = (0, 1, 2, 4), 2, 6, 512


def test_batches_are_planned_as_far_ahead_as_asked() -> None:
    assert column("prefetch", "cache", "depth") == list(itertools.product((0.1, 1.0), DEPTHS))
    for case in quick("prefetch")["rows"]:
        assert (case["rounds"], case["hidden"]) == (ROUNDS, 8)
        assert min(case[key] for key in ("wait_share", "median_wait_share", "plan_ms", "dense_ms")) > 0
        assert case["cache"] < 1 or case["ms_over_resident"] == case["median_ms_over_resident"] == 1
        assert case["depth"] * (case["depth"] > 0) <= case["planned_at_start"] <= case["depth"] + (case["depth"] > 0)
        assert case["depth_reached"] <= case["depth"] + (case["depth"] > 0), "the batch to be trained, and those ahead"


def test_counters_are_of_the_timed_steps() -> None:
    for case in quick("prefetch")["rows"]:
        # At the start of a round, the batch that is about to be trained may be planned beside those ahead.
        counters, ahead = case["counters"], ROUNDS * (case["depth"] + (case["depth"] > 0))
        assert ROUNDS * STEPS - ahead <= case["counted_batches"] <= ROUNDS * STEPS + ahead
        assert counters["lookups"] == LOOKUPS * case["counted_batches"]
        assert counters["new_rows"] == 0, "tables are filled first"
        assert counters["unique_misses"] == counters["rows_in"]
        assert (counters["unique_misses"] > 0) is (case["cache"] < 1.0)


def test_a_model_that_learns_otherwise_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = Trainer.run

    def forgets(self: Trainer, batches: Any, depth: int, *rest: int) -> Any:
        return run(self, batches[1:] if depth == 2 else batches, depth, *rest)

    monkeypatch.setattr(Trainer, "run", forgets)
    path = tmp_path / "results.json"
    assert prefetch.BENCHMARK.main(["--quick", "--depths", "0", "2", "--json", str(path)]) == 1
    results = json.loads(path.read_text())
    assert not any(case["correct"] for case in results["rows"])
    assert all(target["met"] is None for target in results["targets"])


def test_targets_of_prefetch_take_their_own_cases_only() -> None:
    def met(*changes: Row) -> list[bool | None]:
        case = {"cache": 0.1, "depth": 2, "hides a plan": True, "correct": True}
        rows = [{**case, "wait_share": 0.04, "ms_over_resident": 1.3, **change} for change in changes]
        return [target.judge(rows)["met"] for target in prefetch.BENCHMARK.targets]  # type: ignore[union-attr]

    both = {"wait_share": 0.9, "ms_over_resident": 9.0}
    assert met() == [None, None]
    assert met({}) == [True, True]
    assert met({}, {"wait_share": 0.051}) == [False, True]
    assert met({}, {"ms_over_resident": 1.31}) == [True, False]
    assert met({}, {"wait_share": 0.9, "hides a plan": False}) == [True, True], "nothing hides behind a short step"
    assert met({}, {"ms_over_resident": 9.0, "cache": 1.0}) == [True, True]
    assert met({}, {**both, "depth": 4}, {**both, "correct": False}) == [True, True]


# ---- sharding


def test_bytes_that_ranks_exchange_are_counted() -> None:
    cases = [case for case in quick("sharding")["rows"] if "ranks" in case]
    axes = itertools.product(("power law 1.05", "uniform"), (1, 2))
    assert [(case["ids"], case["ranks"]) for case in cases] == list(axes)
    for case in cases:
        assert case["lookups"] == 512
        assert 0 < case["unique_ids"] < 512
        assert case["steps_per_second"] > 0
        if case["ranks"] == 1:
            assert case["exchanged_bytes"] == case["least_bytes"] == 0
        else:
            assert 0.9 < case["over_least"] < 1.1, "ids are about even"
            assert case["exchanged_bytes"] < case["bytes_with_duplicates"]
            assert case["exchanged_bytes"] == pytest.approx(case["id_bytes"] * (8 + 2 * 4 * 8) / 8)


def test_the_model_is_arithmetic_of_the_counts() -> None:
    rows = quick("sharding")["rows"]
    modelled = [case for case in rows if "devices" in case]
    sizes = [(8, 1), (1024, 1), (1024, 8), (1024, 16), (1024, 32)]
    assert [(case["devices"], case["local_size"]) for case in modelled] == sizes * 2
    of_id = rows[0]["unique_ids"] * (8 + 2 * 4 * 8)
    for case, speed in zip(modelled[:5], (None, None, 100e9, 100e9, 25e9), strict=True):
        size, machines = case["local_size"], case["devices"] // case["local_size"]
        within, between = of_id * (size - 1) / size, of_id * (machines - 1) / machines
        assert case["bytes"] == pytest.approx(within + between)
        assert case["messages"] == 4 * (size - 1 + machines - 1)
        seconds = within / (speed or 1) + between / 25e9 + case["messages"] * 5e-6
        assert case["exchange_ms"] == pytest.approx(1e3 * seconds)
        assert case["status_ms"] == pytest.approx(1e3 * 2 * (size + machines - 2) * 5e-6)


# ---- whole models

WHOLE = end_to_end.BENCHMARK.parse(["--quick"])


@pytest.mark.parametrize("model", PROBLEMS)
def test_contenders_learn_alike(model: str) -> None:
    """Ours have the same bits with small caches and large ones, and the rivals come out near them."""
    runs = {name: train_one(WHOLE, model, 64, name) for name in CONTENDERS}
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


def test_ratios_of_whole_models_are_of_rounds() -> None:
    def run(contender: str, number: int, rate: float, **changes: Any) -> Row:
        given = {"contender": contender, "round": number, "samples_per_second": rate, "auc": 0.75, "whole": True}
        return {**given, "trained": 100, "table_bytes": 3 << 20, **changes}

    runs = [run("torch", 0, 10.0), run("cached", 0, 20.0), run("cached", 1, 30.0), run("torch", 1, 30.0)]
    runs += [run("cached", 2, 90.0), run("torch", 2, 30.0), run("torchrec", 1, 3.0, whole=False, trained=64)]
    cached, torchs, torchrecs = end_to_end.summary(runs)
    assert cached["cached_over"] == 1
    assert (torchs["cached_over"], torchs["samples_per_second"], torchs["resident_over"]) == (2, 30, None)
    assert (torchrecs["cached_over"], torchrecs["whole"], torchrecs["trained"]) == (10, False, 64)


def test_a_contender_has_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = quick("end_to_end")["rows"]
    assert math.isclose(row["auc"], train_one(WHOLE, "sequence", 64, "cached")["auc"])
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert end_to_end.BENCHMARK.main(["--quick", *QUICK["end_to_end"]]) == 1


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
    with pytest.raises(SystemExit):
        prefetch.BENCHMARK.parse(["--depths", "13"])
    said = capsys.readouterr().err
    assert "0 is not allowed; at least 1 is" in said
    assert "13 is not allowed; 0 to 12 is" in said


def test_a_table_shows_texts_and_numbers() -> None:
    rows = [{"table": "t", "name": "a", "count": 12345, "more": {}}, {"name": "b", "share": 0.123456, "none": None}]
    assert table(rows, "t").splitlines() == [
        "t: name   count   share",
        "-------  ------  ------",
        "a        12,345       -",
        "b             -  0.1235",
    ]
