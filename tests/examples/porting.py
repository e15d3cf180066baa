"""The scripts of the porting guide, as processes of 2 ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "porting"
COMPAT = ("-m", "rec_sdk_torch.compat")
RUNS = {
    "torchrec_script": (),
    "torchrec_ported": (),
    "recsdk_script": COMPAT,
    "recsdk_ported": (),
}
"""What is before the script in torchrun's command."""


def losses(script: str, *launcher: str) -> tuple[str, float, float]:
    """Device, first and last loss that the script prints."""
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    finished = subprocess.run(
        [sys.executable, *launcher, *ranks, *RUNS[script], str(FOLDER / f"{script}.py")],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    printed = re.findall(r"^(\w+): loss ([\d.]+) at first, ([\d.]+) at last$", finished.stdout, re.MULTILINE)
    assert len(printed) == 1, finished.stdout
    device, first, last = printed[0]
    return device, float(first), float(last)
