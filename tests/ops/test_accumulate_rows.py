from __future__ import annotations

import pytest
import torch
from op_batches import int32, segments

import rec_sdk_torch.ops  # noqa: F401

DIMS = [1, 3, 8, 20, 32, 64, 128, 130]


def reference(totals: torch.Tensor, slots: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    return totals.index_add(0, slots, grad.double())


def accumulate(
    pending: torch.Tensor, slots: torch.Tensor, grad: torch.Tensor, scale: torch.Tensor | None = None
) -> None:
    unique, offsets, positions = segments(slots)
    if scale is not None:
        scale = scale[positions.long()]
    torch.ops.rec_sdk.accumulate_rows(pending, [grad], unique, offsets, positions, None, None, scale)


@pytest.mark.parametrize("dim", DIMS)
def test_equals_float64(dim: int, device: torch.device) -> None:
    torch.manual_seed(dim)
    pending = torch.zeros(30, 2 * dim, device=device)
    totals = torch.zeros(30, dim, dtype=torch.float64)
    for _ in range(20):
        slots, grad, scale = torch.randint(0, 25, (200,)), torch.randn(200, dim), torch.rand(200)
        accumulate(pending, slots.to(device), grad.to(device), scale.to(device))
        totals = reference(totals, slots, grad * scale[:, None])
    torch.testing.assert_close(pending[:, :dim].double().cpu(), totals, rtol=1e-6, atol=1e-5)
    assert (pending[25:] == 0).all()


@pytest.mark.parametrize("dim", [1, 8, 20, 64])
def test_the_sum_alone_is_the_best_float(dim: int, device: torch.device) -> None:
    """One lookup per call, so that nothing but the compensated addition rounds."""
    pending = torch.zeros(1, 2 * dim, device=device)
    totals = torch.zeros(1, dim, dtype=torch.float64)
    slots = torch.zeros(1, dtype=torch.int64)
    segment = segments(slots.to(device))
    for step in range(200):
        grad = torch.randn(1, dim) * 10.0 ** (step % 5)
        torch.ops.rec_sdk.accumulate_rows(pending, [grad.to(device)], *segment, None, None, None)
        totals = reference(totals, slots, grad)
    assert torch.equal(pending[:, :dim].cpu(), totals.float())
    both = pending.cpu().double().view(2, dim).sum(0, keepdim=True)
    torch.testing.assert_close(both, totals, rtol=1e-12, atol=1e-9)


def test_empty(device: torch.device) -> None:
    pending = torch.ones(3, 8, device=device)
    accumulate(pending, torch.zeros(0, dtype=torch.int64, device=device), torch.zeros(0, 4, device=device))
    assert (pending == 1).all()


def test_opcheck(device: torch.device) -> None:
    unique, offsets, positions = segments(torch.tensor([1, 1, 4], device=device))
    pending, grad = torch.zeros(5, 16, device=device), torch.randn(3, 8, device=device)
    arguments = (pending, [grad], unique, offsets, positions, None)
    torch.library.opcheck(torch.ops.rec_sdk.accumulate_rows, (*arguments, None, None))
    columns, scale = int32([0, 0, 0], device), torch.rand(3, device=device)
    torch.library.opcheck(torch.ops.rec_sdk.accumulate_rows, (*arguments, columns, scale))


def test_errors_name_the_argument(device: torch.device) -> None:
    unique, offsets, positions = segments(torch.tensor([1, 1, 4], device=device))
    grad = torch.randn(3, 8, device=device)
    op = torch.ops.rec_sdk.accumulate_rows
    with pytest.raises(RuntimeError, match=r"pending must have 2 \* dim columns .* got 15"):
        op(torch.zeros(5, 15, device=device), [grad], unique, offsets, positions, None, None, None)
    with pytest.raises(RuntimeError, match="pending must be contiguous"):
        op(torch.zeros(5, 32, device=device)[:, :16], [grad], unique, offsets, positions, None, None, None)


@pytest.mark.contents
def test_slot_out_of_range(device: torch.device) -> None:
    unique, offsets, positions = segments(torch.tensor([1, 1, 4], device=device))
    pending, grad = torch.zeros(3, 16, device=device), torch.randn(3, 8, device=device)
    with pytest.raises(RuntimeError, match=r"unique_slots must be in \[0, 3\), got 4 at index 1"):
        torch.ops.rec_sdk.accumulate_rows(pending, [grad], unique, offsets, positions, None, None, None)
