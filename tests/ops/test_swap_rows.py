from __future__ import annotations

import signal
from typing import Any

import pytest
import torch
from op_batches import int32, random_bytes

from rec_sdk_torch.operators.calls import call_once, ops


def places_of(leaves: torch.Tensor) -> torch.Tensor:
    """Where rows leave: their numbers; elsewhere -1."""
    return torch.where(leaves, leaves.cumsum(0) - 1, -1).int()


def check(cache: torch.Tensor, slots: torch.Tensor, leaves: torch.Tensor, device: torch.device) -> None:
    rows = random_bytes(len(slots), cache.shape[1])
    there, leaving = cache.to(device, copy=True), random_bytes(int(leaves.sum()), cache.shape[1], device)
    ops.swap_rows(there, int32(slots, device), places_of(leaves).to(device), rows.to(device), leaving)
    assert torch.equal(leaving.cpu(), cache[slots[leaves]])
    assert torch.equal(there.cpu(), cache.index_copy(0, slots, rows))


@pytest.mark.parametrize("bytes_", [1, 16, 48, 272, 4096, 70_000])
@pytest.mark.parametrize("count", [0, 1, 100, 2900])
def test_equals_indexing(bytes_: int, count: int, device: torch.device) -> None:
    """With every slot taken, every slot free, both by turns, and as tables do that are full or are not."""
    count = min(count, 1_000_000 // bytes_)
    slots = torch.randperm(count + 10)[:count]
    cache = random_bytes(count + 10, bytes_)
    order = torch.arange(count)
    for leaves in (order >= 0, order < 0, order % 3 == 0, order * 3 // max(count, 1) != 1):
        check(cache, slots, leaves, device)


def test_rows_beyond_a_chunk_of_places(device: torch.device) -> None:
    """Kernels look at the places of many rows at once: runs that end on, before and behind 1024 rows."""
    count = 4096
    slots, cache = torch.randperm(count), random_bytes(count, 16)
    for begin in (1023, 1024, 1025):
        for end in (2047, 2048, 2049, count):
            leaves = torch.zeros(count, dtype=torch.bool)
            leaves[begin:end] = True
            check(cache, slots, leaves, device)
            check(cache, slots, ~leaves, device)


def test_opcheck(device: torch.device) -> None:
    arguments = (
        random_bytes(5, 16, device),
        int32([3, 1], device),
        int32([-1, 0], device),
        random_bytes(2, 16, device),
        random_bytes(1, 16, device),
    )
    torch.library.opcheck(ops.swap_rows, arguments)


def good(device: torch.device) -> dict[str, torch.Tensor]:
    return {
        "cache": random_bytes(5, 16, device),
        "slots": int32([3, 1], device),
        "places": int32([0, -1], device),
        "rows": random_bytes(2, 16, device),
        "leaving": random_bytes(1, 16, device),
    }


def test_errors_name_the_argument(device: torch.device) -> None:
    def swap(**other: torch.Tensor) -> None:
        ops.swap_rows(**(good(device) | other))

    with pytest.raises(RuntimeError, match="swap_rows: cache must be Byte, got Float"):
        swap(cache=torch.zeros(5, 16, device=device))
    with pytest.raises(RuntimeError, match="cache must be contiguous"):
        swap(cache=random_bytes(5, 32, device)[:, :16])
    with pytest.raises(RuntimeError, match=r"places must have 2 element"):
        swap(places=int32([0], device))
    with pytest.raises(RuntimeError, match=r"rows must be \[2, 16\], got \[3, 16\]"):
        swap(rows=random_bytes(3, 16, device))
    with pytest.raises(RuntimeError, match=r"leaving must be \[1, 16\], got \[1, 8\]"):
        swap(leaving=random_bytes(1, 8, device))
    with pytest.raises(RuntimeError, match="leaving must have at most 2 rows, got 3"):
        swap(leaving=random_bytes(3, 16, device))


@pytest.mark.contents
def test_contents(device: torch.device) -> None:
    def swap(places: list[int], slots: list[int]) -> None:
        ops.swap_rows(**(good(device) | {"places": int32(places, device), "slots": int32(slots, device)}))

    with pytest.raises(RuntimeError, match=r"slots must be in \[0, 5\), got 5 at index 1"):
        swap([0, -1], [0, 5])
    with pytest.raises(RuntimeError, match=r"places must be -1 or the next of 0, 1, ..., here 1, got 0 at index 1"):
        swap([0, 0], [0, 1])
    with pytest.raises(RuntimeError, match="here 0, got -2 at index 0"):
        swap([-2, 0], [0, 1])
    with pytest.raises(RuntimeError, match="leaving must be a row for each of the 2 places, got 1"):
        swap([0, 1], [0, 1])
    with pytest.raises(RuntimeError, match="leaving must be a row for each of the 0 places, got 1"):
        swap([-1, -1], [0, 1])


class InterruptionError(Exception):
    pass


def test_a_signal_finds_the_call_made_and_noted_or_neither(device: torch.device) -> None:
    """At whatever time it comes: the first calls are interrupted before the operator runs, the last ones after it."""
    count = 40_000
    slots = int32(torch.arange(count), device)
    cache, ones = torch.zeros(count, 512, dtype=torch.uint8), torch.ones(count, 512, dtype=torch.uint8, device=device)
    leaving = torch.empty_like(ones)

    def interrupt(*_: Any) -> None:
        raise InterruptionError

    before = signal.signal(signal.SIGALRM, interrupt)
    found = []
    try:
        for delay in (1e-4 * 1.06**i for i in range(150)):  # until the operator, fast or slow, is through by then
            if found[-9:] == [True] * 9:
                break
            there, called = cache.to(device, copy=True), list[None]()
            arguments = there, slots, slots, ones, leaving
            try:
                signal.setitimer(signal.ITIMER_REAL, delay)
                call_once(ops.swap_rows.default, arguments, called)
                while True:
                    pass
            except InterruptionError:
                found.append(bool(called))
            assert bool(there[0, 0].item()) == bool(called)
            call_once(ops.swap_rows.default, arguments, called)
            assert not leaving.any(), "what left before is not overwritten"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert any(found)
