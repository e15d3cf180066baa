"""The suite in seconds: what it counts and compares, never how long anything took."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import cpu, rivals, targets
from benchmarks.bounds import Machine, step_bytes
from benchmarks.contenders import NotAvailableError, Ours
from benchmarks.ids import Distribution, power_law_ranks, scatter, stream
from benchmarks.planning import Planner, large_table_problem, make_engine
from benchmarks.policy import PolicyOptions, RoundRobin, run_policies
from benchmarks.step import StepBench, StepOptions
from benchmarks.workload import OPTIMIZERS, TableSet, Workload, make_workload

for _package in ("torchrec", "matplotlib"):
    pytest.importorskip(_package, reason=f"the CPU benchmark with all rivals and its plot needs {_package}")

TINY = [
    *["--tables", "2x500", "--dims", "8", "--lookups", "256", "--bag", "4", "--rounds", "2", "--buffer-mib", "4"],
    *["--plan-batch", "2000", "--plan-rows", "4000", "--policy-rows", "2000", "--policy-steps", "5"],
]


def _workload(optimizer: str = "adagrad", pooled: bool = False, lookups: int = 256) -> Workload:
    return make_workload(TableSet(2, 500), 8, pooled, optimizer, lookups, 4)


def _run(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    path = tmp_path / "results.json"
    assert cpu.main([*TINY, *arguments, "--json", str(path)]) == 0
    result: dict[str, Any] = json.loads(path.read_text())
    return result


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("matplotlib")
    pytest.importorskip("torchrec")
    folder = tmp_path_factory.mktemp("bench")
    found = _run(folder, "--plot", str(folder / "plot.png"), "--cache", "0.5")
    assert (folder / "plot.png").stat().st_size > 1000
    return found


def test_machine_is_named(results: dict[str, Any]) -> None:
    machine = results["machine"]
    for key in ("cpu", "cores", "caches", "memory_bytes", "isa", "torch_threads", "load_average", "malloc", "packages"):
        assert key in machine
    assert machine["packages"]["torch"]
    assert results["schema"] == 1
    assert results["options"]["dims"] == [8]


def test_every_workload_is_there(results: dict[str, Any]) -> None:
    steps = results["steps"]
    assert {(c["optimizer"], c["form"], c["alpha"]) for c in steps} == {
        (optimizer, form, alpha) for optimizer in OPTIMIZERS for form in ("sequence", "pooled") for alpha in (1.05, 0)
    }
    for case in steps:
        assert case["hit_rate"] == 1.0
        assert all(case["correct"].values())
        assert set(case["ratios"]) == set(case["times"]) - {"ours"}
        assert case["times"]["ours"]["rounds"] == 2
        assert set(case["phases_ms"]) == {"plan", "swap", "lookup", "update", "other"}
        assert min(case["phases_ms"].values()) >= 0
        for key in ("copy_bound_ms", "random_bound_ms", "over_copy_bound", "over_random_bound"):
            assert case[key] > 0


def test_rivals_stand_where_they_can(results: dict[str, Any]) -> None:
    for case in results["steps"]:
        assert ("torch" in case["times"]) is (case["optimizer"] != "rowwise_adagrad")
        assert {"ours-index", "ours@0.5"} <= set(case["times"])
        for name in ("torch", "fbgemm", "torchrec"):
            assert (name in case["times"]) is not (name in case["skipped"])


def test_counters_of_a_step(results: dict[str, Any]) -> None:
    for case in results["steps"]:
        full, half = case["counters"]["ours"], case["counters"]["ours@0.5"]
        assert full["batches"] == 2
        assert full["lookups"] == 2 * 256
        assert full["rows_in"] == full["unique_misses"] == full["rows_out"] == 0
        assert half["unique_rows"] == full["unique_rows"]
        assert half["rows_in"] == half["unique_misses"] > 0
        assert half["bytes_in"] == half["rows_in"] * half["bytes_out"] // half["rows_out"]


def test_plans_and_policies(results: dict[str, Any]) -> None:
    by_kind = {plan["what"]: plan for plan in results["plans"]}
    assert set(by_kind) == {"hits", "insert", "growth", "eviction"}
    for plan in results["plans"]:
        counters = plan["counters"]
        assert counters["lookups"] == 2 * 2000
        if plan["what"] == "hits":
            assert counters["new_rows"] == counters["unique_misses"] == 0
    assert by_kind["insert"]["counters"]["new_rows"] == by_kind["growth"]["counters"]["new_rows"] == 2 * 2000
    assert by_kind["eviction"]["counters"]["rows_out"] > 0
    assert by_kind["hits"]["kind"] == "index"
    assert all(run["counters"]["rows_in"] == run["counters"]["unique_misses"] for run in results["policies"])


def test_targets_are_listed(results: dict[str, Any]) -> None:
    found = {target["target"]: target for target in results["targets"]}
    assert found["torch sparse, adam, median"]["workloads"] == 4
    assert found["plan, hash, 100 million rows, M ids/s"]["met"] is None


def test_index_tables_are_compared_as_well() -> None:
    case = {
        "optimizer": "sgd",
        "threads": 1,
        "alpha": 0.0,
        "dim": 64,
        "form": "pooled",
        "correct": {},
        "ratios": {"torch": 3.0, "fbgemm": 2.0, "ours-index": 0.5},
        "ratios_of_medians": {"torch": 2.0, "fbgemm": 1.5},
        "over_random_bound": 1.0,
        "over_copy_bound": 1.0,
    }
    found = {target["target"]: target for target in targets.compare([case], [], [], [1])}
    hashed, index = (found[f"FBGEMM, sgd{suffix}, median"] for suffix in ("", ", index tables"))
    assert (hashed["reached"], index["reached"]) == (2.0, 4.0)
    assert (hashed["of_medians"], index["of_medians"]) == (1.5, None)
    assert found["torch sparse, sgd, index tables, every workload"]["reached"] == 6.0


def test_contenders_take_turns_in_changing_order(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = StepBench(_workload("sgd"), StepOptions(("torch",), (0.5,), True, 8, 0))
    turns: list[str] = []
    for contender in bench.contenders:
        step = contender.step
        monkeypatch.setattr(
            contender, "step", lambda ids, step=step, name=contender.name: (turns.append(name), step(ids))[1]
        )
    bench.run(Distribution(0.0), Machine(1, 1 << 20, 1))
    timed = turns[-8 * len(bench.contenders) :]
    rounds = [tuple(timed[i : i + len(bench.contenders)]) for i in range(0, len(timed), len(bench.contenders))]
    assert all(sorted(names) == sorted(rounds[0]) for names in rounds)
    assert len(set(rounds)) > 2


def test_growing_table(tmp_path: Path) -> None:
    found = _run(tmp_path, "--sections", "growth", "--growth-rows", "2000", "4000")
    for run, rows in zip(found["growth"], (2000, 4000), strict=True):
        assert run["memory"]["rows"] == rows
        assert run["record_bytes"] == 32
        assert run["counters"]["lookups"] == 2 * 256


def test_sampled_tables(tmp_path: Path) -> None:
    found = _run(tmp_path, "--sections", "step", "--sample-tables", "1x300", "--optimizers", "sgd", "--forms", "pooled")
    sampled = [case for case in found["steps"] if case["tables"] == "1x300"]
    assert [case["alpha"] for case in sampled] == [1.05, 0]
    assert "ours-index" not in sampled[0]["times"]


def test_bytes_of_a_step() -> None:
    workload = Workload(TableSet(2, 500), 8, False, "adam", 256, 4)
    streams, read, written = step_bytes(workload, 100)
    assert streams == 8 * 256 + 8 * 256 * 8
    assert read == 4 * 8 * 100 * (1 + 3)
    assert written == 4 * 8 * 100 * 3
    pooled = Workload(TableSet(2, 500), 8, True, "sgd", 256, 4)
    assert step_bytes(pooled, 100) == (8 * 256 + 8 * 64 * 8, 2 * 3200, 3200)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_record_bytes_are_those_of_the_engine(optimizer: str) -> None:
    if optimizer == "rowwise_adagrad":
        pytest.importorskip("torchrec")
    ours = Ours(_workload(optimizer))
    assert ours.group.engine.record_bytes == ours.workload.record_bytes == ours.group.layout.bytes


def test_a_wrong_rival_is_marked() -> None:
    bench = StepBench(_workload("sgd"), StepOptions(("torch",), (), False, 2, 0))
    rival = bench.contenders[1]
    assert isinstance(rival, rivals.TorchSparse)
    for group in rival._optimizer.param_groups:
        group["lr"] *= 1.5
    machine = Machine(1, 1 << 20, 1)
    case = bench.run(Distribution(0.0), machine)
    machine.add_bounds(case, bench.workload)
    assert case["correct"] == {"torch": False}
    assert case["ratios"] == {}
    assert "torch" in case["times"]
    listed = targets.compare([case], [], [], [1])
    assert all(target["workloads"] == 0 for target in listed)


def test_missing_rival_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise NotAvailableError("fbgemm_gpu cannot be imported: not here")

    monkeypatch.setattr(rivals, "fbgemm_training", missing)
    bench = StepBench(_workload("sgd"), StepOptions(("fbgemm",), (), False, 2, 0))
    assert bench.skipped == {"fbgemm": "fbgemm_gpu cannot be imported: not here"}


def test_a_cache_that_a_batch_does_not_fit_in() -> None:
    workload = _workload("sgd", lookups=1024)
    bench = StepBench(workload, StepOptions((), (0.02,), False, 2, 0))
    case = bench.run(Distribution(0.0), Machine(1, 1 << 20, 1))
    assert "distinct rows" in case["skipped"]["ours@0.02"]
    assert list(case["times"]) == ["ours"]


def test_fbgemm_forms_agree() -> None:
    pytest.importorskip("fbgemm_gpu")
    workload = _workload("adagrad")
    ours = Ours(workload)
    ours.fill()
    ids = workload.draw(Distribution(1.05), np.random.default_rng(0))
    both = [rivals.make_rival(name, workload, 0) for name in ("fbgemm", "fbgemm-none")]
    for rival in both:
        rival.copy_from(ours)
    expected = ours.step(ids).detach()
    for rival in both:
        torch.testing.assert_close(rival.output(rival.step(ids)).detach(), expected)


def test_power_law_has_its_probabilities() -> None:
    ranks = power_law_ranks(np.random.default_rng(0), 20, 1.05, 200_000)
    wanted = np.arange(1, 21) ** -1.05
    np.testing.assert_allclose(np.bincount(ranks, minlength=20) / 200_000, wanted / wanted.sum(), atol=0.005)
    one = power_law_ranks(np.random.default_rng(0), 7, 1.0, 10_000)
    assert (one.min(), one.max()) == (0, 6)


def test_ids_are_scattered_by_a_bijection() -> None:
    ids = scatter(np.arange(1000), 1000, shift=3)
    assert sorted(ids) == list(range(1000))
    assert np.abs(np.diff(ids)).min() > 100


def test_streams() -> None:
    scan = stream("scan", 10, 4, 1.05, 0)
    assert [next(scan).tolist() for _ in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]
    still, moving = (stream(kind, 1000, 50, 1.05, 0) for kind in ("stationary", "drifting"))
    pairs = [(next(still), next(moving)) for _ in range(11)]
    assert all((a == b).all() for a, b in pairs[:10])
    assert (pairs[10][0] != pairs[10][1]).any()


def test_round_robin_on_a_known_case() -> None:
    hand = RoundRobin(10, 3)
    for ids in ([0, 1], [2, 0], [3, 0], [1, 3]):
        hand.plan(np.array(ids))
    # 0, 1, 2 fill the slots; 3 takes that of 1, as 0 is needed; 1 takes that of 2.
    counted = {"lookups": 8, "unique_rows": 8, "unique_misses": 5, "rows_in": 5, "rows_out": 2}
    assert hand.counters == counted
    with pytest.raises(ValueError, match="4 distinct rows"):
        hand.plan(np.array([0, 1, 2, 3]))


def test_engine_counts_on_a_known_case() -> None:
    planner = Planner(make_engine(10, 3))
    for ids in ([0, 1], [2, 0], [3, 0], [1, 3]):
        planner.plan(np.array(ids))
    counted = planner.engine.stats()
    # Least recently used: 3 takes the slot of 1, then 1 that of 2.
    assert (counted["unique_misses"], counted["rows_in"], counted["rows_out"]) == (5, 5, 2)
    assert counted["bytes_out"] == 2 * planner.engine.record_bytes


def test_policies_see_the_same_stream() -> None:
    options = PolicyOptions(1000, 0.1, 20, 5, 5, 1.05, ("lru",), 0)
    runs = run_policies(options)
    assert [(r["stream"], r["policy"]) for r in runs[:2]] == [
        ("stationary", "lru"),
        ("stationary", "round robin (simulated)"),
    ]
    for engine, hand in zip(runs[::2], runs[1::2], strict=True):
        assert engine["counters"]["unique_rows"] == hand["counters"]["unique_rows"]


def test_a_table_that_does_not_fit_says_what_it_needs() -> None:
    problem = large_table_problem(10**13)
    assert problem is not None
    assert "GiB" in problem
    assert large_table_problem(1000) is None


@pytest.mark.parametrize("text", ["4", "x", "0x5", "2x0", "axb"])
def test_bad_table_sets(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"{text!r} is not COUNTxROWS"):
        TableSet.parse(text)


def test_an_output_folder_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        cpu.main(["--json", str(tmp_path / "none" / "results.json")])
