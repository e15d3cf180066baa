"""The CUDA benchmark on the host: what it counts and compares, never how long anything took."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from counts import sums
from threads import threads

from benchmarks import cuda, pool_step, rivals
from benchmarks.ceilings import Ceilings, CeilingSizes, faster_swaps, rate
from benchmarks.ids import Distribution
from benchmarks.operators import OperatorBench, operator_bytes
from benchmarks.pool import DIM, LOOKUPS, Need, Pool, draw_pool
from benchmarks.pool_step import CHECKED, StepCase
from benchmarks.report import render_case, render_ceilings, render_gpu_targets
from benchmarks.targets import compare_on_gpu
from benchmarks.workload import TableSet, Workload

TINY = ["--device", "cpu", "--scale", "tiny"]
BATCHES, PER_TABLE = 8, 100
NEEDS_STREAMS = {"pinned H2D", "pinned D2H", "duplex, both at once"}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with threads(1):
        yield


def _run(folder: Path, *arguments: str, expected: int = 0) -> dict[str, Any]:
    path = folder / "results.json"
    assert cuda.main([*TINY, *arguments, "--json", str(path)]) == expected
    result: dict[str, Any] = json.loads(path.read_text())
    return result


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _run(tmp_path_factory.mktemp("cuda"), "--ratios", "1.0", "0.8", "0.5", "--uniform-ratios", "1.0")


def _pool(alpha: float = 1.05, lookups: int = 2 * PER_TABLE) -> Pool:
    return draw_pool(Distribution(alpha), TableSet(2, 5000), lookups, BATCHES, 0)


def _case(optimizer: str = "sgd", ratio: float = 1.0, rivals: tuple[str, ...] = ()) -> StepCase:
    pool = _pool()
    workload = pool.workload(8, optimizer)
    return StepCase(workload, pool, ratio, rivals, workload.gradient(0), 0)


# ---- the workload


def test_the_full_scale_is_that_of_testcaching() -> None:
    assert (LOOKUPS, DIM) == (10 * (2**20 // 10), 128) == (1_048_570, 128)
    options = cuda.parse_gpu([])
    assert (options.tables, options.uniform_tables) == (TableSet(10, 26_843_545), TableSet(10, 1_677_721))
    assert (options.lookups, options.dim, options.ratios) == (LOOKUPS, DIM, [1.0, 0.8, 0.5, 0.2])
    assert (options.optimizers, options.batches) == (["adam", "sgd"], 20)
    assert [d.alpha for d in options.distributions] == [1.05, 0.0]


@pytest.mark.parametrize("alpha", [1.05, 0.0])
def test_pool(alpha: float) -> None:
    pool = _pool(alpha)
    for table in range(2):
        ids = torch.stack([batch[table] for batch in pool.ids])
        ranks = torch.stack([batch[table] for batch in pool.ranks])
        rank_of = dict(zip(ids.flatten().tolist(), ranks.flatten().tolist(), strict=True))
        assert sorted(rank_of.values()) == list(range(pool.footprints[table])), "a renumbering, one to one"
        assert all(rank_of[i] == r for i, r in zip(ids.flatten().tolist(), ranks.flatten().tolist(), strict=True))
    for batch, unique in zip(pool.ids, pool.unique_rows, strict=True):
        assert unique == sum(len(set(ids.tolist())) for ids in batch)
    assert pool.rows == max(pool.footprints)


def test_bytes_of_the_operators() -> None:
    workload = Workload(TableSet(2, 500), 8, False, "adam", 256, 1)
    assert operator_bytes(workload, 100) == {
        "lookup": 4 * 256 + 4 * 8 * 100 + 4 * 8 * 256,
        "update": 4 * 256 + 8 * 100 + 4 * 8 * 256 + 2 * 3 * 4 * 8 * 100,
    }


# ---- a run


def test_device_and_rows_are_named(results: dict[str, Any]) -> None:
    assert results["machine"]["device"] == {"type": "cpu", "name": None}
    assert results["machine"]["packages"]["torch"]
    power, uniform = results["pools"]
    assert (power["distribution"], power["id_range"]) == ("power law 1.05", 5000)
    assert (uniform["distribution"], uniform["id_range"]) == ("uniform", 400)
    for pool in (power, uniform):
        assert (pool["batches"], pool["lookups"]) == (BATCHES, 2 * PER_TABLE)
        assert 0 < pool["rows"] <= pool["id_range"]
        assert min(pool["device_bytes"], pool["host_bytes"]) > 0


def test_ceilings_that_need_cuda_are_absent(results: dict[str, Any]) -> None:
    ceilings = {ceiling["name"]: ceiling for ceiling in results["ceilings"]}
    swaps = {name for name in ceilings if name.endswith((", staged", ", direct"))}
    assert len(swaps) == 4
    for name, ceiling in ceilings.items():
        if name in NEEDS_STREAMS | swaps:
            assert ceiling["absent"] == "needs CUDA"
            assert (ceiling["seconds"], ceiling["bytes_per_second"]) == (0, None)
        else:
            assert ceiling["absent"] is None
            assert ceiling["correct"] is not False
    assert ceilings["device copy, read + written"]["moved_bytes"] == 2 << 20
    assert ceilings["host gather of 512-byte rows, 1 thread"]["moved_bytes"] == 512 * 512
    assert ceilings["host gather of 512-byte rows, 1 thread"]["correct"]
    assert "not measured: pinned H2D: needs CUDA" in render_ceilings(results["ceilings"])


def test_every_case_is_there_and_right(results: dict[str, Any]) -> None:
    found = [(c["alpha"], c["optimizer"], c["ratio"]) for c in results["steps"]]
    assert found == [
        *((1.05, optimizer, ratio) for optimizer in ("adam", "sgd") for ratio in (1.0, 0.8, 0.5)),
        *((0.0, optimizer, 1.0) for optimizer in ("adam", "sgd")),
    ]
    for case in results["steps"]:
        assert case["correct"]
        for flags in case["correct"].values():
            assert flags == {"lookup": True, "update": True}
        assert case["skipped"]["fbgemm"] == case["skipped"]["fbgemm-cached"] == "needs CUDA"
        assert ("index_add" in case["times"]) is (case["optimizer"] == "sgd")
        assert "torch sparse" in case["times"]
        collection = f"collection{case['ours'].removeprefix('ours')}"
        assert (collection in case["times"]) is not ("collection" in case["skipped"])
        for name, times in case["times"].items():
            measured = {"end to end", "in a row", "lookup in a row", "update in a row", "together in a row"}
            if name in case["counters"]:
                measured |= {"plan", "swap", "lookup", "update", "other", "plans ready"}
                assert min(times[phase]["min_ms"] for phase in ("plan", "lookup", "update")) > 0, "a phase is not seen"
            assert set(times) == measured
            assert times["end to end"]["rounds"] == times["lookup in a row"]["rounds"] == BATCHES


def test_counters(results: dict[str, Any]) -> None:
    pools = {pool["distribution"]: pool for pool in results["pools"]}
    for case in results["steps"]:
        pool = pools[case["distribution"]]
        assert case["slots"] == 2 * math.ceil(case["ratio"] * pool["rows"])
        assert case["record_bytes"] == {"adam": 96, "sgd": 32}[case["optimizer"]]
        assert case["unique_rows"] == pool["unique_rows"]
        for counted in case["counters"].values():
            assert (counted["batches"], counted["lookups"]) == (BATCHES, BATCHES * 2 * PER_TABLE)
            assert counted["unique_rows"] == BATCHES * pool["unique_rows"]
            assert counted["new_rows"] == 0
            assert counted["rows_in"] == counted["rows_out"] == counted["unique_misses"]
            assert counted["bytes_in"] == counted["bytes_out"] == counted["rows_in"] * case["record_bytes"]
            assert (counted["rows_in"] == 0) is (case["ratio"] == 1.0)
        assert len({tuple(sums(counted).items()) for counted in case["counters"].values()}) == 1
        hits = 1 - case["counters"][case["ours"]]["unique_misses"] / (BATCHES * pool["unique_rows"])
        assert case["hit_rate"] == pytest.approx(hits)
    halves = [case["hit_rate"] for case in results["steps"] if case["optimizer"] == "adam" and case["alpha"]]
    assert halves == sorted(halves, reverse=True), "a smaller cache hits less"


def test_operators_where_every_row_is_resident(results: dict[str, Any]) -> None:
    for case in results["steps"]:
        assert (case["operators"] is not None) is (case["ratio"] == 1.0)
        if case["operators"]:
            assert case["operators"]["correct"] == {"lookup": True, "update": True}
            assert {t["rounds"] for t in case["operators"]["times"].values()} == {BATCHES}


def test_the_host_reaches_no_target(results: dict[str, Any]) -> None:
    assert [target["wanted_ms"] for target in results["targets"]] == [0.4, 1.0, 4.3, 2.2]
    assert all(target["met"] is None for target in results["targets"])
    assert "not measured" in render_gpu_targets(results["targets"])


def test_report_of_a_case(results: dict[str, Any]) -> None:
    case = results["steps"][0]
    shown = render_case(case, results["ceilings"])
    assert "100.00% of them hits; 0 rows in (0.0 MB), 0 out" in shown
    assert "lookup right, update right" in shown
    assert "left out: fbgemm: needs CUDA" in shown
    assert "published" not in shown
    full = render_case({**case, "dim": DIM, "lookups": LOOKUPS}, results["ceilings"])
    for line in ("3.36", "11.3", "0.347"):
        assert line in full
    assert full.count("H100, not measured") == 3


# ---- what is not right, or does not fit


def test_targets_count_right_results_of_the_full_shape_only(results: dict[str, Any]) -> None:
    case = {**results["steps"][0], "dim": DIM, "lookups": LOOKUPS}
    ready = case["times"][case["ours"]]["plans ready"]["median_ms"]
    listed = compare_on_gpu([case], "NVIDIA H100 80GB HBM3")
    assert [t["reached_ms"] for t in listed][2:] == [ready, ready]
    assert [t["met"] for t in listed] == [t["reached_ms"] <= t["wanted_ms"] for t in listed]
    slow = json.loads(json.dumps(case))
    slow["times"][case["ours"]]["plans ready"]["median_ms"] = 3.0
    assert [t["met"] for t in compare_on_gpu([slow], "NVIDIA H100 80GB HBM3")][2:] == [True, False]
    wrong = {**case, "correct": {"torch sparse": {"lookup": True, "update": False}}}
    for cases, name in (([wrong], "NVIDIA H100"), ([case], None), ([results["steps"][0]], "NVIDIA H100")):
        assert all(t["reached_ms"] is None for t in compare_on_gpu(cases, name))
    assert "this is A100" in render_gpu_targets(compare_on_gpu([case], "A100"))


def test_a_wrong_update_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals, "LEARNING_RATE", 0.015)
    chosen = ["--distributions", "1.05", "--optimizers", "sgd", "--ratios", "0.5", "--rivals", "index-add"]
    found = _run(tmp_path, *chosen, expected=1)
    (case,) = found["steps"]
    assert case["correct"] == {"index_add": {"lookup": True, "update": False}}
    assert "update DIFFERS" in render_case(case, found["ceilings"])


def test_a_wrong_lookup_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    right = rivals.TorchIndexAdd.forward
    monkeypatch.setattr(rivals.TorchIndexAdd, "forward", lambda *args: right(*args) * (1 + 2**-23))
    result = _case(rivals=("index-add",)).run()
    assert result["correct"] == {"index_add": {"lookup": False, "update": True}}


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_wrong_operators_are_marked(optimizer: str) -> None:
    case = _case(optimizer)
    case.run()
    bench = OperatorBench(case.ours, case.pool.ids[:1], case._grad)
    assert bench.check() == {"lookup": True, "update": True}
    bench._coefficients[:, 1] *= 1.01  # the learning rate
    assert bench.check() == {"lookup": True, "update": False}
    bench._lookup = lambda plan: bench._weights[plan.slots.long()] * (1 + 2**-23)  # type: ignore[method-assign]
    assert bench.check() == {"lookup": False, "update": False}


def test_operators_need_all_rows() -> None:
    case = _case(ratio=0.5)
    with pytest.raises(AssertionError, match="rows are not resident"):
        OperatorBench(case.ours, case.pool.ids, case._grad)


def test_a_batch_that_does_not_fit_in_the_cache(tmp_path: Path) -> None:
    chosen = ["--distributions", "uniform", "--optimizers", "sgd", "--uniform-ratios", "0.05", "--rivals"]
    (case,) = _run(tmp_path, *chosen)["steps"]
    assert "distinct rows" in case["absent"]
    assert "left out: table" in render_case(case, [])


def test_a_rival_without_memory_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    enough = _case()._need
    monkeypatch.setattr(pool_step, "free_memory", lambda device: enough)
    case = _case(rivals=("torch", "index-add"))
    assert set(case.skipped) == {"torch", "index-add"}
    assert all("device memory: needs" in reason for reason in case.skipped.values())
    less = Need(enough.device, enough.host - 1)
    monkeypatch.setattr(pool_step, "free_memory", lambda device: less)
    with pytest.raises(pool_step.NotAvailableError, match="host memory: needs"):
        _case()


def test_too_little_memory_ends_the_run_early(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cuda, "free_memory", lambda device: Need(0, 0))
    assert cuda.main(TINY) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "device memory: needs" in said.err
    assert "fewer --batches" in said.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert cuda.main([]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    assert said.err.startswith("--device cuda: torch ")


def test_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    plot = tmp_path / "plot.png"
    _run(tmp_path, "--distributions", "uniform", "--optimizers", "sgd", "--rivals", "--plot", str(plot))
    assert "no plot: " in capsys.readouterr().out
    assert not plot.exists()


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "plot.png"
    _run(tmp_path, "--distributions", "1.05", "--optimizers", "sgd", "--rivals", "index-add", "--plot", str(plot))
    assert plot.stat().st_size > 1000


# ---- parts


def test_which_swap_is_faster() -> None:
    def swap(name: str, seconds: float) -> dict[str, Any]:
        return {"name": name, "seconds": seconds, "bytes_per_second": None}

    pair = [swap("512-byte rows in, staged", 3.0), swap("512-byte rows in, direct", 2.0)]
    other = [swap("512-byte rows out, staged", 2.0), swap("512-byte rows out, direct", 4.0)]
    assert faster_swaps([*pair, *other]) == [
        "512-byte rows in: direct is faster, 1.50x",
        "512-byte rows out: staged is faster, 2.00x",
    ]
    assert faster_swaps([pair[0], swap("512-byte rows in, direct", 0.0)]) == []


def test_rate_of_a_ceiling() -> None:
    found = Ceilings(torch.device("cpu"), CeilingSizes(1 << 16, 100, 50, 32, 1)).measure()
    assert rate(found, "duplex") is None
    assert rate(found, "device copy") == found[0]["moved_bytes"] / found[0]["seconds"]


def test_checked_batches_are_those_that_are_compared() -> None:
    case = _case(rivals=("index-add",))
    ids, ranks = case._touched(1)
    batches = [batch[1] for batch in case.pool.ids[:CHECKED]]
    assert sorted(ids.tolist()) == torch.cat(batches).unique().tolist()
    table = {
        int(i): int(r) for b in range(CHECKED) for i, r in zip(case.pool.ids[b][1], case.pool.ranks[b][1], strict=True)
    }
    assert [table[i] for i in ids.tolist()] == ranks.tolist()
