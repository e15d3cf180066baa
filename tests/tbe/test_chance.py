"""Admission by chance: one coin for an id and a batch, the same whenever the batch is planned. The oracle draws it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from coin_reference import Coin, philox

import rec_sdk_torch as rst
from rec_sdk_torch.rules import Age, Count, Probability
from rec_sdk_torch.tbe import TableBatchedEmbedding, TableConfig, TableLife, TableOptimizer


def table(device: torch.device, name: str = "t", **rules: Any) -> TableBatchedEmbedding:
    optimizer = TableOptimizer.create(torch.optim.SGD, {"lr": 0.1})
    config = TableConfig(name, 100, 1, life=TableLife(**rules))
    return TableBatchedEmbedding([config], optimizer=optimizer, cache=12_000, device=device, seed=5)


def look_up(embedding: TableBatchedEmbedding, ids: np.ndarray) -> set[int]:
    embedding(torch.from_numpy(ids), torch.tensor([0, len(ids)]))
    return set(embedding.view(embedding.tables[0].name).ids().tolist())


def test_philox_has_the_numbers_of_its_authors() -> None:
    """The known answers of Random123."""
    assert philox([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 2**32 - 1
    assert philox([ones] * 4, [ones] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@pytest.mark.parametrize("probability", [0.01, 0.3, 1.0])
def test_so_many_are_admitted(device: torch.device, probability: float) -> None:
    """In each batch, of those that are left, within five standard deviations."""
    embedding, ids = table(device, admission=Probability(probability)), np.arange(-5_000, 5_000)
    before = 0
    for batch in range(1, 5):
        rows = look_up(embedding, ids)
        left = len(ids) - before
        deviation = (left * probability * (1 - probability)) ** 0.5
        assert abs(len(rows) - before - left * probability) <= 5 * deviation
        assert batch > 1 or rows == {i for i in ids.tolist() if Coin(5, "t").toss(i, 1, probability)}
        before = len(rows)
    assert embedding.memory_report("t")["candidates"] == 0
    assert len(embedding.view("t").candidates()[0]) == 0


def test_tables_toss_their_own_coins(device: torch.device) -> None:
    first, second = (look_up(table(device, name, admission=Probability(0.5)), np.arange(1000)) for name in ("a", "b"))
    assert 150 < len(first & second) < 350


def test_all_lookups_of_a_batch_have_one_coin(device: torch.device) -> None:
    embedding = table(device, admission=Probability(0.5), default_value=7.0)
    rows = embedding(torch.arange(100).repeat(2), torch.arange(201)).flatten()
    assert torch.equal(rows[:100], rows[100:])
    assert (rows != 7.0).sum() == 2 * embedding.view("t").count()


def test_candidates_and_other_rules_do_not_fit(device: torch.device) -> None:
    view = table(device, admission=Probability(0.5)).view("t")
    with pytest.raises(ValueError, match="table 't' counts nothing of ids without a row: it has no candidates"):
        view.set_candidates(torch.tensor([5]), {"count": torch.tensor([1])})
    for probability in (0.0, -0.5, 1.5, float("nan")):
        with pytest.raises(ValueError, match=r"must be finite and in \(0, 1\]"):
            Probability(probability)
    wrong: list[Any] = ["a", True, [0.5], torch.ones(2)]
    for given in wrong:
        with pytest.raises(TypeError, match=r"Probability: probability is .* expected a number"):
            Probability(given)
        with pytest.raises(TypeError, match=r"Count: threshold is .* expected a number"):
            Count(given)
    with pytest.raises(ValueError, match="ids are admitted by chance or by counts"):
        rst.AdmitAndEvictConfig(admit_probability=0.5, admit_threshold=2).table_life()
    with pytest.raises(ValueError, match=r"admit_probability is 0\.0, must be finite and in"):
        rst.AdmitAndEvictConfig(admit_probability=0.0)
    with pytest.raises(ValueError, match="is a way of POLICY_COUNT"):
        rst.AdmitAndEvictConfig(admit_probability=0.5, policy_type=rst.AdmitAndEvictPolicyType.POLICY_SHOWCLICK)
    by_number: Any = int(rst.AdmitAndEvictPolicyType.POLICY_COUNT.value)
    rules = rst.AdmitAndEvictConfig(admit_probability=0.5, evict_threshold=9, policy_type=by_number).table_life()
    assert rules is not None
    assert rules == TableLife(admission=Probability(0.5), eviction=Age(9))
