"""Swaps and lookups joined into one operator call, as on an NPU: when they are joined, and that results are
unchanged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from embeddings import ADAGRAD, one_table

from rec_sdk_torch import ops as ops_module
from rec_sdk_torch.tbe import Pooling
from rec_sdk_torch.tbe.cache import device_cache, swap

ROWS = 8
OF_LOOKUP = {Pooling.NONE: "swap_lookup_sequence", Pooling.SUM: "swap_lookup_pooled"}


@pytest.fixture
def calls(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the operator calls that move rows into caches, by name."""
    made = device_cache.backend_for
    if made(device).reaches_host:
        pytest.skip("rows come straight from the host's memory")
    monkeypatch.setattr(device_cache, "backend_for", lambda of: replace(made(of), joins_lookups=True))
    counted: Counter[str] = Counter()

    def call_once(operator: Any, arguments: Sequence[object], called: list[Any]) -> None:
        counted[operator._opname] += not called
        ops_module.call_once(operator, arguments, called)

    class Counting:
        def __getattr__(self, name: str) -> Any:
            counted[name] += name == "scatter_rows"  # accesses of the operator are counted, one per call
            return getattr(ops_module.ops, name)

    monkeypatch.setattr(swap, "call_once", call_once)
    monkeypatch.setattr(swap, "ops", Counting())
    return counted


def pair(pooling: Pooling, device: torch.device, batches: float = 2.5, trained: Sequence[int] = ()) -> tuple[Any, Any]:
    """Returns two equally trained tables: the first caches `batches` batches, the second all rows."""
    made = [one_table(device, rows=200, pooling=pooling, optimizer=ADAGRAD, cache=int(ROWS * n)) for n in (batches, 25)]
    for each in made:
        for number in trained:
            train(each, pooling, number)
    return made[0], made[1]


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a batch of which half the rows are also in the previous batch; each id occurs twice."""
    ids = torch.arange(ROWS) + (ROWS // 2) * (number % 7)
    return torch.cat([ids, ids.flip(0)]), torch.arange(0, 2 * ROWS + 1, 2)


def offsets(pooling: Pooling, number: int) -> torch.Tensor:
    return batch(number)[1] if pooling is not Pooling.NONE else torch.tensor([0, 2 * ROWS])


def run(tables: Any, ids: torch.Tensor, bags: torch.Tensor) -> torch.Tensor:
    out = tables(ids, bags)
    out.backward(torch.linspace(0.5, 1.5, out.numel(), device=out.device).view_as(out))
    result: torch.Tensor = out.detach().cpu()
    return result


def train(tables: Any, pooling: Pooling, number: int) -> torch.Tensor:
    return run(tables, batch(number)[0], offsets(pooling, number))


@pytest.mark.parametrize("pooling", OF_LOOKUP)
def test_every_step_that_swaps_makes_one_call(pooling: Pooling, device: torch.device, calls: Counter[str]) -> None:
    tables, resident = pair(pooling, device)
    swaps = 0
    for number in range(20):
        before = tables.cache_stats()["rows_in"]
        calls.clear()
        found = train(tables, pooling, number)
        swapped = tables.cache_stats()["rows_in"] > before
        assert +calls == ({OF_LOOKUP[pooling]: 1} if swapped else {})
        swaps += swapped
        assert torch.equal(found, train(resident, pooling, number))
    assert swaps > 10
    assert tables.cache_stats()["rows_out"] > 30


@pytest.mark.parametrize("pooling", OF_LOOKUP)
def test_rows_fetched_by_another_call_get_a_separate_lookup(
    pooling: Pooling, device: torch.device, calls: Counter[str]
) -> None:
    """A prefetched plan is applied before its own forward, because a later plan needs it."""
    tables, resident = pair(pooling, device, trained=(0, 3))
    ids, bags = batch(5)[0], offsets(pooling, 5)
    tables.prefetch(ids, bags)
    tables.queue.wait()
    calls.clear()
    with tables.layout.locks.launch:
        tables.layout.built[0].swap.apply_all()
    assert +calls == {"swap_rows": 1}
    found = run(tables, ids, bags)
    assert +calls == {"swap_rows": 1}
    assert torch.equal(found, train(resident, pooling, 5))
    for number in (1, 2):
        assert torch.equal(train(tables, pooling, number), train(resident, pooling, number))


@pytest.mark.parametrize("pooling", OF_LOOKUP)
def test_late_rows_get_a_separate_lookup(pooling: Pooling, device: torch.device, calls: Counter[str]) -> None:
    """Rows that the previous prefetched batch spills cannot be read ahead; they are fetched separately."""
    tables, resident = pair(pooling, device, 2, trained=(0, 4))
    # The first batch makes the cache spill the oldest rows; the second batch needs them again.
    coming = [(batch(number)[0], offsets(pooling, number)) for number in (6, 0)]
    for ids, bags in coming:
        tables.prefetch(ids, bags)
    tables.queue.wait()
    made = []
    for (ids, bags), number in zip(coming, (6, 0), strict=True):
        calls.clear()
        found = run(tables, ids, bags)
        made.append(dict(+calls))
        assert torch.equal(found, train(resident, pooling, number))
    assert made == [{OF_LOOKUP[pooling]: 1}, {"swap_rows": 1, "scatter_rows": 1}]


class InterruptionError(Exception):
    pass


@pytest.mark.parametrize("pooling", OF_LOOKUP)
def test_an_interrupted_swap_gets_a_separate_lookup(
    pooling: Pooling, device: torch.device, calls: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The swap ran before the interrupt: the forward finds its rows in the cache, but no result of a joined lookup."""
    tables, resident = pair(pooling, device, trained=(0, 3))
    ids, bags = batch(5)[0], offsets(pooling, 5)
    tables.prefetch(ids, bags)
    tables.queue.wait()
    calls.clear()
    counting = swap.call_once

    def call_once(operator: Any, arguments: Sequence[object], called: list[Any]) -> None:
        counting(operator, arguments, called)
        raise InterruptionError

    with monkeypatch.context() as patched, tables.layout.locks.launch:
        patched.setattr(swap, "call_once", call_once)
        with pytest.raises(InterruptionError):
            tables.layout.built[0].swap.apply_all()
    assert +calls == {"swap_rows": 1}
    found = run(tables, ids, bags)
    assert +calls == {"swap_rows": 1}
    assert torch.equal(found, train(resident, pooling, 5))
