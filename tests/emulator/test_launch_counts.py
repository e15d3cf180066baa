"""Counts the work that a training step of one group puts on the EMULATED NPU's streams. Each launch
costs 5 to 20 microseconds on a chip, whatever it does. docs/npu.md has these numbers."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import warm

_EVENTS = ("record of an event", "wait for an event")


def last_step(lookups: int, hot: int, pooling: str) -> Counter[str]:
    """The work of the streams in a step that swaps rows both ways; `hot` of its lookups are of one row."""
    script = Path(__file__).with_name("steps.py")
    done = warm.python(script, str(lookups), str(hot), pooling, REC_SDK_EMULATED_TRACE="1")
    assert done.returncode == 0, done.stderr
    trace = done.stderr.split("\nstep\n")[-1].partition("\nend of step\n")[0]
    tasks = re.findall(r"^NPU emulator: stream \d+: (.*)$", trace, re.MULTILINE)
    return Counter(task for task in tasks if task not in _EVENTS)


LOOKUP = {"NONE": "swap_lookup_sequence", "SUM": "swap_lookup_pooled"}
"""With the swap in the same launch."""

COPIES = {"aclrtMemcpyAsync": 3}


@pytest.mark.parametrize("pooling", LOOKUP)
@pytest.mark.parametrize(("lookups", "hot"), [(20_000, 128), (1020, 1000)], ids=["no hot row", "few lookups"])
def test_a_batch_that_is_updated_in_one_launch(lookups: int, hot: int, pooling: str) -> None:
    assert last_step(lookups, hot, pooling) == {**COPIES, LOOKUP[pooling]: 1, "update_rows": 1}


@pytest.mark.parametrize("pooling", LOOKUP)
def test_a_batch_with_a_hot_row(pooling: str) -> None:
    update = {"sum_chunks": 1, "update_rows": 1}
    assert last_step(1100, 140, pooling) == {**COPIES, **update, LOOKUP[pooling]: 1}
