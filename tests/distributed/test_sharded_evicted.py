"""Rows that leave tables that are divided among ranks: each rank hands out its own, and takes back its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jagged import sequence_config
from ranks import Place, Ranks
from sharded_model import Scenario, shard
from torchrec import KeyedJaggedTensor

import rec_sdk_torch as rst
from rec_sdk_torch.saves.format.manifest import DELTA, EVICTED, read_manifest
from rec_sdk_torch.tbe import EvictedRows, EvictReason

Start = Callable[[int], Ranks]
STEPS = 6
RULES = rst.AdmitAndEvictConfig(max_rows=16, keep_evicted=True)


class Lookups(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = sequence_config("t0", ["f0"], admit_and_evict_config=RULES, is_incremental=True)
        self.sparse = rst.EmbCacheEmbeddingCollection([config], cache=80, device=Place.device, seed=1)
        rst.apply_optimizer_in_backward(torch.optim.Adagrad, self.sparse.parameters(), {"lr": 0.1})

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.sparse(features)["f0"].values().sum()


def train(model: Any, rank: int, steps: range) -> None:
    for step in steps:
        first = 8 * step + 4 * rank
        model(KeyedJaggedTensor(["f0"], torch.arange(first, first + 4), lengths=torch.tensor([4]))).backward()


def found(sparse: Any, rows: EvictedRows) -> dict[str, Any]:
    weights = dict(zip(rows.ids.tolist(), rows.weight.tolist(), strict=True))
    return {"taken": weights, "reasons": rows.reason.tolist(), "rows": sparse.table_ids("t0").tolist()}


def trained(rank: int, world_size: int, sharding: str, path: str) -> dict[str, Any]:
    model = shard(Lookups(), Scenario(sharding=(sharding,)), world_size)
    sparse = model.module.sparse
    train(model, rank, range(STEPS))
    rst.Saver().save(model, path)
    rows = sparse.take_evicted("t0")
    assert len(sparse.take_evicted("t0")) == 0
    return found(sparse, rows)


def loaded(rank: int, world_size: int, sharding: str, path: str) -> dict[str, Any]:
    model = shard(Lookups(), Scenario(sharding=(sharding,)), world_size)
    rst.Saver().load(model, path)
    return found(model.module.sparse, model.module.sparse.take_evicted("t0"))


def put_back(rank: int, world_size: int, path: str) -> tuple[int, list[int], bool]:
    """Every rank is given the rows of all."""
    model = shard(Lookups(), Scenario(sharding=("row_wise",)), world_size)
    rst.Saver().load(model, path)
    sparse = model.module.sparse
    rows, all_rows = sparse.take_evicted("t0"), torch.load(Path(path) / "rows.pt", weights_only=False)
    count = sparse.put_back("t0", all_rows)
    read = sparse.home.embedding.view("t0").read(rows.ids).parts["weight"]
    return count, sparse.table_ids("t0").tolist(), torch.equal(read, rows.weight)


def joined(results: list[dict[str, Any]]) -> dict[int, Any]:
    assert sum(len(each["taken"]) for each in results) == len({i for each in results for i in each["taken"]})
    return {i: weight for each in results for i, weight in each["taken"].items()}


@pytest.mark.parametrize("sharding", ["row_wise", "table_wise"])
def test_each_rank_hands_out_its_own(ranks_of: Start, sharding: str, tmp_path: Path) -> None:
    results = ranks_of(2).run(trained, sharding, str(tmp_path))
    taken = joined(results)
    assert set(taken) | {i for each in results for i in each["rows"]} == set(range(8 * STEPS))
    assert not set(taken) & {i for each in results for i in each["rows"]}
    assert taken
    assert {reason for each in results for reason in each["reasons"]} == {EvictReason.BOUND}
    if sharding == "row_wise":
        assert all(i % 2 == rank for rank, each in enumerate(results) for i in each["taken"])
    alone = Lookups()
    rst.Saver().load(alone, tmp_path)
    rows = alone.sparse.take_evicted("t0")
    assert dict(zip(rows.ids.tolist(), rows.weight.tolist(), strict=True)) == taken
    for other in ("row_wise", "table_wise"):
        again = ranks_of(2).run(loaded, other, str(tmp_path))
        assert joined(again) == taken
    if sharding == "row_wise":
        torch.save(rows, tmp_path / "rows.pt")
        back = ranks_of(2).run(put_back, str(tmp_path))
        assert [right for *_, right in back] == [True, True]
        assert sum(count for count, *_ in back) == len(taken)
        assert sorted(i for _, ids, _ in back for i in ids) == list(range(8 * STEPS))


def deltas(rank: int, world_size: int, path: str, loaded_first: bool = False) -> list[list[int]]:
    """Rows that wait at each of some saves, of which the later ones are taken from by rank 0 alone."""
    model, seen = shard(Lookups(), Scenario(sharding=("row_wise",)), world_size), []
    sparse = model.module.sparse
    if loaded_first:
        rst.Saver().load(model, path)
    for step in range(3, 5) if loaded_first else range(3):
        train(model, rank, range(STEPS * step, STEPS * (step + 1)))
        if step and rank == 0:
            sparse.take_evicted("t0", 3)
        rst.Saver().save(model, path, incremental=True)
        pieces = sparse.home.embedding.view("t0").evicted_waiting()
        seen.append([i for rows in pieces for i in rows.ids.tolist()])
    return seen


@pytest.mark.parametrize("world_size", [1, 2])
def test_deltas_of_ranks_have_what_left_since(ranks_of: Start, world_size: int, tmp_path: Path) -> None:
    of_ranks = ranks_of(2).run(deltas, str(tmp_path))
    folders = sorted(tmp_path.iterdir())
    for number, folder in enumerate(folders):
        files = [file for file in read_manifest(folder).files if file.role == EVICTED]
        before = [len(seen[number - 1]) - 3 * (rank == 0) if number else 0 for rank, seen in enumerate(of_ranks)]
        assert [file.rows for file in files] == [
            len(seen[number]) - rows for seen, rows in zip(of_ranks, before, strict=True)
        ]
        results = ranks_of(world_size).run(loaded, "row_wise", str(folder))
        assert set(joined(results)) == {i for seen in of_ranks for i in seen[number]}


def test_a_delta_after_a_load_on_other_ranks(ranks_of: Start, tmp_path: Path) -> None:
    """Rows that waited on one rank wait on two after a load: the first delta after it has all of them."""
    alone = Lookups()
    train(alone, 0, range(2 * STEPS))
    rst.Saver().save(alone, tmp_path)
    of_ranks = ranks_of(2).run(deltas, str(tmp_path), True)
    for number, folder in enumerate(sorted(tmp_path.iterdir())[1:]):
        assert read_manifest(folder).kind == DELTA
        assert set(joined(ranks_of(2).run(loaded, "row_wise", str(folder)))) == {
            i for seen in of_ranks for i in seen[number]
        }


def test_rows_that_are_none(ranks_of: Start) -> None:
    assert ranks_of(2).run(refused) == [["TypeError", "TypeError", "ValueError", "ValueError", "KeyError"]] * 2


def refused(rank: int, world_size: int) -> list[str]:
    """The errors of rows that are none: the same as of tables that are not divided."""
    plain = Lookups()
    sparse = shard(Lookups(), Scenario(sharding=("row_wise",)), world_size).module.sparse
    rows = sparse.take_evicted("t0")
    cases: list[tuple[str, Any]] = [
        ("t0", None),
        ("t0", rows.ids),
        ("t0", dataclasses.replace(rows, ids=rows.ids.float())),
        ("t0", dataclasses.replace(rows, reason=None)),
        ("t1", rows),
    ]
    errors = []
    for table, wrong in cases:
        messages = []
        for each in (plain.sparse, sparse):
            with pytest.raises((TypeError, ValueError, KeyError)) as raised:
                each.put_back(table, wrong)
            messages.append(f"{raised.type.__name__} {raised.value}")
        assert messages[0] == messages[1]
        errors.append(messages[0].split()[0])
    return errors


def test_rows_that_wait_go_home_with_their_table(ranks_of: Start, tmp_path: Path) -> None:
    results = ranks_of(2).run(sharded_later)
    assert [sorted(taken) for taken in results] == [[2], [1, 3]]


def sharded_later(rank: int, world_size: int) -> list[int]:
    plain = Lookups()
    plain(KeyedJaggedTensor(["f0"], torch.arange(8), lengths=torch.tensor([8]))).backward()
    plain.sparse.embedding.view("t0").remove(torch.tensor([1, 2, 3]))
    model = shard(plain, Scenario(sharding=("row_wise",)), world_size)
    ids: list[int] = model.module.sparse.take_evicted("t0").ids.tolist()
    return ids
