from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_batches import Cache, int32

import rec_sdk_torch.ops  # noqa: F401

DIMS = [1, 3, 8, 20, 64, 130]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def reference(weights: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return weights[slots.long()].float()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [*DIMS, 32, 128])
def test_equals_indexing(dim: int, dtype: torch.dtype, device: torch.device) -> None:
    cache = Cache(torch.randn(50, dim), [torch.ones(50, dim)], dtype, device)
    slots = int32(torch.randint(0, 50, (300,)), device)
    found = torch.ops.rec_sdk.lookup_sequence(cache.weights, slots)
    assert torch.equal(found, reference(cache.weights, slots))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_value(dtype: torch.dtype, device: torch.device) -> None:
    weights = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).reshape(-1, 64).to(device)
    slots = int32(range(len(weights)), device)
    found, expected = torch.ops.rec_sdk.lookup_sequence(weights, slots), reference(weights, slots)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rows", [0, 5])
def test_no_lookups(rows: int, device: torch.device) -> None:
    out = torch.ops.rec_sdk.lookup_sequence(torch.randn(rows, 8, device=device), int32([], device))
    assert out.shape == (0, 8)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 140), st.lists(st.integers(0, 9), max_size=70), st.integers(0, 40))
def test_any_width_and_stride(dim: int, slots: list[int], padding: int) -> None:
    weights = torch.randn(10, dim + padding)[:, :dim]
    index = int32(slots)
    assert torch.equal(torch.ops.rec_sdk.lookup_sequence(weights, index), reference(weights, index))


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(dtype: torch.dtype, device: torch.device) -> None:
    cache = Cache(torch.randn(5, 8), [torch.ones(5, 8)], dtype, device)
    torch.library.opcheck(torch.ops.rec_sdk.lookup_sequence, (cache.weights, int32([1, 4], device)))


def test_errors_name_the_argument(device: torch.device) -> None:
    weights = torch.randn(5, 8, device=device)
    lookup = torch.ops.rec_sdk.lookup_sequence
    with pytest.raises(RuntimeError, match="slots must be Int, got Long"):
        lookup(weights, torch.tensor([1], device=device))
    with pytest.raises(RuntimeError, match=r"slots must have 1 dimension\(s\), got 2"):
        lookup(weights, int32([[1]], device))
    with pytest.raises(RuntimeError, match="weights must be of Float, Half or BFloat16, got Double"):
        lookup(weights.double(), int32([1], device))
    with pytest.raises(RuntimeError, match=r"weights must have stride\(1\) = 1, got 8"):
        lookup(torch.randn(4, 8, device=device).t(), int32([1], device))
    with pytest.raises(RuntimeError, match="slots must be contiguous"):
        lookup(weights, int32([1, 2, 3, 4], device)[::2])


@pytest.mark.contents
@pytest.mark.parametrize("slot", [-1, 5, 2**31 - 1, -(2**31)])
def test_slot_out_of_range(slot: int, device: torch.device) -> None:
    with pytest.raises(RuntimeError, match=rf"slots must be in \[0, 5\), got {slot} at index 2"):
        torch.ops.rec_sdk.lookup_sequence(torch.randn(5, 8, device=device), int32([0, 4, slot], device))
