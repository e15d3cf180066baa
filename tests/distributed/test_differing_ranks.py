"""Ranks whose tables, options, modes or order of calls differ: all raise, and say what differs where."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from jagged import apply, bag_config, bags_collection, jagged, sequences_collection
from ranks import Place, Ranks
from sharded_model import Model, Scenario, bags_of, rows, shard
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingEnv
from torchrec.modules.embedding_configs import DataType

import rec_sdk_torch as rst

Start = Callable[[int], Ranks]
BATCH = {"f0": [[1, 2], [5]]}


def sharded(collection: Any, kind: str = "row_wise", home: int | None = None) -> Any:
    fused = EmbeddingComputeKernel.FUSED.value
    tables = [table.name for table in collection.embedding.tables]
    ranks = None if home is None else [home]
    plan = EmbeddingModuleShardingPlan({table: ParameterSharding(kind, fused, ranks) for table in tables})
    sharders = {sharder.module_type: sharder for sharder in rst.get_default_hybrid_sharders()}
    world = ShardingEnv.from_process_group(torch.distributed.group.WORLD)
    return sharders[type(collection)].shard(collection, plan, world, Place.device)


def raised(work: Callable[[], object]) -> str:
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def same_on_all(results: list[str]) -> str:
    """The error that all ranks raised."""
    assert len(set(results)) == 1, results
    return results[0]


# ---- tables


def with_config(**fields: Any) -> Any:
    return bags_collection(Place.device, bag_config(**fields))


def with_rules(**rules: Any) -> Any:
    return with_config(admit_and_evict_config=rst.AdmitAndEvictConfig(**rules))


def with_option(**options: Any) -> Any:
    return bags_collection(Place.device, **options)


def index_table() -> Any:
    return bags_collection(Place.device, EmbeddingBagConfig(40, 4, name="t0", feature_names=["f0"]))


OTHER_TABLES: dict[str, tuple[Callable[[], Any], str]] = {
    "num_embeddings": (lambda: with_config(num_embeddings=50), "table 't0': num_embeddings is 40 on {0}, 50 on {1}"),
    "embedding_dim": (lambda: with_config(embedding_dim=8), "table 't0': embedding_dim is 4 on {0}, 8 on {1}"),
    "data_type": (
        lambda: with_config(data_type=DataType.FP16),
        "table 't0': weight_dtype is torch.float32 on {0}, torch.float16 on {1}",
    ),
    "pooling": (lambda: with_config(pooling=PoolingType.MEAN), "table 't0': pooling is 'sum' on {0}, 'mean' on {1}"),
    "hashed": (index_table, "table 't0': hashed is True on {0}, False on {1}"),
    "initializer": (lambda: with_config(weight_init_max=0.5), "table 't0': init_max is "),
    "incremental": (lambda: with_config(is_incremental=True), "table 't0': track_changes is False on {0}, True on {1}"),
    "admission": (
        lambda: with_rules(admit_threshold=2),
        "table 't0': admission is None on {0}, Count(threshold=2.0) on {1}",
    ),
    "eviction": (lambda: with_rules(evict_threshold=9), "table 't0': eviction is () on {0}, (Age(seconds=9),) on {1}"),
    "rounding": (
        lambda: with_option(stochastic_rounding=True),
        "table 't0': stochastic_rounding is False on {0}, True on {1}",
    ),
    "cache_dtype": (
        lambda: with_option(cache_dtype=torch.bfloat16),
        "table 't0': cache_dtype is None on {0}, torch.bfloat16 on {1}",
    ),
    "features": (lambda: with_config(features=["f1"]), "table 't0': features is ['f0'] on {0}, ['f1'] on {1}"),
    "name": (lambda: with_config(name="t1"), "tables is ['t0'] on {0}, ['t1'] on {1}"),
    "count": (
        lambda: bags_collection(Place.device, bag_config(), bag_config("t1")),
        "tables is ['t0'] on {0}, ['t0', 't1'] on {1}",
    ),
    "weighted": (lambda: with_option(is_weighted=True), "is_weighted is False on {0}, True on {1}"),
    "class": (
        lambda: sequences_collection(Place.device),
        "class is 'EmbCacheEmbeddingBagCollection' on {0}, 'EmbCacheEmbeddingCollection' on {1}",
    ),
}


def shard_other_tables(rank: int, world_size: int, kind: str) -> str:
    make, _ = OTHER_TABLES[kind]
    message = raised(lambda: sharded(make() if rank == world_size - 1 else with_config()))
    collection = with_config()
    apply(collection)
    sharded(collection)(jagged(BATCH)).values().sum().backward()  # the ranks are where they were
    return message


@pytest.mark.parametrize("kind", OTHER_TABLES)
def test_other_tables_are_refused_when_sharding(ranks_of: Start, kind: str) -> None:
    message = same_on_all(ranks_of(2).run(shard_other_tables, kind))
    assert message.startswith("ValueError: ")
    assert OTHER_TABLES[kind][1].replace("{0}", "rank 0").replace("{1}", "rank 1") in message


def shard_among_four(rank: int, world_size: int) -> str:
    return raised(lambda: sharded(with_config(num_embeddings=50 if rank in (1, 3) else 40)))


def test_the_ranks_of_each_value_are_named(ranks_of: Start) -> None:
    message = same_on_all(ranks_of(4).run(shard_among_four))
    assert "num_embeddings is 40 on ranks 0 and 2, 50 on ranks 1 and 3" in message


def other_plans(rank: int, world_size: int) -> list[str]:
    return [
        raised(lambda: sharded(with_config(), *(("row_wise",), ("table_wise", 0))[rank])),
        raised(lambda: sharded(with_config(), "table_wise", rank)),
        raised(lambda: sharded(with_config(), ("row_wise", "column_wise")[rank])),
    ]


def test_another_plan_is_refused_when_sharding(ranks_of: Start) -> None:
    first, second = ranks_of(2).run(other_plans)
    assert first == second
    assert "table 't0': sharding is 'row_wise' on rank 0, 'table_wise on rank 0' on rank 1" in first[0]
    assert "table 't0': sharding is 'table_wise on rank 0' on rank 0, 'table_wise on rank 1' on rank 1" in first[1]
    assert "sharding type 'column_wise', allowed are" in first[2]


def own_options(rank: int, world_size: int) -> None:
    """Options that may differ from rank to rank."""
    options: dict[str, Any] = [
        {"cache": 30, "bounds_check_mode": "warning", "seed": 5},
        {"cache": 40, "bounds_check_mode": "ignore", "seed": 6, "cache_policy": "lru", "check_finite": "warn"},
    ][rank]
    collection = with_option(**options)
    apply(collection)
    sharded(collection)(jagged(BATCH)).values().sum().backward()


def test_ranks_may_differ_where_results_do_not(ranks_of: Start) -> None:
    ranks_of(2).run(own_options)


def test_check_finite_of_one_rank_is_refused(ranks_of: Start) -> None:
    message = same_on_all(ranks_of(2).run(check_finite))
    assert "check_finite='raise' is False on rank 0, True on rank 1" in message


def check_finite(rank: int, world_size: int) -> str:
    collection = with_option(check_finite=("off", "raise")[rank])
    apply(collection)
    return raised(lambda: sharded(collection)(jagged(BATCH)).values().sum().backward())


# ---- optimizers, and what may change later


OPTIMIZERS: dict[str, tuple[type, dict[str, Any]]] = {
    "class": (torch.optim.Adam, {}),
    "lr": (torch.optim.Adagrad, {"lr": 0.25}),
    "eps": (torch.optim.Adagrad, {"eps": 1e-3}),
    "clipping": (torch.optim.Adagrad, {"gradient_clipping": True, "max_gradient": 2.0}),
    "state_dtypes": (torch.optim.Adagrad, {"state_dtypes": {"sum": torch.float16}}),
    "window": (rst.AccumulateAdagrad, {"use_accumulate": True, "accumulate_step": 3}),
}
MESSAGES = {
    "class": "optimizer is 'torch.optim.adagrad.Adagrad' on rank 0, 'torch.optim.adam.Adam' on rank 1",
    "lr": "lr is 0.5 on rank 0, 0.25 on rank 1",
    "eps": "eps is 1e-08 on rank 0, 0.001 on rank 1",
    "clipping": "max_gradient is inf on rank 0, 2.0 on rank 1",
    "state_dtypes": "state_dtypes is () on rank 0, (torch.float16,) on rank 1",
    "window": "accumulate_step is 1 on rank 0, 3 on rank 1",
    "none": "optimizer is 'torch.optim.adagrad.Adagrad' on rank 0, None on rank 1",
}


def train_other_optimizer(rank: int, world_size: int, kind: str) -> tuple[str, int]:
    collection = with_config()
    if rank == 0:
        apply(collection, torch.optim.Adagrad)
    elif kind != "none":
        optimizer, options = OPTIMIZERS[kind]
        apply(collection, optimizer, **options)
    module = sharded(collection)
    message = raised(lambda: module(jagged(BATCH)).values().sum().backward())
    return message, module.cache_stats()["batches"]


@pytest.mark.parametrize("kind", MESSAGES)
def test_other_optimizers_are_refused_at_the_first_batch(ranks_of: Start, kind: str) -> None:
    results = ranks_of(2).run(train_other_optimizer, kind)
    message = same_on_all([message for message, _ in results])
    assert message.startswith("ValueError: ")
    assert f"table 't0': {MESSAGES[kind]}" in message
    assert [batches for _, batches in results] == [0, 0], "none has come"


def change_later(rank: int, world_size: int, kind: str) -> list[str]:
    collection = with_config(admit_and_evict_config=rst.AdmitAndEvictConfig(evict_idle_steps=5, evict_step_interval=9))
    apply(collection, torch.optim.Adagrad)
    module = sharded(collection)
    group = module.fused_optimizer.param_groups[0]

    def step() -> str:
        return raised(lambda: module(jagged(BATCH)).values().sum().backward())

    messages = [step()]
    if kind == "schedule":  # the same on all ranks
        for lr in (0.4, torch.tensor(0.3), 0.2):
            group["lr"] = lr
            messages.append(step())
        return messages
    if kind == "lr_tensor":
        group["lr"] = torch.tensor(0.25)
        messages.append(step())
    if rank == 1:
        if kind == "lr":
            group["lr"] = 0.1
        elif kind == "lr_tensor":
            group["lr"].fill_(0.125)
        elif kind == "step":
            state = module.fused_optimizer.state_dict()
            for table in state["state"].values():
                table["t0.step"] = 7
            module.fused_optimizer.load_state_dict(state)
        elif kind == "scaler":
            module.home.set_grad_scaler(torch.amp.GradScaler("cpu"))
        elif kind == "frozen":
            module.freeze("t0")
        else:
            module.set_evict_step_interval(3)
    return [*messages, step()]


CHANGES = {
    "lr": "table 't0': lr is 0.5 on rank 0, 0.1 on rank 1",
    "lr_tensor": "table 't0': lr is 0.25 on rank 0, 0.125 on rank 1",
    "step": "table 't0': step is 1 on rank 0, 7 on rank 1",
    "scaler": "grad scaler is False on rank 0, True on rank 1",
    "frozen": "frozen is [] on rank 0, ['t0'] on rank 1",
    "interval": "evict_step_interval is None on rank 0, 3 on rank 1",
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_on_one_rank_is_refused(ranks_of: Start, kind: str) -> None:
    first, second = ranks_of(2).run(change_later, kind)
    assert first == second
    *before, message = first
    assert not any(before)
    assert CHANGES[kind] in message


def test_all_ranks_may_change_together(ranks_of: Start) -> None:
    assert ranks_of(2).run(change_later, "schedule") == [[""] * 4] * 2


# ---- the order of calls


@dataclasses.dataclass
class Way:
    """How a model is trained.

    Attributes:
        kind: `loop`, `ours` or `torchrec`.
        depth: batches that are exchanged ahead, by ours.
    """

    kind: str
    depth: int = 0


WAYS = {"loop": Way("loop"), "depth 0": Way("ours"), "depth 2": Way("ours", 2), "torchrec": Way("torchrec")}


class Two(torch.nn.Module):
    """Two collections, which a rank may call in another order."""

    def __init__(self, second: str = "alike") -> None:
        """`second`: the collection is `alike`, has `wider` rows that are counted, or `fewer` tables."""
        super().__init__()
        scenario = Scenario(dims=(4, 8, 6), admit=2) if second == "wider" else Scenario()
        self.first, self.second = Model(Scenario(), 3), Model(scenario, 4)
        if second == "fewer":
            self.second.sparse = with_config(name="t1")
            apply(self.second.sparse)
        self.swapped = False

    def forward(self, batch: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.swapped:
            second, first = self.second(batch)[0], self.first(batch)[0]
        else:
            first, second = self.first(batch)[0], self.second(batch)[0]
        return first + second, batch.values()


def stepping(model: Any, way: Way, batches: Iterator[Any]) -> Callable[[], object]:
    """A training step, which can be called again."""
    if way.kind == "loop":

        def step() -> None:
            model.module(next(batches))[0].backward()

        return step
    parameters = [value for name, value in model.module.named_parameters() if name.endswith("scale")]
    dense = torch.optim.SGD(parameters, lr=0.05)
    pipeline: Any
    if way.kind == "ours":
        pipeline = rst.EmbCacheTrainPipelineSparseDist(model.module, dense, "cpu", Place.device, depth=way.depth)
    else:
        pipeline = TrainPipelineSparseDist(model.module, dense, Place.device)
    return lambda: pipeline.progress(batches)


def batches_of(scenario: Scenario, rank: int, world_size: int, steps: int = 8) -> Iterator[KeyedJaggedTensor]:
    return (jagged(*bags_of(scenario, step, world_size)[rank]) for step in range(steps))


def call_in_another_order(rank: int, world_size: int, way: Way, second: str) -> list[str]:
    scenario = Scenario()
    model = shard(Two(second), scenario, world_size)
    model.module.swapped = rank == 1
    step = stepping(model, way, batches_of(scenario, rank, world_size))
    messages = [raised(step)]
    if way.kind == "loop":  # the ranks are where they were
        model.module.swapped = False
        messages.append(raised(step))
    return messages


@pytest.mark.parametrize("second", ["alike", "wider", "fewer"])
@pytest.mark.parametrize("way", WAYS)
def test_another_order_of_collections_is_refused(ranks_of: Start, way: str, second: str) -> None:
    results = ranks_of(2).run(call_in_another_order, WAYS[way], second)
    message = same_on_all([messages[0] for messages in results])
    assert message.startswith("RuntimeError: ")
    assert "rank 0 trains batch 1 of collection 'first.sparse', rank 1 trains batch 1 of collection" in message
    assert all(not any(messages[1:]) for messages in results)


def other_gradients(rank: int, world_size: int, kind: str) -> list[str]:
    """In one step each rank has the other's collection in its loss, or the two losses in the other's order."""
    model = shard(Two(), Scenario(), world_size).module
    batch = jagged({key: [[2, 3], [4]] for key in ("f0", "f1", "f2", "f3")})

    def step(odd: bool) -> None:
        losses = [part(batch)[0] for part in (model.first, model.second)]
        for loss in [losses[rank]] if odd and kind == "lacking" else losses[:: -1 if odd and rank else 1]:
            loss.backward()

    return [raised(partial(step, odd)) for odd in (False, True, False, False)]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("lacking", "table 't0': step is 2 on rank 0, 1 on rank 1"),
        ("swapped", "RuntimeError: ranks have exchanged gradients of different collections or batches"),
    ],
)
def test_gradients_of_other_tables_end_the_training(ranks_of: Start, kind: str, message: str) -> None:
    first, second = ranks_of(2).run(other_gradients, kind)
    assert first == second
    assert first[:2] == ["", ""], "nobody can tell yet"
    assert message in first[2]


def train(model: Any, batch: Any) -> None:
    model.module(batch)[0].backward()


def skip_a_batch(rank: int, world_size: int) -> list[str]:
    scenario = Scenario()
    model = shard(Model(scenario, 3), scenario, world_size)
    messages = []
    for place, batch in enumerate(rst.prefetch(batches_of(scenario, rank, world_size, 3), model, depth=2)):
        if place == 1 and rank == 1:
            continue
        messages.append(raised(partial(train, model, batch)))
        if messages[-1]:
            break
    return messages[-1:]


def test_a_batch_that_one_rank_skips(ranks_of: Start) -> None:
    first, second = ranks_of(2).run(skip_a_batch)
    assert first == second
    assert "rank 0 trains batch 2 of collection 'sparse', rank 1 trains batch 3 of collection 'sparse'" in first[0]


def prefetch_otherwise(rank: int, world_size: int, options: list[dict[str, Any]]) -> str:
    scenario = Scenario()
    model = shard(Model(scenario, 3), scenario, world_size)
    dense = torch.optim.SGD([model.module.scale], lr=0.05)
    pipeline: Any = rst.EmbCacheTrainPipelineSparseDist(model, dense, "cpu", Place.device, **options[rank])
    return raised(lambda: pipeline.progress(batches_of(scenario, rank, world_size)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([{"depth": 0}, {"depth": 2}], "batches ahead is 0 on rank 0, 2 on rank 1"),
        ([{"depth": 3}, {"depth": 2}], "batches ahead is 3 on rank 0, 2 on rank 1"),
        ([{}, {"execute_all_batches": False}], "execute_all_batches is True on rank 0, False on rank 1"),
        ([{"evict_step_interval": 2}, {}], "evict_step_interval is 2 on rank 0, None on rank 1"),
    ],
)
def test_pipelines_of_other_options_are_refused(ranks_of: Start, options: list[dict[str, Any]], message: str) -> None:
    assert message in same_on_all(ranks_of(2).run(prefetch_otherwise, options))


# ---- some train what others evaluate


def evaluate_on_one(rank: int, world_size: int, way: Way, scenario: Scenario, after: int) -> list[str]:
    model = shard(Model(scenario, 3), scenario, world_size)
    step = stepping(model, way, batches_of(scenario, rank, world_size))
    messages = [raised(step) for _ in range(after)]
    if rank == 1:
        model.eval()
    messages.append(raised(step))
    if way.kind != "torchrec":  # whose pipeline has replaced the forward
        model.eval()  # all ranks together
        messages.append(raised(lambda: model.module(next(batches_of(scenario, rank, world_size)))))
    return messages


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("rules", [{}, {"admit_threshold": 2}])
@pytest.mark.parametrize("way", WAYS)
def test_one_rank_that_evaluates(ranks_of: Start, way: str, rules: dict[str, Any], after: int) -> None:
    scenario = Scenario(rules=rules)
    results = ranks_of(2).run(evaluate_on_one, WAYS[way], scenario, after)
    assert results[0] == results[1]
    message = results[0].pop(after)
    assert not any(results[0])
    assert message.startswith("RuntimeError: ")
    assert "rank 0 trains" in message
    assert "rank 1 evaluates" in message


def change_mode_together(rank: int, world_size: int, depth: int) -> Any:
    """All ranks evaluate a batch in the middle, which was exchanged to be trained."""
    scenario = Scenario(optimizer=torch.optim.Adagrad, rules={"admit_threshold": 2})
    model = shard(Model(scenario, 3), scenario, world_size)
    outputs = []
    for place, batch in enumerate(rst.prefetch(batches_of(scenario, rank, world_size), model, depth=depth)):
        model.train(place % 3 != 2)
        loss, output = model.module(batch)
        outputs.append(output)
        if model.training:
            loss.backward()
    return outputs, rows(model.module.sparse)


def test_all_ranks_may_evaluate_what_was_prefetched(ranks_of: Start) -> None:
    plain, ahead = (ranks_of(2).run(change_mode_together, depth) for depth in (0, 2))
    for one, other in zip(plain, ahead, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))
        for table, found in one[1].items():
            assert all(torch.equal(row, other[1][table][i]) for i, row in found.items())
