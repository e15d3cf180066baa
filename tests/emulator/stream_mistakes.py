"""A program for test_stream_order.py: three mistakes, each a missing event, and their correct versions.

Prints for each version the number of rounds with a wrong result. Arguments: seconds that the host pauses where the
event is missing, and number of rounds.
"""

from __future__ import annotations

import sys
import time

import torch

from rec_sdk_torch.operators.calls import ops
from rec_sdk_torch.operators.devices.backends import backend_for

PAUSE, ROUNDS = float(sys.argv[1]), int(sys.argv[2])
backend_for(torch.device("npu"))  # loads this package's kernels, since torch's own operators are not asynchronous here


def rows(value: int) -> torch.Tensor:
    return torch.full((64, 32), value, dtype=torch.uint8)


main, a, b = torch.npu.current_stream(), torch.npu.Stream(), torch.npu.Stream()
slots = torch.arange(64, dtype=torch.int32).npu()
new, staging = rows(2).npu(), rows(0).pin_memory()


def read_too_soon(right: bool) -> bool:
    """Reads on one stream what a kernel on another stream writes; returns whether the result is correct."""
    cache = rows(1).npu()
    torch.npu.synchronize()
    with torch.npu.stream(a):
        ops.scatter_rows(cache, slots, new)
    time.sleep(PAUSE)
    if right:
        b.wait_stream(a)
    with torch.npu.stream(b):
        read = ops.gather_rows(cache, slots)
        wrong = bool((read != 2).any())
    torch.npu.synchronize()
    return wrong


def staging_used_again(right: bool) -> bool:
    """Overwrites host memory that is still being copied; returns whether the copy is correct."""
    staging.fill_(1)
    with torch.npu.stream(a):
        there = staging.to("npu", non_blocking=True)
        copied = a.record_event()
    time.sleep(PAUSE)
    if right:
        copied.synchronize()
    staging.fill_(2)
    with torch.npu.stream(a):
        return bool((there != 1).any())


def memory_used_again(right: bool) -> bool:
    """Frees memory on one stream while another stream still reads it; returns whether the result is correct."""
    cache = rows(1).npu()
    a.wait_stream(main)
    with torch.npu.stream(a):
        read = ops.gather_rows(cache, slots)
    if right:
        cache.record_stream(a)
    del cache
    time.sleep(PAUSE)
    other = rows(3).npu()
    with torch.npu.stream(a):
        wrong = bool((read != 1).any())
    del other
    return wrong


for scenario in (read_too_soon, staging_used_again, memory_used_again):
    for right in (False, True):
        print(scenario.__name__, right, sum(scenario(right) for _ in range(ROUNDS)))
