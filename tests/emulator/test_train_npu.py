"""The example for NPUs, run on the EMULATED NPU."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import forked_python
import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "train_npu.py"


def results(finished: subprocess.CompletedProcess[str]) -> dict[str, float]:
    assert finished.returncode == 0, finished.stderr
    assert "emulated, not an NPU" in finished.stdout
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", finished.stdout)]
    auc = re.search(r"test AUC +([\d.]+)", finished.stdout)
    moved = re.search(r"([\d,]+) rows in, ([\d,]+) rows out", finished.stdout)
    assert auc, finished.stdout
    assert moved, finished.stdout
    rows_in, rows_out = (int(number.replace(",", "")) for number in moved.groups())
    return {"first": losses[0], "last": losses[-1], "auc": float(auc[1]), "in": rows_in, "out": rows_out}


@pytest.fixture(scope="module")
def one_rank() -> dict[str, float]:
    return results(forked_python.python(EXAMPLE, "--samples", "12000", "--steps", "40", "--batch-size", "128"))


def test_the_example_learns_and_swaps(one_rank: dict[str, float]) -> None:
    assert one_rank["last"] < one_rank["first"] - 0.03
    assert one_rank["auc"] > 0.6
    assert one_rank["in"] > one_rank["out"] > 0


def test_two_ranks_train_what_one_trains(one_rank: dict[str, float]) -> None:
    """Each rank has half of each batch and half of the rows; losses equal one process's up to rounding."""
    two = results(forked_python.torchrun(2, EXAMPLE, "--samples", "12000", "--steps", "40", "--batch-size", "64"))
    assert two["auc"] == pytest.approx(one_rank["auc"], abs=2e-3)
    assert 0.4 < two["in"] / one_rank["in"] < 0.6
