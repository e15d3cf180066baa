"""gather_rows, scatter_rows and swap_rows equal indexing; swap_lookup_* equals a swap and a lookup."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch
from op_batches import Arguments, int32, moved, random_bytes

from rec_sdk_torch.operators.calls import call_once, ops
from rec_sdk_torch.operators.record import WEIGHT_DTYPES, RecordLayout

SLOTS = 60


@pytest.mark.parametrize("bytes_", [1, 16, 48, 272, 4096])
@pytest.mark.parametrize("count", [0, 1, 100, 900])
def test_gather_and_scatter_are_indexing(bytes_: int, count: int, device: torch.device) -> None:
    cache = random_bytes(1000, bytes_, device)
    slots = int32(torch.randperm(1000)[:count], device)
    assert torch.equal(ops.gather_rows(cache, slots), cache[slots.long()])
    repeated = slots.repeat(2)
    found = random_bytes(2 * count, bytes_, device)
    ops.gather_rows.out(cache, repeated, out=found)
    assert torch.equal(found, cache[repeated.long()])
    rows = random_bytes(count, bytes_, device)
    expected = cache.index_copy(0, slots.long(), rows)
    ops.scatter_rows(cache, slots, rows)
    assert torch.equal(cache, expected)


def number_victims(leaves: torch.Tensor) -> torch.Tensor:
    """Numbers the rows that move out of the cache; other rows have -1."""
    return torch.where(leaves, leaves.cumsum(0) - 1, -1).int()


def check(cache: torch.Tensor, slots: torch.Tensor, leaves: torch.Tensor, device: torch.device) -> None:
    rows = random_bytes(len(slots), cache.shape[1])
    there, victims = cache.to(device, copy=True), random_bytes(int(leaves.sum()), cache.shape[1], device)
    ops.swap_rows(there, int32(slots, device), number_victims(leaves).to(device), rows.to(device), victims)
    assert torch.equal(victims.cpu(), cache[slots[leaves]])
    assert torch.equal(there.cpu(), cache.index_copy(0, slots, rows))


@pytest.mark.parametrize("bytes_", [1, 16, 48, 272, 4096, 70_000])
@pytest.mark.parametrize("count", [0, 1, 100, 2900])
def test_a_swap_is_indexing(bytes_: int, count: int, device: torch.device) -> None:
    """Tries slots that are all occupied, all free, or mixed in two patterns."""
    count = min(count, 1_000_000 // bytes_)
    slots = torch.randperm(count + 10)[:count]
    cache = random_bytes(count + 10, bytes_)
    order = torch.arange(count)
    for leaves in (order >= 0, order < 0, order % 3 == 0, order * 3 // max(count, 1) != 1):
        check(cache, slots, leaves, device)


def test_more_rows_than_one_chunk_of_slots(device: torch.device) -> None:
    """Kernels read the victim_indices of many rows at once; runs of victims end at, before and after row 1024."""
    count = 4096
    slots, cache = torch.randperm(count), random_bytes(count, 16)
    for begin in (1023, 1024, 1025):
        for end in (2047, 2048, 2049, count):
            leaves = torch.zeros(count, dtype=torch.bool)
            leaves[begin:end] = True
            check(cache, slots, leaves, device)
            check(cache, slots, ~leaves, device)


class InterruptionError(Exception):
    pass


def test_a_signal_interrupts_before_or_after_a_call(device: torch.device) -> None:
    """Early signals interrupt before the operator runs, late ones after it."""
    count = 40_000
    slots = int32(torch.arange(count), device)
    cache, ones = torch.zeros(count, 512, dtype=torch.uint8), torch.ones(count, 512, dtype=torch.uint8, device=device)
    victims = torch.empty_like(ones)

    def interrupt(*_: Any) -> None:
        raise InterruptionError

    before = signal.signal(signal.SIGALRM, interrupt)
    found = []
    try:
        for delay in (1e-4 * 1.06**i for i in range(150)):  # by now the operator has finished, whether fast or slow
            if found[-9:] == [True] * 9:
                break
            there, called = cache.to(device, copy=True), list[None]()
            arguments = there, slots, slots, ones, victims
            try:
                signal.setitimer(signal.ITIMER_REAL, delay)
                call_once(ops.swap_rows.default, arguments, called)
                while True:
                    pass
            except InterruptionError:
                found.append(bool(called))
            assert bool(there[0, 0].item()) == bool(called)
            call_once(ops.swap_rows.default, arguments, called)
            assert not victims.any(), "what left before is not overwritten"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert any(found)


# ---- swaps with a lookup in the same call


def records(rows: int, layout: RecordLayout) -> torch.Tensor:
    """Draws records whose weights are finite and whose states may be any bytes."""
    made = random_bytes(rows, layout.bytes)
    layout.weight(made).copy_(torch.randn(rows, layout.dim))
    return made


def calls(layout: RecordLayout, lookups: int, coming: int, leaves: torch.Tensor | None) -> tuple[Arguments, Arguments]:
    """Returns the arguments of a swap on the CPU and of its lookups; with `leaves` None, the swap has no victims."""
    slots = torch.randperm(SLOTS)[:coming]
    swap = {"cache": records(SLOTS, layout), "slots": int32(slots), "rows": records(coming, layout)}
    swap |= {"victim_indices": None, "victims": None}
    if leaves is not None:
        swap |= {"victim_indices": number_victims(leaves), "victims": random_bytes(int(leaves.sum()), layout.bytes)}
    of_slot = torch.arange(SLOTS).index_copy(0, slots, torch.arange(SLOTS, SLOTS + coming))
    looked_up = torch.randint(0, SLOTS, (lookups,))
    rows = {"dim": layout.dim, "weight_dtype": layout.weight_dtype}
    return swap, rows | {"lookup_slots": int32(looked_up), "origins": int32(of_slot[looked_up])}


def bags(lookups: int, dim: int, weighted: bool) -> Arguments:
    """Draws bags of two features; the second feature has mean pooling."""
    samples = 7
    inner = torch.randint(0, lookups + 1, (2 * samples - 1,)).sort().values
    return {
        "offsets": torch.cat([torch.tensor([0]), inner, torch.tensor([lookups])]),
        "per_sample_weights": torch.randn(lookups) if weighted else None,
        "columns": torch.tensor([dim, 0]),
        "mean": torch.tensor([False, True]),
        "first_bag": 0,
        "out": torch.full((samples, 2 * dim), 7.0),
    }


def swapped(swap: Arguments) -> torch.Tensor:
    """Returns the cache after the swap, computed by separate operators; writes `victims`."""
    cache = swap["cache"].clone()
    if swap["victim_indices"] is None:
        ops.scatter_rows(cache, swap["slots"], swap["rows"])
    else:
        ops.swap_rows(cache, swap["slots"], swap["victim_indices"], swap["rows"], swap["victims"])
    return cache


LEAVES = {
    "all": lambda coming: torch.ones(coming, dtype=torch.bool),
    "some": lambda coming: torch.arange(coming) % 3 != 1,
    "none": lambda coming: torch.zeros(coming, dtype=torch.bool),
    "no victim_indices": lambda coming: None,
}


@pytest.mark.parametrize("leaves", LEAVES)
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES)
@pytest.mark.parametrize(
    ("dim", "lookups", "coming"), [(1, 50, 20), (16, 3000, 60), (100, 700, 1), (128, 400, 0), (8, 0, 5)]
)
def test_equals_the_two_operators(
    dim: int, lookups: int, coming: int, dtype: torch.dtype, leaves: str, device: torch.device
) -> None:
    layout = RecordLayout(dim, dtype, (dim,))
    swap, rows = calls(layout, lookups, coming, LEAVES[leaves](coming))
    sequence, pooled, looked_up = (moved(given, device) for given in (swap, swap, rows))
    expected = swapped(swap)
    weights = layout.weight(expected)
    found = ops.swap_lookup_sequence(**sequence, **looked_up)
    assert torch.equal(found.cpu(), ops.lookup_sequence(weights, rows["lookup_slots"]))
    of_bags = bags(lookups, dim, weighted=leaves == "some")
    on_device = moved(of_bags, device)
    ops.swap_lookup_pooled(**pooled, **looked_up, **on_device)
    ops.lookup_pooled(weights, rows["lookup_slots"], **of_bags)
    assert torch.equal(on_device["out"].cpu(), of_bags["out"])
    for each in (sequence, pooled):
        assert torch.equal(each["cache"].cpu(), expected)
        if swap["victims"] is not None:
            assert torch.equal(each["victims"].cpu(), swap["victims"])
