"""One gradient per feature: update_rows and accumulate_rows read several gradients as they would their joined rows."""

from __future__ import annotations

import pytest
import torch
from op_batches import Cache, coefficients, int32, segments, states_of

import rec_sdk_torch.ops  # noqa: F401

ROWS = 40
LENGTHS = {
    "unequal": [70, 1, 130],
    "empty ones": [0, 50, 0, 0, 90, 0],
    "none has rows": [0, 0],
    "hot rows": [3000, 1, 4000],
    "as many as features": [3] * 150,
}


def reference_sums(weights: torch.Tensor, slots: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(weights, dtype=torch.float64).index_add_(0, slots.long(), grad.double())


class Batch:
    """Lookups of several features, each with a gradient [n_f, dim] of its own.

    The segments list them in an order that mixes the features; `joined` is what the gradients are one after another.
    """

    def __init__(self, lengths: list[int], dim: int, device: torch.device, scaled: bool = False) -> None:
        generator = torch.Generator().manual_seed(dim)
        count = sum(lengths)
        self.slots = (torch.rand(count, generator=generator) ** 2 * ROWS).long()
        self.joined = torch.randn(count, dim, generator=generator)
        unique, offsets, lookups = segments(self.slots)
        starts = torch.tensor([0, *lengths]).cumsum(0)
        source = torch.bucketize(lookups.long(), starts[1:], right=True)
        self.grads = [g.to(device) for g in self.joined.split(lengths)]
        self.unique, self.offsets, self.lookups = unique.to(device), offsets.to(device), lookups.to(device)
        self.row = int32(lookups - starts[source], device)
        self.source = int32(source, device)
        self.scale = torch.rand(count, generator=generator).to(device) if scaled else None
        self.tables = int32([0, len(unique)], device)

    def several(self) -> tuple[object, ...]:
        return self.grads, self.row, self.source

    def one(self) -> tuple[object, ...]:
        return [self.joined.to(self.unique.device)], self.lookups, None


def update(cache: Cache, batch: Batch, gradients: tuple[object, ...], optimizer: str) -> None:
    grads, row, source = gradients
    rates = coefficients(0.1, 1e-8, 0.9, 0.1, 0.75, 0.25, 1.25, device=cache.records.device)
    lookups = (batch.unique, batch.tables, batch.offsets, row, source, None, batch.scale)
    torch.ops.rec_sdk.update_rows(cache.records, grads, *lookups, rates, optimizer, cache.dim, cache.dtype)


@pytest.mark.parametrize("dim", [1, 8, 20, 64])
@pytest.mark.parametrize("name", LENGTHS)
def test_equals_the_sum_of_all(name: str, dim: int, device: torch.device) -> None:
    batch = Batch(LENGTHS[name], dim, device)
    weights = torch.randn(ROWS, dim)
    cache = Cache(weights, device=device)
    update(cache, batch, batch.several(), "sgd")
    expected = weights.double() - 0.1 * reference_sums(weights, batch.slots, batch.joined)
    torch.testing.assert_close(cache.weights.cpu().double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dim", [1, 20, 64])
@pytest.mark.parametrize("name", LENGTHS)
def test_the_bits_of_one_joined_gradient(name: str, dim: int, scaled: bool, device: torch.device) -> None:
    batch = Batch(LENGTHS[name], dim, device, scaled)
    for optimizer in ("rowwise_adagrad", "adam"):
        weights = torch.randn(ROWS, dim)
        caches = [
            Cache(weights, [torch.ones(ROWS, n) for n in states_of(optimizer, dim)], device=device) for _ in range(2)
        ]
        for cache, gradients in zip(caches, (batch.several(), batch.one()), strict=True):
            update(cache, batch, gradients, optimizer)
        assert torch.equal(caches[0].records, caches[1].records)
    sums = []
    for grads, row, source in (batch.several(), batch.one()):
        sums.append(torch.zeros(ROWS, 2 * dim, device=device))
        for _ in range(2):
            torch.ops.rec_sdk.accumulate_rows(
                sums[-1], grads, batch.unique, batch.offsets, row, source, None, batch.scale
            )
    assert torch.equal(sums[0], sums[1])


def test_strides_columns_and_a_gradient_given_twice(device: torch.device) -> None:
    wide = torch.randn(6, 50)
    grads = [wide[:, 3:20], torch.randn(4, 9), wide[:, 3:20]]
    source, row, column = [2, 0, 1, 2, 0], [5, 1, 3, 0, 4], [9, 0, 1, 4, 2]
    cache = Cache(torch.zeros(2, 8), device=device)
    torch.ops.rec_sdk.update_rows(
        cache.records,
        [wide.to(device)[:, 3:20], grads[1].to(device), wide.to(device)[:, 3:20]],
        *[int32(x, device) for x in ([1], [0, 1], [0, 5], row, source, column)],
        None,
        coefficients(-1.0, device=device),
        "sgd",
        8,
        torch.float32,
    )
    expected = sum(grads[s][r, c : c + 8].double() for s, r, c in zip(source, row, column, strict=True))
    torch.testing.assert_close(cache.weights[1].cpu().double(), expected, rtol=1e-6, atol=1e-6)


def test_strides_of_a_gradient_without_elements_do_not_matter(device: torch.device) -> None:
    """That of the sum of no rows is a number that was expanded: torch calls it contiguous."""
    batch = Batch([3, 0, 4], 8, device)
    caches = [Cache(torch.zeros(ROWS, 8), device=device) for _ in range(2)]
    (first, _, last), row, source = batch.several()
    for cache, empty in zip(caches, (torch.zeros(0, 8), torch.zeros(()).expand(0, 8)), strict=True):
        update(cache, batch, ([first, empty.to(device), last], row, source), "sgd")
    assert torch.equal(caches[0].records, caches[1].records)
    sums = torch.zeros(ROWS, 16, device=device)
    grads = [first, torch.zeros(8, 5, device=device).t()[:0], last]
    torch.ops.rec_sdk.accumulate_rows(sums, grads, batch.unique, batch.offsets, row, source, None, batch.scale)
    assert sums.count_nonzero()


def test_a_source_for_one_gradient(device: torch.device) -> None:
    batch = Batch([60], 8, device)
    caches = [Cache(torch.zeros(ROWS, 8), device=device) for _ in range(2)]
    for cache, gradients in zip(caches, (batch.several(), batch.one()), strict=True):
        update(cache, batch, gradients, "sgd")
    assert torch.equal(caches[0].records, caches[1].records)


def test_opcheck(device: torch.device) -> None:
    batch = Batch([3, 0, 4], 8, device)
    cache = Cache(torch.zeros(ROWS, 8), device=device)
    rates = coefficients(0.1, device=device)
    lookups = (batch.unique, batch.tables, batch.offsets, batch.row, batch.source, None, None, rates)
    torch.library.opcheck(
        torch.ops.rec_sdk.update_rows, (cache.records, batch.grads, *lookups, "sgd", 8, torch.float32)
    )
    sums = torch.zeros(ROWS, 16, device=device)
    torch.library.opcheck(
        torch.ops.rec_sdk.accumulate_rows,
        (sums, batch.grads, batch.unique, batch.offsets, batch.row, batch.source, None, None),
    )
