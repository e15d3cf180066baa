"""Evicted rows are returned once, unchanged, and can be put back.

The oracle (test_oracle.py) covers random mixtures of rules at every cache size and prefetch depth.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import embeddings
import pytest
import torch
from embeddings import one_table, weights_of
from interrupting import strike

from rec_sdk_torch.rules import Age, Count, Idle, Rows, Score, Share
from rec_sdk_torch.tbe import (
    CapacityError,
    EvictedRows,
    EvictReason,
    Pooling,
    TableBatchedEmbedding,
    TableLifecycle,
    TableOptimizer,
)
from rec_sdk_torch.tbe.cache import evicted

DIM = 4
BOUND = TableLifecycle(bound=Rows(8), keep_evicted=True)


def make(
    device: torch.device | None, lifecycle: TableLifecycle = BOUND, cache: int = 12, **options: Any
) -> TableBatchedEmbedding:
    options = {"pooling": Pooling.NONE, "optimizer": (torch.optim.Adagrad, {"lr": 0.5}), "seed": 3, **options}
    return one_table(device, rows=60, dim=DIM, lifecycle=lifecycle, cache=cache, **options)


def train(embedding: TableBatchedEmbedding, *batches: Iterable[int], **signals: torch.Tensor) -> None:
    for ids in batches:
        embeddings.train(embedding, ids, **signals)
        embedding.apply_gradients()


def triples(last: int) -> list[range]:
    return [range(first, first + 3) for first in range(0, last, 3)]


FOURS = [range(first, first + 4) for first in (0, 4, 8)]


def first_rows(ids: list[int], batches: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the weights and states that rows have after `batches` updates in a table without rules."""
    embedding = make(device, TableLifecycle(), cache=60)
    train(embedding, *[ids] * batches)
    parts = embedding.view("t").read(torch.tensor(ids)).parts
    return parts["weight"], parts["sum"]


def check_once(embedding: TableBatchedEmbedding, seen: set[int], taken: list[EvictedRows]) -> None:
    """Checks that each id in `seen` occurs exactly once, either in the table or among the evicted rows taken."""
    ids = [*embedding.table_ids("t").tolist(), *(i for rows in taken for i in rows.ids.tolist())]
    assert sorted(ids) == sorted(seen)


@pytest.mark.parametrize("cache", [4, 12])
@pytest.mark.parametrize("update", ["backward", "step"])
def test_rows_evicted_by_a_bound_have_their_newest_weights(cache: int, update: str, device: torch.device) -> None:
    embedding = make(device, cache=cache, update=update)
    train(embedding, FOURS[0], FOURS[0], FOURS[1], FOURS[1], FOURS[2])
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


def test_evicted_rows_name_the_rule_as_reason() -> None:
    lifecycle = TableLifecycle(eviction=[Age(5), Idle(3), Share(0.25)], bound=Rows(9), keep_evicted=True)
    embedding = make(None, lifecycle, cache=20)

    def stamped(ids: list[int], when: int) -> None:
        train(embedding, ids, timestamps=torch.full((len(ids),), when))

    for ids, when in ([1, 2], 0), ([3], 7), ([4, 5, 6, 7], 7), *[([8, 9], 8)] * 2, *[([4, 5, 6, 7, 8, 9], 8)] * 4:
        stamped(ids, when)
    view = embedding.view("t")
    view.evict()
    rows = view.take_evicted()
    assert dict(zip(rows.ids.tolist(), map(EvictReason, rows.reason.tolist()), strict=True)) == {
        1: EvictReason.AGE,  # these rows are idle and also have a low score
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


def test_evicted_rows_can_be_taken_in_parts(device: torch.device) -> None:
    embedding = make(device)
    train(embedding, *triples(30))
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
    wrong: Any
    for wrong in (-1, 1.5, "2"):
        with pytest.raises(ValueError, match=r"at_most is .*, must be None or an int >= 0"):
            view.take_evicted(wrong)


def test_taking_without_keep_evicted_is_an_error(device: torch.device) -> None:
    embedding = make(device, TableLifecycle(bound=Rows(8)))
    with pytest.raises(RuntimeError, match="'t' keeps no evicted rows: set keep_evicted=True"):
        embedding.view("t").take_evicted()
    with pytest.raises(ValueError, match="admission, eviction and keep_evicted need a hash table"):
        make(device, TableLifecycle(keep_evicted=True), hashed=False)


# ---- putting rows back


def test_rows_that_are_put_back_are_unchanged(device: torch.device) -> None:
    embedding = make(device, TableLifecycle(eviction=Idle(9), every=9, keep_evicted=True), cache=6)
    train(embedding, *[[1, 2, 3, 4]] * 3)
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


def test_the_latest_row_of_an_id_evicted_twice_is_put_back(device: torch.device) -> None:
    embedding = make(device)
    view, one = embedding.view("t"), torch.tensor([1])
    for batches in (1, 2):
        train(embedding, *[[1]] * batches)
        view.remove(one)
    rows = view.take_evicted()
    assert rows.ids.tolist() == [1, 1]
    assert not torch.equal(rows.weight[0], rows.weight[1])
    assert view.put_back(rows) == 1
    assert torch.equal(view.read(one).parts["weight"][0], rows.weight[1])


def test_a_failed_put_back_changes_nothing(device: torch.device) -> None:
    embedding = make(device, capacity=9)
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


def test_putting_a_candidate_back_removes_the_candidate(device: torch.device) -> None:
    embedding = make(device, TableLifecycle(admission=Count(2), bound=Rows(5), keep_evicted=True))
    train(embedding, [1, 1])
    view = embedding.view("t")
    view.remove(torch.tensor([1]))
    rows = view.take_evicted()
    train(embedding, [1])
    assert view.candidates()[0].tolist() == [1]
    assert view.put_back(rows) == 1
    assert (view.ids().tolist(), view.candidates()[0].tolist()) == ([1], [])
    assert embedding.groups[0].engine.tables.memory(0)["candidates"] == 0


# ---- evictions combined with other operations


def test_a_dropped_plan_evicts_nothing(device: torch.device) -> None:
    embedding = make(device, cache=16)
    train(embedding, *triples(6))
    embedding.prefetch(torch.arange(30, 38), torch.tensor([0, 8]))  # too many rows if it were trained
    embedding.queue.wait()
    embedding.forget()
    train(embedding, [0, 1])
    assert len(embedding.view("t").take_evicted()) == 0
    check_once(embedding, set(range(6)), [])


def test_taking_keeps_prefetched_plans(device: torch.device) -> None:
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


def test_a_copy_has_the_untaken_rows(device: torch.device) -> None:
    embedding = make(device)
    train(embedding, *FOURS)
    twin = copy.deepcopy(embedding)
    ids = [each.view("t").take_evicted().ids.tolist() for each in (embedding, twin)]
    assert ids[0] == ids[1] == [0, 1, 2, 3, 4]


def test_untaken_rows_survive_a_new_optimizer(device: torch.device) -> None:
    embedding = make(device, optimizer=None)
    view = embedding.view("t")
    view.write(torch.arange(3), {"weight": torch.ones(3, DIM)})
    view.remove(torch.tensor([2]))
    options = {"lr": 0.1, "initial_accumulator_value": 0.5}
    embedding.set_optimizers({0: TableOptimizer.create(torch.optim.Adagrad, options)})
    view.remove(torch.tensor([1]))
    rows = view.take_evicted()
    assert rows.ids.tolist() == [2, 1]
    assert torch.equal(rows.states["sum"], torch.full((2, DIM), 0.5))


def test_a_frozen_table_evicts_only_on_request(device: torch.device) -> None:
    embedding = make(device)
    train(embedding, range(8))
    embedding.view("t").write(torch.arange(8, 12), {"weight": torch.ones(4, DIM)})
    embedding.freeze("t")
    embedding(torch.arange(3), torch.tensor([0, 3]))
    view = embedding.view("t")
    assert len(view.take_evicted()) == 0
    assert view.evict() == 5
    assert len(view.take_evicted()) == 5


def test_many_untaken_rows_warn(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evicted.EvictedRowsBuffer, "_warn_from", 100)
    embedding = make(device)
    monkeypatch.setattr(embedding.layout.evicted["t"], "_warn_from", 100)
    train(embedding, range(8))
    with pytest.warns(UserWarning, match="'t': 5 evicted rows take 0 MiB of memory: take them"):
        train(embedding, range(8, 12))


@pytest.mark.parametrize("rules", [{"eviction": Idle(5), "every": 1}, {"score": Score(half_life=2)}, {}])
def test_rows_ahead_of_the_clock_can_be_put_back(device: torch.device, rules: dict[str, Any]) -> None:
    """Rows put back may be ahead of the table's clock, if training has resumed from a save before their eviction.

    They count as used at the table's present time.

    """
    lifecycle = replace(BOUND, **rules)
    later, earlier = make(device, lifecycle), make(device, lifecycle)
    train(later, *[[1, 2]] * 9)
    later.view("t").remove(torch.tensor([1, 2]))
    train(earlier, [3, 4, 5])
    view = earlier.view("t")
    assert view.put_back(later.view("t").take_evicted()) == 2
    train(earlier, [1], range(3, 10))
    assert view.take_evicted().ids.tolist() == [6, 7]
    assert view.knows(torch.tensor([1, 2])).all()


# ---- errors and interrupts


ACTIONS: dict[str, Callable[[TableBatchedEmbedding], object]] = {
    "a step": lambda embedding: train(embedding, [20, 21, 22, 23]),
    "evict": lambda embedding: embedding.view("t").evict(),
    "remove": lambda embedding: embedding.view("t").remove(torch.tensor([4, 5, 30])),
}


@pytest.mark.parametrize(
    ("action", "update"), [("a step", "backward"), ("a step", "step"), ("evict", "step"), ("remove", "backward")]
)
def test_an_interrupt_loses_no_row_and_returns_none_twice(
    action: str, update: str, device: torch.device, pytestconfig: pytest.Config
) -> None:
    full, known, new = pytestconfig.getoption("--full"), {1, 2, 3, 4, 5, 6, 30, 31, 32, 33}, {20, 21, 22, 23}
    if device.type != "cpu" and action == "a step" and not full:
        pytest.skip("points of a step on a device are many")
    at, struck = 1, ""
    while struck is not None:
        embedding = make(device, replace(BOUND, bound=Rows(7)), cache=6, update=update)
        train(embedding, [1, 2, 3, 4], [5, 6])
        view = embedding.view("t")
        view.write(torch.tensor([30, 31, 32, 33]), {"weight": torch.ones(4, DIM)})
        expected = weights_of(embedding, sorted(known))
        struck = strike(functools.partial(ACTIONS[action], embedding), at)
        seen = view.ids().tolist()  # completes the interrupted step
        rows = view.take_evicted()
        found = {*seen, *rows.ids.tolist()}
        assert known <= found <= known | new, struck
        check_once(embedding, known | new & found, [rows])
        for i, weight in zip(rows.ids.tolist(), rows.weight, strict=True):
            assert i in new or torch.equal(weight, expected[sorted(known).index(i)]), struck
        at += 1 if full or at > 300 else 3  # rows are evicted near the end of a step, so every point there is tried


def test_a_failed_eviction_returns_nothing(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    embedding = make(device)
    train(embedding, range(8))
    view = embedding.view("t")
    output = embedding(torch.tensor([1]), torch.tensor([0, 1]))
    with pytest.raises(RuntimeError, match="used by batches in flight"):
        view.remove(torch.tensor([0, 1]))
    output.sum().backward()
    assert len(view.take_evicted()) == 0
    assert view.remove(torch.tensor([0, 1])) == 2
    assert view.take_evicted().ids.tolist() == [0, 1]
