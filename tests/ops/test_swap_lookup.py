"""swap_lookup_sequence and swap_lookup_pooled: swap_rows or scatter_rows, and the lookup behind it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_batches import int32, random_bytes

from rec_sdk_torch.operators.calls import ops
from rec_sdk_torch.operators.record import WEIGHT_DTYPES, RecordLayout

SLOTS = 60

Arguments = dict[str, Any]


def records(rows: int, layout: RecordLayout) -> torch.Tensor:
    """Weights that are numbers, states that may be anything."""
    made = random_bytes(rows, layout.bytes)
    layout.weight(made).copy_(torch.randn(rows, layout.dim))
    return made


def calls(layout: RecordLayout, lookups: int, coming: int, leaves: torch.Tensor | None) -> tuple[Arguments, Arguments]:
    """The arguments of a swap, on the CPU, and those of its lookups beside it; `leaves` None: there are no places."""
    slots = torch.randperm(SLOTS)[:coming]
    swap = {"cache": records(SLOTS, layout), "slots": int32(slots), "rows": records(coming, layout)}
    swap |= {"places": None, "leaving": None}
    if leaves is not None:
        swap["places"] = torch.where(leaves, leaves.cumsum(0) - 1, -1).int()
        swap["leaving"] = random_bytes(int(leaves.sum()), layout.bytes)
    of_slot = torch.arange(SLOTS).index_copy(0, slots, torch.arange(SLOTS, SLOTS + coming))
    looked_up = torch.randint(0, SLOTS, (lookups,))
    rows = {"dim": layout.dim, "weight_dtype": layout.weight_dtype}
    return swap, rows | {"lookup_slots": int32(looked_up), "origins": int32(of_slot[looked_up])}


def bags(lookups: int, dim: int, weighted: bool) -> Arguments:
    """Two features of bags, the second a mean."""
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


def there(arguments: Arguments, device: torch.device) -> Arguments:
    return {k: v.to(device, copy=True) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}


def swapped(swap: Arguments) -> torch.Tensor:
    """The cache behind the swap, by the operators that are apart; changes `leaving`."""
    cache = swap["cache"].clone()
    if swap["places"] is None:
        ops.scatter_rows(cache, swap["slots"], swap["rows"])
    else:
        ops.swap_rows(cache, swap["slots"], swap["places"], swap["rows"], swap["leaving"])
    return cache


LEAVES = {
    "all": lambda coming: torch.ones(coming, dtype=torch.bool),
    "some": lambda coming: torch.arange(coming) % 3 != 1,
    "none": lambda coming: torch.zeros(coming, dtype=torch.bool),
    "no places": lambda coming: None,
}


@pytest.mark.parametrize("leaves", LEAVES)
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES)
@pytest.mark.parametrize(("dim", "lookups", "coming"), [(1, 50, 20), (16, 3000, 60), (100, 700, 1), (128, 400, 0)])
def test_equals_the_two_operators(
    dim: int, lookups: int, coming: int, dtype: torch.dtype, leaves: str, device: torch.device
) -> None:
    layout = RecordLayout(dim, dtype, (dim,))
    swap, rows = calls(layout, lookups, coming, LEAVES[leaves](coming))
    expected = swapped(swap)
    weights = layout.weight(expected)
    sequence = there(swap, device)
    found = ops.swap_lookup_sequence(**sequence, **there(rows, device))
    assert torch.equal(found.cpu(), ops.lookup_sequence(weights, rows["lookup_slots"]))
    pooled, of_bags = there(swap, device), bags(lookups, dim, weighted=leaves == "some")
    on_device = there(of_bags, device)
    ops.swap_lookup_pooled(**pooled, **there(rows, device), **on_device)
    ops.lookup_pooled(weights, rows["lookup_slots"], **of_bags)
    assert torch.equal(on_device["out"].cpu(), of_bags["out"])
    for each in (sequence, pooled):
        assert torch.equal(each["cache"].cpu(), expected)
        if swap["leaving"] is not None:
            assert torch.equal(each["leaving"].cpu(), swap["leaving"])


def test_batches_without_lookups(device: torch.device) -> None:
    layout = RecordLayout(8, torch.float32)
    swap, rows = calls(layout, 0, 5, LEAVES["all"](5))
    expected, given = swapped(swap), there(swap, device)
    assert ops.swap_lookup_sequence(**given, **there(rows, device)).shape == (0, 8)
    assert torch.equal(given["cache"].cpu(), expected)


def good(device: torch.device) -> Arguments:
    layout = RecordLayout(4, torch.float32)
    return {
        "cache": records(5, layout).to(device),
        "slots": int32([3, 1], device),
        "places": int32([0, -1], device),
        "rows": records(2, layout).to(device),
        "leaving": random_bytes(1, 16, device),
        "dim": 4,
        "weight_dtype": torch.float32,
        "lookup_slots": int32([0, 3, 1], device),
        "origins": int32([0, 5, 6], device),
    }


def good_bags(device: torch.device) -> Arguments:
    return there(bags(3, 4, weighted=True), device)


def test_opcheck(device: torch.device) -> None:
    arguments = good(device)
    torch.library.opcheck(ops.swap_lookup_sequence, tuple(arguments.values()))
    torch.library.opcheck(ops.swap_lookup_pooled, (*arguments.values(), *good_bags(device).values()))


def test_errors_name_the_argument(device: torch.device) -> None:
    def call(**other: Any) -> None:
        with pytest.raises(RuntimeError, match=r"^rec_sdk::swap_lookup_pooled: ") as pooled:
            ops.swap_lookup_pooled(**good(device) | other, **good_bags(device))
        with pytest.raises(RuntimeError, match=r"^rec_sdk::swap_lookup_sequence: ") as sequence:
            ops.swap_lookup_sequence(**good(device) | other)
        said = [str(one.value).partition(": ")[2] for one in (sequence, pooled)]
        assert said[0] == said[1]
        raise RuntimeError(said[0])

    with pytest.raises(RuntimeError, match="cache must be Byte, got Float"):
        call(cache=torch.zeros(5, 16, device=device))
    with pytest.raises(RuntimeError, match=r"places must have 2 element"):
        call(places=int32([0], device))
    with pytest.raises(RuntimeError, match=r"rows must be \[2, 16\], got \[3, 16\]"):
        call(rows=random_bytes(3, 16, device))
    with pytest.raises(RuntimeError, match="places and leaving belong together"):
        call(places=None)
    with pytest.raises(RuntimeError, match="places and leaving belong together"):
        call(leaving=None)
    with pytest.raises(RuntimeError, match=r"origins must have 3 element\(s\), got 2"):
        call(origins=int32([0, 5], device))
    with pytest.raises(RuntimeError, match="lookup_slots must be Int, got Long"):
        call(lookup_slots=torch.zeros(3, dtype=torch.int64, device=device))
    for dim in (0, 2**30 + 1, 2**62):
        with pytest.raises(RuntimeError, match=rf"dim must be in \[1, {2**30}\], got {dim}"):
            call(dim=dim)
    with pytest.raises(
        RuntimeError, match="cache must have a multiple of 4 bytes per row, at least 20 for dim 5, got 16"
    ):
        call(dim=5)
    with pytest.raises(RuntimeError, match="weight_dtype must be of Float, Half or BFloat16, got Double"):
        call(weight_dtype=torch.float64)


@pytest.mark.contents
def test_contents_are_wrong_before_anything_changes(device: torch.device) -> None:
    def call(**other: Any) -> None:
        given = good(device) | other
        before = given["cache"].clone()
        try:
            ops.swap_lookup_sequence(**given)
        finally:
            assert torch.equal(given["cache"], before)

    with pytest.raises(RuntimeError, match=r"lookup_slots must be in \[0, 5\), got 5 at index 1"):
        call(lookup_slots=int32([0, 5, 1], device))
    with pytest.raises(RuntimeError, match=r"origins must be in \[0, 7\), got 7 at index 2"):
        call(origins=int32([0, 5, 7], device))
    with pytest.raises(RuntimeError, match="origins must be 5 for slot 3, got 3 at index 1"):
        call(origins=int32([0, 3, 6], device))
    with pytest.raises(RuntimeError, match="origins must be 0 for slot 0, got 5 at index 0"):
        call(origins=int32([5, 5, 6], device))
    with pytest.raises(RuntimeError, match="leaving must be a row for each of the 2 places, got 1"):
        call(places=int32([0, 1], device))
    with pytest.raises(RuntimeError, match=r"slots must be in \[0, 5\), got -1 at index 0"):
        call(slots=int32([-1, 1], device))
