"""Admission by a sketch, and by probability with one random draw per id and batch.

A sketch never undercounts, and overcounts no more often than docs/admission_eviction.md states. The oracle also covers
both kinds of admission.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from coin_reference import Coin, philox
from embeddings import ids_of, one_table
from sketch_reference import Sketch as PlainSketch

from rec_sdk_torch.rules import Age, Count, Probability, ShowClick, Sketch
from rec_sdk_torch.tbe import TableBatchedEmbedding, TableLifecycle

THRESHOLD = 4
LOOKUPS, BATCH = 60_000, 6_000


def stream(kind: str, lookups: int = LOOKUPS) -> np.ndarray:
    rng = np.random.default_rng(3)
    ids = rng.zipf(1.3, lookups) if kind == "power law" else rng.integers(0, 40_000, lookups)
    return np.asarray(ids % 2**62, np.int64) * 0x9E3779B1 - 2**40  # positive and negative ids with a constant stride


def table(device: torch.device, cache: int = 40_000, **rules: Any) -> TableBatchedEmbedding:
    lifecycle = TableLifecycle(**{"admission": Count(THRESHOLD), **rules})
    return one_table(device, rows=1000, dim=1, lifecycle=lifecycle, cache=cache, seed=5)


def look_up(embedding: TableBatchedEmbedding, ids: np.ndarray) -> torch.Tensor:
    return embedding(torch.from_numpy(ids), torch.tensor([0, len(ids)]))


def admitted(embedding: TableBatchedEmbedding) -> set[int]:
    return set(ids_of(embedding))


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
def test_false_admissions_are_within_the_documented_bound(
    device: torch.device, kind: str, width: int, size: str
) -> None:
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
def test_count_errors_are_within_the_documented_bound(kind: str) -> None:
    """After N lookups, a count exceeds the true count by more than e / width * N with probability at most e^-depth."""
    ids = stream(kind, 8_000)
    for width, depth in (200, 1), (500, 3), (2_000, 2):
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
def test_sketch_cells_match_the_reference(device: torch.device, depth: int, width: int, threshold: int) -> None:
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
        assert bytes(embedding.view("t").sketch().tolist()) == sketch.state()


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


def filled(device: torch.device, ids: np.ndarray) -> TableBatchedEmbedding:
    embedding = table(device, **sketched(1000, threshold=200))
    look_up(embedding, ids)
    return embedding


@pytest.mark.parametrize(("width", "depth"), [(700, 4), (1001, 4), (333, 4), (1000, 2), (1000, 6)])
def test_sketches_of_other_shapes_and_ranks_never_count_too_little(
    device: torch.device, width: int, depth: int
) -> None:
    ids = stream("power law", 3_000) % 250
    parts = [ids[ids % 2 == home] for home in (0, 1)]
    states = [filled(device, part).view("t").sketch() for part in parts]
    target = table(device, **sketched(width, depth, 200))
    target.view("t").set_sketch(states)
    counts = Counter(ids.tolist())
    for i, count in counts.items():
        look_up(target, np.full(max(1, 200 - count), i))
    assert admitted(target) == counts.keys()


def test_a_sketch_state_loads_unchanged_into_another_table(device: torch.device) -> None:
    source = filled(device, stream("uniform", 3_000))
    target = table(device, **sketched(1000, threshold=200))
    target.view("t").set_sketch([source.view("t").sketch()])
    assert torch.equal(target.view("t").sketch(), source.view("t").sketch())
    target.view("t").set_sketch([])
    assert not target.view("t").sketch()[24:].any()


def test_invalid_sketch_states_are_refused(device: torch.device) -> None:
    embedding, exact = filled(device, np.arange(9)), table(device)
    view, state = embedding.view("t"), embedding.view("t").sketch()
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
    assert torch.equal(embedding.view("t").sketch(), state)
    with pytest.raises(MemoryError, match=r"table 't': its sketch needs .* bytes and .* are free"):
        look_up(table(device, **sketched(2**60)), np.array([1]))
    with pytest.raises(ValueError, match="table 't' has no sketch"):
        exact.view("t").set_sketch([state])
    assert len(exact.view("t").sketch()) == 0


def test_candidates_of_counters_are_moved_to_a_sketch(device: torch.device) -> None:
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
    before = embedding.view("t").sketch()
    embedding.load_state_dict(saved)
    assert admitted(embedding) == {1}, "other rows go"
    twin = copy.deepcopy(embedding)
    for each in (embedding, twin):
        assert torch.equal(each.view("t").sketch(), before)
        look_up(each, np.array([2]))
        assert admitted(each) == {1, 2}


def test_a_row_has_the_timestamp_of_its_last_lookup(device: torch.device) -> None:
    embedding = table(device, admission=Sketch(3, bytes=4000), eviction=Age(10))
    for stamps in (3, 4), (9, 7):
        embedding(torch.tensor([5, 5]), torch.tensor([0, 2]), timestamps=torch.tensor(stamps))
    assert embedding.view("t").row_columns(torch.tensor([5]))["timestamp"].tolist() == [7]


# ---- admission by probability


def test_philox_matches_known_answers() -> None:
    """The expected values are the known-answer tests of Random123."""
    assert philox([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 2**32 - 1
    assert philox([ones] * 4, [ones] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@pytest.mark.parametrize("probability", [0.01, 0.3, 1.0])
def test_the_admitted_fraction_matches_the_probability(device: torch.device, probability: float) -> None:
    """In each batch the number of admitted ids is within five standard deviations of its expectation."""
    embedding, ids = table(device, 12_000, admission=Probability(probability)), np.arange(-5_000, 5_000)
    before = 0
    for batch in range(1, 5):
        look_up(embedding, ids)
        rows, left = admitted(embedding), len(ids) - before
        deviation = (left * probability * (1 - probability)) ** 0.5
        assert abs(len(rows) - before - left * probability) <= 5 * deviation
        assert batch > 1 or rows == {i for i in ids.tolist() if Coin(5, "t").toss(i, 1, probability)}
        before = len(rows)
    assert embedding.memory_report("t")["candidates"] == 0
    assert len(embedding.view("t").candidates()[0]) == 0


def test_all_lookups_of_an_id_in_a_batch_share_one_draw(device: torch.device) -> None:
    embedding = table(device, admission=Probability(0.5), default_value=7.0)
    rows = embedding(torch.arange(100).repeat(2), torch.arange(201)).flatten()
    assert torch.equal(rows[:100], rows[100:])
    assert (rows != 7.0).sum() == 2 * embedding.view("t").count()


def test_admission_by_probability_has_no_candidates(device: torch.device) -> None:
    view = table(device, admission=Probability(0.5)).view("t")
    with pytest.raises(ValueError, match="table 't' does not count ids without a row, so it has no candidates"):
        view.set_candidates(torch.tensor([5]), {"count": torch.tensor([1])})


def test_clicks_stay_with_their_ids_despite_padding(device: torch.device) -> None:
    rules = TableLifecycle(admission=ShowClick(1, alpha=0, beta=1))
    embedding = one_table(device, rows=100, dim=1, lifecycle=rules, cache=10, padding_idx=7)
    ids, clicks = torch.tensor([7, 1, 2, 7, 3]), torch.tensor([1, 0, 1, 1, 0])
    embedding(ids, torch.tensor([0, 5]), clicks=clicks)
    assert embedding.view("t").ids().tolist() == [2]
