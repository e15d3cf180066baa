"""Scores with a half-life, and the shows, clicks and timestamps that they are computed from: values and errors.

The oracle covers random scores.
"""

from __future__ import annotations

from typing import Any

import embeddings
import pytest
import torch
from embeddings import ids_of, one_table
from lifecycle_reference import MOST, decayed

from rec_sdk_torch.rules import Age, Count, Rows, Score, ShowClick, Sketch
from rec_sdk_torch.tbe import TableBatchedEmbedding, TableLifecycle


def table(device: torch.device, **rules: Any) -> TableBatchedEmbedding:
    return one_table(device, lifecycle=TableLifecycle(**rules))


def train(embedding: TableBatchedEmbedding, *ids: int, **signals: torch.Tensor) -> None:
    embeddings.train(embedding, ids, **signals)


@pytest.mark.parametrize("half_life", [1, 3, 7, 1000, 10**9])
def test_the_reference_decays_by_powers_of_two(half_life: int) -> None:
    for batches in (0, 1, 2, 5, 6, 7, 999, 12_345, 2**32 - 1):
        found, right = decayed(5.0, batches, half_life), 5.0 * 2.0 ** -(batches / half_life)
        assert found == pytest.approx(right, rel=1e-13, abs=1e-300)


def test_scores_are_of_the_last_batch_that_had_the_row(device: torch.device) -> None:
    embedding = table(device, bound=Rows(50), score=Score(half_life=2))
    for ids in (1, 1, 2), (2,), (2, 2), (1,), (3,):
        train(embedding, *ids)
    columns = embedding.view("t").row_columns(torch.tensor([1, 2, 3]))
    assert columns["last_use"].tolist() == [4, 3, 5]
    right = [2 * 2**-1.5 + 1, (1 * 2**-0.5 + 1) * 2**-0.5 + 2, 1]
    torch.testing.assert_close(columns["score"], torch.tensor(right, dtype=torch.float64), rtol=1e-15, atol=0)


@pytest.mark.parametrize("half_life", [1, 3, 7, 2000])
def test_scores_of_rows_that_were_idle_for_long_have_the_bits_of_the_reference(
    device: torch.device, half_life: int
) -> None:
    embedding = table(device, bound=Rows(50), score=Score(half_life=half_life))
    train(embedding, 1)
    view, one = embedding.view("t"), torch.tensor([1])
    for idle in (1, 999, 1000, 1010, 1023, 1024, 2500, 2**31):
        view.write_row_columns(one, {"score": torch.tensor([1e300], dtype=torch.float64)})
        clocks = view.clocks()
        view.set_clocks(clocks | {"batches": clocks["batches"] + idle - 1})
        train(embedding, 1)
        assert view.row_columns(one)["score"].tolist() == [decayed(1e300, idle, half_life) + 1.0], idle


def test_a_row_with_a_future_timestamp_keeps_its_score(device: torch.device) -> None:
    embedding = table(device, bound=Rows(50), score=Score(half_life=1), eviction=Age(100))
    train(embedding, 1, timestamps=torch.tensor([50]))
    train(embedding, 2, timestamps=torch.tensor([50]))
    view, one = embedding.view("t"), torch.tensor([1])
    before = view.row_columns(one)
    view.set_clocks(view.clocks() | {"timestamp": 40})  # the rows' timestamps are later than the clock
    assert view.evict() == 0
    after = view.row_columns(one)
    assert (before["timestamp"].item(), after["timestamp"].item()) == (50, 40)
    assert {**after, "timestamp": before["timestamp"]} == before


def test_decay_evicts_formerly_frequent_ids_first(device: torch.device) -> None:
    for half_life, stays in (0, 1), (1, 2):
        embedding = table(device, bound=Rows(2), score=Score(half_life=half_life))
        train(embedding, *[1] * 40)
        for _ in range(9):
            train(embedding, 2, 2)
        train(embedding, 3, 3, 3)
        assert ids_of(embedding) == ([stays, 3] if half_life else [1, 2]), "by count without it"


def test_admission_and_scores_have_weights_of_their_own(device: torch.device) -> None:
    rules: dict[str, Any] = {"bound": Rows(50), "score": Score(alpha=0, beta=10)}
    for admission in Count(2), Sketch(2, bytes=400):
        embedding = table(device, admission=admission, **rules)
        train(embedding, 1, 2, 2, clicks=torch.tensor([1, 0, 1]))
        assert ids_of(embedding) == [2], "a click is no lookup"
        assert embedding.view("t").row_columns(torch.tensor([2]))["score"].tolist() == [10]


def test_saturated_counts_still_add_to_scores(device: torch.device) -> None:
    """If the score of a saturated count decayed to 0, the hottest id would be evicted."""
    embedding = table(device, bound=Rows(50), score=Score(beta=10, half_life=1))
    train(embedding, 1, clicks=torch.tensor([1]))
    view, one = embedding.view("t"), torch.tensor([1])
    ended = dict.fromkeys(("count", "clicks"), torch.tensor([MOST - 1]))
    view.write_row_columns(one, ended | {"score": torch.tensor([8.0], dtype=torch.float64)})
    for _ in range(2):
        train(embedding, 1, 1, 1, clicks=torch.tensor([1, 0, 1]))
    columns = view.row_columns(one)
    assert (columns["count"].item(), columns["clicks"].item()) == (MOST, MOST)
    assert columns["score"].item() == (8 / 2 + 23) / 2 + 23


# ---- invalid signals

INT32, INT64 = 2**31 - 1, 2**63 - 1


def counting(device: torch.device) -> TableBatchedEmbedding:
    return table(device, admission=ShowClick(10**12, beta=1), eviction=Age(10))


def train_two(embedding: TableBatchedEmbedding, **given: torch.Tensor) -> None:
    known = {"shows": torch.tensor([1, 1]), "clicks": torch.tensor([0, 0]), "timestamps": torch.tensor([5, 5])}
    embeddings.train(embedding, [7, 8], bag=1, **known | given)


def counted(embedding: TableBatchedEmbedding) -> dict[str, list[int]]:
    ids, columns = embedding.view("t").candidates()
    return {"ids": ids.tolist()} | {name: values.tolist() for name, values in columns.items()}


@pytest.mark.parametrize(
    ("name", "value", "dtype", "allowed"),
    [
        ("shows", 2**32 + 1, torch.int64, f"1 to {INT32}"),
        ("shows", 2**31, torch.int64, f"1 to {INT32}"),
        ("shows", 0, torch.int32, f"1 to {INT32}"),
        ("shows", -4, torch.int8, f"1 to {INT32}"),
        ("shows", False, torch.bool, f"1 to {INT32}"),
        ("clicks", 2**32 + 1, torch.int64, f"to {INT32}"),
        ("clicks", 2**31, torch.uint32, f"to {INT32}"),
        ("timestamps", -(2**63), torch.int64, f"{-INT64} to {INT64}"),
        ("timestamps", 2**63 + 5, torch.uint64, f"{-INT64} to {INT64}"),
    ],
)
@pytest.mark.parametrize("ahead", [False, True], ids=["", "prefetched"])
def test_signals_out_of_range_are_refused(
    device: torch.device, name: str, value: int, dtype: torch.dtype, allowed: str, ahead: bool
) -> None:
    embedding = counting(device)
    train_two(embedding)
    before = counted(embedding)
    given = {name: torch.tensor([1, value], dtype=dtype)}
    if ahead:
        embedding.prefetch(torch.tensor([7, 8]), torch.tensor([0, 1, 2]), **given)
        embedding.queue.wait()
    with pytest.raises(ValueError, match=f"^{name} has {value!r}.* allowed are .*{allowed}"):
        train_two(embedding, **given)
    assert counted(embedding) == before
    train_two(embedding)


def test_signals_in_range_are_accepted(device: torch.device) -> None:
    embedding = counting(device)
    train_two(embedding, shows=torch.tensor([INT32, 1]), clicks=torch.tensor([INT32, -(2**32) + 1]))
    train_two(embedding, shows=torch.tensor([True, True]), clicks=torch.tensor([-4, 2]))
    train_two(embedding, timestamps=torch.tensor([6, -7], dtype=torch.int16), clicks=torch.tensor([255, 0]).byte())
    assert counted(embedding) == {
        "ids": [7, 8],
        "count": [INT32 + 2, 3],
        "last_use": [3, 3],
        "clicks": [INT32 + 255, 2],
        "timestamp": [6, -7],
    }
