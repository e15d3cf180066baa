"""Tables that every rank has: copies with the same bits, on every rank, as on one that is home to all ids."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from jagged import jagged
from ranks import Ranks
from sharded_model import Model, Scenario, bags_of, rows, shard, train_sharded

import rec_sdk_torch as rst
from rec_sdk_torch.distributed.placement import Replicated, RowWise, TableWise
from rec_sdk_torch.distributed.replicas import Replicas, Route

Start = Callable[[int], Ranks]
ALL = ("data_parallel",) * 3
OPTIMIZERS: list[tuple[type, dict[str, Any]]] = [
    (torch.optim.SGD, {}),
    (torch.optim.Adam, {}),
    (rst.AccumulateAdagrad, {"use_accumulate": True, "accumulate_step": 2}),
]


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize(("optimizer", "options"), OPTIMIZERS, ids=["sgd", "adam", "window"])
@pytest.mark.parametrize("kind", ["bags", "sequences"])
def test_they_have_the_bits_of_one_home(
    ranks_of: Start, kind: str, optimizer: type, options: dict[str, Any], depth: int
) -> None:
    scenario = Scenario(
        kind=kind, optimizer=optimizer, options=options, sizes=((3, 1), (0, 2)), steps=5, dims=(4, 8, 4), seed=61
    )
    copies = ranks_of(2).run(train_sharded, dataclasses.replace(scenario, sharding=ALL), depth)
    homes = ranks_of(2).run(train_sharded, dataclasses.replace(scenario, sharding=("table_wise",) * 3), depth)
    for rank, (copy, home) in enumerate(zip(copies, homes, strict=True)):
        for one, other in zip(copy[0], home[0], strict=True):
            assert torch.equal(one, other), rank
    for table in ("t0", "t1", "t2"):
        whole = homes[0][1][table] | homes[1][1][table]
        for copy in copies:
            assert copy[1][table].keys() == whole.keys()
            assert all(torch.equal(copy[1][table][i], row) for i, row in whole.items())


def bytes_of(rank: int, world_size: int) -> list[dict[str, int]]:
    """The counters of an evaluation batch, and of a training batch after it."""
    scenario = Scenario(sharding=ALL)
    model = shard(Model(scenario, 3), scenario, world_size)
    batch = jagged(*bags_of(scenario, 0, world_size)[rank])
    with torch.no_grad():
        model.eval()(batch)
    read = model.module.sparse.exchange_stats()
    model.train()(batch)[0].backward()
    return [read, model.module.sparse.exchange_stats()]


def test_reading_exchanges_no_ids_and_no_rows(ranks_of: Start) -> None:
    for read, trained in ranks_of(2).run(bytes_of):
        assert read["unique_ids"] > 0
        assert (read["id_bytes"], read["row_bytes"], read["grad_bytes"]) == (0, 0, 0)
        ids = trained["unique_ids"] - read["unique_ids"]
        assert (trained["id_bytes"], trained["row_bytes"], trained["grad_bytes"]) == (8 * ids, 0, 4 * 4 * ids)


def refuse(rank: int, world_size: int, which: str) -> str:
    scenario = Scenario(sharding=ALL, optimizer=torch.optim.SGD)
    if which == "init_fn":
        scenario = dataclasses.replace(scenario, init_fn=torch.nn.init.normal_)
    model = Model(scenario, 3)
    table = "embedding_bags.t1"
    if which == "rows":
        state = model.sparse.state_dict()
        state[f"{table}.weight"][3] += rank
        model.sparse.load_state_dict(state)
    if which == "hash_init_fn":
        config = rst.HashEmbeddingBagConfig(
            name="t0", num_embeddings=9, embedding_dim=4, feature_names=["f0"], init_fn=torch.nn.init.normal_
        )
        model.sparse = rst.HashEmbeddingBagCollection([config])
        scenario = dataclasses.replace(scenario, sharding=ALL[:1])
    try:
        sharded = shard(model, scenario, world_size)
        torch.manual_seed(7 + rank)
        sharded(jagged(*bags_of(scenario, 0, world_size)[rank]))
    except ValueError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize(
    ("which", "said"),
    [
        ("rows", r"takes over the rows of data_parallel tables.*table 't1': weight is .* on rank 0, .* on rank 1"),
        ("init_fn", r"rows that init_fn drew for table 't1' is .* on rank 0, .* on rank 1"),
        ("hash_init_fn", r"hash tables \['t0'\] have an init_fn.*cannot be data_parallel.*row_wise"),
    ],
    ids=["rows", "init_fn", "hash_init_fn"],
)
def test_copies_that_would_differ_are_refused(ranks_of: Start, which: str, said: str) -> None:
    for text in ranks_of(2).run(refuse, which):
        assert re.search(said, text), text


def begun_in_evaluation(rank: int, world_size: int) -> None:
    """The other ranks were not told of the ids of such a batch."""
    scenario = Scenario(sharding=ALL)
    model = shard(Model(scenario, 3), scenario, world_size)
    tables, batch = model.module.sparse, jagged(*bags_of(scenario, 0, world_size)[rank])
    before = rows(tables)
    ctx = tables.eval().create_context()
    asked = tables.input_dist(ctx, batch).wait().wait()
    tables.train()
    with pytest.raises(RuntimeError, match="begun in evaluation mode is trained"):
        tables.compute_and_output_dist(ctx, asked).wait()
    assert all(torch.equal(row, rows(tables)[table][i]) for table in before for i, row in before[table].items())


def test_a_batch_that_the_others_do_not_know_is_not_trained(ranks_of: Start) -> None:
    ranks_of(2).run(begun_in_evaluation)


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
