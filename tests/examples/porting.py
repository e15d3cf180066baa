"""Runs the scripts of the porting guide on 2 ranks."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import forked_python

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "porting"
COMPAT = ("-m", "rec_sdk_torch.compat")
RUNS = {
    "torchrec_ported": (),
    "recsdk_script": COMPAT,
    "recsdk_ported": (),
}
"""The options before the script in torchrun's command."""


def losses(script: str, arguments: Sequence[str] = ()) -> tuple[str, float, float]:
    """Runs a script; returns the device, and the first and last loss that it prints."""
    command = (*RUNS.get(script, COMPAT), FOLDER / f"{script}.py", *arguments)
    finished = forked_python.torchrun(2, *command, PYTHONPATH=str(ROOT))
    assert finished.returncode == 0, finished.stderr
    printed = re.findall(r"^(\w+): loss ([\d.]+) at first, ([\d.]+) at last$", finished.stdout, re.MULTILINE)
    assert len(printed) == 1, finished.stdout
    device, first, last = printed[0]
    return device, float(first), float(last)


def all_losses(script: str) -> list[float]:
    """Runs a script from fixed initial weights, the same for all scripts; returns all losses of rank 0."""
    finished = forked_python.torchrun(
        2, Path(__file__).with_name("same_weights.py"), FOLDER / f"{script}.py", PYTHONPATH=str(ROOT)
    )
    assert finished.returncode == 0, finished.stderr
    (printed,) = re.findall(r"^losses (.*)$", finished.stdout, re.MULTILINE)
    return [float(loss) for loss in printed.split()]


def check_lifecycle(saves: Path, device: str) -> None:
    """Runs the script with admission and eviction and checks its saves; the script itself compares a reload."""
    of_script, first, last = losses("recsdk_lifecycle_script", [str(saves)])
    assert of_script == device
    assert first > 0.4
    assert last < 0.2
    found = [json.loads((folder / "manifest.json").read_text()) for folder in sorted(saves.iterdir())]
    assert [save["kind"] for save in found] == ["full", "delta"]
    rows = {table["key"]: table["rows"] for table in found[-1]["tables"]}
    assert 150 < rows["t_user"] < 300  # of 520 ids that occurred
    assert 250 < rows["t_item"] <= 300
