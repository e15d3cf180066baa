"""Aggregation of very many gradients on one row, against float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from op_batches import Cache, coefficients, int32

import rec_sdk_torch.ops  # noqa: F401

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
DIM = 3
HITS = [10_000, 100_000, 1_000_000, pytest.param(10_000_000, marks=pytest.mark.full)]


def gradients(kind: str, hits: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hits)
    if kind == "constant":
        return torch.full((hits, DIM), 0.1)
    if kind == "one sign":
        return torch.rand(hits, DIM, generator=generator)
    return torch.randn(hits, DIM, generator=generator)


def reference(grad: torch.Tensor) -> torch.Tensor:
    return grad.double().sum(0)


def one_segment(grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """unique_slots, segment_offsets, grad_row of a batch that hits row 1 only."""
    hits = len(grad)
    return int32([1], grad.device), int32([0, hits], grad.device), int32(torch.arange(hits), grad.device)


def aggregate(grad: torch.Tensor) -> torch.Tensor:
    """The aggregated gradient, as SGD with a learning rate of -1 leaves it in a row of zeros."""
    cache = Cache(torch.zeros(2, DIM), device=grad.device)
    unique, offsets, rows = one_segment(grad)
    tables, row = int32([0, 1], grad.device), coefficients(-1.0, device=grad.device)
    torch.ops.rec_sdk.update_rows(
        cache.records, [grad], unique, tables, offsets, rows, None, None, None, row, "sgd", DIM, torch.float32
    )
    return cache.weights[1].double().cpu()


@pytest.mark.parametrize("kind", ["constant", "one sign", "mixed sign"])
@pytest.mark.parametrize("hits", HITS)
def test_update_rows(kind: str, hits: int, device: torch.device) -> None:
    grad = gradients(kind, hits)
    torch.testing.assert_close(aggregate(grad.to(device)), reference(grad), **TOLERANCE)


@pytest.mark.parametrize("windows", [1, 7, 1000])
@pytest.mark.parametrize("kind", ["constant", "one sign", "mixed sign"])
@pytest.mark.parametrize("hits", HITS)
def test_accumulate_rows(kind: str, hits: int, windows: int, device: torch.device) -> None:
    grad = gradients(kind, hits)
    pending = torch.zeros(2, 2 * DIM, device=device)
    for part in grad.to(device).chunk(windows):
        torch.ops.rec_sdk.accumulate_rows(pending, [part], *one_segment(part), None, None, None)
    torch.testing.assert_close(pending[1, :DIM].double().cpu(), reference(grad), **TOLERANCE)


def test_a_window_of_many_single_hits(device: torch.device) -> None:
    grad = torch.full((1, DIM), 0.1, device=device)
    pending = torch.zeros(2, 2 * DIM, device=device)
    segment = one_segment(grad)
    for _ in range(30_000):
        torch.ops.rec_sdk.accumulate_rows(pending, [grad], *segment, None, None, None)
    expected = grad[0].double().cpu() * 30_000
    torch.testing.assert_close(pending[1, :DIM].double().cpu(), expected, rtol=1e-7, atol=0)


@pytest.mark.parametrize("hits", [100_000, 1_000_000])
def test_the_rule_would_catch_a_naive_sum(hits: int) -> None:
    grad = gradients("constant", hits)
    # cumsum adds one after the other; sum would not
    naive = torch.from_numpy(np.cumsum(grad.numpy(), axis=0, dtype=np.float32)[-1])
    with pytest.raises(AssertionError):
        torch.testing.assert_close(naive.double(), reference(grad), **TOLERANCE)
