"""Several ranks train like one process that has the batches of all ranks and averages the loss over them.

Fixed cases come first, then random tables, optimizers, batches and pipelines. Half of the random cases continue from a
save, which may be a delta whose base save is in another folder. In others, one rank's configuration differs.
"""

from __future__ import annotations

import dataclasses
import pkgutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from optimizer_table import ROWS, Row
from ranks import Ranks, Start, error_of, on_ranks
from reference_homes import home_argument, home_of
from sharded_model import (
    Scenario,
    assert_rows,
    bags_of,
    batches_of,
    configs,
    sequences_of_rank,
    sharded,
    train,
    train_alone,
    train_sharded,
    united,
)
from torchrec.modules.embedding_configs import DataType
from torchrec.optim import RowWiseAdagrad

import rec_sdk_torch as rst
from rec_sdk_torch.modules.configs import table_config
from rec_sdk_torch.tbe import Home

ROW, TABLE, ALL = "row_wise", "table_wise", "data_parallel"
ADAGRAD, ADAM = torch.optim.Adagrad, torch.optim.Adam
SHOW_CLICK = rst.AdmitAndEvictPolicyType.POLICY_SHOWCLICK
SHARE: dict[str, Any] = {
    "policy_type": SHOW_CLICK,
    "showclick_params": rst.ShowClickParams(beta=0.5, evict_percentage=0.25, score_decay=0.5),
    "max_rows": 14,
    "evict_step_interval": 3,
}
CLICKS = {
    "policy_type": SHOW_CLICK,
    "showclick_params": rst.ShowClickParams(alpha=0.5, beta=1, admit_threshold=3),
}
AGE = {"evict_threshold": 12, "evict_step_interval": 2}
SWAPS: dict[str, Any] = {"cache": 40, "sizes": ((2,),), "ids": 300, "steps": 12}
UNEVEN = ((5, 2), (0, 3), (1, 0), (0, 0))
NORMAL = torch.nn.init.normal_


def accumulating(steps: int) -> dict[str, Any]:
    return {"options": {"use_accumulate": True, "accumulate_step": steps}}


CASES = {
    "sgd": Scenario(),
    "table_wise": Scenario(sharding=(TABLE,) * 3, seed=1),
    "mixed": Scenario(sharding=(ROW, TABLE, ROW), optimizer=ADAGRAD, seed=2),
    "replicas": Scenario(sharding=(ALL, ALL, ALL), optimizer=ADAM, seed=52),
    "replicas_sequences": Scenario("sequences", (ALL, ROW, TABLE), dims=(4, 8, 4), optimizer=ADAGRAD, seed=53),
    "replicas_swap": Scenario(
        sharding=(TABLE, ALL, ALL), cache=80, sizes=((2, 1), (0, 3), (1, 0)), ids=300, steps=12, seed=54
    ),
    "replicas_show_click": Scenario(sharding=(ALL, ROW, ALL), rules=SHARE, steps=8, seed=55),
    "replicas_init_fn": Scenario(sharding=(ROW, ALL, ALL), init_fn=NORMAL, seed=56),
    "planner": Scenario(sharding=(None, None, None), seed=3),
    "sequences": Scenario("sequences", optimizer=ADAGRAD, seed=4),
    "dims": Scenario(dims=(4, 8, 3), optimizer=RowWiseAdagrad, options={"eps": 1e-8}, seed=6),
    "weighted": Scenario(weighted=True, optimizer=ADAM, dims=(4, 8, 4), seed=7),
    "hash": Scenario("hash", optimizer=ADAGRAD, seed=8),
    "uneven": Scenario(sizes=UNEVEN, optimizer=ADAGRAD, steps=6, seed=10),
    "swaps": Scenario(optimizer=ADAM, **SWAPS, seed=11),
    "admission": Scenario(admit=4, optimizer=ADAGRAD, sizes=((3, 1), (2, 5)), steps=8, seed=41),
    "admission_sequences": Scenario("sequences", (TABLE, ROW, ROW), admit=3, optimizer=ADAM, dims=(4, 8, 4), seed=42),
    "age": Scenario(rules=AGE, optimizer=ADAGRAD, steps=8, seed=44),
    "show_click": Scenario(rules=CLICKS, optimizer=ADAM, sizes=((3, 1), (2, 5), (0, 2)), steps=8, seed=45),
    "share_and_bound": Scenario(  # each table has one owner rank, so limits apply to whole tables
        "sequences", (TABLE, ROW, TABLE), rules=SHARE, steps=8, seed=46
    ),
    "init_fn": Scenario(init_fn=NORMAL, optimizer=ADAGRAD, seed=47),
    "init_fn_sequences": Scenario("sequences", (ROW, TABLE, ROW), init_fn=NORMAL, seed=48),
    "meta": Scenario(made_on="meta", init_fn=NORMAL, sharding=(ROW, TABLE, ROW), seed=49),
    "meta_sequences": Scenario("sequences", made_on="meta", optimizer=ADAM, seed=50),
    "step": Scenario(update="step", optimizer=ADAM, sharding=(ROW, TABLE, ALL), dims=(4, 8, 4), seed=57),
    "step_sequences": Scenario("sequences", update="step", optimizer=ADAGRAD, **SWAPS, seed=58),
    "step_hash": Scenario("hash", update="step", weighted=True, sizes=UNEVEN, seed=59),
    "accumulate_sgd": Scenario(optimizer=rst.AccumulateSGD, **accumulating(3), steps=6, seed=12),
    "accumulate_adagrad": Scenario(
        optimizer=rst.AccumulateAdagrad, **accumulating(2), cache=40, sizes=((2, 1),), ids=300, steps=8, seed=13
    ),
    "accumulate_adam": Scenario("sequences", optimizer=rst.AccumulateAdam, **accumulating(2), steps=6, seed=14),
}
WORLDS = [
    *((name, 2) for name in CASES),
    *((name, 4) for name in ("mixed", "weighted", "uneven", "init_fn", "init_fn_sequences")),
    *((name, 1) for name in ("sgd", "sequences", "table_wise")),
]


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
    fill = scenario.options.get("initial_accumulator_value", 0)
    assert_rows(united([result[1] for result in results], scenario.sharding), rows, rtol, atol, fill)
    for number, sharding in enumerate(scenario.sharding):
        home = home_argument(scenario.homes[number], configs(scenario)[number].num_embeddings, world_size)
        for rank, result in enumerate(results if sharding == ROW else ()):
            assert all(home_of(i, home, world_size) == rank for i in result[1][f"t{number}"])
    for result in results:
        torch.testing.assert_close(result[2], dense, rtol=rtol, atol=atol)
    return results


@pytest.mark.parametrize(("name", "world_size"), WORLDS)
def test_cases_train_like_one_process(ranks_of: Start, device: torch.device, name: str, world_size: int) -> None:
    results = check(ranks_of(world_size), world_size, CASES[name])
    places = ["cpu" if device.type == "cpu" else f"{device.type}:{rank}" for rank in range(world_size)]
    assert [result[5] for result in results] == places
    if CASES[name].cache == 40:
        assert any(result[4]["rows_out"] for result in results), "the cache swaps"


@on_ranks(2)
def test_prefetched_batches_that_are_only_read_keep_no_rows() -> None:
    """The model is in training mode, but no backward pass follows; staging buffers are freed nevertheless."""
    scenario = Scenario(cache=40, sizes=((2,),), ids=300)
    model = train(sharded(scenario), scenario, range(1))
    tables, staged = model.module.sparse, []
    with torch.no_grad():
        for batch in rst.prefetch(list(batches_of(scenario, 12))[1:], model, depth=2):
            tables.wait_for_plans()
            model(batch)
            staged.append(tables.memory_report()["staging"])
    tables.state_dict()
    assert max(staged) < 3 * 4 * 20 * 5 * 40, "three batches of four bags of 5 ids, of 4 tables, in 40 bytes each"
    assert tables.memory_report()["staging"] == 0


# ---- random cases


def without_rounding(row: Row) -> dict[str, Any]:
    """Returns the optimizer's keywords with an `eps` that hides the rounding error of gradients near zero."""
    options = {name: value for name, value in row.options.items() if name != "lr"}
    return {**options, "eps": 1e-2} if "eps" in options else options


OPTIMIZERS = [(pkgutil.resolve_name(row.cls), without_rounding(row)) for row in ROWS]
OPTIMIZERS += [
    (
        pkgutil.resolve_name(row.spec.accumulate_class),
        {**without_rounding(row), "use_accumulate": True, "accumulate_step": 2 + number % 2},
    )
    for number, row in enumerate(ROWS)
    if row.spec.accumulate_class
]

HOMES = [home.value for home in Home]
DTYPES = (DataType.FP32, DataType.FP32, DataType.FP16, DataType.BF16)
# Where a gradient's terms nearly cancel, their rounding error remains; `lr / eps` and momentum magnify it 50 times.
TOLERANCES = {DataType.FP32: (1e-4, 1e-4), DataType.FP16: (2e-2, 2e-2), DataType.BF16: (5e-2, 5e-2)}


def draw(rng: np.random.Generator, world_size: int) -> Scenario:
    optimizer, options = OPTIMIZERS[rng.integers(len(OPTIMIZERS))]
    kind = str(rng.choice(["bags", "sequences", "hash"]))
    few = tuple(tuple(rng.integers(0, 4, world_size).tolist()) for _ in range(3))
    return Scenario(
        kind=kind,
        sharding=tuple(rng.choice(["row_wise", "table_wise", "data_parallel"], 3).tolist()),
        optimizer=optimizer,
        options=options,
        weighted=kind != "sequences" and bool(rng.integers(2)),
        cache=30 * world_size,  # each rank has at most 2 features with 3 samples of 5 ids per table
        sizes=few,
        steps=6,
        seed=int(rng.integers(2**31)),
        dims=tuple(rng.choice([1, 4, 6, 16], 3).tolist()),
        ids=31 if kind == "hash" else int(rng.choice([31, 200])),
        dtype=DTYPES[rng.integers(len(DTYPES))],
        init_fn=small_normal if rng.integers(3) == 0 else None,
        frozen=str(rng.choice(["", "", "", "t0", "t1", "t2"])),
        padding_idx={f"t{i}": int(rng.integers(-3, 8)) for i in range(3) if rng.integers(4) == 0},
        **draw_rules(rng, whole=world_size == 1),
        homes=tuple(rng.choice(HOMES, 3).tolist()),
        local_size=(None, max(1, world_size // 2))[rng.integers(2)],
    )


def small_normal(weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.init.normal_(weight, std=0.1)


def draw_rules(rng: np.random.Generator, whole: bool) -> dict[str, Any]:
    """Draws rules of admission and eviction.

    With `whole`, also draws shares and row bounds. They apply to each rank's shard, so the results depend on the number
    of ranks.

    """
    if rng.integers(2):
        return {}
    rules: dict[str, Any] = {
        "evict_idle_steps": int(rng.choice([0, 0, 2, 3])),
        "evict_step_interval": int(rng.integers(1, 4)),
        "max_rows": int(rng.choice([0, 12])) * whole,
    }
    if rng.integers(2):
        rules |= {"admit_threshold": int(rng.choice([-1, 2, 5])), "evict_threshold": int(rng.choice([0, 8, 20]))}
        return {"rules": rules}
    params = rst.ShowClickParams(
        alpha=float(rng.choice([1, 0.5])),
        beta=float(rng.choice([0, 0.75])),
        admit_threshold=float(rng.choice([0, 2, 4.5])),
        evict_percentage=float(rng.choice([0, 0.25])) * whole,
        score_decay=float(rng.choice([1, 0.5])),
    )
    return {"rules": rules | {"policy_type": rst.AdmitAndEvictPolicyType.POLICY_SHOWCLICK, "showclick_params": params}}


SEEDS = 110
FAST = 5
"""The number of seeds in a run without --full; each day takes the next ones."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        full, day = (metafunc.config.getoption(name) for name in ("--full", "--day"))
        seeds = range(SEEDS) if full else [(FAST * day + i) % SEEDS for i in range(FAST)]
        metafunc.parametrize("seed", seeds)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_random_scenarios_train_like_one_process(ranks_of: Start, seed: int, world_size: int, tmp_path: Path) -> None:
    rng = np.random.default_rng([world_size, seed])
    scenario = draw(rng, world_size)
    rtol, atol = TOLERANCES[scenario.dtype]
    depth, saved = int(rng.integers(4)), bool(rng.integers(2))
    if saved and scenario.kind != "hash":  # configs of this kind have no `is_incremental`
        scenario = dataclasses.replace(scenario, tracked=bool(rng.integers(2)))
    check(ranks_of(world_size), world_size, scenario, depth, rtol, atol, str(tmp_path) if saved else "")


def effective_options(scenario: Scenario) -> Any:
    """Returns the scenario's options that have an effect."""
    tables = [table_config(config, capacity=scenario.kind == "hash") for config in configs(scenario)]
    of_tables = scenario.padding_idx, scenario.homes, scenario.local_size, tables
    return scenario.kind, scenario.weighted, scenario.optimizer, scenario.options, of_tables


def draw_changed_scenario(rng: np.random.Generator, scenario: Scenario, world_size: int) -> Scenario:
    """Returns a copy of the scenario with a change to one of the attributes that must be the same on all ranks."""
    optimizer, options = OPTIMIZERS[rng.integers(len(OPTIMIZERS))]
    others: list[dict[str, Any]] = [
        {"optimizer": optimizer, "options": options},
        {"options": scenario.options | {"lr": 0.07}},
        {"dims": tuple(rng.choice([1, 4, 6, 16], 3).tolist())},
        {"dtype": DTYPES[rng.integers(len(DTYPES))]},
        {"padding_idx": {"t1": int(rng.integers(100, 200))}},
        {"init_fn": None if scenario.init_fn else small_normal},
        {"kind": str(rng.choice(["bags", "sequences", "hash"])), "weighted": False},
        {"weighted": scenario.kind != "sequences"},
        draw_rules(rng, whole=False),
        {"homes": tuple(rng.choice(HOMES, 3).tolist())},
        {"local_size": (None, 1, world_size // 2, "auto")[rng.integers(4)]},
    ]
    other = scenario
    while effective_options(other) == effective_options(scenario):
        other = dataclasses.replace(scenario, **others[rng.integers(len(others))])
    return other


def error_of_training(rank: int, world_size: int, scenarios: list[Scenario], depth: int) -> str:
    return error_of(lambda: train_sharded(rank, world_size, scenarios[rank], depth))


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_differing_rank_raises_on_all(ranks_of: Start, seed: int, world_size: int) -> None:
    rng = np.random.default_rng([world_size, seed, 1])
    scenarios = [draw(rng, world_size)] * world_size
    odd = int(rng.integers(world_size))
    scenarios[odd] = draw_changed_scenario(rng, scenarios[odd], world_size)
    errors = ranks_of(world_size).run(error_of_training, scenarios, int(rng.integers(4)))
    assert len(set(errors)) == 1, errors
    assert "not the same on all ranks" in errors[0], (errors, scenarios[odd])
    assert f"on rank {odd}" in errors[0]
