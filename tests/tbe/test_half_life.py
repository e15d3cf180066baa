"""Scores that decay with time, by half in so many batches. The oracle draws them; here are numbers and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from life_reference import MOST, decayed

import rec_sdk_torch as rst
from rec_sdk_torch.rules import Age, Count, Rows, Score, Share, Sketch
from rec_sdk_torch.tbe import TableBatchedEmbedding, TableConfig, TableLife, TableOptimizer


def table(device: torch.device, **rules: Any) -> TableBatchedEmbedding:
    optimizer = TableOptimizer.create(torch.optim.SGD, {"lr": 0.1})
    config = TableConfig("t", 100, 4, life=TableLife(**rules))
    return TableBatchedEmbedding([config], optimizer=optimizer, cache=50, device=device)


def train(embedding: TableBatchedEmbedding, *ids: int, **seen: torch.Tensor) -> None:
    embedding(torch.tensor(ids), torch.tensor([0, len(ids)]), **seen).sum().backward()


def known(embedding: TableBatchedEmbedding) -> set[int]:
    return set(embedding.view("t").ids().tolist())


@pytest.mark.parametrize("half_life", [1, 3, 7, 1000, 10**9])
def test_the_reference_is_a_power_of_two(half_life: int) -> None:
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
@pytest.mark.parametrize("idle", [1, 999, 1000, 1010, 1023, 1024, 2500, 2**31])
def test_scores_of_rows_that_were_idle_for_long_have_the_bits_of_the_reference(
    device: torch.device, half_life: int, idle: int
) -> None:
    embedding = table(device, bound=Rows(50), score=Score(half_life=half_life))
    train(embedding, 1)
    view, one = embedding.view("t"), torch.tensor([1])
    view.write_row_columns(one, {"score": torch.tensor([1e300], dtype=torch.float64)})
    clocks = view.clocks()
    view.set_clocks(clocks | {"batches": clocks["batches"] + idle - 1})
    train(embedding, 1)
    assert view.row_columns(one)["score"].tolist() == [decayed(1e300, idle, half_life) + 1.0]


def test_a_row_whose_time_begins_now_keeps_its_score(device: torch.device) -> None:
    embedding = table(device, bound=Rows(50), score=Score(half_life=1), eviction=Age(100))
    train(embedding, 1, timestamps=torch.tensor([50]))
    train(embedding, 2, timestamps=torch.tensor([50]))
    view, one = embedding.view("t"), torch.tensor([1])
    before = view.row_columns(one)
    view.set_clocks(view.clocks() | {"timestamp": 40})  # the rows are of later
    assert view.evict() == 0
    after = view.row_columns(one)
    assert (before["timestamp"].item(), after["timestamp"].item()) == (50, 40)
    assert {**after, "timestamp": before["timestamp"]} == before


def test_what_was_frequent_once_leaves_before_what_is_now(device: torch.device) -> None:
    for half_life, stays in (0, 1), (1, 2):
        embedding = table(device, bound=Rows(2), score=Score(half_life=half_life))
        train(embedding, *[1] * 40)
        for _ in range(9):
            train(embedding, 2, 2)
        train(embedding, 3, 3, 3)
        assert known(embedding) == {stays, 3} if half_life else {1, 2}, "by count without it"


def test_clicks_decay_too(device: torch.device) -> None:
    embedding = table(device, bound=Rows(50), score=Score(beta=10, half_life=1))
    train(embedding, 1, 1, clicks=torch.tensor([1, 0]))
    train(embedding, 1, 2, clicks=torch.tensor([1, 0]))
    columns = embedding.view("t").row_columns(torch.tensor([1, 2]))
    assert columns["score"].tolist() == [12 / 2 + 11, 1]
    with pytest.raises(ValueError, match="scores ids by clicks"):
        train(embedding, 1)


def test_admission_and_scores_have_weights_of_their_own(device: torch.device) -> None:
    rules: dict[str, Any] = {"bound": Rows(50), "score": Score(alpha=0, beta=10)}
    for admission in Count(2), Sketch(2, bytes=400):
        embedding = table(device, admission=admission, **rules)
        train(embedding, 1, 2, 2, clicks=torch.tensor([1, 0, 1]))
        assert known(embedding) == {2}, "a click is no lookup"
        assert embedding.view("t").row_columns(torch.tensor([2]))["score"].tolist() == [10]


def test_counts_that_have_ended_still_add_to_scores(device: torch.device) -> None:
    """The hottest id would decay to 0 and be evicted."""
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


def test_the_share_leaves_by_what_is_left_now(device: torch.device) -> None:
    embedding = table(device, eviction=Share(0.5), score=Score(half_life=1))
    train(embedding, 1, 1, 1, 1, 1, 1)
    train(embedding, 2, 2)
    for _ in range(2):
        train(embedding, 3)
    assert embedding.view("t").row_columns(torch.tensor([1, 2, 3]))["score"].tolist() == [6, 2, 1.5]
    assert embedding.view("t").evict() == 1
    assert known(embedding) == {1, 3}, "2 has 2 / 4, 1 has 6 / 8"


def test_configs_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="score_half_life is 3, and no rule goes by scores"):
        rst.AdmitAndEvictConfig(score_half_life=3, admit_threshold=2)
    with pytest.raises(ValueError, match="score_half_life is 3, and no rule goes by scores"):
        rst.AdmitAndEvictConfig(score_half_life=3)
    with pytest.raises(ValueError, match="score_half_life is 3, and no rule goes by scores"):
        rst.AdmitAndEvictConfig(score_half_life=3, keep_evicted=True)
    with pytest.raises(ValueError, match=r"policy_type is NONE.*'score_half_life': 3"):
        rst.AdmitAndEvictConfig(score_half_life=3, keep_evicted=True, policy_type=rst.AdmitAndEvictPolicyType.NONE)
    rules = rst.AdmitAndEvictConfig(score_half_life=3, max_rows=9).table_life()
    assert rules is not None
    assert rules.score == Score(half_life=3)
    with pytest.raises(ValueError, match="sketch_bytes is 99 without an admit_threshold"):
        rst.AdmitAndEvictConfig(sketch_bytes=99)
    with pytest.raises(ValueError, match="sketch_halve_after is 99 without sketch_bytes"):
        rst.AdmitAndEvictConfig(sketch_halve_after=99, admit_threshold=3)
    clicks = rst.ShowClickParams(1, 1, admit_threshold=3)
    with pytest.raises(ValueError, match="a sketch counts lookups alone"):
        rst.AdmitAndEvictConfig(
            sketch_bytes=99, showclick_params=clicks, policy_type=rst.AdmitAndEvictPolicyType.POLICY_SHOWCLICK
        )
    with pytest.raises(ValueError, match="sketch_depth is 8 without sketch_bytes"):
        rst.AdmitAndEvictConfig(sketch_depth=8, admit_threshold=3)
    sketch = rst.AdmitAndEvictConfig(sketch_bytes=99, sketch_depth=3, sketch_halve_after=7, admit_threshold=3)
    rules = sketch.table_life()
    assert rules is not None
    assert rules.admission == Sketch(3, bytes=99, depth=3, halve_after=7)
