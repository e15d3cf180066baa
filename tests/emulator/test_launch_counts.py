"""Counts the launches and copies of a training step of one group on the EMULATED NPU's streams.

Each launch costs 5 to 20 microseconds on a chip, whatever it does. docs/npu.md has these numbers.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from pathlib import Path

import forked_python
import pytest

_EVENTS = ("record of an event", "wait for an event")


LOOKUP = {"NONE": "swap_lookup_sequence", "SUM": "swap_lookup_pooled"}
"""The kernel of each pooling that swaps and looks up in one launch."""

UPDATES = {(20_000, 128): {}, (1020, 1000): {}, (1100, 140): {"sum_chunks": 1}}
"""(lookups, lookups of one row) -> launches before the update's own: no hot row, few lookups, a hot row."""


@functools.cache
def last_steps() -> dict[str, Counter[str]]:
    """Returns, for each case, the stream operations of a step that swaps rows in both directions."""
    cases = [f"{lookups},{hot},{pooling}" for lookups, hot in UPDATES for pooling in LOOKUP]
    done = forked_python.python(Path(__file__).with_name("steps.py"), *cases, REC_SDK_EMULATED_TRACE="1")
    assert done.returncode == 0, done.stderr
    steps = {}
    for case in cases:
        trace = done.stderr.split(f"\nstep of {case}\n")[-1].partition("\nend of step\n")[0]
        tasks = re.findall(r"^NPU emulator: stream \d+: (.*)$", trace, re.MULTILINE)
        steps[case] = Counter(task for task in tasks if task not in _EVENTS)
    return steps


@pytest.mark.parametrize("pooling", LOOKUP)
@pytest.mark.parametrize(("lookups", "hot"), UPDATES)
def test_the_launches_of_a_step(lookups: int, hot: int, pooling: str) -> None:
    expected = {"aclrtMemcpyAsync": 3, LOOKUP[pooling]: 1, **UPDATES[lookups, hot], "update_rows": 1}
    assert last_steps()[f"{lookups},{hot},{pooling}"] == expected
