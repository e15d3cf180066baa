"""lookup_pooled and, as the gradient of its weights, pooled_weights_grad."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_batches import Cache, Device, int32

import rec_sdk_torch.ops  # noqa: F401

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@dataclass
class Batch:
    weights: torch.Tensor
    slots: torch.Tensor
    offsets: torch.Tensor
    sample_weights: torch.Tensor
    columns: torch.Tensor
    mean: torch.Tensor
    out: torch.Tensor  # [samples, columns], full of NaN


def reference(batch: Batch, sample_weights: torch.Tensor | None, first_bag: int = 0) -> torch.Tensor:
    out = batch.out.clone()
    dim, samples = batch.weights.shape[1], len(out)
    for k in range(len(batch.offsets) - 1):
        feature, sample = divmod(first_bag + k, samples)
        span = slice(int(batch.offsets[k]), int(batch.offsets[k + 1]))
        rows = batch.weights[batch.slots[span].long()].float()
        if sample_weights is not None:
            rows = rows * sample_weights[span, None]
        pooled = rows.sum(0)
        if batch.mean[feature] and len(rows):
            pooled = pooled / len(rows)
        column = int(batch.columns[feature])
        out[sample, column : column + dim] = pooled
    return out


def make_batch(
    lengths: list[int], samples: int, dim: int, dtype: torch.dtype = torch.float32, device: Device = "cpu"
) -> Batch:
    features = len(lengths) // samples
    generator = torch.Generator().manual_seed(len(lengths) + dim)
    cache = Cache(torch.randn(40, dim, generator=generator), [torch.ones(40, 1)], dtype, device)
    total = sum(lengths)
    columns = [2 + (dim + 1) * f for f in range(features)]
    return Batch(
        cache.weights,
        int32(torch.randint(0, 40, (total,), generator=generator), device),
        torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()] if lengths else [0], device=device),
        torch.rand(total, generator=generator).to(device),
        torch.tensor(columns[::-1], dtype=torch.int64, device=device),
        torch.tensor([f % 2 == 1 for f in range(features)], dtype=torch.bool, device=device),
        torch.full((samples, 3 + (dim + 1) * features), float("nan"), device=device),
    )


def lookup(batch: Batch, sample_weights: torch.Tensor | None, first_bag: int, out: torch.Tensor) -> torch.Tensor:
    torch.ops.rec_sdk.lookup_pooled(
        batch.weights, batch.slots, batch.offsets, sample_weights, batch.columns, batch.mean, first_bag, out
    )
    return out


def weights_grad(batch: Batch, grad: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.ops.rec_sdk.pooled_weights_grad(
        batch.weights, batch.slots, batch.offsets, grad, batch.columns, batch.mean
    )
    return found


LENGTHS = [3, 0, 1, 7, 2, 0, 40, 5, 100, 1, 0, 2]  # 3 features, 4 samples


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 3, 8, 20, 32, 64, 130])
def test_equals_embedding_bag(dim: int, dtype: torch.dtype, weighted: bool, device: torch.device) -> None:
    batch = make_batch(LENGTHS, 4, dim, dtype, device)
    sample_weights = batch.sample_weights if weighted else None
    found = lookup(batch, sample_weights, 0, batch.out.clone())
    # Equal NaNs: nothing is written outside the slices.
    torch.testing.assert_close(found, reference(batch, sample_weights), rtol=1e-5, atol=1e-5, equal_nan=True)


def test_ranges_of_bags_into_a_wider_output(device: torch.device) -> None:
    batch = make_batch(LENGTHS, 4, 20, device=device)
    whole = lookup(batch, batch.sample_weights, 0, batch.out.clone())
    wide = torch.full((4, batch.out.shape[1] + 9), float("nan"), device=device)
    pieces = wide[:, : batch.out.shape[1]]
    for first, last in [(0, 3), (3, 4), (4, 4), (4, 12)]:
        begin, end = int(batch.offsets[first]), int(batch.offsets[last])
        part = Batch(
            batch.weights,
            batch.slots[begin:end],
            batch.offsets[first : last + 1] - begin,
            batch.sample_weights[begin:end],
            batch.columns,
            batch.mean,
            batch.out,
        )
        lookup(part, part.sample_weights, first, pieces)
    torch.testing.assert_close(pieces, whole, rtol=0, atol=0, equal_nan=True)
    assert wide[:, batch.out.shape[1] :].isnan().all()


def test_a_long_bag_is_summed_accurately(device: torch.device) -> None:
    weights = torch.full((1, 3), 0.1, device=device)
    count = 100_000
    out = torch.zeros(1, 3, device=device)
    torch.ops.rec_sdk.lookup_pooled(
        weights,
        int32(torch.zeros(count), device),
        torch.tensor([0, count], device=device),
        None,
        torch.tensor([0], device=device),
        torch.tensor([False], device=device),
        0,
        out,
    )
    torch.testing.assert_close(out.double(), weights.double() * count, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 3, 8, 20, 64, 130])
def test_weights_grad_equals_autograd(dim: int, dtype: torch.dtype, device: torch.device) -> None:
    batch = make_batch(LENGTHS, 4, dim, dtype, device)
    sample_weights = batch.sample_weights.clone().requires_grad_()
    out = reference(batch, sample_weights)
    grad = torch.randn_like(out)
    out.backward(grad)
    torch.testing.assert_close(weights_grad(batch, grad), sample_weights.grad, rtol=1e-4, atol=1e-4)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 70), st.data())
def test_any_batch(samples: int, features: int, dim: int, data: st.DataObject) -> None:
    bags = samples * features
    lengths = data.draw(st.lists(st.integers(0, 70), min_size=bags, max_size=bags))
    batch = make_batch(lengths, samples, dim)
    found = lookup(batch, batch.sample_weights, 0, batch.out.clone())
    sample_weights = batch.sample_weights.clone().requires_grad_()
    expected = reference(batch, sample_weights)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-5, equal_nan=True)
    if sum(lengths):
        grad = torch.randn_like(expected)
        expected.backward(grad)
        torch.testing.assert_close(weights_grad(batch, grad), sample_weights.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("lengths", "samples"), [([], 0), ([], 3), ([0, 0, 0], 3)])
def test_empty(lengths: list[int], samples: int, device: torch.device) -> None:
    batch = make_batch(lengths, max(samples, 1), 8, device=device)
    out = lookup(batch, None, 0, torch.full((samples, 12), 5.0, device=device))
    assert (out[:, 2:10] == (0 if lengths else 5)).all()
    assert weights_grad(batch, torch.zeros(samples, 12, device=device)).shape == (0,)


def test_opcheck(device: torch.device) -> None:
    batch = make_batch(LENGTHS, 4, 8, device=device)
    shared = (batch.weights, batch.slots, batch.offsets)
    for sample_weights in (None, batch.sample_weights):
        torch.library.opcheck(
            torch.ops.rec_sdk.lookup_pooled,
            (*shared, sample_weights, batch.columns, batch.mean, 0, torch.zeros_like(batch.out)),
        )
    grad = torch.randn_like(batch.out)
    torch.library.opcheck(torch.ops.rec_sdk.pooled_weights_grad, (*shared, grad, batch.columns, batch.mean))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"offsets": torch.tensor([1, 2])}, "offsets must start at 0, got 1", marks=pytest.mark.contents),
        pytest.param(
            {"offsets": torch.tensor([0, 2, 1, 161])},
            "offsets must not decrease, got 2 then 1 at index 2",
            marks=pytest.mark.contents,
        ),
        pytest.param({"offsets": torch.tensor([0, 3])}, "offsets must end at 161, got 3", marks=pytest.mark.contents),
        ({"offsets": torch.tensor([], dtype=torch.int64)}, "offsets must have bags"),
        ({"offsets": torch.zeros(14, dtype=torch.int64)}, r"bags 0 to 0 \+ 13 exceed the 12 bags"),
        pytest.param(
            {"columns": torch.tensor([0, -1, 9])},
            r"columns must be in \[0, 22\] .* got -1 at index 1",
            marks=pytest.mark.contents,
        ),
        pytest.param(
            {"columns": torch.tensor([0, 23, 9])},
            r"columns must be in \[0, 22\] .* got 23 at index 1",
            marks=pytest.mark.contents,
        ),
        ({"mean": torch.tensor([True])}, r"mean must have 3 element\(s\), got 1"),
        pytest.param(
            {"slots": int32(torch.full((161,), 40))},
            r"slots must be in \[0, 40\), got 40 at index 0",
            marks=pytest.mark.contents,
        ),
        ({"out": torch.zeros(30, 4).t()}, r"out must have stride\(1\) = 1"),
        ({"out": torch.zeros(4, 30).double()}, "out must be Float, got Double"),
    ],
)
def test_errors_name_the_argument(changes: dict[str, torch.Tensor], message: str, device: torch.device) -> None:
    batch = make_batch(LENGTHS, 4, 8, device=device)
    for name, value in changes.items():
        setattr(batch, name, value.to(device))
    with pytest.raises(RuntimeError, match=message):
        lookup(batch, None, 0, batch.out)


def test_first_bag_out_of_range(device: torch.device) -> None:
    batch = make_batch(LENGTHS, 4, 8, device=device)
    for first_bag, message in [(-1, "first_bag must not be negative, got -1"), (1, r"bags 1 to 1 \+ 12 exceed")]:
        with pytest.raises(RuntimeError, match=message):
            lookup(batch, None, first_bag, batch.out)
    with pytest.raises(RuntimeError, match=r"per_sample_weights must have 161 element\(s\), got 2"):
        lookup(batch, batch.sample_weights[:2], 0, batch.out)
