from __future__ import annotations

import pytest
import torch
from op_batches import int32, random_bytes

import rec_sdk_torch.ops  # noqa: F401


def reference_gather(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return cache[slots.long()]


def reference_scatter(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return cache.index_copy(0, slots.long(), rows)


@pytest.mark.parametrize("bytes_", [1, 16, 48, 272, 4096])
@pytest.mark.parametrize("count", [0, 1, 100, 900])
def test_equals_indexing(bytes_: int, count: int, device: torch.device) -> None:
    cache = random_bytes(1000, bytes_, device)
    slots = int32(torch.randperm(1000)[:count], device)
    assert torch.equal(torch.ops.rec_sdk.gather_rows(cache, slots), reference_gather(cache, slots))
    found = random_bytes(count, bytes_, device)
    torch.ops.rec_sdk.gather_rows.out(cache, slots, out=found)
    assert torch.equal(found, reference_gather(cache, slots))
    rows = random_bytes(count, bytes_, device)
    expected = reference_scatter(cache, slots, rows)
    torch.ops.rec_sdk.scatter_rows(cache, slots, rows)
    assert torch.equal(cache, expected)


def test_gather_may_repeat_slots(device: torch.device) -> None:
    cache = random_bytes(3, 16, device)
    slots = int32([2, 2, 0, 2], device)
    assert torch.equal(torch.ops.rec_sdk.gather_rows(cache, slots), reference_gather(cache, slots))


def test_opcheck(device: torch.device) -> None:
    cache, slots = random_bytes(5, 16, device), int32([3, 1], device)
    torch.library.opcheck(torch.ops.rec_sdk.gather_rows.default, (cache, slots))
    torch.library.opcheck(torch.ops.rec_sdk.gather_rows.out, (cache, slots), {"out": random_bytes(2, 16, device)})
    torch.library.opcheck(torch.ops.rec_sdk.scatter_rows, (cache, slots, random_bytes(2, 16, device)))


def test_errors_name_the_argument(device: torch.device) -> None:
    cache, slots = random_bytes(5, 16, device), int32([3, 1], device)
    gather, scatter = torch.ops.rec_sdk.gather_rows, torch.ops.rec_sdk.scatter_rows
    with pytest.raises(RuntimeError, match="cache must be Byte, got Float"):
        gather(cache.float(), slots)
    with pytest.raises(RuntimeError, match="cache must be contiguous"):
        gather(cache[:, :8], slots)
    with pytest.raises(RuntimeError, match=r"out must be \[2, 16\], got \[2, 8\]"):
        gather.out(cache, slots, out=random_bytes(2, 8, device))
    with pytest.raises(RuntimeError, match="out must be contiguous"):
        gather.out(cache, slots, out=random_bytes(2, 32, device)[:, :16])
    with pytest.raises(RuntimeError, match=r"rows must be \[2, 16\], got \[3, 16\]"):
        scatter(cache, slots, random_bytes(3, 16, device))


@pytest.mark.contents
def test_slot_out_of_range(device: torch.device) -> None:
    cache = random_bytes(5, 16, device)
    with pytest.raises(RuntimeError, match=r"slots must be in \[0, 5\), got 5 at index 1"):
        torch.ops.rec_sdk.gather_rows(cache, int32([0, 5], device))
    with pytest.raises(RuntimeError, match=r"slots must be in \[0, 5\), got 7 at index 0"):
        torch.ops.rec_sdk.gather_rows.out(cache, int32([7, 0], device), out=random_bytes(2, 16, device))
    with pytest.raises(RuntimeError, match=r"slots must be in \[0, 5\), got -1 at index 0"):
        torch.ops.rec_sdk.scatter_rows(cache, int32([-1, 5], device), random_bytes(2, 16, device))
