"""update_rows: every optimizer matches torch's, 16-bit weights round once, padding bytes are kept, and tables
may differ.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_batches import Cache, coefficients, int32, segments_of, states_of, update, update_arguments
from optimizer_table import ROWS as OPTIMIZER_ROWS
from optimizer_table import Row

from rec_sdk_torch.operators.calls import ops
from rec_sdk_torch.operators.record import RecordLayout

DIMS = [1, 3, 8, 20, 32, 64, 128, 130]
ROWS, LOOKUPS, STEPS = 40, 150, 20


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Selects every optimizer with every width in the full suite; otherwise with two of eight widths, chosen by
    the day.
    """
    if "row" in metafunc.fixturenames:
        full, day = (metafunc.config.getoption(name) for name in ("--full", "--day"))
        widths = DIMS if "dim" in metafunc.fixturenames else [None]
        pairs = [
            (row, dim)
            for i, row in enumerate(OPTIMIZER_ROWS)
            for j, dim in enumerate(widths)
            if full or dim is None or (i + j + day) % 4 == 0
        ]
        names = ("row", "dim")[: 1 if widths == [None] else 2]
        metafunc.parametrize(names, [pair[: len(names)] for pair in pairs], ids=[f"{r.name}-{d}" for r, d in pairs])


def test_equals_torch_optim(row: Row, dim: int, device: torch.device) -> None:
    """The reference makes the same updates on `torch.nn.Embedding(sparse=True)`."""
    optimizer, tolerance = row.spec.kernel, row.tolerance
    torch.manual_seed(dim)
    weights = torch.randn(ROWS, dim) * 0.1  # the size of embeddings: the reference rounds too
    starts = zip(states_of(optimizer, dim), row.spec.state_init(row.options), strict=True)
    cache = Cache(weights, [torch.full((ROWS, n), start) for n, start in starts], device=device)
    embedding = torch.nn.Embedding.from_pretrained(weights.clone(), freeze=False, sparse=True)
    reference = row.on_rows(embedding.weight)
    for t in range(1, STEPS + 1):
        slots = torch.randint(0, ROWS - 5, (LOOKUPS,)) // (1 + t % 3)
        grad = torch.randn(LOOKUPS, dim) * 0.1
        update(cache, grad.to(device), slots.to(device), optimizer, row.coefficients(t).to(device))
        reference.zero_grad()
        embedding(slots.long()).backward(grad)
        reference.step()
    torch.testing.assert_close(cache.weights.cpu(), embedding.weight.detach(), rtol=tolerance, atol=tolerance)
    assert torch.equal(cache.weights[ROWS - 5 :].cpu(), weights[ROWS - 5 :])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_weights_round_once(row: Row, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    optimizer = row.spec.kernel
    torch.manual_seed(dim)
    weights = torch.randn(ROWS, dim).to(dtype).float()
    states = [torch.rand(ROWS, n) for n in states_of(optimizer, dim)]
    small, exact = Cache(weights, states, dtype, device), Cache(weights, states, device=device)
    slots, grad = torch.randint(0, ROWS, (LOOKUPS,)).to(device), torch.randn(LOOKUPS, dim, device=device)
    for cache in (small, exact):
        update(cache, grad, slots, optimizer, row.coefficients(3).to(device))
    assert torch.equal(small.weights, exact.weights.to(dtype))
    for found, expected in zip(small.states, exact.states, strict=True):
        assert torch.equal(found, expected)


def has_padding(optimizer: str, dim: int, dtype: torch.dtype) -> bool:
    states = states_of(optimizer, dim)
    return RecordLayout(dim, dtype, tuple(states)).bytes > dim * dtype.itemsize + 4 * sum(states)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_padding_of_records_is_left_alone(row: Row, dtype: torch.dtype, device: torch.device) -> None:
    optimizer = row.spec.kernel
    dim = next((dim for dim in (5, 6) if has_padding(optimizer, dim, dtype)), None)
    if dim is None:
        pytest.skip("a record of four equal parts of float32 has no padding")
    cache = Cache(torch.zeros(ROWS, dim), [torch.zeros(ROWS, n) for n in states_of(optimizer, dim)], dtype, device)
    cache.records.fill_(0xA5)
    for part in (cache.weights, *cache.states):
        part.zero_()
    padding = cache.records == 0xA5
    slots, grad = torch.arange(ROWS, device=device), torch.randn(ROWS, dim, device=device)
    update(cache, grad, slots, optimizer, row.coefficients(1).to(device))
    assert padding.any()
    assert (cache.records[padding] == 0xA5).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_to_nearest_even(dtype: torch.dtype, device: torch.device) -> None:
    bits = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).float()
    values = torch.cat(
        [
            bits,
            torch.nextafter(bits, torch.tensor(math.inf)),
            ((bits[:-1].double() + bits[1:].double()) / 2).float(),  # values halfway between two 16-bit numbers
            torch.tensor([65519.0, 65520.0, 3.4e38, -3.4e38]),
            torch.tensor([1e-45, 2.0**-25, 2.0**-25 * 1.0001, 2.0**-24 * 1.5]),
        ]
    )
    values = torch.nn.functional.pad(values, (0, -len(values) % 64)).reshape(-1, 64).to(device)
    cache = Cache(torch.zeros_like(values), dtype=dtype, device=device)
    update(cache, values, torch.arange(len(values), device=device), "sgd", coefficients(-1.0, device=device))
    # 0 + v: a lone -0 becomes +0 on both sides.
    torch.testing.assert_close(cache.weights, (values + 0.0).to(dtype), rtol=0, atol=0, equal_nan=True)


def test_tables_columns_scale_and_clipping(device: torch.device) -> None:
    torch.manual_seed(0)
    dim, lookups = 20, 300
    weights = torch.randn(30, dim)
    cache = Cache(weights, device=device)
    segments = segments_of(torch.randint(0, 30, (lookups,)), torch.rand(lookups))
    unique, offsets, scale = segments["unique_slots"], segments["segment_offsets"], segments["scale"]
    wide = torch.randn(16, 100)
    grad = wide[:, 7:97]
    grad_row, grad_column = torch.randint(0, 16, (lookups,)), torch.randint(0, 71, (lookups,))
    limits, rates = [0.5, math.inf, math.inf, 2.0], [0.1, 9.0, 0.3, 0.7]
    rows = torch.cat([coefficients(lr, max_gradient=m) for lr, m in zip(rates, limits, strict=True)])
    tables = int32([0, 10, 10, 21, len(unique)])
    given = segments | {"table_offsets": tables, "grad_row": int32(grad_row), "grad_column": int32(grad_column)}
    given = {name: value.to(device) for name, value in given.items()}
    ops.update_rows(**update_arguments(cache, [wide.to(device)[:, 7:97]], "sgd", rows.to(device), **given))
    expected = weights.double()
    slices = torch.stack([grad[r, c : c + dim] for r, c in zip(grad_row, grad_column, strict=True)])
    slices *= scale[:, None]
    for u, slot in enumerate(unique.long()):
        g = slices[int(offsets[u]) : int(offsets[u + 1])].double().sum(0)
        table = sum(u >= int(end) for end in tables[1:-1])  # table 1 is empty
        expected[slot] -= rates[table] * g.clamp(-limits[table], limits[table])
    torch.testing.assert_close(cache.weights.cpu().double(), expected, rtol=1e-5, atol=1e-5)


def test_nan_gradients_give_nan_rows(device: torch.device) -> None:
    cache = Cache(torch.zeros(2, 8), device=device)
    grad = torch.full((1, 8), float("nan"), device=device)
    row = coefficients(1.0, max_gradient=1.0, device=device)
    update(cache, grad, torch.tensor([1], device=device), "sgd", row)
    assert cache.weights[1].isnan().all()
    assert not cache.weights[0].isnan().any()


def test_an_empty_segment_updates_with_a_zero_gradient(device: torch.device) -> None:
    cache = Cache(torch.ones(4, 8), [torch.ones(4, 8), torch.ones(4, 8)], device=device)
    given = {"unique_slots": [2], "segment_offsets": [0, 0], "grad_row": []}
    row = coefficients(1.0, 0.0, 0.5, 0.5, 0.5, 0.5, 1.0, device=device)
    segment = {name: int32(value, device) for name, value in given.items()}
    ops.update_rows(**update_arguments(cache, [torch.zeros(1, 8, device=device)], "adam", row, **segment))
    assert (cache.states[0][2] == 0.5).all()
    assert (cache.weights[2] != 1).all()
    assert (cache.weights[3] == 1).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 140), st.lists(st.integers(0, 12), max_size=200), st.booleans())
def test_any_batch(dim: int, slots: list[int], scaled: bool) -> None:
    index = torch.tensor(slots, dtype=torch.int64)
    weights, grad = torch.randn(13, dim), torch.randn(len(slots), dim)
    scale = torch.rand(len(slots)) if scaled else None
    cache = Cache(weights, [torch.zeros(13, dim)])
    update(cache, grad, index, "adagrad", coefficients(0.1, 1e-10), scale)
    scaled_grad = grad if scale is None else grad * scale[:, None]
    total = torch.zeros(13, dim).index_add_(0, index, scaled_grad)
    torch.testing.assert_close(cache.states[0], total * total, rtol=1e-4, atol=1e-5)
    expected = weights - 0.1 * total / (total.abs() + 1e-10)
    large = total.abs() > 1e-3  # elsewhere the sign of a cancelling sum decides
    torch.testing.assert_close(cache.weights[large], expected[large], rtol=1e-4, atol=1e-4)
