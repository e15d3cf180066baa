"""Weights of one data type in the host's table and of another in the device cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rec_sdk_torch.optim.accumulate import AccumulateSGD
from rec_sdk_torch.tbe import Pooling, TableBatchedEmbedding, TableConfig, TableOptimizer

ROWS, DIM = 40, 12
HALVES = [torch.float16, torch.bfloat16]
DTYPES = [torch.float32, *HALVES]


def make(
    stored: torch.dtype,
    cached: torch.dtype | None,
    device: torch.device,
    cache: int = ROWS,
    cls: type = torch.optim.Adagrad,
    options: dict[str, Any] | None = None,
    **fields: Any,
) -> TableBatchedEmbedding:
    pooling = fields.pop("pooling", Pooling.NONE)
    config = TableConfig("t", ROWS, DIM, pooling=pooling, weight_dtype=stored, cache_dtype=cached, **fields)
    optimizer = TableOptimizer.create(cls, options or {"lr": 0.3})
    return TableBatchedEmbedding([config], optimizer=optimizer, cache=cache, device=device, seed=3)


def step(embedding: TableBatchedEmbedding, ids: list[int], scale: float = 1.0) -> torch.Tensor:
    output: torch.Tensor = embedding(torch.tensor(ids), torch.arange(len(ids) + 1))
    grad = torch.linspace(-1, 1, output.numel()).view_as(output) * scale
    output.backward(grad.to(output.device))
    return output.detach().cpu()


def weights(embedding: TableBatchedEmbedding, ids: range = range(ROWS)) -> torch.Tensor:
    return embedding.view("t").read(torch.tensor(ids)).parts["weight"]


def disjoint(count: int) -> list[list[int]]:
    """Batches of ten ids, of which each is in every fourth."""
    return [[10 * (number % 4) + k for k in range(10)] for number in range(count)]


@pytest.mark.parametrize("cached", DTYPES, ids=str)
@pytest.mark.parametrize("stored", DTYPES, ids=str)
def test_views_have_the_stored_type(stored: torch.dtype, cached: torch.dtype, device: torch.device) -> None:
    embedding = make(stored, cached, device, cache=10)
    for batch in disjoint(5):
        step(embedding, batch)
    view = embedding.view("t")
    assert weights(embedding).dtype == stored
    assert all(chunk.parts["weight"].dtype == stored for chunk in view.chunks())
    assert embedding.groups[0].swap.weights.dtype == cached
    values = torch.randn(ROWS, DIM).to(stored)
    view.write(torch.arange(ROWS), {"weight": values})
    expected = values.to(cached).to(stored)
    torch.testing.assert_close(weights(embedding, range(10)), expected[:10], rtol=0, atol=0)  # in the cache
    torch.testing.assert_close(weights(embedding, range(10, ROWS)), expected[10:], rtol=0, atol=0)
    output = embedding.eval()(torch.arange(ROWS), torch.arange(ROWS + 1))
    assert output.dtype == torch.float32
    torch.testing.assert_close(output.cpu(), expected.float(), rtol=0, atol=0)


@pytest.mark.parametrize("cached", HALVES, ids=str)
@pytest.mark.parametrize("rounding", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("cache", [10, ROWS])
def test_a_narrow_cache_is_a_narrow_table(
    cached: torch.dtype, rounding: bool, cache: int, device: torch.device
) -> None:
    """The host's table in float32 keeps every bit of rows that are 16-bit in the cache."""
    narrow = make(cached, None, device, cache=ROWS, stochastic_rounding=rounding)
    wide = make(torch.float32, cached, device, cache=cache, stochastic_rounding=rounding)
    for batch in disjoint(9):
        torch.testing.assert_close(step(narrow, batch), step(wide, batch), rtol=0, atol=0)
    torch.testing.assert_close(weights(narrow).float(), weights(wide), rtol=0, atol=0)


@pytest.mark.parametrize("stored", HALVES, ids=str)
def test_a_wide_cache_keeps_what_rows_in_it_have(stored: torch.dtype, device: torch.device) -> None:
    """Steps that are too small for the stored type add up while the row is in the cache."""
    start = torch.ones(ROWS, DIM)
    results = {}
    for name, embedding in {
        "narrow": make(stored, None, device, cls=torch.optim.SGD, options={"lr": 1e-5}),
        "wide": make(stored, torch.float32, device, cls=torch.optim.SGD, options={"lr": 1e-5}),
        "float": make(torch.float32, None, device, cls=torch.optim.SGD, options={"lr": 1e-5}),
    }.items():
        embedding.view("t").write(torch.arange(ROWS), {"weight": start.to(embedding.tables[0].weight_dtype)})
        results[name] = [step(embedding, [1, 2, 3], 8.0) for _ in range(200)][-1]
        results[name + " view"] = weights(embedding, range(1, 4))
    torch.testing.assert_close(results["wide"], results["float"], rtol=0, atol=0)
    torch.testing.assert_close(results["wide view"], results["float view"].to(stored), rtol=0, atol=0)
    assert not torch.equal(results["narrow view"], results["wide view"])


@pytest.mark.parametrize("stored", HALVES, ids=str)
@pytest.mark.parametrize("window", [1, 2])
def test_a_row_that_leaves_a_wide_cache_is_rounded_to_nearest(
    stored: torch.dtype, window: int, device: torch.device
) -> None:
    options: dict[str, Any] = {"lr": 0.3}
    cls: type = torch.optim.SGD
    if window > 1:
        cls, options = AccumulateSGD, {"lr": 0.3, "use_accumulate": True, "accumulate_step": window}
    embedding = make(stored, torch.float32, device, cache=10, cls=cls, options=options)
    whole = make(torch.float32, None, device, cls=cls, options=options)
    whole.view("t").write(torch.arange(ROWS), {"weight": weights(embedding).float()})
    batches = disjoint(4)
    for batch in batches:
        torch.testing.assert_close(step(embedding, batch), step(whole, batch), rtol=0, atol=0)
    expected = weights(whole).to(stored)
    torch.testing.assert_close(weights(embedding), expected, rtol=0, atol=0)
    # All have left the cache, or will for this batch, but for those of the last.
    torch.testing.assert_close(step(embedding, batches[0]), expected[:10].float(), rtol=0, atol=0)


def test_initial_rows_are_the_same_in_and_out_of_the_cache(device: torch.device) -> None:
    embedding = make(torch.bfloat16, torch.float32, device, cache=10)
    first = weights(embedding)
    looked_up = embedding(torch.arange(10), torch.arange(11)).detach().cpu()  # new rows, in the cache
    torch.testing.assert_close(looked_up, first[:10].float(), rtol=0, atol=0)


@pytest.mark.parametrize("hashed", [True, False])
def test_an_init_fn_fills_the_stored_type(hashed: bool, device: torch.device) -> None:
    seen = []

    def thirds(weight: torch.Tensor) -> None:
        seen.append(weight.dtype)
        weight.fill_(1 / 3)

    embedding = make(torch.float16, torch.float32, device, cache=10, init_fn=thirds, hashed=hashed)
    output = step(embedding, [1, 2])
    assert set(seen) == {torch.float16}
    torch.testing.assert_close(output, torch.full_like(output, 1 / 3).half().float(), rtol=0, atol=0)


def test_host_memory_is_that_of_the_stored_type(device: torch.device) -> None:
    bytes_of = {}
    for stored, cached in ((torch.float32, None), (torch.bfloat16, torch.float32), (torch.bfloat16, None)):
        config = TableConfig("t", 40_000, 64, weight_dtype=stored, cache_dtype=cached, init_min=0.0, init_max=0.0)
        embedding = TableBatchedEmbedding([config], optimizer=TableOptimizer.create(torch.optim.SGD, {}), cache=100)
        embedding.view("t").write(torch.arange(40_000), {"weight": torch.ones(40_000, 64, dtype=stored)})
        bytes_of[stored, cached] = embedding.memory_report()["host"]
    wide, mixed, narrow = bytes_of.values()
    assert mixed == narrow <= 0.6 * wide


def test_wrong_types() -> None:
    with pytest.raises(ValueError, match=r"table 't': cache_dtype torch\.float64, allowed are None and"):
        TableConfig("t", 4, 4, cache_dtype=torch.float64)
