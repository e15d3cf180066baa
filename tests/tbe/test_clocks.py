"""The clock of a table with eviction by age: one timestamp in another unit must not make all ids too old."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import embeddings
import pytest
import torch
from embeddings import ids_of, one_table

from rec_sdk_torch.rules import Age, Count, Rows, Share
from rec_sdk_torch.tbe import Pooling, TableBatchedEmbedding, TableLifecycle

NOW = 1_700_000_000
AGE = 3600


def make(device: torch.device, **rules: Any) -> TableBatchedEmbedding:
    lifecycle = TableLifecycle(**{"eviction": Age(AGE), "every": 2} | rules)
    return one_table(device, pooling=Pooling.NONE, lifecycle=lifecycle)


def train(embedding: TableBatchedEmbedding, ids: list[int], timestamps: list[int]) -> None:
    embeddings.train(embedding, ids, timestamps=torch.tensor(timestamps))


def stamps(embedding: TableBatchedEmbedding, *ids: int) -> list[int]:
    return embedding.view("t").row_columns(torch.tensor(ids))["timestamp"].tolist()


@pytest.fixture
def _warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("wrong", [NOW * 1000, NOW * 10**6, NOW * 10**9, 2**63 - 1])
@pytest.mark.parametrize("first", [False, True], ids=["later", "in the first batch"])
def test_a_timestamp_in_another_unit_is_ignored(device: torch.device, wrong: int, first: bool) -> None:
    embedding = make(device)
    if not first:
        train(embedding, [1, 2, 3], [NOW, NOW + 1, NOW + 2])
    message = f"table 't': 1 timestamps .* .id 7 came with {wrong}.*they count as"
    with pytest.warns(UserWarning, match=message):
        train(embedding, [3, 7, 4], [NOW + 3, wrong, NOW + 4])
    assert embedding.view("t").clocks()["timestamp"] == NOW + 4
    assert stamps(embedding, 3, 7, 4) == [NOW + 3, NOW + 4, NOW + 4]
    for step in range(4):
        train(embedding, [5], [NOW + step])
    assert ids_of(embedding) == [3, 4, 5, 7] if first else [1, 2, 3, 4, 5, 7]
    train(embedding, [5, 6], [NOW + AGE + 5] * 2)
    train(embedding, [5, 6], [NOW + AGE + 5] * 2)
    assert ids_of(embedding) == [5, 6], "and 7 leaves in time"


def test_a_whole_batch_in_another_unit_is_ignored(device: torch.device) -> None:
    embedding = make(device)
    train(embedding, [1, 2, 3], [NOW] * 3)
    with pytest.warns(UserWarning, match="2 timestamps .* .id 8 came with"):
        train(embedding, [8, 9], [NOW * 1000, NOW * 1000 + 1])
    assert (ids_of(embedding), stamps(embedding, 8)) == ([1, 2, 3, 8, 9], [NOW])


def test_timestamps_of_candidates_in_another_unit_are_ignored(device: torch.device) -> None:
    embedding = make(device, admission=Count(2))
    train(embedding, [1, 2, 2], [NOW] * 3)
    with pytest.warns(UserWarning, match="id 5"):
        train(embedding, [5, 1], [NOW * 1000, NOW + 1])
    ids, columns = embedding.view("t").candidates()
    assert (ids.tolist(), columns["timestamp"].tolist()) == ([5], [NOW + 1])


@pytest.mark.usefixtures("_warnings_are_errors")
def test_years_between_batches_are_accepted(device: torch.device) -> None:
    embedding = make(device, every=0)
    year = 365 * 24 * 3600
    train(embedding, [1, 2, 3], [0, NOW, NOW])  # missing timestamps are 0 in this data
    train(embedding, [4], [NOW + 9 * year])
    assert embedding.view("t").clocks()["timestamp"] == NOW + 9 * year
    assert stamps(embedding, 1, 4) == [0, NOW + 9 * year]


def test_a_dropped_plan_ignores_no_timestamp(device: torch.device) -> None:
    embedding = make(device)
    train(embedding, [1], [NOW])
    batch = {"indices": torch.tensor([2]), "offsets": torch.tensor([0, 1]), "timestamps": torch.tensor([NOW * 1000])}
    for _ in range(2):
        embedding.prefetch(**batch)
        embedding.queue.wait()
        assert embedding.view("t").clocks()["timestamp"] == NOW
    embedding.prefetch(**batch)
    embedding.queue.wait()
    with pytest.warns(UserWarning, match="id 2"):
        embedding(**batch).sum().backward()
    assert stamps(embedding, 2) == [NOW]


# ---- a warning if most rows are evicted at once; setting a clock back


@pytest.mark.parametrize("call", ["step", "evict"])
def test_evicting_more_than_half_of_the_rows_warns(device: torch.device, call: str) -> None:
    embedding = make(device, every=2 if call == "step" else 0)
    train(embedding, [1, 2, 3], [NOW] * 3)
    message = rf"table 't': 3 of its 4 rows were evicted at once.*latest timestamp .*{NOW + AGE + 1}.*set_clocks"
    if call == "step":
        with pytest.warns(UserWarning, match=message):
            train(embedding, [4], [NOW + AGE + 1])
    else:
        train(embedding, [4], [NOW + AGE + 1])
        with pytest.warns(UserWarning, match=message):
            assert embedding.view("t").evict() == 3
    assert ids_of(embedding) == [4]


@pytest.mark.usefixtures("_warnings_are_errors")
@pytest.mark.parametrize("rules", [{}, {"eviction": Share(0.9)}, {"eviction": [], "bound": Rows(3)}])
def test_ordinary_evictions_do_not_warn(device: torch.device, rules: dict[str, Any]) -> None:
    embedding = make(device, **rules)
    train(embedding, [1, 2], [NOW] * 2)
    train(embedding, [3, 4], [NOW + AGE + 1] * 2)
    assert len(ids_of(embedding)) < 4
    train(embedding, list(range(5, 15)), [NOW + AGE + 1] * 10)  # a bound evicts most of the rows


def test_the_clock_can_be_repaired(device: torch.device) -> None:
    """Repairs the clock of a table that accepted wrong timestamps in its first batch."""
    embedding = make(device, every=0, admission=Count(2))
    train(embedding, [1, 1, 2, 2, 3], [NOW * 1000] * 5)
    train(embedding, [4, 4], [NOW] * 2)
    view = embedding.view("t")
    view.set_clocks({"timestamp": NOW})
    assert view.clocks() == {"batches": 2, "steps": 2, "timestamp": NOW}
    assert view.evict() == 0
    assert stamps(embedding, 1, 2, 4) == [NOW] * 3, "what is later than the clock is of now"
    train(embedding, [5, 5], [NOW + AGE + 1] * 2)
    with pytest.warns(UserWarning, match="3 of its 4"):
        assert view.evict() == 3
    assert (ids_of(embedding), view.candidates()[0].tolist()) == ([5], [])


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 1.5, "7", True])
def test_invalid_clocks_are_refused(device: torch.device, value: object) -> None:
    embedding = make(device)
    with pytest.raises(ValueError, match="clock 'timestamp' is"):
        embedding.view("t").set_clocks({"timestamp": value})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="clock 'steps' is -1"):
        embedding.view("t").set_clocks({"steps": -1})
