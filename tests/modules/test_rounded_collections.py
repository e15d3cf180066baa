"""Stochastic rounding in collections: saving and resuming leave results bit-identical."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from batches import numbered
from collection_factory import apply, bag_config, bags_collection
from torchrec import KeyedJaggedTensor
from torchrec.modules.embedding_configs import DataType
from training import equal_rows, rows_of, train

import rec_sdk_torch as rst


def collection(device: torch.device, cache: int = 40, stored: DataType = DataType.BF16, **options: Any) -> Any:
    config = bag_config(num_embeddings=80, embedding_dim=8, data_type=stored)
    return apply(bags_collection(device, config, cache=cache, **{"stochastic_rounding": True, **options}), lr=1e-3)


def batches(begin: int = 0, end: int = 24) -> list[KeyedJaggedTensor]:
    return [numbered(12, 7 * step % 60) for step in range(begin, end)]


@pytest.mark.parametrize("stored", [DataType.BF16, DataType.FP32])
def test_a_resumed_run_has_the_same_bits(stored: DataType, device: torch.device, tmp_path: Path) -> None:
    types = {"stored": stored, "cache_dtype": torch.bfloat16}
    straight, resumed = collection(device, **types), collection(device, 30, **types)
    train(straight, batches(0, 10))
    rst.Saver().save(straight, tmp_path)
    rst.Saver().load(resumed, tmp_path)
    for tables in (straight, resumed):
        train(tables, batches(10, 24))
    assert equal_rows(rows_of(resumed), rows_of(straight))


@pytest.mark.parametrize("background", [False, True])
def test_saves_have_the_stored_type(background: bool, device: torch.device, tmp_path: Path) -> None:
    """A save has the table's dtype even if the cache has another, so it loads into tables with any cache dtype."""
    source, target = collection(device, 30, cache_dtype=torch.float32), collection(device, 30)
    train(source, batches(0, 10))
    done = rst.Saver().save(source, tmp_path, background=background)
    if background:
        done.result()
    rst.Saver().load(target, tmp_path)
    assert equal_rows(rows_of(target), rows_of(source))
    assert source.state_dict()["embedding_bags.t0.weight"].dtype == torch.bfloat16
