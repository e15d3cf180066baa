"""Admission by a sketch: it never counts too little, and too much no more often than docs/life.md says."""

from __future__ import annotations

import copy
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from sketch_reference import Sketch as PlainSketch

from rec_sdk_torch.rules import Age, Count, Idle, Rows, Sketch
from rec_sdk_torch.tbe import TableBatchedEmbedding, TableConfig, TableLife, TableOptimizer

THRESHOLD = 4
LOOKUPS, BATCH = 60_000, 6_000


def stream(kind: str, lookups: int = LOOKUPS) -> np.ndarray:
    rng = np.random.default_rng(3)
    ids = rng.zipf(1.3, lookups) if kind == "power law" else rng.integers(0, 40_000, lookups)
    return np.asarray(ids % 2**62, np.int64) * 0x9E3779B1 - 2**40  # of all signs, with a stride


def table(device: torch.device, cache: int = 40_000, **rules: Any) -> TableBatchedEmbedding:
    config = TableConfig("t", 1000, 1, life=TableLife(**{"admission": Count(THRESHOLD), **rules}))
    optimizer = TableOptimizer.create(torch.optim.SGD, {"lr": 0.1})
    return TableBatchedEmbedding([config], optimizer=optimizer, cache=cache, device=device, seed=1)


def look_up(embedding: TableBatchedEmbedding, ids: np.ndarray) -> torch.Tensor:
    return embedding(torch.from_numpy(ids), torch.tensor([0, len(ids)]))


def admitted(embedding: TableBatchedEmbedding) -> set[int]:
    return set(embedding.view("t").ids().tolist())


def sketched(width: int, depth: int = 4, threshold: int = THRESHOLD) -> dict[str, Sketch]:
    return {"admission": Sketch(threshold, width * depth, depth)}


@pytest.mark.parametrize(
    ("kind", "width", "size"),
    [
        ("power law", 300, "small"),
        ("power law", 3_000, ""),
        ("power law", 20_000, "large"),
        ("uniform", 3_000, "small"),
        ("uniform", 20_000, ""),
        ("uniform", 100_000, "large"),
    ],
)
def test_false_admissions_are_as_rare_as_stated(device: torch.device, kind: str, width: int, size: str) -> None:
    ids, depth = stream(kind), 4
    embedding = table(device, **sketched(width, depth))
    for begin in range(0, len(ids), BATCH):
        look_up(embedding, ids[begin : begin + BATCH])
    counts = Counter(ids.tolist())
    found = admitted(embedding)
    assert {i for i, count in counts.items() if count >= THRESHOLD} <= found, "it never counts too little"
    too_early = sum(counts[i] < THRESHOLD for i in found)
    counted = counted_by(embedding)
    stated = sum(
        min(1.0, (counted / (width * (THRESHOLD - count))) ** depth) for count in counts.values() if count < THRESHOLD
    )
    assert too_early <= stated
    rare = sum(count < THRESHOLD for count in counts.values())
    assert (too_early > rare / 10) == (size == "small"), "a sketch that is too small admits too much"
    assert (stated < rare / 10) == (size == "large"), "where this is, more than most ids are right"


def counted_by(embedding: TableBatchedEmbedding) -> int:
    return int(embedding.view("t").sketch().numpy()[24:32].view(np.int64)[0])


@pytest.mark.parametrize("kind", ["power law", "uniform"])
def test_counts_are_as_right_as_stated(kind: str) -> None:
    """An id is counted more than e / width * N too often with a chance of at most e^-depth."""
    ids = stream(kind, 30_000)
    for width, depth in (500, 1), (500, 3), (5_000, 2):
        sketch = PlainSketch(width * depth * 4, depth, 2**31)
        for i in ids.tolist():
            sketch.add(i)
        counts = Counter(ids.tolist())
        over = [sketch.estimate(i) - count for i, count in counts.items()]
        assert min(over) >= 0
        assert max(over) > 0, "else the test says nothing"
        beyond = sum(each > math.e / width * len(ids) for each in over)
        assert beyond <= len(over) * math.exp(-depth)


@pytest.mark.parametrize(("depth", "width", "threshold"), [(1, 50, 200), (4, 50, 250), (3, 700, 300), (16, 3, 70_000)])
def test_cells_are_those_of_plain_python(device: torch.device, depth: int, width: int, threshold: int) -> None:
    sketch = PlainSketch(size := depth * width * 4, depth, threshold)
    embedding = table(device, admission=Sketch(threshold, size, depth))
    rows: set[int] = set()
    for begin in range(0, 6_000, 1_500):
        ids = stream("power law")[begin : begin + 1_500]
        look_up(embedding, ids)
        for i in ids.tolist():
            if i not in rows:
                sketch.add(i)
        rows |= {i for i in ids.tolist() if sketch.estimate(i) >= threshold}
        assert admitted(embedding) == rows
        assert bytes(state_of(embedding).tolist()) == sketch.state()


def test_a_wide_sketch_is_a_counter_for_each_id(device: torch.device) -> None:
    ids, found = stream("power law", 20_000), []
    for more in {}, sketched(1 << 20):
        embedding = table(device, bound=Rows(10**6), **more)
        outputs = [look_up(embedding, ids[begin : begin + 2_000]) for begin in range(0, len(ids), 2_000)]
        rows = embedding.view("t").ids()
        found.append(
            (torch.cat(outputs).tolist(), rows.tolist(), embedding.view("t").row_columns(rows)["count"].tolist())
        )
    assert found[0] == found[1]


def test_memory_is_fixed(device: torch.device) -> None:
    embedding = table(device, **sketched(500))
    report = []
    for step in range(3):
        look_up(embedding, np.arange(1000 * step, 1000 * (step + 1)))
        report.append(embedding.memory_report("t")["candidates"])
    assert report == [2000, 2000, 2000]
    assert len(embedding.view("t").candidates()[0]) == 0


def test_cells_are_as_wide_as_the_threshold_needs(device: torch.device) -> None:
    for threshold, bytes_of_cell in (255, 1), (256, 2), (65535, 2), (65536, 4):
        embedding = table(device, admission=Sketch(threshold, bytes=64))
        width, depth, cell = embedding.view("t").sketch().numpy()[:24].view(np.int64).tolist()
        assert (width, depth, cell) == (16 // bytes_of_cell, 4, bytes_of_cell)
        embedding(torch.full((threshold - 1,), 7), torch.tensor([0, threshold - 1]))
        assert admitted(embedding) == set()
        look_up(embedding, np.array([7]))
        assert admitted(embedding) == {7}


def test_reading_counts_nothing(device: torch.device) -> None:
    embedding = table(device, **sketched(500))
    before = embedding.view("t").sketch()
    embedding.eval()
    look_up(embedding, np.arange(100))
    with torch.no_grad():
        embedding.train()
        look_up(embedding, np.arange(100))
    assert torch.equal(embedding.view("t").sketch(), before)


def test_cells_are_halved_with_so_many_lookups(device: torch.device) -> None:
    """At the end of a step."""
    embedding = table(device, admission=Sketch(200, bytes=4000, halve_after=50))
    for lookups, counted in (40, 40), (9, 49), (1, 25), (24, 49), (70, 59), (1, 30):
        output = look_up(embedding, np.full(lookups, 7))
        output.sum().backward()
        assert counted_by(embedding) == counted


def test_an_id_that_left_is_counted_still(device: torch.device) -> None:
    embedding = table(device, admission=Sketch(3, bytes=4000), eviction=Idle(1), every=1)
    look_up(embedding, np.array([5, 5, 5])).sum().backward()
    look_up(embedding, np.array([6])).sum().backward()
    assert admitted(embedding) == set()
    look_up(embedding, np.array([5])).sum().backward()
    assert admitted(embedding) == {5}


def state_of(embedding: TableBatchedEmbedding) -> torch.Tensor:
    return embedding.view("t").sketch()


def filled(device: torch.device, ids: np.ndarray) -> TableBatchedEmbedding:
    embedding = table(device, **sketched(1000, threshold=200))
    look_up(embedding, ids)
    return embedding


@pytest.mark.parametrize(("width", "depth"), [(700, 4), (1001, 4), (333, 4), (1000, 2), (1000, 6)])
def test_sketches_of_other_shapes_and_ranks_never_count_too_little(
    device: torch.device, width: int, depth: int
) -> None:
    ids = stream("power law", 3_000) % 1_000
    parts = [ids[ids % 2 == home] for home in (0, 1)]
    states = [state_of(filled(device, part)) for part in parts]
    target = table(device, **sketched(width, depth, 200))
    target.view("t").set_sketch(states)
    counts = Counter(ids.tolist())
    for i, count in counts.items():
        look_up(target, np.full(max(1, 200 - count), i))
    assert admitted(target) == counts.keys()


def test_a_state_goes_to_another_table_as_it_is(device: torch.device) -> None:
    source = filled(device, stream("uniform", 3_000))
    target = table(device, **sketched(1000, threshold=200))
    target.view("t").set_sketch([state_of(source)])
    assert torch.equal(state_of(target), state_of(source))
    target.view("t").set_sketch([])
    assert not state_of(target)[24:].any()


def test_states_that_cannot_be(device: torch.device) -> None:
    embedding, exact = filled(device, np.arange(9)), table(device)
    view, state = embedding.view("t"), state_of(embedding)
    for wrong in (state[:-1], state[:10], torch.zeros_like(state), torch.cat([state, state[-1:]])):
        with pytest.raises(ValueError, match="not the state of a sketch"):
            view.set_sketch([state, wrong])
    with pytest.raises(TypeError, match=r"is torch.int64 \(2,\), expected uint8 \[n\]"):
        view.set_sketch([torch.tensor([1, 2])])
    nothing: Any = None
    with pytest.raises(TypeError, match="table 't': the states of sketches are NoneType, expected a list"):
        view.set_sketch(nothing)
    with pytest.raises(TypeError, match="table 't': the state of a sketch is NoneType, expected a tensor"):
        view.set_sketch([nothing])
    assert torch.equal(state_of(embedding), state)
    with pytest.raises(MemoryError, match=r"table 't': its sketch needs .* bytes and .* are free"):
        look_up(table(device, **sketched(2**60)), np.array([1]))
    with pytest.raises(ValueError, match="table 't' counts in no sketch"):
        exact.view("t").set_sketch([state])
    assert len(state_of(exact)) == 0


def test_candidates_of_counters_go_into_a_sketch(device: torch.device) -> None:
    counters, sketch = table(device), table(device, **sketched(1000))
    look_up(counters, np.array([4, 4, 4, 5]))
    sketch.view("t").set_candidates(*counters.view("t").candidates())
    look_up(sketch, np.array([4, 5]))
    assert admitted(sketch) == {4}


def test_copies_and_loads_of_rows_keep_the_sketch(device: torch.device) -> None:
    embedding = table(device, admission=Sketch(2, bytes=4000))
    look_up(embedding, np.array([1, 1, 2])).sum().backward()
    saved = embedding.state_dict()
    look_up(embedding, np.array([3, 3])).sum().backward()
    before = state_of(embedding)
    embedding.load_state_dict(saved)
    assert admitted(embedding) == {1}, "other rows go"
    twin = copy.deepcopy(embedding)
    for each in (embedding, twin):
        assert torch.equal(state_of(each), before)
        look_up(each, np.array([2]))
        assert admitted(each) == {1, 2}


def test_a_row_has_the_timestamp_of_its_last_lookup(device: torch.device) -> None:
    embedding = table(device, admission=Sketch(3, bytes=4000), eviction=Age(10))
    for stamps in (3, 4), (9, 7):
        embedding(torch.tensor([5, 5]), torch.tensor([0, 2]), timestamps=torch.tensor(stamps))
    assert embedding.view("t").row_columns(torch.tensor([5]))["timestamp"].tolist() == [7]
