"""Tables that every rank has: copies with the same bits, on every rank, as on one that is home to all ids."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from ranks import Start, on_ranks
from sharded_model import Model, Scenario, assert_same, batch_of, rows, shard, sharded, train_sharded, united

import rec_sdk_torch as rst
from rec_sdk_torch.distributed.placement import Replicated, RowWise, TableWise
from rec_sdk_torch.distributed.replicas import Replicas, Route

ALL = ("data_parallel",) * 3
OPTIMIZERS: list[tuple[type, dict[str, Any]]] = [
    (torch.optim.SGD, {}),
    (torch.optim.Adam, {}),
    (rst.AccumulateAdagrad, {"use_accumulate": True, "accumulate_step": 2}),
]


@pytest.mark.parametrize(("optimizer", "options"), OPTIMIZERS, ids=["sgd", "adam", "window"])
@pytest.mark.parametrize("kind", ["bags", "sequences"])
def test_they_have_the_bits_of_one_home(ranks_of: Start, kind: str, optimizer: type, options: dict[str, Any]) -> None:
    scenario = Scenario(
        kind, ("table_wise",) * 3, optimizer, options, sizes=((3, 1), (0, 2)), steps=5, dims=(4, 8, 4), seed=61
    )
    homes = ranks_of(2).run(train_sharded, scenario)
    whole = united([home[1] for home in homes])
    for depth in (0, 2):
        for copy, home in zip(
            ranks_of(2).run(train_sharded, dataclasses.replace(scenario, sharding=ALL), depth), homes, strict=True
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
def test_a_batch_that_the_others_do_not_know_is_not_trained() -> None:
    """The other ranks were not told of the ids of a batch that was begun in evaluation mode."""
    scenario = Scenario(sharding=ALL)
    tables = sharded(scenario).module.sparse
    before = rows(tables)
    ctx = tables.eval().create_context()
    asked = tables.input_dist(ctx, batch_of(scenario, 0)).wait().wait()
    tables.train()
    with pytest.raises(RuntimeError, match="begun in evaluation mode is trained"):
        tables.compute_and_output_dist(ctx, asked).wait()
    assert_same(rows(tables), before)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_what_goes_where(rank: int) -> None:
    """Counted by hand: three ranks, table 0 row-wise, table 1 on all, table 2 at home on rank 1."""
    replicas = Replicas([RowWise(rank, 3), Replicated(rank, 3), TableWise(rank, 1, 3)], rank)
    counts = np.zeros((3, 3), np.int64)
    counts[:, 0], counts[rank, 1], counts[1, 2] = [2, 1, 0], 3, 1
    ids = np.array(
        [100 * home + 10 * table + i for home in range(3) for table in range(3) for i in range(counts[home, table])]
    )
    told = ids[replicas.spread(counts, range(3))].tolist()
    own = [100 * rank + 10, 100 * rank + 11, 100 * rank + 12]
    assert told == [0, 1, *own, 100, *own, 120, *own]
    assert replicas.for_all(counts).tolist() == [[2, 3, 0], [1, 3, 1], [0, 3, 0]]
    of = counts[:, [0, 1]].sum(axis=1).tolist()
    plain = Route([4, 4, 4], of, of, [4, 4, 4])
    route = replicas.route(plain, counts, np.full((3, 3), 2, np.int64), None, [0, 1], torch.device("cpu"))
    assert route.to == [4 if home == rank else 2 for home in range(3)]
    assert route.of == [each + 3 * (home == rank) for home, each in enumerate([2, 1, 0])]
    assert (route.grads_to, route.grads_of) == ([5, 4, 3], [4, 4, 4])
