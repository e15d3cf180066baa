"""Stochastic rounding of collections: nothing around the step changes the bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from jagged import apply, bag_config, bags_collection, numbered, rows_of, train_step
from torchrec import KeyedJaggedTensor
from torchrec.modules.embedding_configs import DataType

import rec_sdk_torch as rst


def collection(
    device: torch.device,
    cache: int = 40,
    stochastic: bool = True,
    stored: DataType = DataType.BF16,
    cache_dtype: torch.dtype | None = None,
) -> rst.EmbCacheEmbeddingBagCollection:
    config = bag_config("t0", ("f0",), num_embeddings=80, embedding_dim=8, data_type=stored)
    options: dict[str, Any] = {"stochastic_rounding": stochastic, "cache_dtype": cache_dtype}
    result = bags_collection(device, config, cache=cache, **options)
    apply(result, torch.optim.SGD, lr=1e-3)
    return result


def batches(begin: int = 0, end: int = 24) -> Iterator[KeyedJaggedTensor]:
    for step in range(begin, end):
        yield numbered(12, 7 * step % 60)


def bits(tables: rst.EmbCacheEmbeddingBagCollection) -> dict[int, list[float]]:
    return {one: row.tolist() for one, row in sorted(rows_of(tables).items())}


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_prefetching(depth: int, device: torch.device) -> None:
    plain, ahead, nearest = collection(device), collection(device, 50), collection(device, stochastic=False)
    for batch in batches():
        train_step(plain, batch)
        train_step(nearest, batch)
    for batch in rst.prefetch(batches(), ahead, depth):
        train_step(ahead, batch)
    assert bits(ahead) == bits(plain) != bits(nearest)


@pytest.mark.parametrize("stored", [DataType.BF16, DataType.FP32])
def test_a_run_that_is_resumed_goes_on_alike(stored: DataType, device: torch.device, tmp_path: Path) -> None:
    types = {"stored": stored, "cache_dtype": torch.bfloat16}
    straight, resumed = collection(device, **types), collection(device, 30, **types)
    for batch in batches(0, 10):
        train_step(straight, batch)
    rst.Saver().save(straight, tmp_path)
    rst.Saver().load(resumed, tmp_path)
    for tables in (straight, resumed):
        for batch in batches(10, 24):
            train_step(tables, batch)
    assert bits(resumed) == bits(straight)


@pytest.mark.parametrize("background", [False, True])
def test_saves_have_the_stored_type(background: bool, device: torch.device, tmp_path: Path) -> None:
    """A save of a narrower or wider cache is one of the table, which any table loads."""
    source = collection(device, 30, stored=DataType.BF16, cache_dtype=torch.float32)
    for batch in batches(0, 10):
        train_step(source, batch)
    done = rst.Saver().save(source, tmp_path, background=background)
    if background:
        done.result()
    target = collection(device, 30)
    rst.Saver().load(target, tmp_path)
    assert bits(target) == bits(source)
    assert source.state_dict()["embedding_bags.t0.weight"].dtype == torch.bfloat16
