"""Evicted rows of sharded tables: each rank returns, and puts back, only the rows that it owns."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from collection_factory import sequence_config
from ranks import Place, Start, error_of, on_ranks
from sharded_model import Scenario, shard
from torchrec import KeyedJaggedTensor

import rec_sdk_torch as rst
from rec_sdk_torch.saves.format.manifest import DELTA, EVICTED, read_manifest
from rec_sdk_torch.tbe import EvictedRows, EvictReason

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


def sharded_model(sharding: str = "row_wise", path: Path | str = "") -> Any:
    """Builds a sharded model; loads the save at `path`, if there is one."""
    model = shard(Lookups(), Scenario(sharding=(sharding,)))
    if path:
        rst.Saver().load(model, path)
    return model


def batch(first: int, count: int) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f0"], torch.arange(first, first + count), lengths=torch.tensor([count]))


def train(model: Any, steps: range) -> None:
    for step in steps:
        model(batch(8 * step + 4 * Place.rank, 4)).backward()


def summarize(sparse: Any, rows: EvictedRows) -> dict[str, Any]:
    weights = dict(zip(rows.ids.tolist(), rows.weight.tolist(), strict=True))
    return {"taken": weights, "reasons": rows.reason.tolist(), "rows": sparse.table_ids("t0").tolist()}


def trained(rank: int, world_size: int, sharding: str, path: str) -> dict[str, Any]:
    model = sharded_model(sharding)
    sparse = model.module.sparse
    train(model, range(STEPS))
    rst.Saver().save(model, path)
    rows = sparse.take_evicted("t0")
    assert len(sparse.take_evicted("t0")) == 0
    return summarize(sparse, rows)


def loaded(rank: int, world_size: int, sharding: str, path: str) -> dict[str, Any]:
    sparse = sharded_model(sharding, path).module.sparse
    return summarize(sparse, sparse.take_evicted("t0"))


def put_back(rank: int, world_size: int, path: str) -> tuple[int, list[int]]:
    """Passes the evicted rows of all ranks to `put_back`, which restores those that this rank owns."""
    sparse = sharded_model("row_wise", path).module.sparse
    rows, all_rows = sparse.take_evicted("t0"), torch.load(Path(path) / "rows.pt", weights_only=False)
    count = sparse.put_back("t0", all_rows)
    assert torch.equal(sparse.local_shard.embedding.view("t0").read(rows.ids).parts["weight"], rows.weight)
    return count, sparse.table_ids("t0").tolist()


def joined(results: list[dict[str, Any]]) -> dict[int, Any]:
    assert sum(len(each["taken"]) for each in results) == len({i for each in results for i in each["taken"]})
    return {i: weight for each in results for i, weight in each["taken"].items()}


@pytest.mark.parametrize("sharding", ["row_wise", "table_wise"])
def test_each_rank_returns_its_own_rows(ranks_of: Start, sharding: str, tmp_path: Path) -> None:
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
        assert sum(count for count, _ in back) == len(taken)
        assert sorted(i for _, ids in back for i in ids) == list(range(8 * STEPS))


def deltas(rank: int, world_size: int, path: str, loaded_first: bool = False) -> list[list[int]]:
    """Returns the ids of the pending evicted rows at each of several saves.

    Before every save but the first, only rank 0 takes three evicted rows.
    """
    model, seen = sharded_model(path=path if loaded_first else ""), []
    sparse = model.module.sparse
    for step in range(3, 5) if loaded_first else range(3):
        train(model, range(STEPS * step, STEPS * (step + 1)))
        if step and rank == 0:
            sparse.take_evicted("t0", 3)
        rst.Saver().save(model, path, incremental=True)
        pieces = sparse.local_shard.embedding.view("t0").pending_evicted_rows()
        seen.append([i for rows in pieces for i in rows.ids.tolist()])
    return seen


def test_deltas_of_ranks_have_the_rows_evicted_since(ranks_of: Start, tmp_path: Path) -> None:
    of_ranks = ranks_of(2).run(deltas, str(tmp_path))
    folders = sorted(tmp_path.iterdir())
    for number, folder in enumerate(folders):
        files = [file for file in read_manifest(folder).files if file.role == EVICTED]
        before = [len(seen[number - 1]) - 3 * (rank == 0) if number else 0 for rank, seen in enumerate(of_ranks)]
        assert [file.rows for file in files] == [
            len(seen[number]) - rows for seen, rows in zip(of_ranks, before, strict=True)
        ]
        for world_size in (1, 2) if folder == folders[-1] else (2,):
            results = ranks_of(world_size).run(loaded, "row_wise", str(folder))
            assert set(joined(results)) == {i for seen in of_ranks for i in seen[number]}


def test_a_delta_after_a_load_on_other_ranks(ranks_of: Start, tmp_path: Path) -> None:
    """After a load on two ranks, each holds its part of one process's pending evicted rows; the next delta has
    them all.
    """
    alone = Lookups()
    train(alone, range(2 * STEPS))
    rst.Saver().save(alone, tmp_path)
    of_ranks = ranks_of(2).run(deltas, str(tmp_path), True)
    for number, folder in enumerate(sorted(tmp_path.iterdir())[1:]):
        assert read_manifest(folder).kind == DELTA
        assert set(joined(ranks_of(2).run(loaded, "row_wise", str(folder)))) == {
            i for seen in of_ranks for i in seen[number]
        }


@on_ranks(2)
def test_invalid_rows_are_refused() -> None:
    """The errors are the same as for unsharded tables."""
    plain, sparse = Lookups().sparse, sharded_model().module.sparse
    rows = sparse.take_evicted("t0")
    cases: list[tuple[str, Any, str]] = [
        ("t0", None, "TypeError"),
        ("t0", rows.ids, "TypeError"),
        ("t0", dataclasses.replace(rows, ids=rows.ids.float()), "ValueError"),
        ("t0", dataclasses.replace(rows, reason=None), "ValueError"),
        ("t1", rows, "KeyError"),
    ]
    for table, wrong, error in cases:
        message, expected = (error_of(partial(of.put_back, table, wrong)) for of in (sparse, plain))
        assert message == expected
        assert message.startswith(error)


@on_ranks(2)
def test_untaken_rows_move_to_their_owner_when_sharding(rank: int) -> None:
    plain = Lookups()
    plain(batch(0, 8)).backward()
    plain.sparse.embedding.view("t0").remove(torch.tensor([1, 2, 3]))
    model: Any = shard(plain, Scenario(sharding=("row_wise",)))
    assert sorted(model.module.sparse.take_evicted("t0").ids.tolist()) == [[2], [1, 3]][rank]
