"""Checks of the result rows of quick benchmark runs: counts are exact, and contenders' results agree."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from counts import sums

from benchmarks import variants
from benchmarks.step import PHASES
from benchmarks.targets import STEP
from benchmarks.workload import TableSet, make_workload

Row = dict[str, Any]


def check_cpu(rows: list[Row]) -> None:
    """Checks that every workload has all its contenders, with exact counters of steps and plans."""
    steps = [row for row in rows if row["table"] == STEP]
    for case in steps:
        assert case["hit_rate"] == 1.0
        assert all(case["correct"].values())
        assert set(case["ratios"]) == set(case["times"]) - {"collection"}
        for phases in case["times"].values():
            assert {name: phase["rounds"] for name, phase in phases.items()} == dict.fromkeys(PHASES, 2)
        assert min(case["copy_bound_ms"], case["over_copy_bound"]) > 0
        assert ("torch" in case["times"]) is (case["optimizer"] != "rowwise_adagrad")
        assert {"collection", "ours", "collection-index", "collection@0.5"} <= set(case["times"])
        for name in ("torch", "fbgemm", "torchrec"):
            assert (name in case["times"]) is not (name in case["skipped"])
        full, half = case["counters"]["collection"], case["counters"]["collection@0.5"]
        assert (full["batches"], full["lookups"]) == (2, 2 * 256)
        assert full["unique_rows"] == 2 * case["unique_rows"] == 2 * sum(case["unique_rows_of_tables"])
        assert full["rows_in"] == full["unique_misses"] == full["rows_out"] == 0
        assert sums(case["counters"]["ours"]) == sums(full)
        assert half["unique_rows"] == full["unique_rows"]
        assert half["rows_in"] == half["unique_misses"] > 0
        workload = make_workload(TableSet(2, 500), 8, False, case["optimizer"], 256, 4)
        assert half["bytes_in"] == half["rows_in"] * workload.record_bytes
        assert half["bytes_out"] == half["rows_out"] * workload.record_bytes
    by_kind = {row["what"]: row for row in rows if row["table"] == "plan"}
    assert {what: plan["counters"]["lookups"] for what, plan in by_kind.items()} == dict.fromkeys(
        ("hits", "insert", "growth", "eviction"), 2 * 2000
    )
    assert by_kind["hits"]["kind"] == "index"
    assert by_kind["hits"]["new_rows"] == by_kind["hits"]["counters"]["unique_misses"] == 0
    assert by_kind["insert"]["new_rows"] == by_kind["growth"]["new_rows"] == 2 * 2000
    assert by_kind["eviction"]["rows_out"] > 0
    assert all(row["rows_in"] == row["unique_misses"] for row in rows if "policy" in row)


def check_cuda(rows: list[Row]) -> None:
    """Checks that device, pools and ceilings are named, and that every case is correct with exact counters."""
    assert rows[0]["type"] == "cpu"
    drawn = [row for row in rows if row["table"] == "pools of batches"]
    assert [(pool["distribution"], pool["id_range"]) for pool in drawn] == [("power law 1.05", 5000), ("uniform", 400)]
    for pool in drawn:
        assert (pool["batches"], pool["lookups"]) == (8, 2 * 100)
        assert 0 < pool["rows"] <= pool["id_range"]
        assert min(pool["device_bytes"], pool["host_bytes"]) > 0
    ceilings = {row["name"]: row for row in rows if row["table"] == "ceilings, best"}
    assert all("GB/s" in ceiling for ceiling in ceilings.values())
    assert ceilings["device copy, read + written"]["moved_bytes"] == 2 << 20
    assert ceilings["host gather of 512-byte rows, 1 thread"]["moved_bytes"] == 512 * 512
    assert ceilings["host gather of 512-byte rows, 1 thread"]["correct"]
    pools = {row["distribution"]: row for row in drawn}
    cases = [row for row in rows if row["table"] == STEP]
    for case in cases:
        assert (case["operators"] is not None) is (case["ratio"] == 1.0)
        for flags in case["correct"].values():
            assert flags == {"lookup": True, "update": True}
        assert case["skipped"]["fbgemm"] == case["skipped"]["fbgemm-cached"] == "needs CUDA"
        assert ("index_add" in case["times"]) is (case["optimizer"] == "sgd")
        assert {"torch sparse", f"collection{case['ours'].removeprefix('ours')}"} <= set(case["times"])
        for name, times in case["times"].items():
            measured = {"end to end", "in a row", "lookup in a row", "update in a row", "together in a row"}
            if name in case["counters"]:
                measured |= {"plan", "swap", "lookup", "update", "other", "plans ready"}
                assert min(times[phase]["min_ms"] for phase in ("plan", "lookup", "update")) > 0, "a phase is not seen"
            assert set(times) == measured
            assert times["end to end"]["rounds"] == times["lookup in a row"]["rounds"] == 8
        if case["operators"]:
            assert {times["rounds"] for times in case["operators"].values()} == {8}
        pool = pools[case["distribution"]]
        assert case["slots"] == 2 * math.ceil(case["ratio"] * pool["rows"])
        assert case["record_bytes"] == {"adam": 96, "sgd": 32}[case["optimizer"]]
        assert case["unique_rows"] == pool["unique_rows"]
        for counted in case["counters"].values():
            assert (counted["batches"], counted["lookups"]) == (8, 8 * 2 * 100)
            assert counted["unique_rows"] == 8 * pool["unique_rows"]
            assert counted["new_rows"] == 0
            assert counted["rows_in"] == counted["rows_out"] == counted["unique_misses"]
            assert counted["bytes_in"] == counted["bytes_out"] == counted["rows_in"] * case["record_bytes"]
            assert (counted["rows_in"] == 0) is (case["ratio"] == 1.0)
        assert len({tuple(sums(counted).items()) for counted in case["counters"].values()}) == 1
        hits = 1 - case["counters"][case["ours"]]["unique_misses"] / (8 * pool["unique_rows"])
        assert case["hit_rate"] == pytest.approx(hits)
    halves = [case["hit_rate"] for case in cases if case["optimizer"] == "adam" and case["alpha"]]
    assert halves == sorted(halves, reverse=True), "a smaller cache hits less"


def check_fixed_cost(rows: list[Row]) -> None:
    """Checks that a small number of lookups is divided among the tables."""
    contenders = {"pooled", "sequence", "TorchRec pooled", "TorchRec sequence", "FBGEMM pooled"}
    assert all(contenders <= row.keys() for row in rows)
    batches = variants.Batches(3, 7)
    batch = batches.jagged()
    assert (batch.values().numel(), batch.stride()) == (7, batches.samples) == (7, 3)
    assert batch.length_per_key() == batches.of_features == [3, 3, 1]
    assert not torch.equal(batches.ids(), batches.ids()), "a new batch in each step"


def check_large_table(rows: list[Row]) -> None:
    """Checks that a large table grows."""
    phases = {row["phase"]: row for row in rows}
    assert (phases["insert"]["steps"], phases["insert"]["rows_in"]) == (49, 50_000)
    assert 0 < phases["steady state"]["rows_in"] < 5 * 1024
    assert 0.5 < phases["memory"]["over_bound"] < 3, "a store of few rows takes the bytes of its chunks"


def check_disk_store(rows: list[Row]) -> None:
    """Checks that every row is inserted, and that skewed ids need fewer rows than uniform ids."""
    inserted, uniform, skewed = (row["rows_in_per_step"] for row in rows if "ids" in row)
    assert (inserted, uniform > skewed > 0) == (250, True)


def check_prefetch(rows: list[Row]) -> None:
    """Checks that batches are planned to the requested depth, and counters cover the timed steps."""
    rounds, steps, lookups = 2, 6, 512
    for case in rows:
        # At the start of a round, one more batch than the prefetched ones may be planned: the next batch to train.
        counters, ahead = case["counters"], case["depth"] + (case["depth"] > 0)
        assert (case["rounds"], case["hidden"]) == (rounds, 8)
        assert min(case[key] for key in ("wait_share", "median_wait_share", "plan_ms", "dense_ms")) > 0
        assert case["cache"] < 1 or case["ms_over_resident"] == case["median_ms_over_resident"] == 1
        assert case["depth"] <= case["planned_at_start"] <= ahead
        assert case["depth_reached"] <= ahead, "the batch to be trained, and those ahead"
        assert abs(case["counted_batches"] - rounds * steps) <= rounds * ahead
        assert counters["lookups"] == lookups * case["counted_batches"]
        assert counters["new_rows"] == 0, "tables are filled first"
        assert counters["unique_misses"] == counters["rows_in"]
        assert (counters["unique_misses"] > 0) is (case["cache"] < 1.0)


def check_sharding(rows: list[Row]) -> None:
    """Checks that the bytes exchanged by ranks are counted, and that the model for more devices follows from
    the counts.
    """
    for case in [case for case in rows if "ranks" in case]:
        assert case["lookups"] == 512
        assert 0 < case["unique_ids"] < 512
        assert case["steps_per_second"] > 0
        if case["ranks"] == 1:
            assert case["exchanged_bytes"] == case["least_bytes"] == 0
        else:
            assert 0.9 < case["over_least"] < 1.1, "ids are about even"
            assert case["exchanged_bytes"] < case["bytes_with_duplicates"]
            assert case["exchanged_bytes"] == pytest.approx(case["id_bytes"] * (8 + 2 * 4 * 8) / 8)
    of_id = rows[0]["unique_ids"] * (8 + 2 * 4 * 8)
    modelled = [case for case in rows if "devices" in case][:5]
    for case, speed in zip(modelled, (None, None, 100e9, 100e9, 25e9), strict=True):
        size, machines = case["local_size"], case["devices"] // case["local_size"]
        within, between = of_id * (size - 1) / size, of_id * (machines - 1) / machines
        assert case["bytes"] == pytest.approx(within + between)
        assert case["messages"] == 4 * (size - 1 + machines - 1)
        seconds = within / (speed or 1) + between / 25e9 + case["messages"] * 5e-6
        assert case["exchange_ms"] == pytest.approx(1e3 * seconds)
        assert case["status_ms"] == pytest.approx(1e3 * 2 * (size + machines - 2) * 5e-6)


CHECKS: dict[str, Callable[[list[Row]], None]] = {
    "cpu": check_cpu,
    "cuda": check_cuda,
    "disk_store": check_disk_store,
    "fixed_cost": check_fixed_cost,
    "large_table": check_large_table,
    "prefetch": check_prefetch,
    "sharding": check_sharding,
}
