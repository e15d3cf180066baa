"""lookup_sequence equals indexing; lookup_pooled and pooled_weights_grad equal torch's results and write
nothing else.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_batches import Bags, Cache, int32, make_bags

from rec_sdk_torch.operators.calls import ops

DIMS = [1, 3, 8, 20, 64, 130]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LENGTHS = [3, 0, 1, 7, 2, 0, 40, 5, 100, 1, 0, 2]  # 3 features, 4 samples


def indexed(weights: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return weights[slots.long()].float()


def pooled(bags: Bags, sample_weights: torch.Tensor | None, first_bag: int = 0) -> torch.Tensor:
    out = bags.out.clone()
    dim, samples = bags.weights.shape[1], len(out)
    for k in range(len(bags.offsets) - 1):
        feature, sample = divmod(first_bag + k, samples)
        span = slice(int(bags.offsets[k]), int(bags.offsets[k + 1]))
        rows = indexed(bags.weights, bags.slots[span])
        if sample_weights is not None:
            rows = rows * sample_weights[span, None]
        total = rows.sum(0)
        if bags.mean[feature] and len(rows):
            total = total / len(rows)
        column = int(bags.columns[feature])
        out[sample, column : column + dim] = total
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [*DIMS, 32, 128])
def test_a_sequence_is_indexing(dim: int, dtype: torch.dtype, device: torch.device) -> None:
    cache = Cache(torch.randn(50, dim), [torch.ones(50, dim)], dtype, device)
    slots = int32(torch.randint(0, 50, (300,)), device)
    assert torch.equal(ops.lookup_sequence(cache.weights, slots), indexed(cache.weights, slots))
    assert ops.lookup_sequence(cache.weights, slots[:0]).shape == (0, dim)
    assert ops.lookup_sequence(cache.weights[:0], slots[:0]).shape == (0, dim)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_value(dtype: torch.dtype, device: torch.device) -> None:
    weights = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).reshape(-1, 64).to(device)
    slots = int32(range(len(weights)), device)
    found, expected = ops.lookup_sequence(weights, slots), indexed(weights, slots)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 140), st.lists(st.integers(0, 9), max_size=70), st.integers(0, 40))
def test_any_width_and_stride(dim: int, slots: list[int], padding: int) -> None:
    weights = torch.randn(10, dim + padding)[:, :dim]
    assert torch.equal(ops.lookup_sequence(weights, int32(slots)), indexed(weights, int32(slots)))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [*DIMS, 32])
def test_equals_embedding_bag(dim: int, dtype: torch.dtype, weighted: bool, device: torch.device) -> None:
    bags = make_bags(LENGTHS, 4, dim, dtype, device)
    sample_weights = bags.sample_weights if weighted else None
    found = bags.lookup(sample_weights, 0, bags.out.clone())
    # NaNs that are still equal show that nothing was written outside the slices.
    torch.testing.assert_close(found, pooled(bags, sample_weights), rtol=1e-5, atol=1e-5, equal_nan=True)


def test_ranges_of_bags_into_a_wider_output(device: torch.device) -> None:
    bags = make_bags(LENGTHS, 4, 20, device=device)
    whole = bags.lookup(bags.sample_weights, 0, bags.out.clone())
    wide = torch.full((4, bags.out.shape[1] + 9), float("nan"), device=device)
    pieces = wide[:, : bags.out.shape[1]]
    for first, last in [(0, 3), (3, 4), (4, 4), (4, 12)]:
        begin, end = int(bags.offsets[first]), int(bags.offsets[last])
        part = replace(bags, slots=bags.slots[begin:end], offsets=bags.offsets[first : last + 1] - begin)
        part.lookup(bags.sample_weights[begin:end], first, pieces)
    torch.testing.assert_close(pieces, whole, rtol=0, atol=0, equal_nan=True)
    assert wide[:, bags.out.shape[1] :].isnan().all()


def test_a_long_bag_is_summed_accurately(device: torch.device) -> None:
    weights, count = torch.full((1, 3), 0.1, device=device), 100_000
    bag = make_bags([count], 1, 3, device=device)
    bag = replace(bag, weights=weights, slots=bag.slots * 0, columns=bag.columns * 0, out=torch.zeros_like(weights))
    found = bag.lookup(None, 0, bag.out)
    torch.testing.assert_close(found.double(), weights.double() * count, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
def test_weights_grad_equals_autograd(dim: int, dtype: torch.dtype, device: torch.device) -> None:
    bags = make_bags(LENGTHS, 4, dim, dtype, device)
    sample_weights = bags.sample_weights.clone().requires_grad_()
    out = pooled(bags, sample_weights)
    grad = torch.randn_like(out)
    out.backward(grad)
    torch.testing.assert_close(bags.weights_grad(grad), sample_weights.grad, rtol=1e-4, atol=1e-4)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 70), st.data())
def test_any_batch(samples: int, features: int, dim: int, data: st.DataObject) -> None:
    count = samples * features
    lengths = data.draw(st.lists(st.integers(0, 70), min_size=count, max_size=count))
    bags = make_bags(lengths, samples, dim)
    found = bags.lookup(bags.sample_weights, 0, bags.out.clone())
    sample_weights = bags.sample_weights.clone().requires_grad_()
    expected = pooled(bags, sample_weights)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-5, equal_nan=True)
    if sum(lengths):
        grad = torch.randn_like(expected)
        expected.backward(grad)
        torch.testing.assert_close(bags.weights_grad(grad), sample_weights.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("lengths", "samples"), [([], 0), ([], 3), ([0, 0, 0], 3)])
def test_empty(lengths: list[int], samples: int, device: torch.device) -> None:
    bags = make_bags(lengths, max(samples, 1), 8, device=device)
    out = bags.lookup(None, 0, torch.full((samples, 12), 5.0, device=device))
    assert (out[:, 2:10] == (0 if lengths else 5)).all()
    assert bags.weights_grad(torch.zeros(samples, 12, device=device)).shape == (0,)
