"""Plans of the host engine in several threads: cancelling, applying and dropping them."""

from __future__ import annotations

import gc
import sys
import threading

import forked_python
import numpy as np
import pytest
from engine_calls import DIM, Planned, engine, plan, records, run, table

from rec_sdk_torch import _engine


def test_plans_from_several_threads() -> None:
    e = engine(table("a", slots=400))
    errors: list[BaseException] = []
    launch = threading.Lock()

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(100):
                ids = rng.integers(0, 90, 50).tolist()
                p = plan(e, [ids])
                assert len(set(ids)) == p.unique_slots.size == np.unique(p.slots).size
                with launch:
                    for host in e.unapplied(p.host):
                        _engine.start_plans([host])
                        e.applied(host)
                p.release()
        except BaseException as error:  # the main thread reports the error
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert e.tables.stats()["lookups"] == 4 * 100 * 50


def test_whole_tables_wait_for_plans_and_rows() -> None:
    e = engine(table("a", slots=1, columns=["version"]))
    run(e, [[1]])
    one = np.array([0])
    p = plan(e, [[2]])

    def refused(reason: str) -> None:
        calls = (
            lambda: e.tables.rows(0),
            lambda: e.saves.ids_with_records(0),
            lambda: e.saves.changed_ids(0, 0),
            lambda: e.tables.read_rows(0, one, one, records(e, 1)),
            lambda: e.tables.write_rows(0, one, one, records(e, 1)),
            lambda: e.tables.reserve_rows(0, one),
            lambda: e.tables.find_rows(0, one),
            lambda: e.saves.unlisted_ids(0, one),
            lambda: e.tables.insert(0, one),
            lambda: e.tables.remove(0, one),
            lambda: e.tables.clear(0),
            e.window_rows,
            lambda: e.read_spilled(0, 0, records(e, 0), np.empty((0, 2 * DIM), np.float32)),
            lambda: e.write_spilled(0, 0, records(e, 0)),
            e.close_window,
        )
        for call in calls:
            with pytest.raises(RuntimeError, match=reason):
                call()

    refused("1 plans are not applied, the write-backs of 1 plans are pending")
    _engine.start_plans([p.host])
    refused("1 plans are not applied, the write-backs of 1 plans are pending")
    e.applied(p.host)
    refused("0 plans are not applied, the write-backs of 1 plans are pending")
    back = plan(e, [[2]])
    p.release()
    assert back.sources == []
    e.cancel(back.host)
    back = plan(e, [[1]])
    assert back.sources == [p.serial]
    with pytest.raises(RuntimeError, match=f"complete the write-back of plan {p.serial} first"):
        e.read_in(back.host, records(e, 1))
    e.cancel(back.host)
    assert not p.written_back
    e.complete_write_back(p.host, records(e, 1))
    assert p.written_back
    ids = e.tables.rows(0)[0].tolist()
    assert ids == e.saves.ids_with_records(0).tolist() == e.saves.changed_ids(0, 0)[0].tolist() == [1, 2]


def test_a_plan_that_is_being_applied_may_be_dropped() -> None:
    e = engine(table("a"))
    p = plan(e, [[1]])
    hosts = e.unapplied()
    del p
    gc.collect()
    _engine.start_plans(hosts)
    e.applied(hosts[0])
    assert e.tables.rows(0)[0].tolist() == [1]
    p = plan(e, [[2]])
    hosts = e.unapplied()
    p.release()
    assert e.in_flight() == 1
    del hosts
    gc.collect()
    assert e.in_flight() == 0, "nobody applied it"
    assert e.tables.rows(0)[0].tolist() == [1]


def test_an_arena_of_the_callers() -> None:
    e = engine(table("a"))
    batch = (np.array([5, 6, 5]), np.array([0, 3]), np.array([0]), 1)
    most = e.arena_bytes(*batch)
    memory = np.zeros(most, np.uint8)
    references = sys.getrefcount(memory)
    host = e.plan(*batch, arena=memory)
    assert np.shares_memory(host.arena, memory)
    assert sys.getrefcount(memory) > references
    assert Planned(host).slots.tolist() == [0, 1, 0]
    e.cancel(host)
    del host
    gc.collect()
    assert e.in_flight() == 0, "dropped plans end in the next call"
    assert sys.getrefcount(memory) == references
    with pytest.raises(ValueError, match="the arena has 64 bytes, the plan needs"):
        e.plan(*batch, arena=np.zeros(64, np.uint8))
    assert sys.getrefcount(memory) == references
    assert e.tables.row_count(0) == e.in_flight() == 0


def use_columns_while_plans_fail() -> None:
    """Plans into arenas that are too small in one thread, and reads and writes columns in another."""
    e = engine(table("a"))
    batch = (np.arange(50) % 8, np.array([0, 50]), np.array([0]), 1)
    rows = np.zeros(0, np.int64)

    def fail() -> None:
        for _ in range(500):
            with pytest.raises(ValueError, match="arena"):
                e.plan(*batch, arena=np.zeros(64, np.uint8))

    thread = threading.Thread(target=fail)
    thread.start()
    while thread.is_alive():
        e.lifecycle.set_clock(0, *e.lifecycle.clock(0))
        e.lifecycle.write_columns(0, rows, e.lifecycle.read_columns(0, rows))
        e.lifecycle.candidates(0)


def test_columns_do_not_wait_for_the_engine_with_the_interpreter_lock() -> None:
    """Freeing an arena inside the engine acquires the interpreter's lock; this once caused a deadlock of the two
    threads.
    """
    process = forked_python.CONTEXT.Process(target=use_columns_while_plans_fail)
    process.start()
    process.join(60)
    process.kill()
    assert process.exitcode == 0
