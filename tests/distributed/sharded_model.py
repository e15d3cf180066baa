"""A model that tests train on several ranks, and in one process with the batches of all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from batches import jagged, random_bags, random_weights
from collection_factory import bag_config, sequence_config
from ranks import Place
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor, PoolingType
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingEnv
from torchrec.modules.embedding_configs import DataType
from torchrec.optim import CombinedOptimizer, KeyedOptimizerWrapper

import rec_sdk_torch as rst
from rec_sdk_torch.saves.format.manifest import read_manifest


@dataclass(frozen=True)
class Scenario:
    """A model, its batches and options.

    Attributes:
        kind: `bags`, `sequences` or `hash`.
        sharding: sharding type of each table, such as `row_wise` or `table_wise`; None lets the planner choose.
        cache: cached rows per rank.
        admit: the number of occurrences at which an id of a hash table gets a row; 0 admits every id immediately.
        rules: arguments of `AdmitAndEvictConfig` for hash tables; replaces `admit`.
        init_fn: initializer of the index table.
        padding_idx: padding id by table.
        frozen: name of a table that is not trained.
        homes: the `Home` of each table.
        made_on: torch's default device while the unsharded model is built, without a device argument.
        index_rows: rows of the index table, of which ids 0 to 30 are looked up.
        tracked: whether tables track changes, so that delta saves are possible; not for kind `hash`.
        update: when rows are updated; the collections' option `update`.
        local_size: ranks per machine; the sharders' option `local_size`.
        sizes: number of samples by step and rank, both repeated cyclically: `step % len(sizes)` is the first index.
    """

    kind: str = "bags"
    sharding: tuple[str | None, ...] = ("row_wise", "row_wise", "row_wise")
    optimizer: type = torch.optim.SGD
    options: dict[str, Any] = field(default_factory=dict)
    weighted: bool = False
    cache: Any = 1.0
    sizes: tuple[tuple[int, ...], ...] = ((5,),)
    steps: int = 4
    seed: int = 0
    dims: tuple[int, int, int] = (4, 4, 4)
    ids: int = 31
    dtype: DataType = DataType.FP32
    admit: int = 0
    rules: dict[str, Any] = field(default_factory=dict)
    init_fn: Any = None
    homes: tuple[str, str, str] = ("modulo", "modulo", "modulo")
    made_on: str = ""
    padding_idx: dict[str, int] | None = None
    frozen: str = ""
    tracked: bool = False
    index_rows: int = 31
    update: str = "backward"
    local_size: Any = None


FILLS = 17
"""The seed during an `init_fn`, which is called at the first step."""
KEYS = ("f0", "f1", "f2", "f3")
Rows = dict[str, dict[int, torch.Tensor]]
"""Weights and states by table and id."""

FEATURES = (["f0", "f1"], ["f2"], ["f3", "f0"])


def configs(scenario: Scenario) -> list[Any]:
    """Builds the configs of a hash table, an index table, and a hash table that shares a feature."""
    pooled = scenario.kind != "sequences"
    uniform: dict[str, Any] = {"initializer_type": rst.InitializerType.UNIFORM, "data_type": scenario.dtype}
    if scenario.tracked:
        uniform["is_incremental"] = True
    if scenario.admit or scenario.rules:
        chosen = scenario.rules or {"admit_threshold": scenario.admit}
        uniform["admit_and_evict_config"] = rst.AdmitAndEvictConfig(not_admitted_default_value=0.25, **chosen)
    kinds = PoolingType.SUM, PoolingType.MEAN, PoolingType.SUM if scenario.kind == "hash" else PoolingType.MEAN
    pooling: list[dict[str, Any]] = [{"pooling": kind} if pooled else {} for kind in kinds]
    make: Any = {"bags": bag_config, "sequences": sequence_config, "hash": _capacity_config}[scenario.kind]
    found = [
        make(f"t{i}", names, embedding_dim=dim, **uniform, **how)
        for i, (names, dim, how) in enumerate(zip(FEATURES, scenario.dims, pooling, strict=True))
    ]
    if scenario.kind != "hash":
        index: Any = EmbeddingBagConfig if pooled else EmbeddingConfig
        shape = {"num_embeddings": scenario.index_rows, "embedding_dim": scenario.dims[1], "data_type": scenario.dtype}
        found[1] = index(name="t1", feature_names=FEATURES[1], init_fn=scenario.init_fn, **shape, **pooling[1])
    return found


def _capacity_config(name: str, features: list[str], **options: Any) -> Any:
    return rst.HashEmbeddingBagConfig(name=name, feature_names=features, num_embeddings=100, **options)


PLACE = object()
"""The device of the process."""


class Model(torch.nn.Module):
    """A model with a collection and one dense parameter."""

    def __init__(self, scenario: Scenario, seed: int, cache: Any = None, device: Any = PLACE) -> None:
        super().__init__()
        homes = {f"t{i}": home for i, home in enumerate(scenario.homes)}
        options: dict[str, Any] = {"device": Place.device if device is PLACE else device, "home": homes}
        options["update"] = scenario.update
        options["padding_idx"] = scenario.padding_idx
        if scenario.kind != "sequences":
            options["is_weighted"] = scenario.weighted
        if scenario.kind == "hash":
            torch.manual_seed(seed)
        else:
            options |= {"cache": scenario.cache if cache is None else cache, "seed": seed}
        kinds: dict[str, Any] = {"sequences": rst.EmbCacheEmbeddingCollection, "hash": rst.HashEmbeddingBagCollection}
        self.sparse = kinds.get(scenario.kind, rst.EmbCacheEmbeddingBagCollection)(configs(scenario), **options)
        self.pooled = scenario.kind != "sequences"
        self.scale = torch.nn.Parameter(torch.full((1,), 0.7, device=Place.device))
        # By default sharded tables have TorchRec's `eps` of Adagrad, and unsharded tables have torch's.
        defaults = {"lr": 0.1, **({"eps": 1e-8} if scenario.optimizer is torch.optim.Adagrad else {})}
        rst.apply_optimizer_in_backward(scenario.optimizer, self.sparse.parameters(), defaults | scenario.options)
        if scenario.frozen:
            self.sparse.freeze(scenario.frozen)

    def forward(self, batch: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = self.sparse(batch)
        # The output may be an Awaitable. Doubling it in place is exact, and allowed since the caller owns it.
        doubled = output.values().mul_(2) if self.pooled else sequence_values(output)
        values = doubled / 2
        return torch.tanh(values * self.scale * 3).pow(2).sum() + values.sum() * 0.1, values.detach().cpu()


NAMES = ("f0@t0", "f1", "f2", "f3", "f0@t2")


def sequences_of_rank(
    whole: torch.Tensor, scenario: Scenario, batches: list[tuple[Any, Any]], rank: int
) -> torch.Tensor:
    """Returns a rank's part of `sequence_values`, given the values of all ranks' batches."""
    d0, d1, d2 = scenario.dims
    parts, begin = [], 0
    for name, dim in zip(NAMES, (d0, d0, d1, d2, d2), strict=True):
        counts = [sum(map(len, bags[name.partition("@")[0]])) * dim for bags, _ in batches]
        start = begin + sum(counts[:rank])
        parts.append(whole[start : start + counts[rank]])
        begin += sum(counts)
    return torch.cat(parts)


def sequence_values(output: Any) -> torch.Tensor:
    """Concatenates the outputs, doubled in place; reads them by name since TorchRec's pipelines trace the model."""
    return torch.cat([output[name].values().mul_(2).flatten() for name in NAMES])


def bags_of(scenario: Scenario, step: int, world_size: int) -> list[tuple[Any, Any]]:
    """Draws random bags and weights for each rank."""
    rng = np.random.default_rng([scenario.seed, step])
    sizes = scenario.sizes[step % len(scenario.sizes)]
    batches = []
    for rank in range(world_size):
        bags = random_bags(rng, KEYS, scenario.ids, batch_size=sizes[rank % len(sizes)], longest=5)
        # f2 belongs to the index table; the other features also have negative ids
        bags = {key: [[i % 31 if key == "f2" else i - 15 for i in bag] for bag in of] for key, of in bags.items()}
        batches.append((bags, random_weights(rng, bags) if scenario.weighted else None))
    return batches


def with_signals(scenario: Scenario, step: int, given: list[tuple[Any, Any]], first: int) -> KeyedJaggedTensor:
    """Builds the batch of the ranks from `first` on, with unsorted timestamps and click labels; some are negative."""
    stamps: dict[str, list[int]] = {key: [] for key in KEYS}
    labels: list[int] = []
    for rank, (bags, _) in enumerate(given, first):
        rng = np.random.default_rng([scenario.seed, step, rank, 7])
        for key in KEYS:
            stamps[key] += (10 * step + rng.integers(0, 25, sum(map(len, bags[key])))).tolist()
        labels += rng.integers(-1, 3, len(bags[KEYS[0]])).tolist()
    plain = concatenated(given)
    return rst.KeyedJaggedTensorWithTimestamp(
        plain.keys(),
        plain.values(),
        torch.tensor([stamp for key in KEYS for stamp in stamps[key]], dtype=torch.int64),
        plain.weights_or_none(),
        plain.lengths(),
        click_labels=torch.tensor(labels, dtype=torch.int64),
    )


def concatenated(batches: list[tuple[Any, Any]]) -> KeyedJaggedTensor:
    """Builds the batch of all ranks."""
    whole = {key: [bag for bags, _ in batches for bag in bags[key]] for key in KEYS}
    weights = None
    if batches[0][1] is not None:
        weights = {key: [bag for _, weight in batches for bag in weight[key]] for key in KEYS}
    return jagged(whole, weights)


def world() -> ShardingEnv:
    """Returns the sharding environment of all ranks."""
    return ShardingEnv.from_process_group(torch.distributed.group.WORLD)


def shard(
    model: torch.nn.Module, scenario: Scenario, one_group: bool = False, kinds: Mapping[str, str | None] | None = None
) -> DistributedModelParallel:
    """Shards a model with TorchRec's planner and DistributedModelParallel, as a user's script would.

    Args:
        model: a model with tables.
        scenario: supplies shardings and ranks per machine.
        one_group: exchanges ids in the process group of the rows.
        kinds: the sharding of each table, instead of the scenario's.
    """
    kinds = {f"t{i}": kind for i, kind in enumerate(scenario.sharding)} if kinds is None else kinds
    constraints = {name: ParameterConstraints(sharding_types=[kind]) for name, kind in kinds.items() if kind}
    sharders = rst.get_default_hybrid_sharders(world() if one_group else None, local_size=scenario.local_size)
    kind = "cuda" if Place.device.type == "cuda" else "cpu"  # device kinds that TorchRec's Topology supports
    topology = Topology(Place.world_size, kind, local_world_size=Place.world_size)
    planner = EmbeddingShardingPlanner(topology, constraints=constraints)
    plan = planner.collective_plan(model, sharders, torch.distributed.group.WORLD)
    return DistributedModelParallel(model, world(), Place.device, plan, sharders)


def plan_of(tables: Sequence[str], kinds: str | Sequence[str] = "row_wise", ranks: list[int] | None = None) -> Any:
    """Builds a sharding plan.

    `kinds`: one sharding type, or one per table; `ranks`: owner ranks of table-wise tables.
    """
    kinds = [kinds] * len(tables) if isinstance(kinds, str) else kinds
    kernel = EmbeddingComputeKernel.FUSED.value
    return EmbeddingModuleShardingPlan(
        {
            table: ParameterSharding(kind, kernel, None if kind == "row_wise" else ranks)
            for table, kind in zip(tables, kinds, strict=True)
        }
    )


def shard_tables(
    collection: Any, kinds: str | Sequence[str] = "row_wise", ranks: list[int] | None = None, **options: Any
) -> Any:
    """Shards a single collection with a plan built by `plan_of`; `options` are the options of the sharders."""
    (sharder,) = [each for each in rst.get_default_hybrid_sharders(**options) if each.module_type is type(collection)]
    plan = plan_of([table.name for table in collection.embedding.tables], kinds, ranks)
    return sharder.shard(collection, plan, world(), Place.device)


def sharded(scenario: Scenario, seed: int = 3, cache: Any = None, one_group: bool = False) -> Any:
    """Builds the scenario's model and shards it."""
    return shard(Model(scenario, seed, cache), scenario, one_group)


def batch_of(scenario: Scenario, step: int) -> KeyedJaggedTensor:
    """Returns the batch of this rank."""
    return jagged(*bags_of(scenario, step, Place.world_size)[Place.rank])


def batches_of(scenario: Scenario, steps: int) -> Iterator[KeyedJaggedTensor]:
    """Yields the first batches of this rank."""
    return (batch_of(scenario, step) for step in range(steps))


def train(model: Any, scenario: Scenario, steps: Iterable[int]) -> Any:
    """Trains the model on this rank's batch of each step; returns the model."""
    for step in steps:
        model(batch_of(scenario, step))[0].backward()
    return model


def assert_same(found: Any, expected: Any, where: str = "") -> None:
    """Asserts that results are equal, tensors bit by bit; lists and dictionaries may be nested to any depth."""
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected), where
    elif isinstance(expected, Mapping):
        assert found.keys() == expected.keys(), where
        for name, value in expected.items():
            assert_same(found[name], value, f"{where}, {name}")
    elif isinstance(expected, list | tuple):
        for place, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{where}, {place}")
    else:
        assert found == expected, where


def assert_rows(found: Rows, expected: Rows, rtol: float = 0, atol: float = 0, fill: float = 0) -> None:
    """Compares the rows of tables. A row without optimizer states, never looked up, is padded with `fill`."""
    assert found.keys() == expected.keys()
    for table, wanted in expected.items():
        assert found[table].keys() == wanted.keys(), table
        pairs = [_padded([found[table][i], row], fill) for i, row in wanted.items()]
        if pairs:
            one, other = (torch.cat(rows) for rows in zip(*pairs, strict=True))
            torch.testing.assert_close(
                one, other, rtol=rtol, atol=atol, msg=lambda text, table=table: f"{table}: {text}"
            )


def _padded(rows: list[torch.Tensor], fill: float) -> list[torch.Tensor]:
    width = max(map(len, rows))
    return [
        row if len(row) == width else torch.nn.functional.pad(row, (0, width - len(row)), value=fill) for row in rows
    ]


def united(of_ranks: list[Rows], shardings: Sequence[str | None] = ("row_wise",) * 3) -> Rows:
    """Merges the rows of all ranks. A table's rows are on one rank each, or all on every rank.

    A sharding of None means that the planner chose; the table is then replicated if ranks share ids.
    """
    result: Rows = {}
    for table, sharding in zip(of_ranks[0], shardings, strict=True):
        first, *others = parts = [rows[table] for rows in of_ranks]
        copies = sharding == "data_parallel" or (
            sharding is None and any(first.keys() & part.keys() for part in others)
        )
        whole = result.setdefault(table, {})
        for part in parts:
            if copies:
                assert list(part) == list(first), "all ranks have the ids, in one order"
                assert_same(part, first, "the bits of all ranks")
            else:
                assert not whole.keys() & part.keys(), "a row has one home"
            whole |= part
    return result


def rows(collection: Any) -> Rows:
    """Returns rows by table and id, with weight and states in one tensor."""
    result = {}
    state = collection.state_dict()
    optimizer = collection.fused_optimizer.state_dict()["state"]
    for table in ("t0", "t1", "t2"):
        (key,) = [key for key in state if key.endswith(f".{table}.weight")]
        ids = state.get(key.replace(".weight", ".ids"), torch.arange(len(state[key])))
        result[table] = dict(zip(ids.tolist(), state[key].float(), strict=True))
        values = optimizer[key]
        known = values.get(f"{table}.ids", torch.arange(len(state[key])))
        for name in (f"{table}.momentum1", f"{table}.exp_avg_sq"):
            if name in values:
                for i, part in zip(known.tolist(), values[name], strict=True):
                    result[table][i] = torch.cat([result[table][i], part.flatten()])
    return result


def _made(scenario: Scenario) -> Any:
    made_on = torch.device(scenario.made_on) if scenario.made_on else contextlib.nullcontext()
    with made_on:
        model: Any = Model(scenario, seed=3 + Place.rank, device=None if scenario.made_on else Place.device)
    assert model.sparse.device.type == (scenario.made_on or Place.device.type)
    return shard(model, scenario)  # sharding keeps the seed of rank 0


def train_sharded(
    rank: int, world_size: int, scenario: Scenario, depth: int = 0, saves: str = "", homes: Any = None
) -> Any:
    """Trains on one rank; returns (outputs of each step, rows, dense parameter, exchange stats, cache stats, device).

    With a folder `saves`, the tables are saved there half-way, and training continues in a new model that loads the
    save and has the option `homes`. If tables track changes, that save is a delta whose base save, written after the
    first step, is in another subfolder.
    """
    model = _made(scenario)
    torch.manual_seed(FILLS)
    half = scenario.steps // 2 if saves else scenario.steps
    begun = int(bool(saves) and scenario.tracked)
    outputs = _steps(model, scenario, range(begun), depth)
    if begun:
        rst.Saver().save(model, f"{saves}/base")
    outputs += _steps(model, scenario, range(begun, half), depth)
    if saves:
        first, model, path = model, _made(replace(scenario, homes=homes or scenario.homes)), f"{saves}/deltas"
        saved = rst.Saver().save(first, path, incremental=scenario.tracked)
        assert (read_manifest(Path(saved)).previous is not None) == scenario.tracked
        rst.Saver().load(model, path)
        model.module.scale.data.copy_(first.module.scale.data)
        outputs += _steps(model, scenario, range(half, scenario.steps), depth)
    sparse, scale = model.module.sparse, model.module.scale.detach().cpu().clone()
    return outputs, rows(sparse), scale, sparse.exchange_stats(), sparse.cache_stats(), str(sparse.device)


def optimizer_of(model: Any, lr: float) -> CombinedOptimizer:
    """Builds SGD for the dense parameter, combined with the tables' optimizer."""
    dense = KeyedOptimizerWrapper({"scale": model.scale}, lambda parameters: torch.optim.SGD(parameters, lr=lr))
    return CombinedOptimizer([("sparse", model.sparse.fused_optimizer), ("dense", dense)])


def _steps(model: Any, scenario: Scenario, steps: range, depth: int) -> list[torch.Tensor]:
    """Runs the training steps; returns the output of each."""
    optimizer, rank = optimizer_of(model.module, lr=0.05), Place.rank
    pipeline: Any = rst.EmbCacheTrainPipelineSparseDist(model, optimizer, "cpu", Place.device, depth=depth)
    batches = (with_signals(scenario, step, [bags_of(scenario, step, Place.world_size)[rank]], rank) for step in steps)
    return [pipeline.progress(batches) for _ in steps]


def train_alone(scenario: Scenario, world_size: int) -> Any:
    """Trains in one process; returns (outputs of each step, rows, dense parameter)."""
    if scenario.optimizer is torch.optim.Adam and scenario.options.get("weight_decay"):
        # TorchRec's sharded tables decouple Adam's weight decay
        scenario = replace(scenario, optimizer=torch.optim.AdamW)
    model = Model(scenario, seed=3, cache=1000)
    torch.manual_seed(FILLS)
    optimizer = optimizer_of(model, lr=0.05)
    outputs = []
    for step in range(scenario.steps):
        optimizer.zero_grad()
        loss, output = model(with_signals(scenario, step, bags_of(scenario, step, world_size), 0))
        (loss / world_size).backward()
        optimizer.step()
        outputs.append(output)
    return outputs, rows(model.sparse), model.scale.detach().clone()
