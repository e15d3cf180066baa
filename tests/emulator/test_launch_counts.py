"""What a training step of one group puts on the EMULATED NPU's streams: each launch costs 5 to 20 microseconds on a
chip, whatever it does. docs/npu.md has these numbers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

_EVENTS = ("record of an event", "wait for an event")


def last_step(lookups: int, pooling: str) -> Counter[str]:
    """What the streams do in a step that swaps rows both ways."""
    script = Path(__file__).with_name("steps.py")
    done = subprocess.run(
        [sys.executable, "-m", "rec_sdk_torch.emulate", str(script), str(lookups), pooling],
        env={**os.environ, "REC_SDK_EMULATED_TRACE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    trace = done.stderr.split("\nstep\n")[-1].partition("\nend of step\n")[0]
    tasks = re.findall(r"^NPU emulator: stream \d+: (.*)$", trace, re.MULTILINE)
    return Counter(task for task in tasks if task not in _EVENTS)


LOOKUP = {"NONE": "lookup_sequence", "SUM": "lookup_pooled"}


@pytest.mark.parametrize("pooling", LOOKUP)
def test_a_small_batch(pooling: str) -> None:
    swap = {"gather_rows": 1, "scatter_rows": 1, "aclrtMemcpyAsync": 3}
    assert last_step(4000, pooling) == {**swap, LOOKUP[pooling]: 1, "update_rows": 1}


@pytest.mark.parametrize("pooling", LOOKUP)
def test_a_batch_that_may_have_hot_rows(pooling: str) -> None:
    swap = {"gather_rows": 1, "scatter_rows": 1, "aclrtMemcpyAsync": 3}
    update = {"find_hot_rows": 1, "sum_chunks": 1, "update_rows": 1}
    assert last_step(5000, pooling) == {**swap, **update, LOOKUP[pooling]: 1}
