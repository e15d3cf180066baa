"""Many ranks give what one process gives on the batches of all of them, with the loss averaged over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from jagged import jagged
from ranks import Ranks
from reference_homes import home_of, named
from sharded_model import Model, Scenario, bags_of, configs, sequences_of_rank, shard, train_alone, train_sharded
from torchrec.optim import RowWiseAdagrad

import rec_sdk_torch as rst

ROW, TABLE, ALL = "row_wise", "table_wise", "data_parallel"
SHOW_CLICK = rst.AdmitAndEvictPolicyType.POLICY_SHOWCLICK
CASES = {
    "sgd": Scenario(),
    "table_wise": Scenario(sharding=(TABLE,) * 3, seed=1),
    "mixed": Scenario(sharding=(ROW, TABLE, ROW), optimizer=torch.optim.Adagrad, seed=2),
    "replicas": Scenario(sharding=(ALL, ALL, ALL), optimizer=torch.optim.Adam, seed=52),
    "replicas_sequences": Scenario(
        kind="sequences", sharding=(ALL, ROW, TABLE), dims=(4, 8, 4), optimizer=torch.optim.Adagrad, seed=53
    ),
    "replicas_swap": Scenario(
        sharding=(TABLE, ALL, ALL), cache=80, sizes=((2, 1), (0, 3), (1, 0)), ids=300, steps=12, seed=54
    ),
    "replicas_show_click": Scenario(
        rules={
            "policy_type": SHOW_CLICK,
            "showclick_params": rst.ShowClickParams(beta=0.5, evict_percentage=0.25, score_decay=0.5),
            "max_rows": 14,
            "evict_step_interval": 3,
        },
        sharding=(ALL, ROW, ALL),
        steps=8,
        seed=55,
    ),
    "replicas_init_fn": Scenario(init_fn=torch.nn.init.normal_, sharding=(ROW, ALL, ALL), seed=56),
    "planner": Scenario(sharding=(None, None, None), seed=3),
    "sequences": Scenario(kind="sequences", optimizer=torch.optim.Adagrad, seed=4),
    "sequences_dims": Scenario(kind="sequences", sharding=(ROW, ROW, TABLE), dims=(4, 8, 4), seed=5),
    "dims": Scenario(dims=(4, 8, 3), optimizer=RowWiseAdagrad, options={"eps": 1e-8}, seed=6),
    "weighted": Scenario(weighted=True, optimizer=torch.optim.Adam, dims=(4, 8, 4), seed=7),
    "hash": Scenario(kind="hash", optimizer=torch.optim.Adagrad, seed=8),
    "hash_table_wise": Scenario(kind="hash", sharding=(TABLE, ROW, TABLE), seed=9),
    "uneven": Scenario(sizes=((5, 2), (0, 3), (1, 0), (0, 0)), optimizer=torch.optim.Adagrad, steps=6, seed=10),
    "swaps": Scenario(cache=40, optimizer=torch.optim.Adam, sizes=((2,),), ids=300, steps=12, seed=11),
    "admission": Scenario(admit=4, optimizer=torch.optim.Adagrad, sizes=((3, 1), (2, 5)), steps=8, seed=41),
    "admission_sequences": Scenario(
        kind="sequences", admit=3, optimizer=torch.optim.Adam, sharding=(TABLE, ROW, ROW), dims=(4, 8, 4), seed=42
    ),
    "age": Scenario(
        rules={"evict_threshold": 12, "evict_step_interval": 2}, optimizer=torch.optim.Adagrad, steps=8, seed=44
    ),
    "show_click": Scenario(
        rules={
            "policy_type": SHOW_CLICK,
            "showclick_params": rst.ShowClickParams(alpha=0.5, beta=1, admit_threshold=3),
        },
        optimizer=torch.optim.Adam,
        sizes=((3, 1), (2, 5), (0, 2)),
        steps=8,
        seed=45,
    ),
    "share_and_bound": Scenario(  # of whole tables, since each has one home
        rules={
            "policy_type": SHOW_CLICK,
            "showclick_params": rst.ShowClickParams(beta=0.5, evict_percentage=0.25, score_decay=0.5),
            "max_rows": 14,
            "evict_step_interval": 3,
        },
        sharding=(TABLE, ROW, TABLE),
        kind="sequences",
        steps=8,
        seed=46,
    ),
    "init_fn": Scenario(init_fn=torch.nn.init.normal_, optimizer=torch.optim.Adagrad, seed=47),
    "init_fn_sequences": Scenario(init_fn=torch.nn.init.normal_, kind="sequences", sharding=(ROW, TABLE, ROW), seed=48),
    "meta": Scenario(made_on="meta", init_fn=torch.nn.init.normal_, sharding=(ROW, TABLE, ROW), seed=49),
    "meta_sequences": Scenario(made_on="meta", kind="sequences", optimizer=torch.optim.Adam, seed=50),
    "meta_hash": Scenario(made_on="meta", kind="hash", optimizer=torch.optim.Adagrad, seed=51),
    "step": Scenario(update="step", optimizer=torch.optim.Adam, sharding=(ROW, TABLE, ALL), dims=(4, 8, 4), seed=57),
    "step_sequences": Scenario(
        update="step",
        kind="sequences",
        optimizer=torch.optim.Adagrad,
        cache=40,
        sizes=((2,),),
        ids=300,
        steps=12,
        seed=58,
    ),
    "step_hash": Scenario(update="step", kind="hash", weighted=True, sizes=((5, 2), (0, 3), (1, 0), (0, 0)), seed=59),
    "accumulate_sgd": Scenario(
        optimizer=rst.AccumulateSGD, options={"use_accumulate": True, "accumulate_step": 3}, steps=6, seed=12
    ),
    "accumulate_adagrad": Scenario(
        optimizer=rst.AccumulateAdagrad,
        options={"use_accumulate": True, "accumulate_step": 2},
        cache=40,
        sizes=((2, 1),),
        ids=300,
        steps=8,
        seed=13,
    ),
    "accumulate_adam": Scenario(
        kind="sequences",
        optimizer=rst.AccumulateAdam,
        options={"use_accumulate": True, "accumulate_step": 2},
        steps=6,
        seed=14,
    ),
}


def compare_outputs(results: list[Any], outputs: list[torch.Tensor], scenario: Scenario, **near: float) -> None:
    for step, expected in enumerate(outputs):
        found = [result[0][step] for result in results]
        if scenario.kind == "sequences":
            batches = bags_of(scenario, step, len(results))
            whole = [sequences_of_rank(expected, scenario, batches, rank) for rank in range(len(results))]
        else:
            found, whole = [torch.cat(found)], [expected]
        for one, other in zip(found, whole, strict=True):
            torch.testing.assert_close(one, other, **near)
            assert step or torch.equal(one, other), "the bits of the first forward"


def united(of_ranks: list[dict[int, torch.Tensor]], sharding: str | None) -> dict[int, torch.Tensor]:
    """The rows of a table on all ranks. `sharding`: None is as the planner had it."""
    first, *others = of_ranks
    if sharding == ALL or (sharding is None and any(first.keys() & other.keys() for other in others)):
        for other in others:
            assert list(first) == list(other), "all ranks have the ids, in one order"
            assert all(torch.equal(first[i], other[i]) for i in first), "the bits of all ranks"
        return first
    found: dict[int, torch.Tensor] = {}
    for rows in of_ranks:
        assert not found.keys() & rows.keys(), "a row has one home"
        found |= rows
    return found


def check(
    ranks: Ranks,
    world_size: int,
    scenario: Scenario,
    depth: int = 0,
    rtol: float = 1e-5,
    atol: float = 2e-6,
    saves: str = "",
) -> list[Any]:
    results = ranks.run(train_sharded, scenario, depth, saves)
    outputs, rows, dense = train_alone(scenario, world_size)
    compare_outputs(results, outputs, scenario, rtol=rtol, atol=atol)
    for table, expected in rows.items():
        number = int(table[1])
        found = united([result[1][table] for result in results], scenario.sharding[number])
        assert expected.keys() <= found.keys()
        extra = found.keys() - expected.keys()
        assert not extra, f"rows {sorted(extra)} that one process has not"
        for rank, result in enumerate(results):
            if scenario.sharding[number] == ROW:
                home = named(scenario.homes[number], configs(scenario)[number].num_embeddings, world_size)
                assert all(home_of(i, home, world_size) == rank for i in result[1][table])
        for i, row in expected.items():
            kept = len(found[i])  # states of a row of an index table that was not looked up are not kept
            assert (row[kept:] == scenario.options.get("initial_accumulator_value", 0)).all()
            torch.testing.assert_close(found[i], row[:kept], rtol=rtol, atol=atol, msg=f"{table}, id {i}")
    for result in results:
        torch.testing.assert_close(result[2], dense, rtol=rtol, atol=atol)
    return results


@pytest.mark.parametrize("name", CASES)
def test_two_ranks(ranks_of: Callable[[int], Ranks], device: torch.device, name: str) -> None:
    results = check(ranks_of(2), 2, CASES[name])
    places = ["cpu", "cpu"] if device.type == "cpu" else [f"{device.type}:{rank}" for rank in (0, 1)]
    assert [result[5] for result in results] == places
    if CASES[name].cache == 40:
        assert any(result[4]["rows_out"] for result in results), "the cache swaps"


@pytest.mark.parametrize("name", ["mixed", "weighted", "uneven", "init_fn", "init_fn_sequences"])
def test_four_ranks(ranks_of: Callable[[int], Ranks], name: str) -> None:
    check(ranks_of(4), 4, CASES[name])


@pytest.mark.parametrize("name", ["sgd", "sequences", "table_wise"])
def test_one_rank(ranks_of: Callable[[int], Ranks], name: str) -> None:
    check(ranks_of(1), 1, CASES[name])


@pytest.mark.parametrize("depth", [0, 3])
def test_ids_are_counted_on_all_ranks(ranks_of: Callable[[int], Ranks], depth: int) -> None:
    """No rank sees an id often enough by itself, but all together do."""
    scenario = Scenario(admit=6, sizes=((1, 1),), ids=12, steps=8, seed=43)
    results = check(ranks_of(2), 2, scenario, depth)
    stats = [result[4] for result in results]
    assert sum(each["admitted"] for each in stats) > 0
    assert sum(each["not_admitted_lookups"] for each in stats) > 0
    alone = train_alone(scenario, 2)
    assert sum(len(rows) for rows in alone[1].values()) == sum(
        len(rows) for result in results for rows in result[1].values()
    )


def read_ahead(rank: int, world_size: int) -> list[int]:
    """Bytes of rows on their way, of a loop that prefetches and only reads, though in training mode."""
    scenario = Scenario(cache=40, sizes=((2,),), ids=300)
    model = shard(Model(scenario, 3), scenario, world_size)
    tables = model.module.sparse
    model(jagged(*bags_of(scenario, 0, world_size)[rank]))[0].backward()
    batches = [jagged(*bags_of(scenario, step, world_size)[rank]) for step in range(1, 12)]
    staged = []
    with torch.no_grad():
        for batch in rst.prefetch(batches, model, depth=2):
            tables.wait_for_plans()
            model(batch)
            staged.append(tables.memory_report()["staging"])
    tables.state_dict()
    return [max(staged), tables.memory_report()["staging"]]


def test_ranks_that_read_what_they_prefetched_keep_no_rows(ranks_of: Callable[[int], Ranks]) -> None:
    for most, left in ranks_of(2).run(read_ahead):
        assert most < 3 * 4 * 20 * 5 * 40, "three batches of four bags of 5 ids, of 4 tables, in records of 40 bytes"
        assert left == 0
