"""The prefetch benchmark in seconds: what it counts and compares, never how long anything took."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import prefetch
from benchmarks.prefetch_step import Trainer

pytest.importorskip("torchrec", reason="the prefetch benchmark trains collections")

DEPTHS, ROUNDS, STEPS, LOOKUPS = (0, 1, 2, 4), 2, 6, 512
QUICK = ["--quick", "--hidden", "8"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("prefetch") / "results.json"
    threads = torch.get_num_threads()
    assert prefetch.main([*QUICK, "--json", str(path)]) == 0
    assert torch.get_num_threads() == threads
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_every_cache_and_depth_is_there(results: dict[str, Any]) -> None:
    assert results["schema"] == 1
    assert results["mode"] == "quick"
    assert results["machine"]["torch_threads"] == 1
    assert results["workload"]["lookups"] == LOOKUPS
    cases = results["cases"]
    assert [(case["cache"], case["depth"]) for case in cases] == [(c, d) for c in (0.1, 1.0) for d in DEPTHS]
    for case in cases:
        assert case["time"]["rounds"] == ROUNDS
        assert case["hidden"] == 8
        for key in ("wait_ms", "wait_share", "median_wait_share", "plan_ms", "dense_ms", "over_resident"):
            assert case[key] > 0
        if case["cache"] == 1.0:
            assert case["over_resident"] == case["medians_over_resident"] == 1.0


def test_batches_are_planned_as_far_ahead_as_asked(results: dict[str, Any]) -> None:
    for case in results["cases"]:
        assert (case["planned_at_start"] == 0) is (case["depth"] == 0)
        assert case["depth"] <= case["planned_at_start"] <= case["depth"] + 1
        if case["depth"] == 0:
            assert case["depth_reached"] == 0
        assert case["depth_reached"] <= case["depth"] + 1, "the batch that is about to be trained, and those ahead"


def test_counters_are_of_the_timed_steps(results: dict[str, Any]) -> None:
    for case in results["cases"]:
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
    assert prefetch.main([*QUICK, "--depths", "0", "2", "--json", str(path)]) == 1
    results = json.loads(path.read_text())
    assert not any(case["correct"] for case in results["cases"])
    assert all(target["met"] is None for target in results["targets"])


def _case(**changes: Any) -> dict[str, Any]:
    waits = {"wait_share": 0.04, "median_wait_share": 0.06, "over_resident": 1.3, "medians_over_resident": 1.5}
    return {"cache": 0.1, "depth": 2, "dense_ms": 9.0, "plan_ms": 2.0, "correct": True, **waits, **changes}


def _met(*cases: dict[str, Any]) -> list[bool | None]:
    return [target["met"] for target in prefetch.compare(cases)]


def test_targets_take_their_own_cases_only() -> None:
    assert _met() == [None, None]
    assert _met(_case()) == [True, True]
    assert _met(_case(), _case(wait_share=0.051)) == [False, True]
    assert _met(_case(), _case(over_resident=1.31)) == [True, False]
    assert _met(_case(), _case(wait_share=0.9, dense_ms=1.0)) == [True, True], "nothing hides behind a short step"
    assert _met(_case(), _case(over_resident=9.0, cache=1.0)) == [True, True]
    assert _met(_case(), _case(wait_share=0.9, over_resident=9.0, depth=4)) == [True, True]
    assert _met(_case(), _case(wait_share=0.9, over_resident=9.0, correct=False)) == [True, True]


def test_depths_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        prefetch.parse(["--depths", "13"])
    assert "13 is not allowed; 0 to 12 is" in capsys.readouterr().err
