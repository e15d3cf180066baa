"""The benchmark `npu`: its counts, on the EMULATED NPU, and the arithmetic of its model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.npu import npu
from benchmarks.npu_model import Chip, Kernel, LeastCopies
from rec_sdk_torch.operators.default import KERNELS

CHIP = Chip("toy", 100.0, core_bytes_per_s=10.0, copy_issue_s=1.0, clock_hz=1.0, vector_issue_cycles=2, launch_s=0)


MOST_OF_FLOOR = 1.3
"""The largest ratio of a 910B's modelled time to its minimum, at D = 64."""

ABOVE = {
    "lookup_pooled bfloat16": 1.4,
    "swap_lookup_pooled bfloat16": 1.5,
    "pooled_weights_grad float32": 1.4,
    "pooled_weights_grad bfloat16": 1.65,
    "update_rows sgd": 1.75,
    "update_rows sgd bfloat16": 1.9,
    "update_rows rowwise_adagrad": 1.9,
    "update_rows rowwise_adagrad bfloat16": 2.3,
    "update_rows adagrad": 1.5,
    "update_rows adagrad bfloat16": 1.8,
    "update_rows adam bfloat16": 1.55,
    "accumulate_rows": 1.5,
}
"""Larger ratios of kernels that the scalar unit bounds, with GCC's code for x86-64; the minimum has 4 scalar
instructions for a row."""


def kernel(**counters: list[float]) -> Kernel:
    names = ("mte2_instructions", "mte2_gm_bytes", "mte3_instructions", "mte3_gm_bytes")
    zeros = dict.fromkeys((*names, "vector_instructions", "vector_cycles", "scalar_instructions"), np.zeros(2))
    return Kernel("k", 1, zeros | {name: np.array(values) for name, values in counters.items()})


@pytest.mark.parametrize(
    ("counters", "seconds", "bound"),
    [
        ({"mte2_instructions": [3.0, 1.0], "mte2_gm_bytes": [20.0, 30.0]}, 5.0, "mte2"),
        ({"mte3_instructions": [0.0, 4.0], "mte3_gm_bytes": [0.0, 0.0]}, 4.0, "mte3"),
        ({"vector_instructions": [2.0, 3.0], "vector_cycles": [1.0, 5.0]}, 11.0, "vector"),
        ({"scalar_instructions": [2.0, 7.0], "vector_cycles": [6.0, 6.0]}, 7.0, "scalar"),
        ({"mte2_gm_bytes": [500.0, 500.0], "mte3_gm_bytes": [5000.0, 5000.0]}, 500.0, "mte3"),
    ],
)
def test_the_busiest_engine_of_the_slowest_core(counters: dict[str, list[float]], seconds: float, bound: str) -> None:
    assert kernel(**counters).seconds(CHIP) == (seconds, bound)


def test_no_faster_than_the_memory_and_a_launch() -> None:
    wide = Chip("wide", 100.0, 1e9, 0.0, 1.0, 0, launch_s=3.0)
    assert kernel(mte2_gm_bytes=[500.0, 300.0], mte3_gm_bytes=[100.0, 100.0]).seconds(wide) == (13.0, "hbm")


def test_the_floor_shares_copies_and_rows_evenly() -> None:
    moved = [kernel(mte2_gm_bytes=[30.0, 10.0], mte3_gm_bytes=[0.0, 80.0])]
    assert LeastCopies(8, 0, 0).seconds(moved, 0, 2, CHIP) == 4 + 2
    assert LeastCopies(0, 8, 0).seconds(moved, 0, 2, CHIP) == 4 + 4
    assert LeastCopies(0, 0, 5).seconds(moved, 0, 2, CHIP) == 4 * 5 / 2
    assert LeastCopies(0, 0, 0).seconds(moved, 900, 2, CHIP) == 9


def test_imbalance_counts_cores_that_did_nothing() -> None:
    assert kernel(mte2_gm_bytes=[30.0, 10.0]).imbalance(2) == pytest.approx(0.5)
    assert kernel(mte2_gm_bytes=[30.0, 10.0]).imbalance(4) == pytest.approx(2.0)


@pytest.mark.parametrize("lookups", [32_768, pytest.param(65_536, marks=pytest.mark.full)])
def test_every_kernel_meets_the_targets(lookups: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In smaller batches, the hottest rows of a power law are too many to be divided evenly."""
    path = tmp_path / "npu.json"
    sizes = ("--lookups", str(lookups), "--rows", str(lookups * 3 // 2))
    every = "--every" if lookups == 65_536 else "--no-every"
    assert npu.main(["--dims", "64", *sizes, every, "--json", str(path)]) == 0
    assert "times are MODELLED" in capsys.readouterr().out
    results = json.loads(path.read_text())
    assert [target["met"] for target in results["targets"]] == [True, True]
    figures = results["rows"]
    assert {figure["operator"].split()[0] for figure in figures} == {name.partition(".")[0] for name in KERNELS}
    assert all(figure["bytes over least"] >= 1 and figure["imbalance"] >= 0 for figure in figures)
    over_floor = [(figure["operator"], figure["910B of floor"]) for figure in figures]
    assert all(1 <= over <= ABOVE.get(operator, MOST_OF_FLOOR) for operator, over in over_floor), over_floor


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lookups", "7"], "--lookups is 7; pooled lookups need a bag of 8 at least"),
        (["--distributions", "zipf"], "'zipf' is neither 'uniform' nor an exponent in"),
    ],
)
def test_wrong_options_end_with_a_sentence(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        npu.parse(arguments)
    assert message in capsys.readouterr().err
