"""Announced batches: which rows a look-ahead policy keeps for them, and that no announcement remains afterwards."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from engine_calls import Planned, apply, engine, run, table


def batch(ids: list[int]) -> tuple[Any, ...]:
    return np.array(ids), np.array([0, len(ids)]), np.zeros(1, np.int64), 1


def cache(slots: int, *batches: list[int], policy: str = "look_ahead", hashed: bool = True) -> Any:
    """Builds an engine with one table and a cache of `slots` rows, and runs the batches."""
    e = engine(table("a", hashed=hashed, slots=slots), policy=policy)
    for ids in batches:
        run(e, [ids])
    return e


def resident(e: Any) -> set[int]:
    ids, slots, _ = e.tables.rows(0)
    return set(ids[slots >= 0].tolist())


def planned(e: Any, ids: list[int], announced: Any) -> None:
    apply(e, Planned(e.plan(*batch(ids), announced=announced))).release()


@pytest.mark.parametrize("hashed", [True, False])
def test_announced_rows_stay(hashed: bool) -> None:
    e = cache(4, [4], [2, 3, 1], hashed=hashed)
    soon, later = e.announce(*batch([1, 4])), e.announce(*batch([2, 4]))
    run(e, [[5]])
    assert resident(e) == {1, 2, 4, 5}, "3 is needed by none"
    run(e, [[6, 7]])
    assert resident(e) == {1, 4, 6, 7}, "of those needed, 2 is needed last"
    planned(e, [1, 4], soon)
    run(e, [[6, 8, 9]])
    assert resident(e) == {4, 6, 8, 9}, "4 is needed still, 1 no more"
    planned(e, [2, 4], later)
    run(e, [[6, 7, 8]])
    run(e, [[6, 7, 8, 9]])
    assert resident(e) == {6, 7, 8, 9}, "nothing is left of what was announced"


@pytest.mark.parametrize("known", [True, False])
def test_rows_fetched_before_their_announced_batch_stay(known: bool) -> None:
    e = cache(2, *([[1]] if known else []), [8, 9])
    kept = e.announce(*batch([1]))
    run(e, [[1, 2]])
    run(e, [[3]])
    run(e, [[4]])
    assert resident(e) == {1, 4}
    kept.forget()
    kept.forget()
    run(e, [[2, 3]])
    assert resident(e) == {2, 3}


@pytest.mark.parametrize("drop", [True, False])
def test_dropped_announcements_have_no_effect(drop: bool) -> None:
    e = cache(2, [1], [2])
    announced = e.announce(*batch([1]))
    if drop:
        del announced
    run(e, [[3]])
    assert resident(e) == ({2, 3} if drop else {1, 3})


def test_a_plan_that_fails_leaves_the_announcement() -> None:
    e = cache(2, [1], [2])
    announced = e.announce(*batch([1]))
    with pytest.raises(RuntimeError, match="needs 3 distinct rows"):
        e.plan(*batch([4, 5, 6]), announced=announced)
    run(e, [[3]])
    assert resident(e) == {1, 3}


def test_a_cancelled_plan_gives_announced_rows_back() -> None:
    e = cache(2, [1, 2])
    announced = e.announce(*batch([1]))
    e.cancel(e.plan(*batch([3, 4])))
    run(e, [[5]])
    assert resident(e) == {1, 5}
    del announced


@pytest.mark.parametrize("policy", ["lru", "lfu", "lrfu"])
def test_other_policies_ignore_announcements(policy: str) -> None:
    e = cache(2, [1], [2], policy=policy)
    announced = [e.announce(*batch([1])) for _ in range(100)]
    planned(e, [3], announced[0])
    assert resident(e) == {2, 3}


def test_wrong_announcements() -> None:
    e, other = cache(2), cache(2)
    announced = [e.announce(*batch([1])) for _ in range(16)]
    with pytest.raises(RuntimeError, match="at most 16 batches can be announced"):
        e.announce(*batch([1]))
    with pytest.raises(ValueError, match="the announcement is of another engine"):
        other.plan(*batch([1]), announced=announced[0])
    with pytest.raises(ValueError, match="offsets must end at the number of ids, 1, got 2"):
        e.announce(np.array([1]), np.array([0, 2]), np.zeros(1, np.int64), 1)
    with pytest.raises(TypeError):
        e.announce(np.array([1.5]), np.array([0, 1]), np.zeros(1, np.int64), 1)
    planned(e, [1], announced.pop(0))
    e.announce(*batch([1]))


def test_announcements_beside_plans_of_another_thread() -> None:
    e = cache(60)
    errors: list[BaseException] = []

    def announce() -> None:
        rng = np.random.default_rng(3)
        try:
            for _ in range(200):
                held = [e.announce(*batch(rng.integers(0, 200, 20).tolist())) for _ in range(3)]
                held[1].forget()
        except BaseException as error:  # the main thread reports the error
            errors.append(error)

    thread = threading.Thread(target=announce)
    thread.start()
    rng = np.random.default_rng(9)
    for _ in range(200):
        run(e, [rng.integers(0, 200, 40).tolist()])
    thread.join()
    assert not errors
    for _ in range(16):
        e.announce(*batch([1])).forget()
