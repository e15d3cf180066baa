"""Optimizer states that are stored in 16 bits: `state_dtypes` of a TableOptimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rec_sdk_torch import ops
from rec_sdk_torch.operators.record import RecordLayout, dtype_codes
from rec_sdk_torch.optim.accumulate import AccumulateAdagrad
from rec_sdk_torch.tbe import Pooling, TableBatchedEmbedding, TableConfig, TableOptimizer

ROWS, DIM = 40, 11
HALVES = [torch.float16, torch.bfloat16]
ADAM = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3}


def make(
    cls: type,
    options: dict[str, Any],
    device: torch.device,
    cache: int = ROWS,
    weight: torch.dtype = torch.float32,
) -> TableBatchedEmbedding:
    config = TableConfig("t", ROWS, DIM, pooling=Pooling.NONE, weight_dtype=weight)
    optimizer = TableOptimizer.create(cls, options)
    return TableBatchedEmbedding([config], optimizer=optimizer, cache=cache, device=device, seed=3)


def step(embedding: TableBatchedEmbedding, number: int) -> torch.Tensor:
    ids = torch.arange(10) + 10 * (number % 4)
    output: torch.Tensor = embedding(ids, torch.arange(11))
    grad = torch.linspace(-1, 1, output.numel()).view_as(output) * (1 + number)
    output.backward(grad.to(output.device))
    return grad


def parts(embedding: TableBatchedEmbedding) -> dict[str, torch.Tensor]:
    return embedding.view("t").read(torch.arange(ROWS)).parts


@pytest.mark.parametrize("second", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("first", HALVES, ids=str)
@pytest.mark.parametrize("weight", [torch.float32, *HALVES], ids=str)
def test_adam_is_computed_in_float32_and_rounded(
    weight: torch.dtype, first: torch.dtype, second: torch.dtype, device: torch.device
) -> None:
    embedding = make(
        torch.optim.Adam, ADAM | {"state_dtypes": {"exp_avg": first, "exp_avg_sq": second}}, device, weight=weight
    )
    assert embedding.view("t").dtypes() == {"weight": weight, "exp_avg": first, "exp_avg_sq": second}
    expected = {name: part.clone() for name, part in parts(embedding).items()}
    for number in range(6):
        grad, rows, t = step(embedding, number), torch.arange(10) + 10 * (number % 4), number + 1
        m = torch.lerp(expected["exp_avg"][rows].float(), grad.cpu(), 0.2)
        v = torch.lerp(expected["exp_avg_sq"][rows].float(), grad.cpu() ** 2, 0.1)
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
    embedding = make(torch.optim.Adagrad, {"lr": 0.1, "state_dtypes": {"sum": dtype}}, device)
    wide = make(torch.optim.Adagrad, {"lr": 0.1}, device)
    for number in range(8):
        step(embedding, number)
        step(wide, number)
        here = parts(wide)
        torch.testing.assert_close(parts(embedding)["sum"], here["sum"].to(dtype), rtol=0, atol=0)
        torch.testing.assert_close(parts(embedding)["weight"], here["weight"], rtol=0, atol=0)
        wide.view("t").write(torch.arange(ROWS), {"sum": here["sum"].to(dtype)})


@pytest.mark.parametrize("window", [1, 2])
def test_bits_are_those_of_every_cache_size(window: int, device: torch.device) -> None:
    cls, more = torch.optim.Adagrad, {}
    if window > 1:
        cls, more = AccumulateAdagrad, {"use_accumulate": True, "accumulate_step": window}
    results = []
    for cache in (10 * window, ROWS):
        options = {"lr": 0.3, "state_dtypes": {"sum": torch.float16}, **more}
        embedding = make(cls, options, device, cache)
        for number in range(8):
            step(embedding, number)
        results.append(parts(embedding))
    assert results[0]["sum"].dtype == torch.float16
    for name in results[0]:
        torch.testing.assert_close(results[0][name], results[1][name], rtol=0, atol=0)


def test_layout() -> None:
    layout = RecordLayout(3, torch.float16, (3, 1, 3), (torch.bfloat16, torch.float16, torch.float32))
    assert layout.bytes == 32  # weight 0..6, states 8..14, 16..18, 20..32
    records = torch.zeros(2, layout.bytes, dtype=torch.uint8)
    for index, begin in enumerate((8, 16, 20)):
        assert layout.state(records, index).data_ptr() - records.data_ptr() == begin
        assert layout.state(records, index).dtype == layout.state_dtypes[index]
    assert dtype_codes(layout.state_dtypes) == [2, 1, 0]
    assert RecordLayout(3, torch.float16, (3, 1)).bytes == 32


WRONG = {
    "name": ({"momentum": torch.float16}, ValueError, r"names 'momentum', the states are \['sum'"),
    "dtype": ({"sum": torch.float64}, ValueError, r"\['sum'\] is torch.float64, allowed are"),
    "counter": ({"row_counter": torch.bfloat16}, ValueError, "counters are always torch.float32"),
    "kind": ([torch.float16], TypeError, "expected a mapping"),
}


@pytest.mark.parametrize("which", WRONG)
def test_wrong_state_dtypes(which: str) -> None:
    given, error, message = WRONG[which]
    cls = type("RowWiseAdagrad", (), {"__module__": "torchrec.optim.rowwise_adagrad"})
    options = {"weight_decay_mode": "cowclip", "state_dtypes": given}
    with pytest.raises(error, match=message):
        TableOptimizer.create(cls, options)


def test_all_float32_is_none() -> None:
    named = TableOptimizer.create(torch.optim.Adam, {"state_dtypes": {"exp_avg": torch.float32}})
    assert named.state_dtypes == () == TableOptimizer.create(torch.optim.Adam, {}).state_dtypes


@pytest.mark.parametrize("codes", [[1], [1, 3]])
def test_wrong_codes(codes: list[int]) -> None:
    none = torch.zeros(0, dtype=torch.int32)
    lookups = (none, torch.zeros(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), none, None, None, None)
    with pytest.raises(RuntimeError, match="state_dtypes must "):
        ops.ops.update_rows(
            torch.zeros(1, 64, dtype=torch.uint8),
            [torch.zeros(1, 4)],
            *lookups,
            torch.zeros(1, 16),
            "adam",
            4,
            torch.float32,
            None,
            None,
            codes,
        )
