"""Segments of many lookups: what lists them, and that the list changes no bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from op_batches import OPTIMIZERS, Cache, coefficients, int32, states_of

from rec_sdk_torch.operators.calls import ops
from rec_sdk_torch.operators.segments import hot_segments

LENGTHS = [
    pytest.param([1, 129, 0, 2, 128, 5000, 256, 127, 3, 257, 640, 1], id="between others"),
    pytest.param([2100], id="one row"),
    pytest.param([130] * 40, id="side by side"),
    pytest.param([1] * 900 + [385] * 3 + [1] * 900 + [7000], id="few of many"),
]


def test_the_list() -> None:
    offsets = np.array([0, 3, 200, 200, 328, 457, 1000], dtype=np.int32)
    found = hot_segments(offsets)
    assert found.tolist() == [[1, 3, 1, 0], [4, 328, 1, 1], [5, 457, 4, 2]]
    assert found.dtype == np.int32
    assert hot_segments(offsets[:2]).shape == (0, 4)


def segments(lengths: list[int], device: torch.device) -> tuple[list[torch.Tensor | None], torch.Tensor]:
    """segment_offsets, grad_row, grad_source, grad_column and scale, and the hot segments."""
    generator = torch.Generator().manual_seed(0)
    offsets = np.cumsum([0, *lengths]).astype(np.int32)
    rows = torch.randint(0, 300, (int(offsets[-1]),), generator=generator, dtype=torch.int32)
    lookups = [torch.from_numpy(offsets).to(device), rows.to(device), None, None, None]
    return lookups, torch.from_numpy(hot_segments(offsets)).to(device)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("dim", [4, 20])
def test_updates_have_the_same_bits(lengths: list[int], dim: int, device: torch.device) -> None:
    rows = len(lengths)
    lookups, hot = segments(lengths, device)
    grad = torch.randn(300, dim).to(device)
    weights = torch.randn(rows, dim)
    unique = torch.randperm(rows).int().to(device)
    for optimizer in ("sgd", "rowwise_adagrad", "adam"):
        states = [torch.rand(rows, width) for width in states_of(optimizer, dim)]
        found = []
        for segments_given in (None, hot):
            cache = Cache(weights, states, device=device)
            row = coefficients(0.1, 1e-8, 0.9, 0.1, 0.75, 0.25, 1.25, device=device)
            tables = int32([0, rows], device)
            fixed = (unique, tables, *lookups, row, optimizer, dim, torch.float32)
            ops.update_rows(cache.records, [grad], *fixed, hot_segments=segments_given)
            found.append(cache.records.cpu())
        assert torch.equal(*found), optimizer
        assert optimizer in OPTIMIZERS


@pytest.mark.parametrize("lengths", LENGTHS)
def test_accumulated_gradients_have_the_same_bits(lengths: list[int], device: torch.device) -> None:
    dim, rows = 8, len(lengths)
    lookups, hot = segments(lengths, device)
    grad = torch.randn(300, dim).to(device)
    unique = torch.arange(rows, dtype=torch.int32, device=device)
    found = []
    for segments_given in (None, hot):
        pending = torch.ones(rows, 2 * dim, device=device)
        ops.accumulate_rows(pending, [grad], unique, *lookups, segments_given)
        found.append(pending.cpu())
    assert torch.equal(*found)
