"""Sketches of several ranks, saved and loaded by as many, by others, and by one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jagged import sequence_config
from ranks import Place, Ranks
from sharded_model import Scenario, shard
from sketch_reference import Sketch
from torchrec import KeyedJaggedTensor

import rec_sdk_torch as rst
from rec_sdk_torch.saves.owners import owners_of
from rec_sdk_torch.tbe import Home

Start = Callable[[int], Ranks]
THRESHOLD = 5


class Lookups(torch.nn.Module):
    def __init__(self, size: int, home: Home) -> None:
        super().__init__()
        rules = rst.AdmitAndEvictConfig(admit_threshold=THRESHOLD, sketch_bytes=size)
        config = sequence_config("t0", ["f0"], admit_and_evict_config=rules)
        self.sparse = rst.EmbCacheEmbeddingCollection([config], cache=600, device=Place.device, home=home)
        rst.apply_optimizer_in_backward(torch.optim.SGD, self.sparse.parameters(), {"lr": 0.1})

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        rows: torch.Tensor = self.sparse(features)["f0"].values().sum()
        return rows


@dataclass
class Found:
    """The state of a rank's home: ids with rows, those of `range(300)` at home there, the state of the sketch."""

    rows: list[int]
    home: list[int]
    sketch: list[int]


def ids_of(step: int, rank: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(0, 300, (150,), generator=random)


def train(model: Any, steps: range, rank: int) -> None:
    for step in steps:
        ids = ids_of(step, rank)
        model(KeyedJaggedTensor(["f0"], ids, lengths=torch.tensor([len(ids)]))).backward()


def found(model: torch.nn.Module) -> Found:
    owner = owners_of(model)[0]
    view = owner.embedding.view("t0")
    every = np.arange(300, dtype=np.int64)
    return Found(view.ids().tolist(), every[owner.mine("t0", every)].tolist(), view.sketch().tolist())


def save(rank: int, world_size: int, size: int, path: str) -> Found:
    model = shard(Lookups(size, Home.MODULO), Scenario(sharding=("row_wise",)), world_size)
    train(model, range(3), rank)
    rst.Saver(rank).save(model, path)
    return found(model)


def load(rank: int, world_size: int, size: int, path: str, home: Home, sharding: str) -> Found:
    model = shard(Lookups(size, home), Scenario(sharding=(sharding,)), world_size)
    train(model, range(7, 9), rank)  # which is forgotten
    rst.Saver().load(model, path)
    return found(model)


def estimates(state: list[int], ids: list[int]) -> dict[int, int]:
    width, depth, cell, _ = np.array(state[:32], np.uint8).view(np.int64).tolist()
    sketch = Sketch(width * depth * cell, depth, THRESHOLD)
    cells = np.array(state[32:], np.uint8).reshape(depth, width)
    sketch.rows = [row.tolist() for row in cells]
    return {i: sketch.estimate(i) for i in ids}


@pytest.mark.parametrize("size", [2000, 160])
def test_sketches_go_to_other_homes(ranks_of: Start, tmp_path: Path, size: int) -> None:
    path = str(tmp_path)
    counts = Counter(torch.cat([ids_of(step, rank) for step in range(3) for rank in (0, 1)]).tolist())
    saved = ranks_of(2).run(save, size, path)
    with_rows = {i for each in saved for i in each.rows}
    waiting = counts.keys() - with_rows
    assert (len(waiting) > 100) == (size == 2000), "one of the sketches is too small"
    for world_size, home, sharding in (
        (2, Home.MODULO, "row_wise"),
        (2, Home.HASH, "row_wise"),
        (2, Home.MODULO, "table_wise"),
        (2, Home.MODULO, "data_parallel"),
        (4, Home.MODULO, "row_wise"),
    ):
        loaded = ranks_of(world_size).run(load, size, path, home, sharding)
        assert {i for each in loaded for i in each.rows} == with_rows
        for rank, each in enumerate(loaded):
            mine = [i for i in each.home if i in waiting]
            assert all(count >= counts[i] for i, count in estimates(each.sketch, mine).items())
            if (world_size, home, sharding) == (2, Home.MODULO, "row_wise"):
                assert each.sketch == saved[rank].sketch, "a rank that goes on has its own sketch, as it was"
    alone = Lookups(size, Home.MODULO)
    rst.Saver().load(alone, path)
    known = found(alone)
    assert all(count >= counts[i] for i, count in estimates(known.sketch, sorted(waiting)).items())


def gone_on(rank: int, world_size: int, path: str) -> tuple[Found, Found]:
    straight, again = (shard(Lookups(400, Home.MODULO), Scenario(sharding=("row_wise",)), world_size) for _ in range(2))
    train(straight, range(2), rank)
    rst.Saver().save(straight, path)
    rst.Saver().load(again, path)
    for model in (straight, again):
        train(model, range(2, 5), rank)
    return found(straight), found(again)


def test_training_goes_on_where_it_stopped(ranks_of: Start, tmp_path: Path) -> None:
    for straight, again in ranks_of(2).run(gone_on, str(tmp_path)):
        assert straight.sketch == again.sketch
        assert sorted(straight.rows) == sorted(again.rows)
