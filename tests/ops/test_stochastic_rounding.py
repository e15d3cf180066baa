"""update_rows with row_ids: the direction in which 16-bit weights round."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from op_batches import OPTIMIZERS, Cache, coefficients, int32, states_of, update_arguments
from reference_rounding import random_bits, rounded, row_numbers

from rec_sdk_torch.operators.calls import ops

DTYPES = [torch.bfloat16, torch.float16]
SEEDS = torch.tensor([0x1234_5678_9ABC_DEF0, -77])


def updated(
    weights: torch.Tensor,
    steps: torch.Tensor,
    ids: torch.Tensor,
    dtype: torch.dtype,
    device: torch.device,
    optimizer: str = "sgd",
    slots: torch.Tensor | None = None,
    seeds: torch.Tensor | None = SEEDS,
    row: torch.Tensor | None = None,
) -> Cache:
    """Returns the cache after one update that adds -`steps` to all rows; each of two tables has half of them."""
    count, dim = weights.shape
    states = [torch.zeros(count, elements) for elements in states_of(optimizer, dim)]
    cache = Cache(torch.zeros(count, dim), states, dtype, device)
    slots = torch.arange(count) if slots is None else slots
    cache.weights[slots.to(device)] = weights.to(dtype).to(device)
    every, table = torch.arange(count + 1, dtype=torch.int32, device=device), coefficients(1.0) if row is None else row
    given = {
        "unique_slots": int32(slots, device),
        "table_offsets": every[[0, count // 2, count]],
        "segment_offsets": every,
        "grad_row": every[:-1],
    }
    if seeds is not None:
        given |= {"row_ids": ids.to(device), "rounding_seeds": seeds.to(device)}
    ops.update_rows(**update_arguments(cache, [steps.to(device)], optimizer, table.repeat(2, 1).to(device), **given))
    return cache


def expected(values: torch.Tensor, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    half = len(ids) // 2
    numbers = [
        row_numbers(part.numpy(), seed) for part, seed in zip((ids[:half], ids[half:]), SEEDS.tolist(), strict=True)
    ]
    return rounded(values, dtype, random_bits(np.concatenate(numbers), values.shape[1]))


def bits(tensor: torch.Tensor) -> bytes:
    """Returns the bytes of a tensor, with one representation of NaN."""
    tensor = tensor.cpu()
    same = torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor)
    return same.view(torch.int16).numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [1, 8, 33, 64, 300])
def test_rounds_as_the_reference(dim: int, dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(dim)
    count = 50
    magnitudes = 2.0 ** torch.randint(-30, 16, (count, 1), generator=generator).float()
    values = torch.randn(count, dim, generator=generator) * magnitudes
    ids = torch.randint(-(2**62), 2**62, (count,), generator=generator)
    cache = updated(torch.zeros(count, dim), -values, ids, dtype, device)
    assert bits(cache.weights) == bits(expected(values, ids, dtype))
    assert (cache.weights.cpu() != values.to(dtype)).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_at_the_edges(dtype: torch.dtype, device: torch.device) -> None:
    """Infinity, NaN, zero and exact values are unchanged; values beyond the largest number round to nearest."""
    largest = torch.finfo(dtype).max
    beyond = float(torch.tensor(largest).nextafter(torch.tensor(float("inf"))))
    step = largest - float(torch.tensor(largest, dtype=dtype).view(torch.int16).sub(1).view(dtype))
    middle = largest + step / 2
    inf = float("inf")
    row = [largest, beyond, middle, float(np.nextafter(np.float32(middle), np.float32(0))), inf, float("nan"), 0.0, 1.0]
    row += [-value for value in row if value] + [float(torch.finfo(dtype).smallest_normal), 2.0**-24, 2.0**-25, 1e-45]
    values = torch.tensor([row] * 64, dtype=torch.float32)
    ids = torch.arange(64) * 1_000_003
    cache = updated(torch.zeros_like(values), -values, ids, dtype, device)
    found = cache.weights.cpu()
    if device.type == "npu":  # the vector unit of this device flushes subnormal floats to zero
        values, found = values[:, :-1], found[:, :-1]
    assert bits(found) == bits(expected(values, ids, dtype)[:, : found.shape[1]])
    assert found[:, [0, 3]].eq(largest).all()
    assert found[:, 2].isinf().all()


# Rows of 45,000 columns are wider than a core's memory.
SHAPES = [
    *((optimizer, 40, 32) for optimizer in OPTIMIZERS),
    *((optimizer, 4, 45_000) for optimizer in ("sgd", "adam", "partial_rowwise_lamb")),
]


@pytest.mark.parametrize(("optimizer", "count", "dim"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_optimizers_round_what_float32_gives(
    optimizer: str, count: int, dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Every result is one of the exact result's two neighbours, independent of the slots."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(count, dim, generator=generator).to(dtype).float()
    grads = torch.randn(count, dim, generator=generator)
    ids = torch.randint(-(2**62), 2**62, (count,), generator=generator)
    row = coefficients(0.01, 0.1, 0.9, 0.1, 0.75, 0.25, 1.0, 1.0, 0.0)
    run = (weights, grads, ids)
    exact = updated(*run, torch.float32, device, optimizer, seeds=None, row=row)
    cache = updated(*run, dtype, device, optimizer, row=row)
    assert bits(cache.weights) == bits(expected(exact.weights.cpu(), ids, dtype))
    slots = torch.randperm(count, generator=generator)
    moved = updated(*run, dtype, device, optimizer, slots=slots, row=row)
    assert bits(moved.weights[slots.to(device)]) == bits(cache.weights)
    for state, of_moved in zip(cache.states, moved.states, strict=True):
        assert torch.equal(of_moved[slots.to(device)], state)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding_is_unbiased(dtype: torch.dtype, device: torch.device) -> None:
    """In every column, the mean over many ids equals the exact value within four standard deviations."""
    count, dim = 4096, 16
    generator = torch.Generator().manual_seed(2)
    ulp = torch.finfo(dtype).eps
    value = 1 + torch.rand(dim, generator=generator) * ulp
    value = torch.cat([value[:8], -value[8:]])
    values = value.repeat(count, 1)
    cache = updated(torch.zeros(count, dim), -values, torch.arange(count), dtype, device)
    share = (value.abs() - 1).double() / ulp
    deviation = ulp * (share * (1 - share) / count).sqrt()
    error = (cache.weights.cpu().double().mean(0) - value.double()).abs()
    assert (error <= 4 * deviation + 1e-12).all()
    to_nearest = values.to(dtype).double().mean(0) - value.double()
    assert (to_nearest.abs() > 4 * deviation).any(), "rounding to nearest would pass"


def test_float32_does_not_round(device: torch.device) -> None:
    values = torch.randn(10, 8)
    cache = updated(torch.zeros(10, 8), -values, torch.arange(10), torch.float32, device)
    assert torch.equal(cache.weights.cpu(), values)
