"""Weights with different dtypes in the host store and in the cache, and 16-bit optimizer states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from embeddings import Optimizer, one_table, weights_of, windowed

from rec_sdk_torch.operators.record import RecordLayout, dtype_codes
from rec_sdk_torch.tbe import Pooling, TableBatchedEmbedding, TableConfig, TableOptimizer

ROWS, DIM = 40, 12
HALVES = [torch.float16, torch.bfloat16]
DTYPES = [torch.float32, *HALVES]
ADAGRAD = torch.optim.Adagrad, {"lr": 0.3}


def make(
    stored: torch.dtype,
    cached: torch.dtype | None,
    device: torch.device,
    cache: int = ROWS,
    optimizer: Optimizer = ADAGRAD,
    **fields: Any,
) -> TableBatchedEmbedding:
    types = {"weight_dtype": stored, "cache_dtype": cached, "pooling": Pooling.NONE, **fields}
    return one_table(device, rows=ROWS, dim=DIM, optimizer=optimizer, cache=cache, seed=3, **types)


def step(embedding: TableBatchedEmbedding, ids: list[int], scale: float = 1.0) -> torch.Tensor:
    output: torch.Tensor = embedding(torch.tensor(ids), torch.arange(len(ids) + 1))
    grad = torch.linspace(-1, 1, output.numel()).view_as(output) * scale
    output.backward(grad.to(output.device))
    return output.detach().cpu()


def disjoint(count: int) -> list[list[int]]:
    """Returns batches of ten ids, in which each id recurs every fourth batch."""
    return [[10 * (number % 4) + k for k in range(10)] for number in range(count)]


@pytest.mark.parametrize("cached", DTYPES, ids=str)
@pytest.mark.parametrize("stored", DTYPES, ids=str)
def test_views_have_the_stored_type(stored: torch.dtype, cached: torch.dtype, device: torch.device) -> None:
    embedding = make(stored, cached, device, cache=10)
    for batch in disjoint(5):
        step(embedding, batch)
    view = embedding.view("t")
    assert weights_of(embedding, range(ROWS)).dtype == stored
    assert all(chunk.parts["weight"].dtype == stored for chunk in view.chunks())
    assert embedding.groups[0].swap.weights.dtype == cached
    values = torch.randn(ROWS, DIM).to(stored)
    view.write(torch.arange(ROWS), {"weight": values})
    expected = values.to(cached).to(stored)
    torch.testing.assert_close(weights_of(embedding, range(10)), expected[:10], rtol=0, atol=0)  # in the cache
    torch.testing.assert_close(weights_of(embedding, range(10, ROWS)), expected[10:], rtol=0, atol=0)
    output = embedding.eval()(torch.arange(ROWS), torch.arange(ROWS + 1))
    assert output.dtype == torch.float32
    torch.testing.assert_close(output.cpu(), expected.float(), rtol=0, atol=0)


@pytest.mark.parametrize("stored", HALVES, ids=str)
def test_a_wide_cache_accumulates_small_updates(stored: torch.dtype, device: torch.device) -> None:
    """While a row is cached, update steps below the resolution of the host store's dtype accumulate."""
    start, small = torch.ones(ROWS, DIM), (torch.optim.SGD, {"lr": 2.5e-5})
    results = {}
    for name, embedding in {
        "narrow": make(stored, None, device, optimizer=small),
        "wide": make(stored, torch.float32, device, optimizer=small),
        "float": make(torch.float32, None, device, optimizer=small),
    }.items():
        embedding.view("t").write(torch.arange(ROWS), {"weight": start.to(embedding.tables[0].weight_dtype)})
        results[name] = [step(embedding, [1, 2, 3], 8.0) for _ in range(80)][-1]
        results[name + " view"] = weights_of(embedding, range(1, 4))
    torch.testing.assert_close(results["wide"], results["float"], rtol=0, atol=0)
    torch.testing.assert_close(results["wide view"], results["float view"].to(stored), rtol=0, atol=0)
    assert not torch.equal(results["narrow view"], results["wide view"])


@pytest.mark.parametrize("stored", HALVES, ids=str)
@pytest.mark.parametrize("window", [1, 2])
def test_a_victim_of_a_wide_cache_is_rounded_to_nearest(stored: torch.dtype, window: int, device: torch.device) -> None:
    optimizer = windowed("SGD", window, lr=0.3)
    embedding = make(stored, torch.float32, device, 10, optimizer)
    whole = make(torch.float32, None, device, optimizer=optimizer)
    whole.view("t").write(torch.arange(ROWS), {"weight": weights_of(embedding, range(ROWS)).float()})
    batches = disjoint(4)
    for batch in batches:
        torch.testing.assert_close(step(embedding, batch), step(whole, batch), rtol=0, atol=0)
    expected = weights_of(whole, range(ROWS)).to(stored)
    torch.testing.assert_close(weights_of(embedding, range(ROWS)), expected, rtol=0, atol=0)
    # The cache has spilled all rows but the last batch's, and spills those for this batch.
    torch.testing.assert_close(step(embedding, batches[0]), expected[:10].float(), rtol=0, atol=0)


def test_initial_rows_are_the_same_in_and_out_of_the_cache(device: torch.device) -> None:
    embedding = make(torch.bfloat16, torch.float32, device, cache=10)
    first = weights_of(embedding, range(ROWS))
    looked_up = embedding(torch.arange(10), torch.arange(11)).detach().cpu()  # the lookup creates new rows in the cache
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


def test_host_memory_follows_the_stored_type(device: torch.device) -> None:
    bytes_of = {}
    for stored, cached in ((torch.float32, None), (torch.bfloat16, torch.float32), (torch.bfloat16, None)):
        types = {"weight_dtype": stored, "cache_dtype": cached, "init_min": 0.0, "init_max": 0.0}
        embedding = one_table(None, rows=40_000, dim=64, **types)
        embedding.view("t").write(torch.arange(40_000), {"weight": torch.ones(40_000, 64, dtype=stored)})
        bytes_of[stored, cached] = embedding.memory_report()["host"]
    wide, mixed, narrow = bytes_of.values()
    assert mixed == narrow <= 0.6 * wide


def test_wrong_types() -> None:
    with pytest.raises(ValueError, match=r"table 't': cache_dtype torch\.float64, allowed are None and"):
        TableConfig("t", 4, 4, cache_dtype=torch.float64)


# ---- optimizer states


def parts(embedding: TableBatchedEmbedding) -> dict[str, torch.Tensor]:
    return embedding.view("t").read(torch.arange(ROWS)).parts


@pytest.mark.parametrize(("first", "second"), [(HALVES[0], HALVES[1]), (HALVES[1], torch.float32)], ids=str)
@pytest.mark.parametrize("weight", DTYPES, ids=str)
def test_adam_is_computed_in_float32_and_rounded(
    weight: torch.dtype, first: torch.dtype, second: torch.dtype, device: torch.device
) -> None:
    options = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3, "state_dtypes": {"exp_avg": first, "exp_avg_sq": second}}
    embedding = make(weight, None, device, optimizer=(torch.optim.Adam, options))
    assert embedding.view("t").dtypes() == {"weight": weight, "exp_avg": first, "exp_avg_sq": second}
    expected = {name: part.clone() for name, part in parts(embedding).items()}
    for t, rows in enumerate(disjoint(6), 1):
        grad = torch.linspace(-1, 1, 10 * DIM).view(10, DIM) * t
        step(embedding, rows, t)
        m = torch.lerp(expected["exp_avg"][rows].float(), grad, 0.2)
        v = torch.lerp(expected["exp_avg_sq"][rows].float(), grad**2, 0.1)
        size, root = 0.1 / (1 - 0.8**t), (1 - 0.9**t) ** 0.5
        w = expected["weight"][rows].float() - size * m / (v.sqrt() / root + 1e-3)
        for name, value in {"weight": w, "exp_avg": m, "exp_avg_sq": v}.items():
            found = parts(embedding)[name]
            assert found.dtype == expected[name].dtype
            ulp = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}[found.dtype]
            torch.testing.assert_close(found[rows].float(), value, rtol=ulp, atol=1e-5)
        expected = {name: part.clone() for name, part in parts(embedding).items()}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_state_is_rounded_to_nearest_even(dtype: torch.dtype, device: torch.device) -> None:
    narrow = torch.optim.Adagrad, {"lr": 0.3, "state_dtypes": {"sum": dtype}}
    embedding, wide = make(torch.float32, None, device, optimizer=narrow), make(torch.float32, None, device)
    for number, rows in enumerate(disjoint(8)):
        for each in (embedding, wide):
            step(each, rows, 1 + number)
        here = parts(wide)
        torch.testing.assert_close(parts(embedding)["sum"], here["sum"].to(dtype), rtol=0, atol=0)
        torch.testing.assert_close(parts(embedding)["weight"], here["weight"], rtol=0, atol=0)
        wide.view("t").write(torch.arange(ROWS), {"sum": here["sum"].to(dtype)})


def test_layout() -> None:
    layout = RecordLayout(3, torch.float16, (3, 1, 3), (torch.bfloat16, torch.float16, torch.float32))
    assert layout.bytes == 32  # weight 0..6, states 8..14, 16..18, 20..32
    records = torch.zeros(2, layout.bytes, dtype=torch.uint8)
    for index, begin in enumerate((8, 16, 20)):
        assert layout.state(records, index).data_ptr() - records.data_ptr() == begin
        assert layout.state(records, index).dtype == layout.state_dtypes[index]
    assert dtype_codes(layout.state_dtypes) == [2, 1, 0]
    assert RecordLayout(3, torch.float16, (3, 1)).bytes == 32


def test_all_float32_is_none() -> None:
    named = TableOptimizer.create(torch.optim.Adam, {"state_dtypes": {"exp_avg": torch.float32}})
    assert named.state_dtypes == () == TableOptimizer.create(torch.optim.Adam, {}).state_dtypes
