"""FBGEMM's additions to exact row-wise Adagrad: CowClip, COUNTER, global weight decay, and bounds of row norms."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torchrec
from batches import jagged, single_ids
from collection_factory import apply, bag_config, bags_collection
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import ComputeDevice, EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    CounterBasedRegularizationDefinition,
    CounterWeightDecayMode,
    CowClipDefinition,
    LearningRateMode,
    SplitTableBatchedEmbeddingBagsCodegen,
    TailIdThreshold,
    WeightDecayMode,
)
from training import differing_tensors, rows_of, state_of, train, train_step

import rec_sdk_torch as rst
from rec_sdk_torch.tbe import Pooling, TableBatchedEmbedding, TableConfig, TableOptimizer

ROWWISE = torchrec.optim.RowWiseAdagrad
ROWS, DIM = 20, 8
ONES = {"weight_init_min": 1.0, "weight_init_max": 1.0}
GLOBAL = {"weight_decay": 0.5, "weight_decay_mode": "decouple_global"}
COWCLIP, COUNTER = {"weight_decay_mode": "cowclip"}, {"weight_decay_mode": "counter"}


@dataclass
class GlobalWeightDecay:  # FBGEMM's class, which older versions define in another module
    start_iter: int = 0
    lower_bound: float = 0.0


class Mode(enum.IntEnum):
    DECOUPLE_GLOBAL = 5


def counter(decay: str, rates: str = "EQUAL", tail: TailIdThreshold | None = None, **more: Any) -> Any:
    return CounterBasedRegularizationDefinition(
        counter_weight_decay_mode=CounterWeightDecayMode[decay],
        learning_rate_mode=LearningRateMode[rates],
        tail_id_threshold=tail or TailIdThreshold(),
        **{"adjustment_ub": 0.75, "max_counter_update_freq": -1, **more},
    )


def cowclip(decay: str, halflife: int) -> CowClipDefinition:
    return CowClipDefinition(CounterWeightDecayMode[decay], halflife, weight_norm_coefficient=0.3, lower_bound=0.02)


DEFINITIONS = {
    "plain": counter("NONE"),
    "l2": counter("L2", counter_halflife=5),
    "l2, growing": counter("L2"),  # without a half-life, FBGEMM's decay is negative
    "decouple": counter("DECOUPLE", counter_halflife=3, adjustment_iter=4),
    "forgetful": counter("DECOUPLE", "COUNTER_SGD", counter_halflife=0),
    "increase": counter("L2", "TAIL_ID_LR_INCREASE", counter_halflife=7),
    "decrease": counter("NONE", "TAIL_ID_LR_DECREASE", adjustment_iter=3),
    "far": counter("NONE", "TAIL_ID_LR_DECREASE", adjustment_ub=3.0),
    "threshold": counter("NONE", "TAIL_ID_LR_INCREASE", TailIdThreshold(3.0)),
    "ratio": counter("DECOUPLE", "COUNTER_SGD", TailIdThreshold(0.06, True), counter_halflife=4),
    "adagradw": counter("ADAGRADW"),
    "adagradw, late": counter("ADAGRADW", adjustment_iter=5),
    "adagradw, bound": counter("ADAGRADW", counter_halflife=-2, adjustment_ub=0.25),
    "adagradw, fading": counter("ADAGRADW", counter_halflife=4),
    **{
        f"cowclip, {decay}, {halflife}": cowclip(decay, halflife)
        for decay in ("NONE", "L2", "DECOUPLE")
        for halflife in (-1, 0, 5)
    },
}


@pytest.mark.parametrize(
    ("kind", "max_counter"),
    [(kind, most) for kind in DEFINITIONS for most in ((1.0,) if "cowclip" in kind else (1.0, 60.0))],
)
def test_row_counts_match_fbgemm(kind: str, max_counter: float, device: torch.device) -> None:
    clips = "cowclip" in kind
    name = "cowclip_regularization" if clips else "counter_based_regularization"
    mode = WeightDecayMode.COWCLIP if clips else WeightDecayMode.COUNTER
    options: dict[str, Any] = {"eps": 1e-3, "weight_decay": 0.2, "weight_decay_mode": mode, name: DEFINITIONS[kind]}
    theirs = SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.1,
        device=torch.device("cpu"),
        **options,
    )
    theirs.init_embedding_weights_uniform(-0.5, 0.5)
    theirs.max_counter[0] = max_counter
    optimizer = TableOptimizer.create(ROWWISE, {"lr": 0.1, **options})
    if not clips:
        optimizer.options["max_counter"] = max_counter
    config = TableConfig("t0", num_embeddings=ROWS, embedding_dim=DIM, pooling=Pooling.SUM, hashed=False)
    ours = TableBatchedEmbedding([config], optimizer=optimizer, cache={"t0": ROWS}, device=device)
    every, offsets = torch.arange(ROWS), torch.arange(0, 13, 3)
    ours.view("t0").write(every, {"weight": theirs.split_embedding_weights()[0].clone()})
    torch.manual_seed(0)
    for t in range(12):  # some rows miss updates
        indices = torch.randint(0, 5 if t % 3 else ROWS, (12,))
        grad = torch.randn(4, DIM) * 0.3
        theirs(indices, offsets).backward(grad)
        ours(indices, offsets).backward(grad.to(device))
    found = ours.view("t0").read(every, ["weight", "sum", "prev_iter", "row_counter"]).parts
    expected = [theirs.split_embedding_weights()[0], *theirs.split_optimizer_states()[0]]
    for name, value in zip(found, expected, strict=True):
        torch.testing.assert_close(found[name].reshape(value.shape), value, rtol=1e-5, atol=1e-6)


# ---- the greatest count


def greatest(collection: Any) -> Any:
    return collection.fused_optimizer.param_groups[0]["max_counter"]


def test_the_greatest_count_is_found_in_host_memory_too(device: torch.device) -> None:
    """The cache holds three of five rows.

    Every third update, the greatest count is set to the greatest so far, plus 1.
    """
    options = {**COUNTER, "learning_rate_mode": "tail_id_lr_increase", "max_counter_update_freq": 3}
    batches = [[1, 2, 3], [3, 1, 3], [4, 3, 5], [4, 5], [4, 5], [1, 4], [5, 4], [2]]
    counts = [1, 1, 1 + 2, 3, 3, 1 + 3, 4, 4, 1 + 5]  # the greatest count used by each update, from update 1 on
    collections = [apply(bags_collection(device, cache=cache), ROWWISE, **options) for cache in (3, 40)]
    for collection in collections:
        found = [greatest(collection)]
        for ids in batches:
            train_step(collection, single_ids(ids))
            found.append(greatest(collection))
        assert found == [1, *counts[1:]]
    assert not list(differing_tensors(*map(state_of, collections)))


def test_the_greatest_count_is_of_all_tables(device: torch.device) -> None:
    """Two tables share an optimizer; ids of the first occur more often."""
    collection = apply(
        bags_collection(device, bag_config(), bag_config("t1", ("f1",))),
        ROWWISE,
        **COUNTER,
        learning_rate_mode="tail_id_lr_increase",
        max_counter_update_freq=3,
    )
    train(collection, [jagged({"f0": [[7]], "f1": [[ids]]}) for ids in range(3)])
    assert greatest(collection) == 1 + 2, "of the first two updates"


def test_batches_in_flight_do_not_change_the_greatest_count(device: torch.device) -> None:
    """Finding the greatest count reads whole tables while later batches are planned and staged; these are replanned."""
    options = {"learning_rate_mode": "tail_id_lr_decrease", "max_counter_update_freq": 2, "adjustment_ub": 2.0}
    batches = [single_ids([i % 3, i % 5, 7]) for i in range(12)]
    states = []
    for depth in (0, 3):
        collection = apply(bags_collection(device, cache=12), ROWWISE, **COUNTER, **options)
        train(collection, rst.prefetch(batches, collection, depth) if depth else batches)
        assert greatest(collection) == 12
        states.append(collection.state_dict())
    assert not list(differing_tensors(*states))


def test_equal_rates_never_read_the_greatest_count(device: torch.device) -> None:
    collection = apply(bags_collection(device), ROWWISE, max_counter_update_freq=1, **COUNTER)
    train(collection, [single_ids([1])] * 3)
    assert greatest(collection) == 1.0


# ---- global decay, bounds, states


def test_global_decay_of_a_row_that_missed_updates(device: torch.device) -> None:
    """Gradients are zero, so only decay changes rows. Row 1 is in updates 1 and 4; decay begins at update 4."""
    options = {**GLOBAL, "weight_decay_mode": Mode.DECOUPLE_GLOBAL, "global_weight_decay": GlobalWeightDecay(4)}
    collection = apply(bags_collection(device, bag_config(**ONES)), ROWWISE, lr=0.5, eps=1.0, **options)
    for ids in ([1], [2], [2], [1, 2]):
        train_step(collection, single_ids(ids), factor=0.0)
    rows = {i: float(row[0]) for i, row in rows_of(collection).items()}
    assert rows == pytest.approx({1: 0.75**4, 2: 0.75**3}, rel=1e-6)
    collection.fused_optimizer.param_groups[0]["gwd_lower_bound"] = 0.9
    for ids in ([2], [2], [1]):
        train_step(collection, single_ids(ids), factor=0.0)
    assert float(rows_of(collection)[1][0]) == pytest.approx(0.75**5 * 0.9, rel=1e-6)


def test_max_norm_bounds_rows_after_the_update(device: torch.device) -> None:
    collection = apply(bags_collection(device, bag_config(**ONES)), ROWWISE, lr=1.0, eps=1.0, max_norm=2.5)
    train_step(collection, single_ids([1]), factor=-1.0)  # changes 1 to 1.5 in each of 4 columns: a norm of 3
    train_step(collection, single_ids([2]), factor=1.0)  # changes 1 to 0.5
    lengths = {i: float(row.norm()) for i, row in rows_of(collection).items()}
    assert lengths == pytest.approx({1: 2.5, 2: 1.0}, rel=1e-6)
    collection.fused_optimizer.param_groups[0]["max_norm"] = 0.0  # 0 means no bound
    train_step(collection, single_ids([1]), factor=-1.0)
    assert float(rows_of(collection)[1].norm()) == pytest.approx(2.5 + 2 / (1 + math.sqrt(2)), rel=1e-6)


def test_counts_of_a_row_begin_at_zero(device: torch.device) -> None:
    """Only sums begin at initial_accumulator_value."""
    collection = apply(bags_collection(device), ROWWISE, initial_accumulator_value=0.5, lower_bound=1.0, **COWCLIP)
    train_step(collection, single_ids([1]), factor=0.0)
    state = state_of(collection)["states"]["embedding_bags.t0.weight"]
    found = {name: state[f"t0.{name}"].flatten().tolist() for name in ("momentum1", "prev_iter", "row_counter")}
    assert found == {"momentum1": [0.5], "prev_iter": [1.0], "row_counter": [1.0]}
