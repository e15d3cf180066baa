"""The benchmark runner: targets, exit status, options, tables and turns; a run ends with an error if results differ."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchrec", reason="tables are collections")
pytest.importorskip("fbgemm_gpu", reason="it is a rival")

from threads import threads

from benchmarks import find, prefetch, recorded, timing, variants, whole_models
from benchmarks.prefetch import Trainer
from benchmarks.runner import Benchmark, Option, Target, table
from benchmarks.whole_models import CONTENDERS, PROBLEMS, criteo_shape, train_one
from benchmarks.workload import CRITEO_SIZES
from rec_sdk_torch.formulas import SPECS
from rec_sdk_torch.tbe import TableOptimizer

Row = dict[str, Any]


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


def test_a_differing_row_sets_the_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
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
        prefetch.prefetch.parse(["--depths", "13"])
    printed = capsys.readouterr().err
    assert "0 is not allowed; at least 1 is" in printed
    assert "13 is not allowed; 0 to 12 is" in printed


def test_a_table_shows_texts_and_numbers() -> None:
    rows = [{"table": "t", "name": "a", "count": 12345, "more": {}}, {"name": "b", "share": 0.123456, "none": None}]
    assert table(rows, "t").splitlines() == [
        "t: name   count   share",
        "-------  ------  ------",
        "a        12,345       -",
        "b             -  0.1235",
    ]


def test_contenders_take_turns_in_an_order_that_changes() -> None:
    turns: list[str] = []
    calls = {name: lambda name=name: turns.append(name) or len(turns) for name in "ab"}
    samples = timing.take_turns(calls, 3, warm=1, repeats=2)
    assert "".join(turns) == "bbaa" + "aabb" + "bbaa" + "aabb"
    assert {name: each.seconds for name, each in samples.items()} == {
        "a": [5, 6, 11, 12, 13, 14],
        "b": [7, 8, 9, 10, 15, 16],
    }
    assert (samples["a"].best, samples["b"].median) == (5, 9.5)


# ---- results that differ


def _shifted(steps: type[variants.FbgemmSteps]) -> Callable[..., None]:
    make = steps.__init__

    def made(self: variants.FbgemmSteps, namespace: Any, *rest: Any) -> None:
        make(self, namespace, *rest)
        if namespace is variants.ours_of_fbgemm:
            self.module.split_embedding_weights()[0].add_(1)

    return made


DIFFER: dict[str, tuple[str, Any, str, list[str]]] = {
    "fbgemm": (
        "benchmarks.variants.FbgemmSteps.__init__",
        _shifted(variants.FbgemmSteps),
        "not close",
        ["--cases", "MEAN"],
    ),
    "many_tables": ("benchmarks.large.Ours.load", lambda model, path: None, "Ours: loaded rows are others", []),
    "large_table": (
        "rec_sdk_torch.serving.TableReader.lookup",
        lambda reader, ids: ids,
        "served rows are others",
        ["--rows", "2000", "--batch", "1000", "--cache", "1024"],
    ),
}


@pytest.mark.parametrize("name", DIFFER)
def test_results_that_differ_end_a_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, wrong, message, arguments = DIFFER[name]
    monkeypatch.setattr(place, wrong)
    with pytest.raises(AssertionError, match=message):
        find(name).main(["--quick", *arguments])


def test_a_differing_model_is_detected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = Trainer.run

    def run_without_first_batch(self: Trainer, batches: Any, depth: int, *rest: int) -> Any:
        return run(self, batches[1:] if depth == 2 else batches, depth, *rest)

    monkeypatch.setattr(Trainer, "run", run_without_first_batch)
    path = tmp_path / "results.json"
    assert prefetch.prefetch.main(["--quick", "--depths", "0", "2", "--json", str(path)]) == 1
    results = json.loads(path.read_text())
    assert not any(case["correct"] for case in results["rows"])
    assert all(target["met"] is None for target in results["targets"])


def test_targets_of_prefetch_take_their_own_cases_only() -> None:
    def met(*changes: Row) -> list[bool | None]:
        case = {"cache": 0.1, "depth": 2, "hides a plan": True, "correct": True}
        rows = [{**case, "wait_share": 0.04, "ms_over_resident": 1.3, **change} for change in changes]
        targets = prefetch.prefetch.targets
        assert not callable(targets)
        return [target.judge(rows)["met"] for target in targets]

    both = {"wait_share": 0.9, "ms_over_resident": 9.0}
    assert met() == [None, None]
    assert met({}) == [True, True]
    assert met({}, {"wait_share": 0.051}) == [False, True]
    assert met({}, {"ms_over_resident": 1.31}) == [True, False]
    assert met({}, {"wait_share": 0.9, "hides a plan": False}) == [True, True], "nothing hides behind a short step"
    assert met({}, {"ms_over_resident": 9.0, "cache": 1.0}) == [True, True]
    assert met({}, {**both, "depth": 4}, {**both, "correct": False}) == [True, True]


# ---- optimizers


def test_every_kernel_has_a_case_and_its_bytes() -> None:
    specs = [TableOptimizer.create(case.cls, case.keywords).spec for case in variants.OPTIMIZER_CASES.values()]
    assert {spec.kernel for spec in specs} == {spec.kernel for spec in SPECS}
    # One row in each of 4 tables: 80 ids, 80 outputs and gradients, one weight read, one record read and written.
    narrow, wide = (variants.OPTIMIZER_CASES[f"Adam, bf16 {part}"] for part in ("states", "weights"))
    assert narrow.step_bytes(8, 80, 4.0) == 80 * 8 + 2 * 80 * 32 + 4 * (32 + 2 * (32 + 16 + 16))
    assert variants.resident_step(wide, 1, 8, 80)[1] == 80 * 8 + 2 * 80 * 32 + 4 * (16 + 2 * (16 + 32 + 32))


# ---- whole models

WHOLE = whole_models.end_to_end.parse(["--quick"])


@pytest.mark.parametrize("model", PROBLEMS)
def test_contenders_learn_the_same(model: str) -> None:
    """This package's tables are bit-identical with small and large caches, and other contenders' results are close."""
    with threads(1):
        runs = {name: train_one(0, WHOLE, model, 64, name) for name in CONTENDERS}
    assert {run["trained"] for run in runs.values()} == {800}
    assert all(run["whole"] and min(run["first_pass"], run["second_pass"]) > 0 for run in runs.values())
    assert runs["cached"]["auc"] == runs["resident"]["auc"]
    assert runs["cached"]["cache"]["unique_misses"] > runs["resident"]["cache"]["unique_misses"] >= 0
    for run in runs.values():
        assert run["auc"] == pytest.approx(runs["resident"]["auc"], abs=0.1)


def test_a_missing_contender_sets_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(*arguments: object) -> list[Any]:
        raise RuntimeError("its process ended")

    monkeypatch.setattr(whole_models, "in_processes", ended)
    assert whole_models.end_to_end.main(["--quick", "--models", "sequence", "--contenders", "cached"]) == 1


def test_ids_are_spread_over_their_table() -> None:
    problem = criteo_shape(500, seed=1, most_rows=300_000)
    assert [rows for rows, _ in problem.tables.values()] == [min(size, 300_000) for size in CRITEO_SIZES]
    for name, (rows, _) in problem.tables.items():
        ids = problem.data.features[name].values
        assert 0 <= int(ids.min()) <= int(ids.max()) < rows
        if rows > 10_000:
            assert ids.unique().diff().float().mean() > rows / 1000, "rows that are often looked up are neighbours"


def test_ratios_of_whole_models_are_of_rounds() -> None:
    def run(contender: str, number: int, rate: float, **changes: Any) -> Row:
        rates = {"first_pass": rate, "second_pass": 2 * rate, "first_longest_ms": 1.0, "second_longest_ms": 1.0}
        given = {"contender": contender, "round": number, **rates, "auc": 0.75, "whole": True}
        return {**given, "trained": 100, "table_bytes": 3 << 20, **changes}

    runs = [run("torch", 0, 10.0), run("cached", 0, 20.0), run("cached", 1, 30.0), run("torch", 1, 30.0)]
    runs += [run("cached", 2, 90.0), run("torch", 2, 30.0), run("torchrec", 1, 3.0, whole=False, trained=64)]
    cached, torchs, torchrecs = whole_models.summary(runs)
    over = {name: f"{name}_over, first_pass" for name in ("cached", "resident")}
    assert cached[over["cached"]] == 1
    assert (torchs[over["cached"]], torchs["first_pass"], torchs["second_pass"], torchs[over["resident"]]) == (
        *(2, 30, 60),
        None,
    )
    assert (torchrecs[over["cached"]], torchrecs["whole"], torchrecs["trained"]) == (10, False, 64)


def test_tables_in_pages_match_the_records() -> None:
    texts = [page.read_text() for page in recorded.PAGES]
    assert recorded.pages(texts) == texts, "python -m benchmarks.recorded writes them"
    text = "".join(texts)
    assert text.count("\n|---") == text.count("\nRecorded 20") == text.count("<!-- "), "a table is by hand"
