"""Rows that leave a table are handed out once, as they were, and can be put back.

Random mixtures of rules, at every cache size and depth, are the oracle's (test_oracle.py).
"""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from interrupting import strike

from rec_sdk_torch import AccumulateSGD
from rec_sdk_torch.rules import Age, Count, Idle, Rows, Score, Share
from rec_sdk_torch.tbe import (
    CapacityError,
    EvictedRows,
    EvictReason,
    Pooling,
    TableBatchedEmbedding,
    TableConfig,
    TableLife,
    TableOptimizer,
)
from rec_sdk_torch.tbe.cache import evicted

DIM = 4
BOUND = TableLife(bound=Rows(8), keep_evicted=True)


def make(
    device: torch.device,
    life: TableLife = BOUND,
    cache: int = 12,
    table: dict[str, Any] | None = None,
    optimizer: TableOptimizer | None = None,
    **options: Any,
) -> TableBatchedEmbedding:
    config = TableConfig("t", 60, DIM, pooling=Pooling.NONE, life=life, **(table or {}))
    optimizer = optimizer or TableOptimizer.create(torch.optim.Adagrad, {"lr": 0.5})
    return TableBatchedEmbedding([config], optimizer=optimizer, cache=cache, device=device, seed=3, **options)


def train(embedding: TableBatchedEmbedding, ids: list[int], **seen: torch.Tensor) -> None:
    embedding(torch.tensor(ids), torch.tensor([0, len(ids)]), **seen).sum().backward()
    embedding.apply_gradients()


def first_rows(ids: list[int], batches: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and states of rows that so many batches trained, each of which had them once; no rule is on."""
    embedding = make(device, TableLife(), cache=60)
    for _ in range(batches):
        train(embedding, ids)
    parts = embedding.view("t").read(torch.tensor(ids)).parts
    return parts["weight"], parts["sum"]


def check_once(embedding: TableBatchedEmbedding, seen: set[int], taken: list[EvictedRows]) -> None:
    """Each id that was seen is a row or was handed out, and none is both or twice."""
    ids = [*embedding.table_ids("t").tolist(), *(i for rows in taken for i in rows.ids.tolist())]
    assert sorted(ids) == sorted(seen)


@pytest.mark.parametrize("cache", [4, 12])
@pytest.mark.parametrize("update", ["backward", "step"])
def test_a_bound_hands_out_the_newest_weights(cache: int, update: str, device: torch.device) -> None:
    embedding = make(device, cache=cache, update=update)
    for ids in ([0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7], [8, 9, 10, 11]):
        train(embedding, ids)
    rows = embedding.view("t").take_evicted()
    assert rows.ids.tolist() == [0, 8, 9, 10, 11], "the least frequent, then the one that was idle for longest"
    assert rows.columns["count"].tolist() == [2, 1, 1, 1, 1]
    assert set(rows.reason.tolist()) == {EvictReason.BOUND}
    for part, batches in ((rows[:1], 2), (rows[1:], 1)):
        weight, states = first_rows(part.ids.tolist(), batches, device)
        assert torch.equal(part.weight, weight)
        assert torch.equal(part.states["sum"], states)
    assert len(embedding.view("t").take_evicted()) == 0
    check_once(embedding, set(range(12)), [rows])


def test_each_rule_is_the_reason() -> None:
    device = torch.device("cpu")
    life = TableLife(eviction=[Age(5), Idle(3), Share(0.25)], bound=Rows(9), keep_evicted=True)
    embedding = make(device, life, cache=20)

    def stamped(ids: list[int], when: int) -> None:
        train(embedding, ids, timestamps=torch.full((len(ids),), when))

    stamped([1, 2], 0)
    stamped([3], 7)
    stamped([4, 5, 6, 7], 7)
    for _ in range(2):
        stamped([8, 9], 8)
    for _ in range(4):
        stamped([4, 5, 6, 7, 8, 9], 8)
    view = embedding.view("t")
    view.evict()
    rows = view.take_evicted()
    assert dict(zip(rows.ids.tolist(), map(EvictReason, rows.reason.tolist()), strict=True)) == {
        1: EvictReason.AGE,  # and idle, and of a low score
        2: EvictReason.AGE,
        3: EvictReason.IDLE,
    }
    view.evict()
    assert view.take_evicted().reason.tolist() == [EvictReason.SCORE]
    stamped(list(range(20, 26)), 8)
    rows = view.take_evicted()
    assert set(rows.reason.tolist()) == {EvictReason.BOUND}
    view.remove(torch.tensor([99, *view.ids().tolist()[:2]]))
    assert view.take_evicted().reason.tolist() == [EvictReason.REMOVED] * 2


def test_some_at_a_time(device: torch.device) -> None:
    embedding = make(device)
    for first in range(0, 30, 3):
        train(embedding, [first, first + 1, first + 2])
    view, taken = embedding.view("t"), []
    waiting = embedding.cache_stats("t")["evicted_waiting"]
    assert embedding.memory_report("t")["evicted"] == waiting * (8 + 4 * DIM + 4 * DIM + 16 + 1)
    while len(rows := view.take_evicted(4)):
        taken.append(rows)
        assert embedding.cache_stats()["evicted_waiting"] == waiting - sum(map(len, taken))
    assert [len(rows) for rows in taken[:-1]] == [4] * (len(taken) - 1)
    assert embedding.memory_report()["evicted"] == 0
    check_once(embedding, set(range(30)), taken)
    assert len(view.take_evicted(0)) == 0
    for wrong in (-1, 1.5, "2"):
        with pytest.raises(ValueError, match=r"at_most is .*, must be an int from 0 on, or None"):
            view.take_evicted(wrong)  # type: ignore[arg-type]


def test_a_table_that_keeps_none_says_so(device: torch.device) -> None:
    embedding = make(device, TableLife(bound=Rows(8)))
    with pytest.raises(RuntimeError, match="'t' keeps no rows that leave it: set keep_evicted=True"):
        embedding.view("t").take_evicted()
    with pytest.raises(ValueError, match="only a hash table admits or evicts ids, and hands out rows that leave"):
        make(device, TableLife(keep_evicted=True), table={"hashed": False})
    with pytest.raises(TypeError, match="keep_evicted is 1, expected a bool"):
        TableLife(keep_evicted=1)  # type: ignore[arg-type]


# ---- putting back


def test_rows_that_are_put_back_are_as_they_were(device: torch.device) -> None:
    embedding = make(device, TableLife(eviction=Idle(9), every=9, keep_evicted=True), cache=6)
    for _ in range(3):
        train(embedding, [1, 2, 3, 4])
    view, ids = embedding.view("t"), torch.tensor([1, 2, 3, 4])
    before, columns = view.read(ids).parts, view.row_columns(ids)
    assert view.remove(torch.tensor([4, 1, 77, 3])) == 3
    rows = view.take_evicted()
    assert rows.ids.tolist() == [1, 3, 4]
    train(embedding, [9])
    assert view.put_back(rows) == 3
    after = view.read(ids).parts
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert all(torch.equal(view.row_columns(ids)[name], columns[name]) for name in columns)
    assert len(view.take_evicted()) == 0
    assert view.put_back(rows[:0]) == 0


@pytest.mark.parametrize("overwrite", [True, False])
def test_an_id_that_came_back_is_overwritten_unless_it_is_to_stay(overwrite: bool, device: torch.device) -> None:
    embedding = make(device, cache=4)
    for _ in range(3):
        train(embedding, [1, 2])
    view, ids = embedding.view("t"), torch.tensor([1, 2])
    before = view.read(ids).parts["weight"]
    view.remove(ids)
    rows = view.take_evicted()
    train(embedding, [1])  # it begins anew, and is in the cache
    anew = view.read(ids).parts["weight"]
    assert not torch.equal(anew[0], before[0])
    assert view.put_back(rows, overwrite=overwrite) == (2 if overwrite else 1)
    after = view.read(ids).parts["weight"]
    assert torch.equal(after[0], before[0] if overwrite else anew[0])
    assert torch.equal(after[1], before[1])


def test_of_an_id_that_left_twice_the_latest_row_is_put_back(device: torch.device) -> None:
    embedding = make(device)
    view, one = embedding.view("t"), torch.tensor([1])
    for batches in (1, 2):
        for _ in range(batches):
            train(embedding, [1])
        view.remove(one)
    rows = view.take_evicted()
    assert rows.ids.tolist() == [1, 1]
    assert not torch.equal(rows.weight[0], rows.weight[1])
    assert view.put_back(rows) == 1
    assert torch.equal(view.read(one).parts["weight"][0], rows.weight[1])


def test_rows_that_cannot_be_put_back_change_nothing(device: torch.device) -> None:
    embedding = make(device, table={"capacity": 9})
    train(embedding, [1, 2, 3, 4])
    view = embedding.view("t")
    view.remove(torch.tensor([1, 2]))
    rows = view.take_evicted()
    columns = dict(rows.columns)
    wrong: list[tuple[Any, type[Exception], str]] = [
        ([1], TypeError, "rows are list, expected EvictedRows"),
        (replace(rows, states={"momentum": rows.weight}), ValueError, "no part 'momentum'"),
        (replace(rows, weight=rows.weight[:1]), ValueError, "not of 2 rows"),
        (replace(rows, weight=rows.weight[:, :1]), ValueError, "shape .* of weight"),
        (replace(rows, ids=rows.ids.float()), ValueError, "expected flat torch.int64"),
        (replace(rows, columns={"score": rows.weight[:, 0].double()}), ValueError, "keeps no column 'score'"),
        (replace(rows, columns=columns | {"count": torch.tensor([1, 2**32])}), ValueError, "allowed are 0 to"),
        (replace(rows, columns=columns | {"count": torch.tensor([1.0, 2.0])}), TypeError, "expected torch.int64"),
    ]
    for given, error, message in wrong:
        with pytest.raises(error, match=message):
            view.put_back(given)
    for part in ("states", "columns"):
        with pytest.raises(TypeError, match=f"EvictedRows: {part} is None, expected a dict of tensors by name"):
            replace(rows, **{part: None})
    many = {name: torch.zeros(8, dtype=torch.int64) for name in columns}
    flood = EvictedRows(torch.arange(50, 58), torch.ones(8, DIM), {}, many, torch.ones(8, dtype=torch.uint8))
    with pytest.raises(CapacityError):
        view.put_back(flood)
    assert sorted(view.ids().tolist()) == [3, 4]
    assert view.put_back(replace(rows, columns={}, states={})) == 2
    assert view.row_columns(rows.ids)["count"].tolist() == [0, 0], "begins anew"


def test_a_candidate_that_is_put_back_waits_no_more(device: torch.device) -> None:
    embedding = make(device, TableLife(admission=Count(2), bound=Rows(5), keep_evicted=True))
    train(embedding, [1, 1])
    view = embedding.view("t")
    view.remove(torch.tensor([1]))
    rows = view.take_evicted()
    train(embedding, [1])
    assert view.candidates()[0].tolist() == [1]
    assert view.put_back(rows) == 1
    assert (view.ids().tolist(), view.candidates()[0].tolist()) == ([1], [])
    assert embedding.groups[0].engine.tables.memory(0)["candidates"] == 0


# ---- whatever else goes on


def test_a_plan_that_is_dropped_hands_out_nothing(device: torch.device) -> None:
    embedding = make(device, cache=16)
    for first in range(0, 6, 3):
        train(embedding, [first, first + 1, first + 2])
    embedding.prefetch(torch.arange(30, 38), torch.tensor([0, 8]))  # too many rows, were it trained
    embedding.queue.wait()
    embedding.forget()
    train(embedding, [0, 1])
    assert len(embedding.view("t").take_evicted()) == 0
    check_once(embedding, set(range(6)), [])


def test_taking_leaves_plans_that_were_made_ahead(device: torch.device) -> None:
    embedding = make(device, cache=30)
    taken, batches = [], [list(range(2 * first, 2 * first + 4)) for first in range(12)]
    for number, ids in enumerate(batches):
        if number + 1 < len(batches):
            embedding.prefetch(torch.tensor(batches[number + 1]), torch.tensor([0, 4]))
            embedding.queue.wait()
        planned = embedding.cache_stats()["batches"]
        taken.append(embedding.view("t").take_evicted())
        assert embedding.cache_stats()["batches"] == planned
        train(embedding, ids)
    taken.append(embedding.view("t").take_evicted())
    ids = [i for rows in taken for i in rows.ids.tolist()]
    assert set(ids) | set(embedding.table_ids("t").tolist()) == set(range(26))


def test_rows_wait_for_the_end_of_a_window(device: torch.device) -> None:
    options = {"lr": 0.5, "use_accumulate": True, "accumulate_step": 3}
    embedding = make(device, cache=6, optimizer=TableOptimizer.create(AccumulateSGD, options))
    for first in range(0, 12, 4):
        train(embedding, list(range(first, first + 4)))
    rows = embedding.view("t").take_evicted()
    initial = embedding.view("t").read(rows.ids, ["weight"]).parts["weight"]
    assert rows.ids.tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(rows.weight, initial - 0.5), "with the gradient of the window"


def test_rows_on_disk_and_weights_of_two_data_types(device: torch.device) -> None:
    plain = make(device)
    with tempfile.TemporaryDirectory() as folder:
        table = {"weight_dtype": torch.bfloat16, "cache_dtype": torch.float32}
        for embedding in (plain, make(device, cache=5, table=table, host_store=folder)):
            for first in range(0, 12, 4):
                train(embedding, list(range(first, first + 4)))
            rows = embedding.view("t").take_evicted()
            assert rows.weight.dtype is embedding.tables[0].weight_dtype
            assert rows.ids.tolist() == [0, 1, 2, 3, 4]
            torch.testing.assert_close(
                rows.weight.float(), first_rows([0, 1, 2, 3, 4], 1, device)[0], rtol=0.01, atol=0.01
            )
            assert embedding.view("t").put_back(rows) == 5
            assert torch.equal(embedding.view("t").read(rows.ids).parts["weight"], rows.weight)


def test_a_copy_has_the_rows_that_wait(device: torch.device) -> None:
    embedding = make(device)
    for first in range(0, 12, 4):
        train(embedding, list(range(first, first + 4)))
    twin = copy.deepcopy(embedding)
    ids = [each.view("t").take_evicted().ids.tolist() for each in (embedding, twin)]
    assert ids[0] == ids[1] == [0, 1, 2, 3, 4]


def test_rows_wait_while_their_table_gets_an_optimizer(device: torch.device) -> None:
    config = TableConfig("t", 60, DIM, pooling=Pooling.NONE, life=BOUND)
    embedding = TableBatchedEmbedding([config], cache=12, device=device)
    view = embedding.view("t")
    view.write(torch.arange(3), {"weight": torch.ones(3, DIM)})
    view.remove(torch.tensor([2]))
    options = {"lr": 0.1, "initial_accumulator_value": 0.5}
    embedding.set_optimizers({0: TableOptimizer.create(torch.optim.Adagrad, options)})
    view.remove(torch.tensor([1]))
    rows = view.take_evicted()
    assert rows.ids.tolist() == [2, 1]
    assert torch.equal(rows.states["sum"], torch.full((2, DIM), 0.5))


def test_a_frozen_table_loses_rows_when_asked_alone(device: torch.device) -> None:
    embedding = make(device)
    train(embedding, list(range(8)))
    embedding.view("t").write(torch.arange(8, 12), {"weight": torch.ones(4, DIM)})
    embedding.freeze("t")
    embedding(torch.arange(3), torch.tensor([0, 3]))
    view = embedding.view("t")
    assert len(view.take_evicted()) == 0
    assert view.evict() == 5
    assert len(view.take_evicted()) == 5


def test_much_that_waits_warns(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evicted.Departures, "_warn_from", 100)
    embedding = make(device)
    monkeypatch.setattr(embedding.layout.evicted["t"], "_warn_from", 100)
    train(embedding, list(range(8)))
    with pytest.warns(UserWarning, match="'t': 5 rows that left it wait in 0 MiB of memory: take them"):
        train(embedding, list(range(8, 12)))


@pytest.mark.parametrize("rules", [{"eviction": Idle(5), "every": 1}, {"score": Score(half_life=2)}, {}])
def test_rows_of_a_later_moment_are_of_now(device: torch.device, rules: dict[str, Any]) -> None:
    """They left after the save that training goes on from."""
    life = replace(BOUND, **rules)
    later, earlier = make(device, life), make(device, life)
    for _ in range(9):
        train(later, [1, 2])
    later.view("t").remove(torch.tensor([1, 2]))
    train(earlier, [3, 4, 5])
    view = earlier.view("t")
    assert view.put_back(later.view("t").take_evicted()) == 2
    train(earlier, [1])
    train(earlier, [3, 4, 5, 6, 7, 8, 9])
    assert view.take_evicted().ids.tolist() == [6, 7]
    assert view.knows(torch.tensor([1, 2])).all()


# ---- errors and interrupts


def actions() -> dict[str, Callable[[TableBatchedEmbedding], object]]:
    return {
        "a step": lambda embedding: train(embedding, [20, 21, 22, 23]),
        "evict": lambda embedding: embedding.view("t").evict(),
        "remove": lambda embedding: embedding.view("t").remove(torch.tensor([4, 5, 30])),
    }


@pytest.mark.parametrize("action", actions())
@pytest.mark.parametrize("update", ["backward", "step"])
def test_an_interrupt_loses_no_row_and_hands_none_out_twice(
    action: str, update: str, device: torch.device, pytestconfig: pytest.Config
) -> None:
    if device.type != "cpu" and action == "a step" and not pytestconfig.getoption("--full"):
        pytest.skip("points of a step on a device are many")
    at, stride, struck = 1, 1 if pytestconfig.getoption("--full") else 3, ""
    while struck is not None:
        embedding = make(device, replace(BOUND, bound=Rows(7)), cache=6, update=update)
        train(embedding, [1, 2, 3, 4])
        train(embedding, [5, 6])
        embedding.view("t").write(torch.tensor([30, 31, 32, 33]), {"weight": torch.ones(4, DIM)})
        expected = embedding.view("t").read(torch.tensor([1, 2, 3, 4, 5, 6, 30, 31, 32, 33])).parts["weight"]
        struck = strike(functools.partial(actions()[action], embedding), at)
        view = embedding.view("t")
        seen = view.ids().tolist()  # completes what was broken off
        rows = view.take_evicted()
        known = {1, 2, 3, 4, 5, 6, 30, 31, 32, 33}
        assert known <= {*seen, *rows.ids.tolist()} <= known | {20, 21, 22, 23}, struck
        check_once(embedding, known | {20, 21, 22, 23} & {*seen, *rows.ids.tolist()}, [rows])
        for i, weight in zip(rows.ids.tolist(), rows.weight, strict=True):
            if i in known:
                assert torch.equal(weight, expected[sorted(known).index(i)]), struck
        at += stride


def test_an_eviction_that_fails_hands_out_nothing(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    embedding = make(device)
    train(embedding, list(range(8)))
    view = embedding.view("t")
    output = embedding(torch.tensor([1]), torch.tensor([0, 1]))
    with pytest.raises(RuntimeError, match="used by batches in flight"):
        view.remove(torch.tensor([0, 1]))
    output.sum().backward()
    assert len(view.take_evicted()) == 0
    assert view.remove(torch.tensor([0, 1])) == 2
    assert view.take_evicted().ids.tolist() == [0, 1]
