"""Rows are evicted if the norm of their weights is small, whether or not they are in the cache."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from embeddings import embedding_of, ids_of, one_table, weights_of

from rec_sdk_torch.rules import Norm
from rec_sdk_torch.tbe import InitializerType, TableBatchedEmbedding, TableConfig, TableLifecycle
from rec_sdk_torch.tbe.cache.eviction import row_norms

DIM, RATE = 3, 0.25
NORM = 0.75
STEPS_OF = (torch.optim.SGD, {"lr": RATE})


def table(device: torch.device, cache: int = 50, dtype: torch.dtype = torch.float32, **rules: Any) -> Any:
    lifecycle = TableLifecycle(**{"eviction": Norm(NORM), "every": 2, **rules})
    initial = {"initializer_type": InitializerType.UNIFORM, "init_min": -1, "init_max": 1}
    return one_table(
        device, dim=DIM, optimizer=STEPS_OF, lifecycle=lifecycle, weight_dtype=dtype, cache=cache, **initial
    )


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = np.random.default_rng(step).choice(60, 8, replace=False)
    return torch.from_numpy(ids), torch.arange(9)


def gradient(step: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(100 + step).integers(-2, 3, (8, DIM))).float()


def known(embedding: TableBatchedEmbedding) -> dict[int, list[float]]:
    ids = ids_of(embedding)
    return dict(zip(ids, weights_of(embedding, ids).float().tolist(), strict=True))


def run(embedding: TableBatchedEmbedding, depth: int, steps: int = 30) -> list[dict[int, list[float]]]:
    batches = [batch_of(step) for step in range(steps)]
    seen = []
    for step in range(steps):
        for ahead in batches[step + 1 : step + 1 + depth] if depth and step % depth == 0 else ():
            embedding.prefetch(*ahead)
        output = embedding(*batches[step])
        output.backward(gradient(step).to(output.device))
        seen.append(known(embedding))
    return seen


def expected(embedding: TableBatchedEmbedding, steps: int = 30) -> tuple[list[dict[int, list[float]]], int]:
    """Computes SGD in float32. Gradients are small integers, so only the update itself rounds."""
    every = torch.arange(60)
    initial = dict(zip(range(60), embedding.view("t").read(every).parts["weight"].numpy(), strict=True))
    rows: dict[int, np.ndarray] = {}
    seen, left = [], 0
    for step in range(steps):
        ids, grads = batch_of(step)[0].tolist(), gradient(step).numpy()
        for i, grad in zip(ids, grads, strict=True):
            rows[i] = rows.get(i, initial[i]) - np.float32(RATE) * grad
        if step % 2:
            small = [i for i, row in rows.items() if math.sqrt(sum(float(w) ** 2 for w in row)) < NORM]
            left += len(small)
            for i in small:
                del rows[i]
        seen.append({i: rows[i].tolist() for i in sorted(rows)})
    return seen, left


@pytest.mark.parametrize(("cache", "depth"), [(8, 0), (30, 2), (100, 0)])
def test_rows_are_evicted_by_their_current_weights(device: torch.device, cache: int, depth: int) -> None:
    embedding = table(device, cache + 8 * depth)
    right, left = expected(table(device))
    assert run(embedding, depth) == right
    assert embedding.cache_stats("t")["evicted"] == left > 15
    assert embedding.view("t").memory()["candidates"] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits(device: torch.device, dtype: torch.dtype) -> None:
    few, many = (run(table(device, cache, dtype), 0) for cache in (8, 100))
    assert few == many
    assert any(len(after) < len(before) for before, after in itertools.pairwise(few))


def test_rows_of_batches_in_flight_are_not_evicted(device: torch.device) -> None:
    embedding = table(device, eviction=Norm(100), every=1)
    held = embedding(torch.tensor([1]), torch.tensor([0, 1])).sum()
    embedding(torch.tensor([2]), torch.tensor([0, 1])).sum().backward()
    assert known(embedding).keys() == {1}
    held.backward()
    assert not known(embedding)


def test_a_frozen_table_keeps_its_rows(device: torch.device) -> None:
    lifecycle = TableLifecycle(eviction=Norm(100), every=2)
    tables = [TableConfig(name, 100, DIM, lifecycle=lifecycle) for name in "tu"]
    embedding = embedding_of(*tables, cache=50, device=device)
    both = torch.tensor([1, 2]), torch.arange(3)
    embedding(*both).sum().backward()
    embedding.freeze("t")
    for _ in range(3):
        embedding(*both).sum().backward()
    assert [embedding.view(name).ids().tolist() for name in "tu"] == [[1], []]


def test_evict_evicts_rows_with_small_norms(device: torch.device) -> None:
    embedding = table(device, cache=8, every=0)
    run(embedding, 0, 5)
    before = known(embedding)
    stays = {i for i, row in before.items() if math.sqrt(sum(w * w for w in row)) >= NORM}
    assert embedding.view("t").evict() == len(before) - len(stays) > 0
    assert known(embedding) == {i: before[i] for i in stays}


def test_norms_are_summed_in_column_order() -> None:
    weight = torch.from_numpy(np.random.default_rng(0).normal(size=(5_000, 7))).float()
    right = [math.sqrt(sum((float(w) * float(w) for w in row), 0.0)) for row in weight.tolist()]
    assert row_norms(weight).tolist() == right
    assert row_norms(torch.zeros(0, 4)).tolist() == []
    big = torch.full((1, 4), torch.finfo(torch.float32).max)
    assert np.isfinite(row_norms(big)).all()
