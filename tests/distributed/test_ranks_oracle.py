"""Random tables, optimizers, batches and pipelines on many ranks, half of them over a save, which may be a delta of one
in another folder, beside one process; or one rank has others."""

from __future__ import annotations

import dataclasses
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from optimizer_table import ROWS, Row
from ranks import Ranks
from sharded_model import Scenario, configs, train_sharded
from test_sharded_training import check
from torchrec.modules.embedding_configs import DataType

import rec_sdk_torch as rst
from rec_sdk_torch.modules.configs import table_config
from rec_sdk_torch.tbe import Home


def without_rounding(row: Row) -> dict[str, Any]:
    """The row's keywords, with an `eps` far above the rounding of a gradient near zero: a step divides by it."""
    options = {name: value for name, value in row.options.items() if name != "lr"}
    return {**options, "eps": 1e-2} if "eps" in options else options


OPTIMIZERS = [(pkgutil.resolve_name(row.cls), without_rounding(row)) for row in ROWS]
OPTIMIZERS += [
    (
        pkgutil.resolve_name(row.spec.window_class),
        {**without_rounding(row), "use_accumulate": True, "accumulate_step": 2 + number % 2},
    )
    for number, row in enumerate(ROWS)
    if row.spec.window_class
]

HOMES = [home.value for home in Home]
DTYPES = (DataType.FP32, DataType.FP32, DataType.FP16, DataType.BF16)
# A gradient that nearly cancels keeps the rounding of its parts; `lr / eps` and momentum make it 50 times as large.
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
        cache=30 * world_size,  # 2 features of 3 samples of 5 ids on each rank, at most
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
    """Admission and eviction. `whole`: also shares and bounds, which are of a rank's part of a table."""
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
"""Seeds of a run that is not full, every day the next."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        full, day = (metafunc.config.getoption(name) for name in ("--full", "--day"))
        seeds = range(SEEDS) if full else [(FAST * day + i) % SEEDS for i in range(FAST)]
        metafunc.parametrize("seed", seeds)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_are_one_process(ranks_of: Callable[[int], Ranks], seed: int, world_size: int, tmp_path: Path) -> None:
    rng = np.random.default_rng([world_size, seed])
    scenario = draw(rng, world_size)
    rtol, atol = TOLERANCES[scenario.dtype]
    depth, saved = int(rng.integers(4)), bool(rng.integers(2))
    if saved and scenario.kind != "hash":  # whose configs have no `is_incremental`
        scenario = dataclasses.replace(scenario, tracked=bool(rng.integers(2)))
    check(ranks_of(world_size), world_size, scenario, depth, rtol, atol, str(tmp_path) if saved else "")


def meaning(scenario: Scenario) -> Any:
    """The scenario without options that change nothing."""
    tables = [table_config(config, capacity=scenario.kind == "hash") for config in configs(scenario)]
    of_tables = scenario.padding_idx, scenario.homes, scenario.local_size, tables
    return scenario.kind, scenario.weighted, scenario.optimizer, scenario.options, of_tables


def draw_other(rng: np.random.Generator, scenario: Scenario, world_size: int) -> Scenario:
    """The scenario with one thing that ranks have to have alike, and of which this is another."""
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
    while meaning(other) == meaning(scenario):
        other = dataclasses.replace(scenario, **others[rng.integers(len(others))])
    return other


def train_or_say(rank: int, world_size: int, scenarios: list[Scenario], depth: int) -> str:
    try:
        train_sharded(rank, world_size, scenarios[rank], depth)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


@pytest.mark.parametrize("world_size", [2, 4])
def test_one_rank_that_differs_ends_all(ranks_of: Callable[[int], Ranks], seed: int, world_size: int) -> None:
    rng = np.random.default_rng([world_size, seed, 1])
    scenarios = [draw(rng, world_size)] * world_size
    odd = int(rng.integers(world_size))
    scenarios[odd] = draw_other(rng, scenarios[odd], world_size)
    said = ranks_of(world_size).run(train_or_say, scenarios, int(rng.integers(4)))
    assert len(set(said)) == 1, said
    assert "not the same on all ranks" in said[0], (said, scenarios[odd])
    assert f"on rank {odd}" in said[0]
