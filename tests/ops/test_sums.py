"""Sums of a row's gradients in update_rows and accumulate_rows, compared with float64 and between layouts.

Gradients may be one tensor or one per feature, and rows with many lookups may be listed as hot: results stay bit-
identical.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from op_batches import (
    Arguments,
    Cache,
    accumulate,
    coefficients,
    int32,
    segments,
    segments_of,
    states_of,
    update_arguments,
)

from rec_sdk_torch.operators.calls import ops
from rec_sdk_torch.operators.segments import hot_segments

ROWS = 40
RATES = (0.1, 1e-8, 0.9, 0.1, 0.75, 0.25, 1.25)


def sums(totals: torch.Tensor, slots: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    return totals.double().index_add(0, slots.long(), grad.double())


# ---- accumulate_rows against float64


@pytest.mark.parametrize("dim", [1, 3, 8, 20, 32, 64, 128, 130])
def test_accumulated_rows_equal_float64(dim: int, device: torch.device) -> None:
    torch.manual_seed(dim)
    pending, totals = torch.zeros(30, 2 * dim, device=device), torch.zeros(30, dim)
    for _ in range(20):
        slots, grad, scale = torch.randint(0, 25, (200,)), torch.randn(200, dim), torch.rand(200)
        accumulate(pending, [grad.to(device)], **segments_of(slots.to(device), scale.to(device)))
        totals = sums(totals, slots, grad * scale[:, None])
    torch.testing.assert_close(pending[:, :dim].double().cpu(), totals, rtol=1e-6, atol=1e-5)
    assert (pending[25:] == 0).all()
    before = pending.clone()
    accumulate(pending, [grad[:0].to(device)], **segments_of(slots[:0].to(device)))
    assert torch.equal(pending, before), "of no lookups"


@pytest.mark.parametrize("dim", [1, 8, 20, 64])
def test_a_compensated_sum_is_the_nearest_float(dim: int, device: torch.device) -> None:
    """Each call has one lookup, so that only the compensated addition rounds."""
    pending, totals = torch.zeros(1, 2 * dim, device=device), torch.zeros(1, dim)
    slots = torch.zeros(1, dtype=torch.int64)
    segment = segments_of(slots.to(device))
    for step in range(200):
        grad = torch.randn(1, dim) * 10.0 ** (step % 5)
        accumulate(pending, [grad.to(device)], **segment)
        totals = sums(totals, slots, grad)
    assert torch.equal(pending[:, :dim].cpu(), totals.float())
    both = pending.cpu().double().view(2, dim).sum(0, keepdim=True)
    torch.testing.assert_close(both, totals, rtol=1e-12, atol=1e-9)


# ---- very many gradients of one row

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
DIM = 3
HITS = [10_000, 100_000, 1_000_000, pytest.param(10_000_000, marks=pytest.mark.full)]
HIT_KINDS = pytest.mark.parametrize("kind", ["constant", "one sign", "mixed sign"])


def gradients(kind: str, hits: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hits)
    if kind == "constant":
        return torch.full((hits, DIM), 0.1)
    draw = torch.rand if kind == "one sign" else torch.randn
    return draw(hits, DIM, generator=generator)


def one_segment(grad: torch.Tensor) -> Arguments:
    """Returns arguments in which every row of `grad` belongs to row 1."""
    hits = torch.arange(len(grad) + 1, dtype=torch.int32, device=grad.device)
    return {"unique_slots": hits[1:2], "segment_offsets": hits[[0, -1]], "grad_row": hits[:-1]}


@HIT_KINDS
@pytest.mark.parametrize("hits", HITS)
def test_many_hits_in_one_update(kind: str, hits: int, device: torch.device) -> None:
    """SGD with learning rate -1 adds the summed gradients to a row of zeros, so the row is the sum."""
    grad = gradients(kind, hits)
    cache = Cache(torch.zeros(2, DIM), device=device)
    row, segment = coefficients(-1.0, device=device), one_segment(grad.to(device))
    ops.update_rows(**update_arguments(cache, [grad.to(device)], "sgd", row, **segment))
    torch.testing.assert_close(cache.weights[1].double().cpu(), grad.double().sum(0), **TOLERANCE)


@pytest.mark.parametrize("windows", [1, 7, 1000])
@HIT_KINDS
@pytest.mark.parametrize("hits", HITS)
def test_many_hits_in_a_window(kind: str, hits: int, windows: int, device: torch.device) -> None:
    grad = gradients(kind, hits)
    pending = torch.zeros(2, 2 * DIM, device=device)
    for part in grad.to(device).chunk(windows):
        accumulate(pending, [part], **one_segment(part))
    torch.testing.assert_close(pending[1, :DIM].double().cpu(), grad.double().sum(0), **TOLERANCE)


def test_a_window_of_many_single_hits(device: torch.device) -> None:
    grad, calls = torch.full((1, DIM), 0.1, device=device), 4000
    pending, segment = torch.zeros(2, 2 * DIM, device=device), one_segment(grad)
    for _ in range(calls):
        accumulate(pending, [grad], **segment)
    expected = grad[0].double().cpu() * calls
    torch.testing.assert_close(pending[1, :DIM].double().cpu(), expected, rtol=1e-7, atol=0)


@pytest.mark.parametrize("hits", [100_000, 1_000_000])
def test_the_tolerance_detects_a_naive_sum(hits: int) -> None:
    grad = gradients("constant", hits)
    # cumsum adds in sequence, unlike sum
    naive = torch.from_numpy(np.cumsum(grad.numpy(), axis=0, dtype=np.float32)[-1])
    with pytest.raises(AssertionError):
        torch.testing.assert_close(naive.double(), grad.double().sum(0), **TOLERANCE)


# ---- hot rows

HOT_LENGTHS = [
    pytest.param([1, 129, 0, 2, 128, 5000, 256, 127, 3, 257, 640, 1], id="between others"),
    pytest.param([2100], id="one row"),
    pytest.param([130] * 40, id="side by side"),
    pytest.param([1] * 900 + [385] * 3 + [1] * 900 + [7000], id="few of many"),
]


def test_the_list_of_hot_segments() -> None:
    offsets = np.array([0, 3, 200, 200, 328, 457, 1000], dtype=np.int32)
    found = hot_segments(offsets)
    assert found.tolist() == [[1, 3, 1, 0], [4, 328, 1, 1], [5, 457, 4, 2]]
    assert found.dtype == np.int32
    assert hot_segments(offsets[:2]).shape == (0, 4)


@pytest.mark.parametrize("lengths", HOT_LENGTHS)
@pytest.mark.parametrize("dim", [4, 20])
def test_a_list_of_hot_segments_changes_no_bit(lengths: list[int], dim: int, device: torch.device) -> None:
    rows, offsets = len(lengths), np.cumsum([0, *lengths]).astype(np.int32)
    lookups: Arguments = {
        "segment_offsets": torch.from_numpy(offsets).to(device),
        "grad_row": int32(torch.randint(0, 300, (int(offsets[-1]),)), device),
        "unique_slots": int32(torch.randperm(rows), device),
    }
    hot = torch.from_numpy(hot_segments(offsets)).to(device)
    grads, weights = [torch.randn(300, dim).to(device)], torch.randn(rows, dim)
    for optimizer in ("sgd", "rowwise_adagrad", "adam"):
        states = [torch.rand(rows, width) for width in states_of(optimizer, dim)]
        caches = [Cache(weights, states, device=device) for _ in range(2)]
        for cache, listed in zip(caches, (None, hot), strict=True):
            row = coefficients(*RATES, device=device)
            ops.update_rows(**update_arguments(cache, grads, optimizer, row, **lookups, hot_segments=listed))
        assert torch.equal(caches[0].records, caches[1].records), optimizer
    pending = [torch.ones(rows, 2 * dim, device=device) for _ in range(2)]
    for sums_of_rows, listed in zip(pending, (None, hot), strict=True):
        accumulate(sums_of_rows, grads, **lookups, hot_segments=listed)
    assert torch.equal(*pending)


# ---- one gradient for each feature

LENGTHS = {
    "unequal": [70, 1, 130],
    "empty ones": [0, 50, 0, 0, 90, 0],
    "none has rows": [0, 0],
    "hot rows": [3000, 1, 4000],
    "as many as features": [3] * 150,
    "one": [60],
}


class Features:
    """Lookups of several features, each with its own gradient [n_f, dim].

    The segments list them in an order that mixes the features; `joined` is the concatenation of the gradients.
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
        shared = {"unique_slots": unique.to(device), "segment_offsets": offsets.to(device)}
        shared["scale"] = torch.rand(count, generator=generator).to(device) if scaled else None
        self.several = shared | {"grad_row": int32(lookups - starts[source], device)}
        self.several["grad_source"] = int32(source, device)
        self.one = shared | {"grad_row": lookups.to(device)}

    def update(self, grads: list[torch.Tensor], given: Arguments, optimizer: str, weights: torch.Tensor) -> Cache:
        """Returns the cache after an update."""
        device = given["unique_slots"].device
        states = [torch.ones(ROWS, n) for n in states_of(optimizer, weights.shape[1])]
        cache = Cache(weights, states, device=device)
        row = coefficients(*RATES, device=device)
        ops.update_rows(**update_arguments(cache, grads, optimizer, row, **given))
        return cache


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dim", [1, 8, 20, 64])
@pytest.mark.parametrize("name", LENGTHS)
def test_several_gradients_have_the_bits_of_one(name: str, dim: int, scaled: bool, device: torch.device) -> None:
    """Several gradient tensors give results bit-identical to one tensor, and the sum is correct."""
    batch, weights = Features(LENGTHS[name], dim, device, scaled), torch.randn(ROWS, dim)
    ways = (batch.grads, batch.several), ([batch.joined.to(device)], batch.one)
    for optimizer in ("sgd", "rowwise_adagrad", "adam"):
        found, expected = (batch.update(*way, optimizer, weights) for way in ways)
        assert torch.equal(found.records, expected.records), optimizer
        if optimizer == "sgd" and not scaled:
            right = weights.double() - 0.1 * sums(torch.zeros(ROWS, dim), batch.slots, batch.joined)
            torch.testing.assert_close(found.weights.cpu().double(), right, rtol=1e-5, atol=1e-4)
    pending = []
    for grads, given in ways:
        pending.append(torch.zeros(ROWS, 2 * dim, device=device))
        for _ in range(2):
            accumulate(pending[-1], grads, **given)
    assert torch.equal(*pending)


def test_strides_columns_and_a_gradient_given_twice(device: torch.device) -> None:
    wide = torch.randn(6, 50)
    grads = [wide[:, 3:20], torch.randn(4, 9), wide[:, 3:20]]
    source, row, column = [2, 0, 1, 2, 0], [5, 1, 3, 0, 4], [9, 0, 1, 4, 2]
    cache = Cache(torch.zeros(2, 8), device=device)
    on_device = [wide.to(device)[:, 3:20], grads[1].to(device), wide.to(device)[:, 3:20]]
    names = ("unique_slots", "segment_offsets", "grad_row", "grad_source", "grad_column")
    given = {name: int32(x, device) for name, x in zip(names, ([1], [0, 5], row, source, column), strict=True)}
    ops.update_rows(**update_arguments(cache, on_device, "sgd", coefficients(-1.0, device=device), **given))
    expected = sum(grads[s][r, c : c + 8].double() for s, r, c in zip(source, row, column, strict=True))
    torch.testing.assert_close(cache.weights[1].cpu().double(), expected, rtol=1e-6, atol=1e-6)


def test_strides_of_a_gradient_without_elements_do_not_matter(device: torch.device) -> None:
    """The gradient of a sum over no rows is an expanded scalar, which torch considers contiguous."""
    batch = Features([3, 0, 4], 8, device)
    first, _, last = batch.grads
    found = []
    for empty in (torch.zeros(0, 8), torch.zeros(()).expand(0, 8)):
        grads = [first, empty.to(device), last]
        found.append(batch.update(grads, batch.several, "sgd", torch.zeros(ROWS, 8)).records)
    assert torch.equal(*found)
    pending = torch.zeros(ROWS, 16, device=device)
    accumulate(pending, [first, torch.zeros(8, 5, device=device).t()[:0], last], **batch.several)
    assert pending.count_nonzero()
