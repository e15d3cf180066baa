"""On which rank a row lives: modulo, hash, continuous. Only speed and memory depend on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jagged import bag_config, jagged
from ranks import Place, Ranks
from reference_homes import MASK, fold, home_of
from sharded_model import Scenario, train_sharded
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv

import rec_sdk_torch as rst
from rec_sdk_torch._engine import ranks_of as engine_ranks_of
from rec_sdk_torch.distributed.placement import RowWise
from rec_sdk_torch.tbe import Home

Start = Callable[[int], Ranks]
EDGES = [0, 1, -1, 7, -7, 2**31, -(2**31), 2**63 - 1, -(2**63)]


# ---- the rule


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 1000])
@pytest.mark.parametrize("home", [(-1, 0), (-2, 0), (-3, 1), (-3, 5), (-3, 2**62), (0, 0)], ids=str)
def test_the_engine_finds_the_rank(home: tuple[int, int], world_size: int) -> None:
    ids = np.concatenate([EDGES, np.random.default_rng(0).integers(-99, 99, 200)]).astype(np.int64)
    found = engine_ranks_of(ids, home, world_size)
    assert found.tolist() == [home_of(int(i), home, world_size) for i in ids]


def test_hashed_ranks_stay_what_they_are() -> None:
    """State dicts of ranks hold rows by it, and those of other versions are loaded."""
    hashed = [4, 4, 0, 0, 2, 3, 3, 4, 2, 4, 3, 0, 3, 2, 2, 4]
    assert engine_ranks_of(np.arange(-4, 12), (-2, 0), 5).tolist() == hashed


@pytest.mark.parametrize(
    ("home", "world_size", "message"),
    [((3, 0), 3, "rank 3 of 3"), ((-3, 0), 3, "a block of 0"), ((-1, 0), 0, "world_size must be at least 1")],
)
def test_homes_that_cannot_be(home: tuple[int, int], world_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine_ranks_of(np.arange(3), home, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("rows", [1, 2, 9, 31, 1000])
@pytest.mark.parametrize("home", Home)
def test_rows_of_ranks_are_the_table(home: Home, rows: int, world_size: int) -> None:
    seen = []
    for rank in range(world_size):
        placement = RowWise(rank, world_size, home, rows)
        mine = placement.rows(rows)
        assert mine.dtype == np.int64
        assert (placement.owner(mine) == rank).all()
        assert len(mine) <= placement.most_rows(rows)
        seen.append(mine)
    assert np.sort(np.concatenate(seen)).tolist() == list(range(rows))


def test_rows_that_are_hashed_in_pieces() -> None:
    rows = 2**20 + 3
    parts = [RowWise(rank, 3, Home.HASH, rows).rows(rows) for rank in range(3)]
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(rows))


def test_continuous_rows_are_torchrec_s_blocks() -> None:
    assert [RowWise(rank, 4, Home.CONTINUOUS, 9).rows(9).tolist() for rank in range(4)] == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7, 8],
        [],
    ]


def test_names() -> None:
    config = bag_config("t0", ["f0"])
    collection = rst.EmbCacheEmbeddingBagCollection([config, bag_config("t1", ["f1"])], home={"t1": "HASH"})
    assert [table.home for table in collection.embedding.tables] == [Home.MODULO, Home.HASH]
    with pytest.raises(ValueError, match=r"home is 'no_such', allowed are \['modulo', 'hash', 'continuous'\]"):
        rst.EmbCacheEmbeddingBagCollection([config], home="no_such")
    with pytest.raises(ValueError, match=r"home names tables \['t9'\], only \['t0'\] are there"):
        rst.EmbCacheEmbeddingBagCollection([config], home={"t9": "hash"})
    with pytest.raises(TypeError, match="home is 'hash', expected a Home"):
        rst.TableConfig("t", 5, 4, home="hash")  # type: ignore[arg-type]


# ---- training


OTHERS = ("hash", "continuous", "hash"), ("continuous", "hash", "continuous")
CASES = {
    "bags": Scenario(cache=1000, optimizer=torch.optim.Adam, weighted=True, steps=6, seed=61),
    "sequences": Scenario(
        cache=1000, kind="sequences", optimizer=torch.optim.Adagrad, dims=(4, 8, 4), steps=6, seed=62
    ),
    "hash": Scenario(kind="hash", optimizer=rst.AccumulateAdagrad, options={"use_accumulate": True}, steps=6, seed=63),
    "swaps": Scenario(cache=60, optimizer=torch.optim.Adam, sizes=((2, 1),), ids=300, steps=10, seed=64),
    "admission": Scenario(
        cache=1000, rules={"admit_threshold": 3, "evict_threshold": 12, "evict_step_interval": 2}, steps=8, seed=65
    ),
    "init_fn": Scenario(
        cache=1000, init_fn=torch.nn.init.normal_, sharding=("row_wise", "row_wise", "table_wise"), seed=66
    ),
}


def together(results: list[Any]) -> dict[str, dict[int, list[float]]]:
    """The rows of all ranks, which share none."""
    whole: dict[str, dict[int, list[float]]] = {}
    for _, rows, *_ in results:
        for table, own in rows.items():
            known = whole.setdefault(table, {})
            assert not set(known) & set(own), "a row lives twice"
            known.update({i: row.tolist() for i, row in own.items()})
    return whole


@pytest.mark.parametrize(("case", "homes"), [(case, OTHERS[number % 2]) for number, case in enumerate(CASES)])
def test_training_has_the_same_bits(ranks_of: Start, tmp_path: Path, case: str, homes: Any) -> None:
    """Also over a save, which is loaded into other homes than it has."""
    scenario, ranks = CASES[case], ranks_of(2)
    expected = ranks.run(train_sharded, scenario, 0, str(tmp_path / "modulo"))
    rows = together(expected)
    for saved, loaded in ((scenario.homes, homes), (homes, scenario.homes)):
        folder = str(tmp_path / f"{saved}{loaded}".replace("'", ""))
        found = ranks.run(train_sharded, replace(scenario, homes=saved), 2, folder, loaded)
        for (outputs, _, scale, *_), (wanted, _, known, *_) in zip(found, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(outputs, wanted, strict=True))
            assert torch.equal(scale, known)
        assert together(found) == rows
        homes_differ = [set(a[1]["t0"]) != set(b[1]["t0"]) for a, b in zip(found, expected, strict=True)]
        assert all(homes_differ) == (loaded != scenario.homes), "rows live elsewhere"


# ---- loads


def planned(world_size: int, home: str) -> tuple[Any, list[int]]:
    """A sharded collection of one table, and the planner's rows of each rank."""
    config = bag_config("t0", ["f0"], num_embeddings=4000)
    collection = rst.EmbCacheEmbeddingBagCollection([config], cache=4000, device=Place.device, home=home)
    rst.apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": 0.1})
    world = torch.distributed.group.WORLD
    env = ShardingEnv.from_process_group(world)
    sharders = rst.get_default_hybrid_sharders(None)
    constraints = {"t0": ParameterConstraints(sharding_types=["row_wise"])}
    planner = EmbeddingShardingPlanner(
        Topology(world_size, "cpu", local_world_size=world_size), constraints=constraints
    )
    plan: Any = planner.collective_plan(torch.nn.ModuleDict({"sparse": collection}), sharders, world).plan["sparse"]
    (sharder,) = [each for each in sharders if each.module_type is type(collection)]
    rows = [shard.shard_sizes[0] for shard in plan["t0"].sharding_spec.shards]
    return sharder.shard(collection, plan, env, Place.device), rows


def strided(rank: int, world_size: int, home: str) -> tuple[int, list[int]]:
    """Rows of this rank, and the planner's of each, of ids that are a multiple of the number of ranks."""
    sharded, rows = planned(world_size, home)
    sharded(jagged({"f0": [[i * world_size for i in range(4000)]]})).wait()
    return len(sharded.table_ids("t0")), rows


@pytest.mark.parametrize("world_size", [2, 4])
def test_ids_with_a_stride_spread_by_hash_alone(ranks_of: Start, world_size: int) -> None:
    """The planner gives every rank the same load, which hashed ids have."""
    even = 4000 // world_size
    modulo = ranks_of(world_size).run(strided, "modulo")
    assert [rows for rows, _ in modulo] == [4000] + [0] * (world_size - 1)
    hashed = ranks_of(world_size).run(strided, "hash")
    assert sum(rows for rows, _ in hashed) == 4000
    for rows, shards in hashed:
        assert shards == [even] * world_size
        assert abs(rows - even) < 4 * even**0.5


def test_ids_of_a_rank_do_not_crowd_its_map() -> None:
    """Ranks and maps hash ids in other ways: those of one rank are anywhere in its map."""
    ids = np.arange(1_000_000)
    mine = ids[engine_ranks_of(ids, (-2, 0), 8) == 3]
    places = [home_in_map(int(i), 64) for i in mine[:20_000]]
    counts = np.bincount(places, minlength=64)
    assert abs(counts - counts.mean()).max() < 6 * counts.mean() ** 0.5


def home_in_map(i: int, places: int) -> int:
    """Where an id goes in a new map of so many places."""
    mixed = fold((i & MASK) ^ 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93)
    return fold(mixed, 0x9E3779B97F4A7C15) * places >> 64


# ---- state dicts


def state_of_other_homes(rank: int, world_size: int) -> str:
    states = {}
    for home in ("modulo", "hash"):
        sharded, _ = planned(world_size, home)
        sharded(jagged({"f0": [list(range(20))]})).wait()
        states[home] = sharded.state_dict()
        sharded.load_state_dict(states[home])
    try:
        sharded.load_state_dict(states["modulo"])
    except ValueError as error:
        return str(error)
    return "loaded"


def test_a_rank_s_state_dict_of_other_homes_is_refused(ranks_of: Start) -> None:
    for said in ranks_of(2).run(state_of_other_homes):
        assert "of its ids are not at home" in said
        assert "with the same home=" in said
