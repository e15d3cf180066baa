"""`home=` chooses owner ranks by modulo, hash or blocks. The choice affects only speed and memory.

Replicated tables, all of whose rows every rank owns, are bit-identical to tables with one owner per row.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batches import jagged
from collection_factory import bag_config, bags_collection
from ranks import Place, Start, error_of, on_ranks
from reference_homes import MASK, fold, home_of
from sharded_model import (
    Model,
    Scenario,
    assert_rows,
    assert_same,
    batch_of,
    rows,
    shard,
    shard_tables,
    sharded,
    train_sharded,
    united,
)

import rec_sdk_torch as rst
from rec_sdk_torch._engine import owner_ranks
from rec_sdk_torch.distributed.placement import Replicated, RowWise, TableWise
from rec_sdk_torch.distributed.replicas import Replicas, Route
from rec_sdk_torch.tbe import Home

EDGES = [0, 1, -1, 7, -7, 2**31, -(2**31), 2**63 - 1, -(2**63)]


# ---- the owner rank


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 1000])
@pytest.mark.parametrize("home", [(-1, 0), (-2, 0), (-3, 1), (-3, 5), (-3, 2**62), (0, 0)], ids=str)
def test_the_engine_finds_the_rank(home: tuple[int, int], world_size: int) -> None:
    ids = np.concatenate([EDGES, np.random.default_rng(0).integers(-99, 99, 200)]).astype(np.int64)
    found = owner_ranks(ids, home, world_size)
    assert found.tolist() == [home_of(int(i), home, world_size) for i in ids]


def test_hashed_ranks_do_not_change_between_versions() -> None:
    """State dicts written by other versions also distribute rows by these owner ranks, so they must not change."""
    hashed = [4, 4, 0, 0, 2, 3, 3, 4, 2, 4, 3, 0, 3, 2, 2, 4]
    assert owner_ranks(np.arange(-4, 12), (-2, 0), 5).tolist() == hashed


@pytest.mark.parametrize(
    ("home", "world_size", "message"),
    [((3, 0), 3, "rank 3 of 3"), ((-3, 0), 3, "a block of 0"), ((-1, 0), 0, "world_size must be at least 1")],
)
def test_invalid_homes_are_refused(home: tuple[int, int], world_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        owner_ranks(np.arange(3), home, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("rows", [1, 2, 9, 31, 1000])
@pytest.mark.parametrize("home", Home)
def test_rows_of_ranks_are_the_table(home: Home, rows: int, world_size: int) -> None:
    seen = []
    for rank in range(world_size):
        placement = RowWise(rank, world_size, home, rows)
        own_ids = placement.local_ids(rows)
        assert own_ids.dtype == np.int64
        assert (placement.owner(own_ids) == rank).all()
        assert len(own_ids) <= placement.max_own_rows(rows)
        seen.append(own_ids)
    assert np.sort(np.concatenate(seen)).tolist() == list(range(rows))


def test_rows_that_are_hashed_in_pieces() -> None:
    rows = 2**20 + 3
    parts = [RowWise(rank, 3, Home.HASH, rows).local_ids(rows) for rank in range(3)]
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(rows))


def test_continuous_homes_are_torchrecs_blocks() -> None:
    assert [RowWise(rank, 4, Home.CONTINUOUS, 9).local_ids(9).tolist() for rank in range(4)] == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7, 8],
        [],
    ]


def test_home_is_given_by_name() -> None:
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
AGES = {"admit_threshold": 3, "evict_threshold": 12, "evict_step_interval": 2}
ROWS_AND_TABLE = ("row_wise", "row_wise", "table_wise")
ACCUMULATE = {"use_accumulate": True}
CASES = {
    "hash": Scenario("hash", optimizer=rst.AccumulateAdagrad, options=ACCUMULATE, steps=6, seed=63),
    "swaps": Scenario(cache=60, optimizer=torch.optim.Adam, sizes=((2, 1),), ids=300, steps=10, seed=64),
    "admission": Scenario(cache=1000, rules=AGES, steps=8, seed=65),
    "init_fn": Scenario(cache=1000, init_fn=torch.nn.init.normal_, sharding=ROWS_AND_TABLE, seed=66),
}


@pytest.mark.parametrize("number", range(len(CASES)), ids=list(CASES))
def test_training_has_the_same_bits(ranks_of: Start, tmp_path: Path, number: int) -> None:
    """The rows are also saved half-way and loaded into a model with another `home=`."""
    scenario, ranks = list(CASES.values())[number], ranks_of(2)
    saved, loaded = (scenario.homes, OTHERS[number % 2])[:: -1 if number > 1 else 1]
    expected = ranks.run(train_sharded, scenario)
    found = ranks.run(train_sharded, replace(scenario, homes=saved), 2, str(tmp_path), loaded)
    assert_same([(of[0], of[2]) for of in found], [(of[0], of[2]) for of in expected])
    assert_rows(united([result[1] for result in found]), united([result[1] for result in expected]))
    homes_differ = [set(a[1]["t0"]) != set(b[1]["t0"]) for a, b in zip(found, expected, strict=True)]
    assert all(homes_differ) == (loaded != scenario.homes), "rows live elsewhere"


# ---- loads


def tables_at(home: str) -> Any:
    tables = bags_collection(Place.device, bag_config(num_embeddings=4000), cache=4000, home=home)
    rst.apply_optimizer_in_backward(torch.optim.SGD, tables.parameters(), {"lr": 0.1})
    return tables


@on_ranks(2, 4)
def test_only_hashed_homes_spread_ids_with_a_stride(rank: int, world_size: int) -> None:
    """The planner assumes an equal load on all ranks; only hashed owner ranks achieve it here."""
    even, batch = 4000 // world_size, jagged({"f0": [[i * world_size for i in range(4000)]]})
    model: Any = shard(torch.nn.ModuleDict({"sparse": tables_at("hash")}), Scenario(sharding=("row_wise",)))
    (of_table,) = model.plan.plan["sparse"].values()
    assert [part.shard_sizes[0] for part in of_table.sharding_spec.shards] == [even] * world_size
    modulo, hashed = shard_tables(tables_at("modulo")), model.module["sparse"]
    for tables in (modulo, hashed):
        tables(batch).wait()
    assert len(modulo.table_ids("t0")) == (0 if rank else 4000)
    assert abs(len(hashed.table_ids("t0")) - even) < 4 * even**0.5


def test_ids_of_a_rank_do_not_crowd_its_map() -> None:
    """Owner ranks and id maps use different hashes, so the ids of one rank spread over its whole map."""
    ids = np.arange(1_000_000)
    own_ids = ids[owner_ranks(ids, (-2, 0), 8) == 3]
    places = [home_in_map(int(i), 64) for i in own_ids[:20_000]]
    counts = np.bincount(places, minlength=64)
    assert abs(counts - counts.mean()).max() < 6 * counts.mean() ** 0.5


def home_in_map(i: int, places: int) -> int:
    """Returns the home position of an id in a new map with `places` positions."""
    mixed = fold((i & MASK) ^ 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93)
    return fold(mixed, 0x9E3779B97F4A7C15) * places >> 64


# ---- state dicts


@on_ranks(2)
def test_a_rank_s_state_dict_of_other_homes_is_refused() -> None:
    states = {}
    for home in ("modulo", "hash"):
        tables = shard_tables(tables_at(home))
        tables(jagged({"f0": [list(range(20))]})).wait()
        states[home] = tables.state_dict()
        tables.load_state_dict(states[home])
    message = error_of(lambda: tables.load_state_dict(states["modulo"]))
    assert "does not own" in message
    assert "the same home=" in message


# ---- replicated rows


ALL = ("data_parallel",) * 3
OPTIMIZERS: list[tuple[type, dict[str, Any]]] = [
    (torch.optim.SGD, {}),
    (torch.optim.Adam, {}),
    (rst.AccumulateAdagrad, {"use_accumulate": True, "accumulate_step": 2}),
]


@pytest.mark.parametrize(("optimizer", "options"), OPTIMIZERS, ids=["sgd", "adam", "window"])
@pytest.mark.parametrize("kind", ["bags", "sequences"])
def test_replicated_rows_have_the_bits_of_one_owner(
    ranks_of: Start, kind: str, optimizer: type, options: dict[str, Any]
) -> None:
    scenario = Scenario(
        kind, ("table_wise",) * 3, optimizer, options, sizes=((3, 1), (0, 2)), steps=5, dims=(4, 8, 4), seed=61
    )
    homes = ranks_of(2).run(train_sharded, scenario)
    whole = united([home[1] for home in homes])
    for depth in (0, 2):
        for copy, home in zip(
            ranks_of(2).run(train_sharded, replace(scenario, sharding=ALL), depth), homes, strict=True
        ):
            assert_same(copy[0], home[0])
            assert_same(copy[1], whole)


@on_ranks(2)
def test_reading_exchanges_no_ids_and_no_rows() -> None:
    scenario = Scenario(sharding=ALL)
    model, batch = sharded(scenario), batch_of(scenario, 0)
    with torch.no_grad():
        model.eval()(batch)
    read = model.module.sparse.exchange_stats()
    model.train()(batch)[0].backward()
    trained = model.module.sparse.exchange_stats()
    assert read["unique_ids"] > 0
    assert (read["id_bytes"], read["row_bytes"], read["grad_bytes"]) == (0, 0, 0)
    ids = trained["unique_ids"] - read["unique_ids"]
    assert (trained["id_bytes"], trained["row_bytes"], trained["grad_bytes"]) == (8 * ids, 0, 4 * 4 * ids)


@on_ranks(2)
def test_copies_that_would_differ_are_refused(rank: int) -> None:
    model = Model(Scenario(sharding=ALL), 3)
    state = model.sparse.state_dict()
    state["embedding_bags.t1.weight"][3] += rank
    model.sparse.load_state_dict(state)
    text = r"takes over the rows of data_parallel tables.*table 't1': weight is .* on rank 0, .* on rank 1"
    with pytest.raises(ValueError, match=text):
        shard(model, Scenario(sharding=ALL))
    scenario = Scenario(sharding=ALL, init_fn=torch.nn.init.normal_)
    model = sharded(scenario)
    torch.manual_seed(7 + rank)
    with pytest.raises(ValueError, match=r"rows that init_fn drew for table 't1' is .* on rank 0, .* on rank 1"):
        model(batch_of(scenario, 0))
    config = rst.HashEmbeddingBagConfig(
        name="t0", num_embeddings=9, embedding_dim=4, feature_names=["f0"], init_fn=torch.nn.init.normal_
    )
    model = Model(scenario, 3)
    model.sparse = rst.HashEmbeddingBagCollection([config])
    text = r"hash tables \['t0'\] have an init_fn.*cannot be data_parallel.*row_wise"
    with pytest.raises(ValueError, match=text):
        shard(model, Scenario(sharding=ALL[:1]))


@on_ranks(2)
def test_a_batch_begun_in_evaluation_is_not_trained() -> None:
    """In evaluation mode, ids of replicated tables are not sent to other ranks, so the batch cannot be trained."""
    scenario = Scenario(sharding=ALL)
    tables = sharded(scenario).module.sparse
    before = rows(tables)
    ctx = tables.eval().create_context()
    inputs = tables.input_dist(ctx, batch_of(scenario, 0)).wait().wait()
    tables.train()
    with pytest.raises(RuntimeError, match="begun in evaluation mode is trained"):
        tables.compute_and_output_dist(ctx, inputs).wait()
    assert_same(rows(tables), before)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_ids_are_sent_to_their_owners(rank: int) -> None:
    """The expected values are counted by hand: three ranks; table 0 row-wise, table 1 on all, table 2 on rank 1."""
    replicas = Replicas([RowWise(rank, 3), Replicated(rank, 3), TableWise(rank, 1, 3)], rank)
    counts = np.zeros((3, 3), np.int64)
    counts[:, 0], counts[rank, 1], counts[1, 2] = [2, 1, 0], 3, 1
    ids = np.array(
        [100 * home + 10 * table + i for home in range(3) for table in range(3) for i in range(counts[home, table])]
    )
    replicated = ids[replicas.replication_indices(counts, range(3))].tolist()
    own = [100 * rank + 10, 100 * rank + 11, 100 * rank + 12]
    assert replicated == [0, 1, *own, 100, *own, 120, *own]
    assert replicas.counts_for_all(counts).tolist() == [[2, 3, 0], [1, 3, 1], [0, 3, 0]]
    of = counts[:, [0, 1]].sum(axis=1).tolist()
    plain = Route([4, 4, 4], of, of, [4, 4, 4])
    route = replicas.route(plain, counts, np.full((3, 3), 2, np.int64), None, [0, 1], torch.device("cpu"))
    assert route.rows_to == [4 if home == rank else 2 for home in range(3)]
    assert route.rows_from == [each + 3 * (home == rank) for home, each in enumerate([2, 1, 0])]
    assert (route.grads_to, route.grads_from) == ([5, 4, 3], [4, 4, 4])
