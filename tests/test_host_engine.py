"""The host engine: its C++ unit tests, with and without sanitizers, and its Python binding."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from cpp_units import PLAIN, TESTS, Tree, parameters
from engine_calls import DIM, Planned, apply, engine, plan, records, run, swap, table

from rec_sdk_torch import _engine


@pytest.mark.full
def test_cpp_units_as_installed(pytestconfig: pytest.Config) -> None:
    """Runs the C++ unit tests with the optimizations of a release, and for more rounds than with sanitizers,
    which are slow.
    """
    PLAIN.build("engine/all")
    PLAIN.run("engine", pytestconfig)


def test_every_interleaving(pytestconfig: pytest.Config) -> None:
    PLAIN.build("test_protocol")
    PLAIN.run("engine", pytestconfig, only="^protocol$")


UNITS = sorted(path.stem.removeprefix("test_") for path in (TESTS / "engine").glob("test_*.cpp"))
SLOW = {"protocol"}
"""Tests that compile and run for minutes with the address sanitizer."""


@pytest.fixture(scope="module")
def address_tree(request: pytest.FixtureRequest) -> Tree:
    """Builds the C++ unit tests that this session runs with the address sanitizer."""
    tree = Tree("engine-address", TESTS / "engine", ["-DREC_SDK_SANITIZE=address,undefined"])
    tree.build(*(f"test_{unit}" for unit in parameters(request, "unit")))
    return tree


@pytest.mark.parametrize("unit", [pytest.param(unit, marks=pytest.mark.full if unit in SLOW else ()) for unit in UNITS])
def test_cpp_units(pytestconfig: pytest.Config, address_tree: Tree, unit: str) -> None:
    variables = {"ASAN_OPTIONS": "detect_leaks=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
    address_tree.run("", pytestconfig, only=f"^{unit}$", **variables)


def test_no_data_races(pytestconfig: pytest.Config) -> None:
    tests = "planner;plan_order;host_store;plan_lifecycle;stress"
    options = ["-DREC_SDK_SANITIZE=thread", f"-DREC_SDK_ENGINE_TESTS={tests}"]
    tree = Tree("engine-thread", TESTS / "engine", options)
    tree.build()
    tree.run("", pytestconfig, REC_SDK_TEST_ROUNDS="30" if pytestconfig.getoption("--full") else "10")


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_sequence_plan(dtype: Any) -> None:
    e = engine(table("a"), table("b", hashed=False))
    p = plan(e, [[7, -3, 7], [5]], dtype)
    assert p.slots.tolist() == [0, 1, 0, 8]
    assert p.offsets is None
    assert p.unique_slots.tolist() == [0, 1, 8]
    assert p.table_offsets.tolist() == [0, 2, 3]
    assert p.segment_offsets.tolist() == [0, 2, 3, 4]
    assert p.positions is None
    assert p.grad_row.tolist() == [0, 2, 1, 0]
    assert p.grad_source.tolist() == [0, 0, 0, 1]
    assert p.grad_column is None
    assert p.scale is None
    assert p.swap_in_slots.tolist() == [0, 1, 8]
    assert p.swap_out_slots.tolist() == []
    assert {p.slots.dtype, p.unique_slots.dtype, p.table_offsets.dtype, p.grad_row.dtype} == {np.dtype(np.int32)}
    assert e.record_bytes == 2 * DIM * 4


def test_pooled_plan_with_a_shared_key() -> None:
    e = engine(table("a"), table("b"), columns=[4, 0], means=[True, False])
    bags = [[9], [], [1, 2], [2, 1, 1, 3]]
    assert plan(e, bags, keys=[1, 1], batch=2).positions is None
    p = plan(e, bags, keys=[1, 1], batch=2, weighted=True)
    assert p.offsets.tolist() == [0, 2, 6, 8, 12]
    assert p.positions.tolist() == [0, 3, 4, 1, 2, 5, 6, 9, 10, 7, 8, 11]
    assert p.grad_row.tolist() == [0, 1, 1, 0, 1, 1] * 2
    assert p.grad_column is not None
    assert p.grad_column.tolist() == [4] * 6 + [0] * 6
    assert p.scale is not None
    assert p.scale.tolist() == [0.5, 0.25, 0.25, 0.5, 0.25, 0.25] + [1.0] * 6


def test_empty_batches() -> None:
    e = engine(table("a"), columns=[0])
    for bags, batch in ([[], [], []], 3), ([], 0):
        p = plan(e, bags, keys=[0], batch=batch)
        assert p.offsets.tolist() == [0] * (batch + 1)
        assert p.slots.size == p.unique_slots.size == p.swap_in_slots.size == 0
        assert p.segment_offsets.tolist() == [0]
        assert p.table_offsets.tolist() == [0, 0]
        apply(e, p)
    found = e.find(np.array([], np.int64), np.array([0]), np.array([0]), 0, 0, 0)
    assert found.all_resident
    assert found.offsets.tolist() == [0]
    assert e.bag_ranges(np.array([0]), np.array([0]), 0, 5).tolist() == [0]


def test_evaluation_reads_the_same_records() -> None:
    e = engine(table("a", slots=3))
    cache = np.zeros((3, e.record_bytes), np.uint8)
    for ids in ([1, 2, 3], [4, 5]):
        p = plan(e, [ids])
        swap(e, cache, p)
        cache[p.unique_slots] = p.unique_slots[:, None] + 10
        p.release()
    before = e.tables.stats()
    ids = np.array([3, 99, 4, 1, 99, 3])
    found = e.find(ids, np.array([0, 2, 6]), np.array([0]), 2, 0, 2)
    assert not found.all_resident
    assert found.host_count == 2
    assert found.resident_slots.size == 2
    host = records(e, found.host_count)
    e.read(found, host)
    rows = np.concatenate([cache[found.resident_slots], host])[found.index]
    fresh = records(e, 1)
    e.tables.initial_records(0, np.array([99]), fresh)
    assert (rows[1] == fresh[0]).all()
    assert (rows[4] == fresh[0]).all()
    assert (rows[[0, 5]] == 12).all()
    assert (rows[3] == 10).all()
    part = e.find(ids, np.array([0, 2, 6]), np.array([0]), 2, 0, 1)
    assert part.index.size == 2
    assert part.offsets.tolist() == [0, 2]
    resident = e.find(np.array([3, 4]), np.array([0, 2]), np.array([0]), 1, 0, 1)
    assert resident.all_resident
    assert resident.resident_slots.size == 0
    assert e.tables.stats() == before
    assert e.tables.row_count(0) == 5


def test_a_cache_too_small_leaves_the_engine_usable() -> None:
    e = engine(table("small", slots=2), table("b"))
    held = apply(e, plan(e, [[1], [1]]))
    message = (
        "table 'small': this batch needs 2 distinct rows in the device cache, which has 2 slots "
        r"\(1 pinned by batches in flight\); enlarge it with cache=..., or use a smaller batch"
    )
    with pytest.raises(_engine.CacheTooSmallError, match=message):
        plan(e, [[2, 3], [1, 2]])
    assert e.tables.rows(0)[0].tolist() == e.tables.rows(1)[0].tolist() == [1]
    assert not held.released
    held.release()
    held.release()
    assert held.released
    assert plan(e, [[2, 3], [1, 2]]).unique_slots.tolist() == [1, 0, 2, 3]


def test_a_dropped_plan_ends_its_pins() -> None:
    e = engine(table("a", slots=1))
    for i in range(5):
        p = plan(e, [[i]])
        if i % 2:
            apply(e, p)
        view = p.unique_slots
        del p
        gc.collect()
        assert e.in_flight() == 0
    assert view.tolist() == [0]
    assert e.tables.rows(0)[0].tolist() == [1, 3], "those that were applied"


def test_views_outlive_plan_and_engine() -> None:
    e = engine(table("a"))
    slots = plan(e, [[5, 6, 5]]).slots
    for i in range(3):
        plan(e, [[i, 9, 8]])
    del e
    gc.collect()
    assert slots.tolist() == [0, 1, 0]


def test_capacity() -> None:
    e = engine(table("full", capacity=3))
    run(e, [[1, 2, 3]])
    for attempt in (lambda: plan(e, [[1, 77]]), lambda: e.tables.insert(0, np.array([2, 77]))):
        with pytest.raises(_engine.CapacityError, match=r"'full'.* 3 ids.* 77 "):
            attempt()
    assert e.tables.row_count(0) == 3
    assert issubclass(_engine.CapacityError, RuntimeError)


def test_bounds_fatal() -> None:
    e = engine(table("i", hashed=False, rows=10))
    for dtype in (np.int32, np.int64):
        with pytest.raises(IndexError, match=r"'i': id -1 .*num_embeddings 10 \(2 such ids"):
            plan(e, [[3, -1, 10]], dtype)
    with pytest.raises(IndexError, match="'i': id 10"):
        e.find(np.array([10]), np.array([0, 1]), np.array([0]), 1, 0, 1)
    with pytest.raises(IndexError, match="'i': id 10"):
        e.tables.insert(0, np.array([3, 10]))
    assert e.tables.stats()["batches"] == 0
    assert e.tables.stats()["bounds_errors"] == 0


@pytest.mark.parametrize("mode", ["warning", "ignore", "none"])
def test_ids_out_of_bounds_are_replaced_by_zero(mode: str) -> None:
    e = engine(table("i", hashed=False, rows=10, bounds_check=mode))
    p = plan(e, [[3, -1, 10, 0]])
    assert p.slots.tolist() == [0, 1, 1, 1]
    warnings = [("i", 2, -1)] if mode == "warning" else []
    assert p.bounds_warnings == warnings
    assert e.tables.stats()["bounds_errors"] == 0, "counted when the plan is applied"
    apply(e, p)
    assert e.tables.stats()["bounds_errors"] == 2
    assert e.tables.take_bounds_warnings() == []
    e.find(np.array([3, -1, 10]), np.array([0, 3]), np.array([0]), 1, 0, 1)
    assert e.tables.take_bounds_warnings() == warnings
    assert e.tables.take_bounds_warnings() == []


@pytest.mark.parametrize(
    ("values", "offsets", "keys", "batch", "error", "message"),
    [
        ([1.0], [0, 1], [0], 1, TypeError, "ids must be int32 or int64, got float64"),
        (np.array([1], np.uint64), [0, 1], [0], 1, TypeError, "ids .*uint64"),
        (np.array([1], np.int16), [0, 1], [0], 1, TypeError, "ids .*int16"),
        ([1], [0.0, 1.0], [0], 1, TypeError, "offsets .*float64"),
        ([[1]], [0, 1], [0], 1, ValueError, "ids must have one dimension"),
        ([1], [1, 1], [0], 1, ValueError, "offsets must start at 0, got 1"),
        ([1], [0, 2, 1], [0], 1, ValueError, r"must not decrease: offsets\[1\] is 2, offsets\[2\] is 1"),
        ([1, 2], [0, 1], [0], 1, ValueError, "must end at the number of ids, 2, got 1"),
        ([1], [0, 1, 1, 1], [0], 2, ValueError, "batch_size 2 does not fit offsets of length 4"),
        ([1], [0, 1], [0], 0, ValueError, "batch_size 0"),
        ([1], [0, 1], [0], -1, ValueError, "batch_size -1"),
        ([1], [0, 1], [1], 1, ValueError, r"feature_keys\[0\] is 1"),
        ([1], [0, 1], [-1], 1, ValueError, r"feature_keys\[0\] is -1"),
        ([1], [0, 1], [0, 0], 1, ValueError, "feature_keys must have one entry per feature, 1, got 2"),
        ([], [], [0], 1, (TypeError, ValueError), "offsets|ids"),
    ],
)
def test_wrong_batches(values: Any, offsets: Any, keys: Any, batch: int, error: Any, message: str) -> None:
    e = engine(table("a"))
    with pytest.raises(error, match=message):
        e.plan(np.asarray(values), np.asarray(offsets), np.asarray(keys), batch)
    assert e.tables.row_count(0) == 0
    assert plan(e, [[1]]).slots.tolist() == [0]


def test_strided_ids() -> None:
    e = engine(table("a"))
    ids = np.arange(12)[::3]
    p = apply(e, Planned(e.plan(ids, np.array([0, 9, 4, 9])[::2], np.array([0]), 1)))
    assert p.slots.size == 4
    assert e.tables.rows(0)[0].tolist() == ids.tolist()


def test_wrong_record_arrays() -> None:
    e = engine(table("a"))
    p = plan(e, [[1, 2]])
    host = p.host
    for wrong in (records(e, 1), records(e, 2).astype(np.int8), records(e, 4)[::2], records(e, 2)[:, :-1]):
        with pytest.raises(ValueError, match=r"records must be a contiguous uint8 array of shape \[2, 32\]"):
            e.read_in(host, wrong)
    frozen = records(e, 2)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="writeable"):
        e.read_in(host, frozen)
    apply(e, p)
    with pytest.raises(IndexError, match="rows"):
        e.tables.read_rows(0, np.arange(1, 3), np.arange(1, 3), records(e, 2))
    with pytest.raises(ValueError, match="1 ids and 2 rows"):
        e.tables.read_rows(0, np.arange(1), np.arange(2), records(e, 2))
    with pytest.raises(IndexError, match="table 1"):
        e.tables.row_count(1)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"slots": 0}, "'t': slots must be at least 1"),
        ({"rows": 0}, "num_embeddings must be at least 1"),
        ({"capacity": -1}, "capacity"),
        ({"state_init": []}, "state_init must have one value per state block, 1, got 0"),
        ({"slots": 2**31}, "2\\^30 slots"),
        ({"bounds_check": "no_such"}, "'fatal', 'warning', 'ignore' or 'none'"),
    ],
)
def test_wrong_specs(other: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine(table(**other))


def test_wrong_groups() -> None:
    one = [table("a")]
    with pytest.raises(ValueError, match=f"policy 'no_such'.*{', '.join(map(repr, _engine.cache_policies()))}"):
        _engine.Engine(one, DIM, 0, [DIM], [0], [], [], "no_such")
    with pytest.raises(ValueError, match="ordered by table"):
        _engine.Engine([*one, table("b")], DIM, 0, [DIM], [1, 0], [], [])
    with pytest.raises(ValueError, match="one entry per feature"):
        _engine.Engine(one, DIM, 0, [DIM], [0], [0, 4], [False, False])
    with pytest.raises(ValueError, match="initializer kind 'no_such'"):
        _engine.Initializer("no_such", 0.0, 0.0, 0.0, 0.0)


def test_sizes_that_would_overflow() -> None:
    for dim in (2**61, 2**62 + 1, 2**24 + 1, 0):
        with pytest.raises(ValueError, match=f"dim must be between 1 and 16777216, got {dim}"):
            _engine.Engine([table("a")], dim, 0, [], [0], [], [])
    e = engine(table("a"))
    run(e, [[1]])
    sums = np.empty((1, 2 * DIM), np.float32)
    for begin, end in ((-(2**63), 1), (-1, 0), (3, 2)):
        with pytest.raises(IndexError, match="begin <= end"):
            e.read_spilled(begin, end, records(e, 1), sums)
    with pytest.raises(IndexError, match="not within"):
        e.read_spilled(0, 1, records(e, 1), sums)
    for row in (2**63 - 1, -(2**63), 1):
        with pytest.raises(IndexError, match=f"'a': row {row} is not one of its rows"):
            e.tables.read_rows(0, np.array([1]), np.array([row]), records(e, 1))
        with pytest.raises(IndexError, match=f"'a': row {row} is not one of its rows"):
            e.tables.write_rows(0, np.array([1]), np.array([row]), records(e, 1))


def test_memory_limit_names_the_table() -> None:
    e = engine(table("big", slots=2))
    run(e, [[1, 2]])
    e.tables.set_memory_limit(0)
    with pytest.raises(MemoryError, match="table 'big'"):
        plan(e, [[3]])
    with pytest.raises(MemoryError, match="table 'big'"):
        e.tables.write_rows(0, np.array([2]), np.array([0]), np.zeros((1, e.record_bytes), np.uint8))
    assert e.tables.row_count(0) == 2
    e.tables.set_memory_limit(1 << 40)
    assert plan(e, [[3]]).swap_out_slots.tolist() == [0]


def test_pending_gradients_follow_their_rows() -> None:
    e = engine(table("a", slots=2))
    cache = np.zeros((2, e.record_bytes), np.uint8)
    p = plan(e, [[1, 2]])
    swap(e, cache, p)
    assert not e.window_open()
    e.mark(p.host)
    assert e.window_open()
    p.release()
    with pytest.raises(RuntimeError, match="released"):
        e.mark(p.host)
    p = plan(e, [[3]])
    assert p.window_out_slots.tolist() == p.swap_out_slots.tolist() == [0]
    assert p.window_in == p.window_in_slots.size == 0
    with pytest.raises(ValueError, match="writes back sums"):
        e.complete_write_back(p.host, records(e, 1))
    sums = np.arange(2 * DIM, dtype=np.float32)[None]
    swap(e, cache, p, sums)
    p.release()
    assert [part.tolist() for part in e.window_rows()] == [[1], [0, 1], [0], [0, 1]]
    away_records, away_sums = records(e, 1), np.zeros_like(sums)
    e.read_spilled(0, 1, away_records, away_sums)
    assert (away_sums == sums).all()
    e.write_spilled(0, 1, away_records + 1)
    p = plan(e, [[1]])
    assert p.window_in_slots.tolist() == p.swap_in_slots.tolist()
    back = np.zeros_like(sums)
    e.read_sums(p.host, back)
    assert (back == sums).all()
    swap(e, cache, p, np.zeros((p.window_out, 2 * DIM), np.float32))
    assert (cache[p.slots[0]] == away_records[0] + 1).all()
    with pytest.raises(RuntimeError, match="before it is applied"):
        e.read_sums(p.host, back)
    e.close_window()
    assert not e.window_open()
    assert [part.tolist() for part in e.window_rows()] == [[], [0, 0], [], [0, 0]]


def test_clear_table_and_seeds() -> None:
    e = engine(table("a", seed=-1))
    p = plan(e, [[1]])
    with pytest.raises(RuntimeError, match=r"clearing a table needs .*: 1 plans are not applied"):
        e.tables.clear(0)
    apply(e, p)
    with pytest.raises(RuntimeError, match="'a' cannot be cleared while 1 of its rows"):
        e.tables.clear(0)
    p.release()
    e.tables.clear(0)
    assert e.tables.row_count(0) == 0
    assert plan(e, [[4]]).slots.tolist() == [0]
    same, other = records(e, 1), records(e, 1)
    engine(table("a", seed=2**64 - 1)).tables.initial_records(0, np.array([1]), same)
    e.tables.initial_records(0, np.array([1]), other)
    assert (same == other).all()


def test_candidates_that_come_in_the_order_of_a_map() -> None:
    """Inserting ids in the iteration order of another map does not make this map grow beyond its capacity."""
    source = engine(table("s", slots=20000))
    source.tables.insert(0, np.random.default_rng(3).integers(-(2**62), 2**62, 6000))
    order = source.saves.scan_ids(0, 0, 6000)[0][:400]
    e = engine(table("t", slots=1000, lifecycle=_engine.Rules(rules=[("count", {"threshold": 2})]), columns=["count"]))
    others = np.arange(3000)
    e.lifecycle.set_candidates(0, others, {"count": np.full(3000, 1)})
    e.lifecycle.set_candidates(0, others[:0], {})
    bytes_before = e.tables.memory()["candidate_bytes"]
    run(e, [[*order.tolist(), *order[::2].tolist()]])
    assert e.tables.memory()["candidate_bytes"] == bytes_before
    assert sorted(e.tables.rows(0)[0].tolist()) == sorted(order[::2].tolist())
    assert e.lifecycle.candidates(0)[0].tolist() == sorted(order[1::2].tolist())


def test_an_unknown_rule_or_parameter_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match=r"'no_such' is not known; use one of .*'count'.*'rows'"):
        _engine.Rules(rules=[("age", {"seconds": 3}), ("no_such", {})])
    with pytest.raises(ValueError, match="rule 'idle': parameter 'no_such' is not known; use 'batches'"):
        _engine.Rules(rules=[("idle", {"batches": 3, "no_such": 3})])
    with pytest.raises(ValueError, match="rule 'idle': 'batches' must be a whole number, 1 or more"):
        _engine.Rules(rules=[("idle", {"batches": 2.5})])
