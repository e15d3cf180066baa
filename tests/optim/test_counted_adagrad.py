"""Row-wise Adagrad with weight decay COUNTER, as FBGEMM's CPU module has it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchrec
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import ComputeDevice, EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    CounterBasedRegularizationDefinition,
    CounterWeightDecayMode,
    LearningRateMode,
    SplitTableBatchedEmbeddingBagsCodegen,
    TailIdThreshold,
    WeightDecayMode,
)
from jagged import apply, bag_config, bags_collection, jagged, same_bits, single_ids, train_step

import rec_sdk_torch as rst
from rec_sdk_torch.tbe import Pooling, TableBatchedEmbedding, TableConfig, TableOptimizer

ROWWISE = torchrec.optim.RowWiseAdagrad
ROWS, DIM = 20, 8
COUNTER = {"weight_decay_mode": "counter"}
ADAGRADW = {**COUNTER, "counter_weight_decay_mode": "adagradw"}


def definition(decay: str, rates: str = "EQUAL", tail: TailIdThreshold | None = None, **more: Any) -> Any:
    return CounterBasedRegularizationDefinition(
        counter_weight_decay_mode=CounterWeightDecayMode[decay],
        learning_rate_mode=LearningRateMode[rates],
        tail_id_threshold=tail or TailIdThreshold(),
        **{"adjustment_ub": 0.75, "max_counter_update_freq": -1, **more},
    )


DEFINITIONS = {
    "plain": definition("NONE"),
    "l2": definition("L2", counter_halflife=5),
    "l2, growing": definition("L2"),  # without a half-life FBGEMM's decay is below 0
    "decouple": definition("DECOUPLE", counter_halflife=3, adjustment_iter=4),
    "forgetful": definition("DECOUPLE", "COUNTER_SGD", counter_halflife=0),
    "increase": definition("L2", "TAIL_ID_LR_INCREASE", counter_halflife=7),
    "decrease": definition("NONE", "TAIL_ID_LR_DECREASE", adjustment_iter=3),
    "far": definition("NONE", "TAIL_ID_LR_DECREASE", adjustment_ub=3.0),
    "threshold": definition("NONE", "TAIL_ID_LR_INCREASE", TailIdThreshold(3.0)),
    "ratio": definition("DECOUPLE", "COUNTER_SGD", TailIdThreshold(0.06, True), counter_halflife=4),
    "adagradw": definition("ADAGRADW"),
    "adagradw, late": definition("ADAGRADW", adjustment_iter=5),
    "adagradw, bound": definition("ADAGRADW", counter_halflife=-2, adjustment_ub=0.25),
    "adagradw, fading": definition("ADAGRADW", counter_halflife=4),
}


@pytest.mark.parametrize("max_counter", [1.0, 60.0])
@pytest.mark.parametrize("kind", list(DEFINITIONS))
def test_counter_is_fbgemms(kind: str, max_counter: float, device: torch.device) -> None:
    regularization = DEFINITIONS[kind]
    options: dict[str, Any] = {"eps": 1e-3, "weight_decay": 0.2, "weight_decay_mode": WeightDecayMode.COUNTER}
    theirs = SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.1,
        counter_based_regularization=regularization,
        device=torch.device("cpu"),
        **options,
    )
    theirs.init_embedding_weights_uniform(-0.5, 0.5)
    theirs.max_counter[0] = max_counter
    optimizer = TableOptimizer.create(ROWWISE, {"lr": 0.1, "counter_based_regularization": regularization, **options})
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


def test_the_greatest_count_is_found_in_host_memory_too(device: torch.device) -> None:
    """A cache of three rows of five; each third update begins with the greatest count so far, plus 1."""
    options = {**COUNTER, "learning_rate_mode": "tail_id_lr_increase", "max_counter_update_freq": 3}
    small, large = bags_collection(device, cache=3), bags_collection(device, cache=40)
    batches = [[1, 2, 3], [3, 1, 3], [4, 3, 5], [4, 5], [4, 5], [1, 4], [5, 4], [2]]
    counts = [1, 1, 1 + 2, 3, 3, 1 + 3, 4, 4, 1 + 5]  # of the update of each number, from 1
    for collection in (small, large):
        apply(collection, ROWWISE, **options)
        group = collection.fused_optimizer.param_groups[0]
        found = []
        for ids in batches:
            found.append(group["max_counter"])
            train_step(collection, single_ids(ids))
        assert [*found, group["max_counter"]] == counts
    assert not list(same_bits(small.state_dict(), large.state_dict()))


def test_the_greatest_count_is_of_all_tables(device: torch.device) -> None:
    """One optimizer of two tables: ids of the first come more often than those of the second."""
    collection = bags_collection(device, bag_config(), bag_config("t1", ("f1",)))
    apply(collection, ROWWISE, **COUNTER, learning_rate_mode="tail_id_lr_increase", max_counter_update_freq=3)
    for ids in range(3):
        train_step(collection, jagged({"f0": [[7]], "f1": [[ids]]}))
    assert collection.fused_optimizer.param_groups[0]["max_counter"] == 1 + 2, "of the first two updates"


def test_batches_in_flight_do_not_change_the_greatest_count(device: torch.device) -> None:
    """Whole tables are read while later batches are planned and staged: these are planned again."""
    options = {
        **COUNTER,
        "learning_rate_mode": "tail_id_lr_decrease",
        "max_counter_update_freq": 2,
        "adjustment_ub": 2.0,
    }
    batches = [single_ids([i % 3, i % 5, 7]) for i in range(12)]
    states = []
    for depth in (0, 3):
        collection = bags_collection(device, cache=12)
        apply(collection, ROWWISE, **options)
        for batch in rst.prefetch(batches, collection, depth) if depth else batches:
            train_step(collection, batch)
        assert collection.fused_optimizer.param_groups[0]["max_counter"] == 12
        states.append(collection.state_dict())
    assert not list(same_bits(*states))


def test_equal_rates_never_ask_for_the_greatest_count(device: torch.device) -> None:
    collection = bags_collection(device, bag_config())
    apply(collection, ROWWISE, max_counter_update_freq=1, **COUNTER)
    for _ in range(3):
        train_step(collection, single_ids([1]))
    assert collection.fused_optimizer.param_groups[0]["max_counter"] == 1.0


@pytest.mark.parametrize(("options", "error", "message"), [
    ({**COUNTER, "counter_weight_decay_mode": "cowclip"}, ValueError, "counter_weight_decay_mode is 'cowclip'"),
    ({**COUNTER, "learning_rate_mode": 0}, ValueError, "learning_rate_mode is 0, supported are .'equal'"),
    ({**COUNTER, "grad_sum_decay": "ctr_decay"}, ValueError, "grad_sum_decay is 'ctr_decay', supported"),
    ({**COUNTER, "adjustment_ub": -1.0}, ValueError, "adjustment_ub is -1.0"),
    ({**COUNTER, "adjustment_iter": 0.5}, TypeError, "adjustment_iter is 0.5"),
    ({**COUNTER, "max_counter": 0.5}, ValueError, "max_counter is 0.5"),
    ({**COUNTER, "tail_id_threshold": 3.0}, TypeError, "tail_id_threshold is 3.0"),
    ({**COUNTER, "tail_id_threshold": {"val": 3.0, "is_ratio": 1}}, TypeError, "tail_id_threshold_is_ratio is 1"),
    ({**COUNTER, "max_norm": 1.0}, ValueError, "max_norm=1.0 is not supported"),
    ({**ADAGRADW, "learning_rate_mode": "counter_sgd"}, ValueError, "learning_rate_mode is 'counter_sgd'"),
    ({**ADAGRADW, "lr": 2.0, "weight_decay": 0.5}, ValueError, r"lr \* weight_decay is 1.0"),
    ({"counter_based_regularization": definition("NONE")}, TypeError, "unknown keyword"),
])  # fmt: skip
def test_refused_keywords(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TableOptimizer.create(ROWWISE, options)
