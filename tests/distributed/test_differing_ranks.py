"""Ranks whose tables, options, modes or order of calls differ: all ranks raise an error that names the difference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from batches import jagged
from collection_factory import apply, bag_config, bags_collection, sequences_collection
from ranks import Place, error_of, on_ranks
from sharded_model import Model, Scenario, assert_same, batch_of, batches_of, rows, shard, shard_tables, sharded
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.modules.embedding_configs import DataType

import rec_sdk_torch as rst

BATCH = {"f0": [[1, 2], [5]]}


def step(tables: Any) -> None:
    tables(jagged(BATCH)).values().sum().backward()


# ---- tables


def with_config(**fields: Any) -> Any:
    return bags_collection(Place.device, bag_config(**fields))


def with_rules(**rules: Any) -> Any:
    return with_config(admit_and_evict_config=rst.AdmitAndEvictConfig(**rules))


def with_option(**options: Any) -> Any:
    return bags_collection(Place.device, **options)


def trainable(collection: Any, optimizer: type | None = torch.optim.SGD, **options: Any) -> Any:
    if optimizer is not None:
        apply(collection, optimizer, **options)
    return shard_tables(collection)


OTHER_TABLES: dict[str, tuple[Callable[[], Any], str, str]] = {
    "num_embeddings": (lambda: with_config(num_embeddings=50), "40", "50"),
    "embedding_dim": (lambda: with_config(embedding_dim=8), "4", "8"),
    "weight_dtype": (lambda: with_config(data_type=DataType.FP16), "torch.float32", "torch.float16"),
    "pooling": (lambda: with_config(pooling=PoolingType.MEAN), "'sum'", "'mean'"),
    "hashed": (
        lambda: bags_collection(Place.device, EmbeddingBagConfig(40, 4, name="t0", feature_names=["f0"])),
        "True",
        "False",
    ),
    "init_max": (lambda: with_config(weight_init_max=0.5), "None", "0.5"),
    "track_changes": (lambda: with_config(is_incremental=True), "False", "True"),
    "admission": (lambda: with_rules(admit_threshold=2), "None", "Count(threshold=2.0)"),
    "eviction": (lambda: with_rules(evict_threshold=9), "()", "(Age(seconds=9),)"),
    "stochastic_rounding": (lambda: with_option(stochastic_rounding=True), "False", "True"),
    "cache_dtype": (lambda: with_option(cache_dtype=torch.bfloat16), "None", "torch.bfloat16"),
    "features": (lambda: with_config(features=["f1"]), "['f0']", "['f1']"),
}
OTHER_COLLECTIONS: dict[str, tuple[Callable[[], Any], str, str]] = {
    "tables": (lambda: with_config(name="t1"), "['t0']", "['t1']"),
    "tables ": (lambda: bags_collection(Place.device, bag_config(), bag_config("t1")), "['t0']", "['t0', 't1']"),
    "is_weighted": (lambda: with_option(is_weighted=True), "False", "True"),
    "class": (
        lambda: sequences_collection(Place.device),
        "'EmbCacheEmbeddingBagCollection'",
        "'EmbCacheEmbeddingCollection'",
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("what", [*OTHER_TABLES, *OTHER_COLLECTIONS])
def test_differing_tables_are_refused_when_sharding(rank: int, what: str) -> str:
    make, first, second = (OTHER_TABLES | OTHER_COLLECTIONS)[what]
    message = error_of(lambda: shard_tables(make() if rank == 1 else with_config()))
    assert message.startswith("ValueError: ")
    of_table = "table 't0': " if what in OTHER_TABLES else ""
    assert f"{of_table}{what.strip()} is {first} on rank 0, {second} on rank 1" in message
    step(trainable(with_config()))  # the exchanges of the ranks still match
    return message


@on_ranks(4)
def test_the_ranks_of_each_value_are_named(rank: int) -> str:
    message = error_of(lambda: shard_tables(with_config(num_embeddings=50 if rank in (1, 3) else 40)))
    assert "num_embeddings is 40 on ranks 0 and 2, 50 on ranks 1 and 3" in message
    return message


@on_ranks(2)
@pytest.mark.parametrize(
    ("plans", "text"),
    [
        (
            (("row_wise",), ("table_wise", [0])),
            "table 't0': sharding is 'row_wise' on rank 0, 'table_wise on rank 0' on rank 1",
        ),
        (
            (("table_wise", [0]), ("table_wise", [1])),
            "table 't0': sharding is 'table_wise on rank 0' on rank 0, 'table_wise on rank 1' on rank 1",
        ),
        ((("row_wise",), ("column_wise",)), "sharding type 'column_wise', allowed are"),
    ],
)
def test_differing_plans_are_refused_when_sharding(rank: int, plans: Any, text: str) -> str:
    message = error_of(lambda: shard_tables(with_config(), *plans[rank]))
    assert text in message
    return message


@on_ranks(2)
def test_ranks_may_differ_where_results_do_not(rank: int) -> None:
    options: list[dict[str, Any]] = [
        {"cache": 30, "bounds_check_mode": "warning", "seed": 5},
        {"cache": 40, "bounds_check_mode": "ignore", "seed": 6, "cache_policy": "lru", "check_finite": "warn"},
    ]
    step(trainable(with_option(**options[rank])))


@on_ranks(2)
def test_check_finite_of_one_rank_is_refused(rank: int) -> str:
    tables = trainable(with_option(check_finite=("off", "raise")[rank]))
    message = error_of(lambda: step(tables))
    assert "check_finite='raise' is False on rank 0, True on rank 1" in message
    return message


# ---- optimizers, and attributes that may change during training


ADAGRAD = torch.optim.Adagrad
OPTIMIZERS: dict[str, tuple[type | None, dict[str, Any], str, str]] = {
    "optimizer": (torch.optim.Adam, {}, "'torch.optim.adagrad.Adagrad'", "'torch.optim.adam.Adam'"),
    "lr": (ADAGRAD, {"lr": 0.25}, "0.5", "0.25"),
    "eps": (ADAGRAD, {"eps": 1e-3}, "1e-08", "0.001"),
    "max_gradient": (ADAGRAD, {"gradient_clipping": True, "max_gradient": 2.0}, "inf", "2.0"),
    "state_dtypes": (ADAGRAD, {"state_dtypes": {"sum": torch.float16}}, "()", "(torch.float16,)"),
    "accumulate_step": (rst.AccumulateAdagrad, {"use_accumulate": True, "accumulate_step": 3}, "1", "3"),
    "optimizer ": (None, {}, "'torch.optim.adagrad.Adagrad'", "None"),
}


@on_ranks(2)
@pytest.mark.parametrize("what", OPTIMIZERS)
def test_differing_optimizers_are_refused_at_the_first_batch(rank: int, what: str) -> str:
    optimizer, options, first, second = OPTIMIZERS[what]
    tables = trainable(with_config(), *((ADAGRAD,), (optimizer,))[rank], **(options if rank else {}))
    message = error_of(lambda: step(tables))
    assert message.startswith("ValueError: ")
    assert f"table 't0': {what.strip()} is {first} on rank 0, {second} on rank 1" in message
    assert tables.cache_stats()["batches"] == 0
    return message


def set_step(tables: Any) -> None:
    state = tables.fused_optimizer.state_dict()
    for table in state["state"].values():
        table["t0.step"] = 7
    tables.fused_optimizer.load_state_dict(state)


CHANGES: dict[str, tuple[Callable[[Any, Any], object], str]] = {
    "lr": (lambda tables, group: group.update(lr=0.1), "table 't0': lr is 0.5 on rank 0, 0.1 on rank 1"),
    "lr_tensor": (
        lambda tables, group: group["lr"].fill_(0.125),
        "table 't0': lr is 0.25 on rank 0, 0.125 on rank 1",
    ),
    "step": (lambda tables, group: set_step(tables), "table 't0': step is 1 on rank 0, 7 on rank 1"),
    "scaler": (
        lambda tables, group: tables.local_shard.set_grad_scaler(torch.amp.GradScaler("cpu")),
        "grad scaler is False on rank 0, True on rank 1",
    ),
    "frozen": (lambda tables, group: tables.freeze("t0"), "frozen is [] on rank 0, ['t0'] on rank 1"),
    "interval": (
        lambda tables, group: tables.set_evict_step_interval(3),
        "evict_step_interval is None on rank 0, 3 on rank 1",
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_on_one_rank_is_refused(rank: int, kind: str) -> str:
    tables = trainable(with_rules(evict_idle_steps=5, evict_step_interval=9), ADAGRAD)
    group = tables.fused_optimizer.param_groups[0]
    step(tables)
    if kind == "lr_tensor":
        for lr in (0.4, torch.tensor(0.3), torch.tensor(0.25)):  # these changes are the same on all ranks
            group["lr"] = lr
            step(tables)
    change, text = CHANGES[kind]
    if rank == 1:
        change(tables, group)
    message = error_of(lambda: step(tables))
    assert text in message
    return message


# ---- the order of calls


WAYS = {"loop": None, "depth 0": 0, "depth 2": 2, "torchrec": None}
"""How a model is trained: in a loop, by this package's pipeline with a prefetch depth, or by TorchRec's pipeline."""


class TwoCollections(torch.nn.Module):
    """A model with two collections; a test may swap the order in which one rank calls them."""

    def __init__(self, second: str = "alike") -> None:
        """Builds two collections. The second is `alike`, has `wider` rows and counts ids, or has `fewer` tables."""
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


def training_step(model: Any, way: str, batches: Iterator[Any]) -> Callable[[], object]:
    """Returns a function that runs one training step at each call."""
    if way == "loop":

        def step() -> None:
            model.module(next(batches))[0].backward()

        return step
    parameters = [value for name, value in model.module.named_parameters() if name.endswith("scale")]
    dense = torch.optim.SGD(parameters, lr=0.05)
    pipeline: Any
    if way == "torchrec":
        pipeline = TrainPipelineSparseDist(model.module, dense, Place.device)
    else:
        pipeline = rst.EmbCacheTrainPipelineSparseDist(model.module, dense, "cpu", Place.device, depth=WAYS[way])
    return lambda: pipeline.progress(batches)


@on_ranks(2)
@pytest.mark.parametrize("second", ["alike", "wider", "fewer"])
@pytest.mark.parametrize("way", WAYS)
def test_a_differing_order_of_collections_is_refused(rank: int, way: str, second: str) -> str:
    model: Any = shard(TwoCollections(second), Scenario())
    model.module.swapped = rank == 1
    once = training_step(model, way, batches_of(Scenario(), 8))
    message = error_of(once)
    assert message.startswith("RuntimeError: ")
    assert "rank 0 trains batch 1 of collection 'first.sparse', rank 1 trains batch 1 of collection" in message
    if way == "loop":  # the exchanges of the ranks still match
        model.module.swapped = False
        once()
    return message


@on_ranks(2)
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("lacking", "table 't0': step is 2 on rank 0, 1 on rank 1"),
        ("swapped", "RuntimeError: ranks have exchanged gradients of different collections or batches"),
    ],
)
def test_gradients_of_differing_tables_end_the_training(rank: int, kind: str, text: str) -> list[str]:
    """In one step the ranks train different collections, or run the two backward passes in different orders."""
    model = shard(TwoCollections(), Scenario()).module
    batch = jagged({key: [[2, 3], [4]] for key in ("f0", "f1", "f2", "f3")})

    def once(odd: bool) -> None:
        losses = [part(batch)[0] for part in (model.first, model.second)]
        for loss in [losses[rank]] if odd and kind == "lacking" else losses[:: -1 if odd and rank else 1]:
            loss.backward()

    messages = [error_of(partial(once, odd)) for odd in (False, True, False, False)]
    assert messages[:2] == ["", ""], "nobody can tell yet"
    assert text in messages[2]
    return messages


@on_ranks(2)
def test_a_batch_skipped_by_one_rank_is_refused(rank: int) -> str:
    model = sharded(Scenario())
    for place, batch in enumerate(rst.prefetch(batches_of(Scenario(), 3), model, depth=2)):
        if place != 1 or rank != 1:
            message = error_of(lambda batch=batch: model.module(batch)[0].backward())
            if message:
                break
    assert "rank 0 trains batch 2 of collection 'sparse', rank 1 trains batch 3 of collection 'sparse'" in message
    return message


@on_ranks(2)
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ([{"depth": 0}, {"depth": 2}], "batches ahead is 0 on rank 0, 2 on rank 1"),
        ([{"depth": 3}, {"depth": 2}], "batches ahead is 3 on rank 0, 2 on rank 1"),
        ([{}, {"execute_all_batches": False}], "execute_all_batches is True on rank 0, False on rank 1"),
        ([{"evict_step_interval": 2}, {}], "evict_step_interval is 2 on rank 0, None on rank 1"),
    ],
)
def test_differing_pipeline_options_are_refused(rank: int, options: list[dict[str, Any]], text: str) -> str:
    model = sharded(Scenario())
    dense = torch.optim.SGD([model.module.scale], lr=0.05)
    pipeline: Any = rst.EmbCacheTrainPipelineSparseDist(model, dense, "cpu", Place.device, **options[rank])
    message = error_of(lambda: pipeline.progress(batches_of(Scenario(), 8)))
    assert text in message
    return message


# ---- some ranks train what others evaluate


@on_ranks(2)
@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("rules", [{}, {"admit_threshold": 2}])
@pytest.mark.parametrize("way", WAYS)
def test_evaluation_on_one_rank_is_refused(rank: int, way: str, rules: dict[str, Any], after: int) -> str:
    scenario = Scenario(rules=rules)
    model = sharded(scenario)
    once = training_step(model, way, batches_of(scenario, 8))
    for _ in range(after):
        once()
    if rank == 1:
        model.eval()
    message = error_of(once)
    assert message.startswith("RuntimeError: ")
    assert "rank 0 trains" in message
    assert "rank 1 evaluates" in message
    if way != "torchrec":  # TorchRec's pipeline has replaced the forward
        model.eval()  # all ranks change the mode together
        model.module(batch_of(scenario, 0))
    return message


@on_ranks(2)
def test_all_ranks_may_evaluate_what_was_prefetched() -> None:
    """A batch in the middle is evaluated although it was exchanged for training."""
    scenario, found = Scenario(optimizer=ADAGRAD, rules={"admit_threshold": 2}), []
    for depth in (0, 2):
        model, outputs = sharded(scenario), []
        for place, batch in enumerate(rst.prefetch(batches_of(scenario, 8), model, depth=depth)):
            model.train(place % 3 != 2)
            loss, output = model.module(batch)
            outputs.append(output)
            if model.training:
                loss.backward()
        found.append((outputs, rows(model.module.sparse)))
    assert_same(*found)
