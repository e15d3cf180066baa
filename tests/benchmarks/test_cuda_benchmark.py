"""The CUDA benchmark, run on the host: counts and comparisons, not times."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from threads import threads

from benchmarks import cuda, pool_step, rivals
from benchmarks.ceilings import Ceilings, faster_swaps, rate
from benchmarks.ids import Distribution
from benchmarks.operators import operator_bytes
from benchmarks.pool import DIM, LOOKUPS, MemoryNeed, Pool, draw_pool
from benchmarks.pool_step import CHECKED, StepCase
from benchmarks.runner import Row
from benchmarks.targets import GPU_TARGETS, STEP
from benchmarks.workload import TableSet, Workload

BATCHES, PER_TABLE = 8, 100
TINY = ["--quick", "--device", "cpu"]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with threads(1):
        yield


def _pool(alpha: float = 1.05, lookups: int = 2 * PER_TABLE) -> Pool:
    return draw_pool(Distribution(alpha), TableSet(2, 5000), lookups, BATCHES, 0)


def _case(optimizer: str = "sgd", ratio: float = 1.0, rivals: tuple[str, ...] = ()) -> StepCase:
    pool = _pool()
    workload = pool.workload(8, optimizer)
    return StepCase(workload, pool, ratio, rivals, workload.gradient(0), 0)


# ---- the workload


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


# ---- results that differ, or do not fit


def test_targets_count_right_results_of_the_full_shape_on_a_gpu_only() -> None:
    pool = _pool()
    workload = pool.workload(8, "adam")
    case = pool_step.run_case(workload, pool, 1.0, ["torch"], workload.gradient(0), 0)
    assert (LOOKUPS, DIM) == (1_048_570, 128), "the shape of TestCaching"
    full = {**case, "dim": DIM, "lookups": LOOKUPS}
    wrong = {**full, "correct": {"torch sparse": {"lookup": True, "update": False}}}

    def judged(given: Row, device: str | None = "NVIDIA H100") -> list[Row]:
        rows = list(cuda.case_rows(given, [], device))
        assert sum("published: " in row.get("contender", "") for row in rows) == 3 * (given["dim"] == DIM)
        return [target.judge(rows) for target in GPU_TARGETS]

    found = judged(full)
    assert [each["wanted worst"] for each in found] == [0.4, 1.0, 4.3, 2.2]
    assert [each["worst"] for each in found][2:] == [case["times"][case["ours"]]["plans ready"]["median_ms"]] * 2
    assert [each["met"] for each in found] == [each["worst"] <= each["wanted worst"] for each in found]
    slow = json.loads(json.dumps(full))
    slow["times"][case["ours"]]["plans ready"]["median_ms"] = 3.0
    assert [each["met"] for each in judged(slow)][2:] == [True, False]
    for given, device in ((wrong, "NVIDIA H100"), (full, None), (case, "NVIDIA H100")):
        assert all(each["met"] is None for each in judged(given, device))


def test_a_wrong_update_is_marked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(rivals, "LEARNING_RATE", 0.015)
    chosen = ["--distributions", "1.05", "--optimizers", "sgd", "--ratios", "0.5", "--rivals", "index-add"]
    assert cuda.cuda.main([*TINY, *chosen, "--json", str(tmp_path / "results.json")]) == 1
    assert re.search(r"index_add .* NO\n", capsys.readouterr().out)
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    (case,) = (row for row in rows if row["table"] == STEP)
    assert case["correct"] == {"index_add": {"lookup": True, "update": False}}


def test_a_wrong_lookup_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    right = rivals.TorchIndexAdd.forward
    monkeypatch.setattr(rivals.TorchIndexAdd, "forward", lambda *args: right(*args) * (1 + 2**-23))
    result = _case(rivals=("index-add",)).run()
    assert result["correct"] == {"index_add": {"lookup": False, "update": True}}


def test_a_batch_that_does_not_fit_in_the_cache() -> None:
    chosen = ["--distributions", "uniform", "--optimizers", "sgd", "--uniform-ratios", "0.05", "--rivals"]
    rows = cuda.cuda.measure(cuda.cuda.parse([*TINY, *chosen]))["rows"]
    (absent,) = (row for row in rows if row["table"] == "left out")
    assert "distinct rows" in absent["reason"]


def test_a_rival_without_memory_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    enough = _case()._need
    monkeypatch.setattr(pool_step, "free_memory", lambda device: enough)
    case = _case(rivals=("torch", "index-add"))
    assert set(case.skipped) == {"torch", "index-add"}
    assert all("device memory: needs" in reason for reason in case.skipped.values())
    less = MemoryNeed(enough.device, enough.host - 1)
    monkeypatch.setattr(pool_step, "free_memory", lambda device: less)
    with pytest.raises(pool_step.NotAvailableError, match="host memory: needs"):
        _case()


def test_too_little_memory_ends_the_run_early(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cuda, "free_memory", lambda device: MemoryNeed(0, 0))
    assert cuda.cuda.main(TINY) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "device memory: needs" in printed.err
    assert "fewer --batches" in printed.err


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cuda.cuda.main([]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch("--device cuda: torch .*\n", printed.err)


# ---- parts


def test_which_swap_is_faster() -> None:
    measurements = [
        ("in, staged", 3.0),
        ("in, direct", 2.0),
        ("out, staged", 2.0),
        ("out, direct", 4.0),
        ("up, staged", 1.0),
    ]
    found = faster_swaps([{"name": name, "ms": milliseconds} for name, milliseconds in measurements])
    assert [(row["rows"], row["way"], row["times"]) for row in found] == [("in", "direct", 1.5), ("out", "staged", 2.0)]


def test_rate_of_a_ceiling() -> None:
    sizes = argparse.Namespace(copy_mib=1, host_rows=100, swap_rows=50)
    found = Ceilings(torch.device("cpu"), sizes, 32).measure()
    assert rate(found, "duplex") is None
    assert rate(found, "device copy") == found[0]["GB/s"] * 1e9


def test_compared_ids_are_the_ids_of_the_checked_batches() -> None:
    case = _case(rivals=("index-add",))
    ids, ranks = case._touched(1)
    batches = [batch[1] for batch in case.pool.ids[:CHECKED]]
    assert sorted(ids.tolist()) == torch.cat(batches).unique().tolist()
    table = {
        int(i): int(r) for b in range(CHECKED) for i, r in zip(case.pool.ids[b][1], case.pool.ranks[b][1], strict=True)
    }
    assert [table[i] for i in ids.tolist()] == ranks.tolist()
