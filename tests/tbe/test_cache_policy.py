"""`cache_policy=` determines the cache's victims, is kept when the layout changes, and never affects results."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from embeddings import SGD, one_table, train

from rec_sdk_torch._engine import cache_policies
from rec_sdk_torch.tbe import Pooling, TableBatchedEmbedding, TableOptimizer


def embedding(device: torch.device, policy: str, late: bool = False) -> TableBatchedEmbedding:
    options = {"pooling": Pooling.NONE, "cache": 3, "cache_policy": policy}
    return one_table(device, rows=50, optimizer=None if late else SGD, **options)


def misses(tables: TableBatchedEmbedding, ids: list[int]) -> int:
    before = tables.cache_stats()["unique_misses"]
    train(tables, ids)
    return tables.cache_stats()["unique_misses"] - before


HOT = [[1], [1, 2, 3], [1], [1], [1], [2], [3], [4]]  # row 1 is used most often but least recently


@pytest.mark.parametrize(("policy", "again"), [("lru", 1), ("lfu", 0), ("lrfu", 0), ("look_ahead", 0)])
@pytest.mark.parametrize("how", ["new", "deepcopy", "other optimizer"])
def test_the_policy_chooses_the_victims(device: torch.device, policy: str, again: int, how: str) -> None:
    tables = embedding(device, policy, late=how == "other optimizer")
    assert tables.options.cache_policy == policy
    if how == "deepcopy":
        train(tables, [7])
        tables = copy.deepcopy(tables)
    if how == "other optimizer":
        assert tables.eval()(torch.tensor([1]), torch.tensor([0, 1])).shape == (1, 4)
        tables.train()
        tables.set_optimizers({0: TableOptimizer.create(torch.optim.Adagrad, {"lr": 0.1})})
    # fills the cache, so that uses are counted and victims chosen from the first batch of HOT on
    train(tables, [5, 6, 9], [6])
    train(tables, *HOT)
    assert misses(tables, [1]) == again


def test_an_unknown_policy_is_refused_with_the_known_ones(device: torch.device) -> None:
    allowed = re.escape(f"allowed are {cache_policies()}")
    with pytest.raises(ValueError, match=f"cache_policy is 'no_such', {allowed}"):
        embedding(device, "no_such")
