"""FBGEMM's additions to exact row-wise Adagrad: CowClip, global weight decay, a bound of a row's norm."""

from __future__ import annotations

import copy
import enum
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torchrec
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import ComputeDevice, EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    CounterWeightDecayMode,
    CowClipDefinition,
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)
from jagged import apply, bag_config, bags_collection, rows_of, same_bits, single_ids, train_step

from rec_sdk_torch.tbe import Pooling, TableBatchedEmbedding, TableConfig, TableOptimizer

ROWWISE = torchrec.optim.RowWiseAdagrad
ROWS, DIM = 20, 8


@dataclass
class GlobalWeightDecay:  # FBGEMM's definition, which its older versions keep elsewhere
    start_iter: int = 0
    lower_bound: float = 0.0


class Mode(enum.IntEnum):
    DECOUPLE_GLOBAL = 5


GLOBAL = {"weight_decay": 0.5, "weight_decay_mode": "decouple_global"}
COWCLIP = {"weight_decay_mode": "cowclip"}


@pytest.mark.parametrize("halflife", [-1, 0, 5])
@pytest.mark.parametrize("mode", ["NONE", "L2", "DECOUPLE"])
def test_cowclip_is_fbgemms(mode: str, halflife: int, device: torch.device) -> None:
    definition = CowClipDefinition(
        counter_weight_decay_mode=CounterWeightDecayMode[mode],
        counter_halflife=halflife,
        weight_norm_coefficient=0.3,
        lower_bound=0.02,
    )
    options: dict[str, Any] = {"eps": 1e-3, "weight_decay": 0.2, "weight_decay_mode": WeightDecayMode.COWCLIP}
    theirs = SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.1,
        cowclip_regularization=definition,
        device=torch.device("cpu"),
        **options,
    )
    theirs.init_embedding_weights_uniform(-0.5, 0.5)
    optimizer = TableOptimizer.create(ROWWISE, {"lr": 0.1, "cowclip_regularization": definition, **options})
    config = TableConfig("t0", num_embeddings=ROWS, embedding_dim=DIM, pooling=Pooling.SUM, hashed=False)
    ours = TableBatchedEmbedding([config], optimizer=optimizer, cache={"t0": ROWS}, device=device)
    every, offsets = torch.arange(ROWS), torch.arange(0, 13, 3)
    ours.view("t0").write(every, {"weight": theirs.split_embedding_weights()[0].clone()})
    torch.manual_seed(halflife)
    for t in range(10):  # some rows miss updates
        indices = torch.randint(0, 5 if t % 3 else ROWS, (12,))
        grad = torch.randn(4, DIM) * 0.3
        theirs(indices, offsets).backward(grad)
        ours(indices, offsets).backward(grad.to(device))
    found = ours.view("t0").read(every, ["weight", "sum", "prev_iter", "row_counter"]).parts
    expected = [theirs.split_embedding_weights()[0], *theirs.split_optimizer_states()[0]]
    for name, value in zip(found, expected, strict=True):
        torch.testing.assert_close(found[name].reshape(value.shape), value, rtol=1e-5, atol=1e-6)


def test_global_decay_of_a_row_that_missed_updates(device: torch.device) -> None:
    """Gradients of zero: only the decay is seen. Row 1 is in the updates 1 and 4, and the decay begins at 4."""
    collection = bags_collection(device, bag_config(weight_init_min=1.0, weight_init_max=1.0))
    definition = GlobalWeightDecay(start_iter=4, lower_bound=0.0)
    apply(collection, ROWWISE, lr=0.5, eps=1.0, **{**GLOBAL, "weight_decay_mode": Mode.DECOUPLE_GLOBAL},
          global_weight_decay=definition)  # fmt: skip
    for ids in ([1], [2], [2], [1, 2]):
        train_step(collection, single_ids(ids), factor=0.0)
    rows = {i: float(row[0]) for i, row in rows_of(collection).items()}
    assert rows == pytest.approx({1: 0.75**4, 2: 0.75**3}, rel=1e-6)
    collection.fused_optimizer.param_groups[0]["gwd_lower_bound"] = 0.9
    for ids in ([2], [2], [1]):
        train_step(collection, single_ids(ids), factor=0.0)
    assert float(rows_of(collection)[1][0]) == pytest.approx(0.75**5 * 0.9, rel=1e-6)


def test_max_norm_bounds_rows_after_the_update(device: torch.device) -> None:
    collection = bags_collection(device, bag_config(weight_init_min=1.0, weight_init_max=1.0))
    apply(collection, ROWWISE, lr=1.0, eps=1.0, max_norm=2.5)
    train_step(collection, single_ids([1]), factor=-1.0)  # to 1.5 in each of 4 columns: a norm of 3
    train_step(collection, single_ids([2]), factor=1.0)  # to 0.5
    lengths = {i: float(row.norm()) for i, row in rows_of(collection).items()}
    assert lengths == pytest.approx({1: 2.5, 2: 1.0}, rel=1e-6)
    collection.fused_optimizer.param_groups[0]["max_norm"] = 0.0  # none
    train_step(collection, single_ids([1]), factor=-1.0)
    assert float(rows_of(collection)[1].norm()) == pytest.approx(2.5 + 2 / (1 + math.sqrt(2)), rel=1e-6)


@pytest.mark.parametrize(("options", "error", "message"), [
    ({**GLOBAL, "lr": 2.0}, ValueError, r"lr \* weight_decay is 1\.0"),
    ({**GLOBAL, "gwd_lower_bound": 1.5}, ValueError, "gwd_lower_bound is 1.5"),
    ({**GLOBAL, "gwd_start_iter": -1}, ValueError, "gwd_start_iter is -1"),
    ({**GLOBAL, "gwd_start_iter": 0.5}, TypeError, "gwd_start_iter is 0.5"),
    ({**GLOBAL, "max_norm": 1.0}, ValueError, "max_norm=1.0 is not supported"),
    ({**GLOBAL, "global_weight_decay": 3}, TypeError, "global_weight_decay is 3"),
    ({**GLOBAL, "global_weight_decay": {"start": 3}}, TypeError, "global_weight_decay is .*start"),
    ({**GLOBAL, "gwd_start_iter": 1, "global_weight_decay": {"start_iter": 3}}, TypeError, "global_weight_decay is"),
    ({"weight_decay": 0.5, "global_weight_decay": {"start_iter": 3}}, TypeError, "unknown keyword gwd_start_iter"),
    ({**COWCLIP, "counter_weight_decay_mode": CounterWeightDecayMode.ADAGRADW}, ValueError, "supported are .'none'"),
    ({**COWCLIP, "counter_halflife": True}, TypeError, "counter_halflife is True"),
    ({**COWCLIP, "weight_norm_coefficient": -1.0}, ValueError, "weight_norm_coefficient is -1.0"),
    ({"cowclip_regularization": CowClipDefinition()}, TypeError, "unknown keyword counter_weight_decay_mode"),
    ({"max_norm": -1.0}, ValueError, "max_norm is -1.0"),
    ({"max_norm": math.nan}, ValueError, "max_norm is nan"),
])  # fmt: skip
def test_refused_keywords(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TableOptimizer.create(ROWWISE, options)


@pytest.mark.parametrize("options", [GLOBAL, COWCLIP, {"max_norm": 1.0}])
def test_a_mode_that_its_kernel_has_not_may_not_come_later(options: dict[str, Any]) -> None:
    optimizer = TableOptimizer.create(ROWWISE, options)
    wrong = "decouple" if "weight_decay_mode" in options else "cowclip"
    optimizer.options["weight_decay_mode"] = wrong
    with pytest.raises(ValueError, match=f"weight_decay_mode is '{wrong}', may change only within"):
        optimizer.coefficients()


@pytest.mark.parametrize("options", [GLOBAL, {**COWCLIP, "counter_halflife": 2, "lower_bound": 0.125}])
def test_counts_of_a_row_are_saved_and_loaded(options: dict[str, Any], device: torch.device) -> None:
    trained = bags_collection(device)
    apply(trained, ROWWISE, initial_accumulator_value=0.5, **options)
    for ids in ([1, 2], [2], [2, 3]):
        train_step(trained, single_ids(ids))
    twin = bags_collection(device)
    apply(twin, ROWWISE, initial_accumulator_value=0.5, **options)
    twin.load_state_dict(trained.state_dict())
    twin.fused_optimizer.load_state_dict(copy.deepcopy(trained.fused_optimizer.state_dict()))
    state = twin.fused_optimizer.state_dict()["state"]["embedding_bags.t0.weight"]
    assert state["t0.prev_iter"].flatten().tolist() == [1, 3, 3]
    for collection in (trained, twin):
        train_step(collection, single_ids([1, 2, 4]))
    assert not list(same_bits(trained.state_dict(), twin.state_dict()))


def test_counts_of_a_row_begin_at_zero(device: torch.device) -> None:
    """Only sums begin at initial_accumulator_value."""
    collection = bags_collection(device)
    apply(collection, ROWWISE, initial_accumulator_value=0.5, lower_bound=1.0, **COWCLIP)
    train_step(collection, single_ids([1]), factor=0.0)
    state = collection.fused_optimizer.state_dict()["state"]["embedding_bags.t0.weight"]
    found = {name: state[f"t0.{name}"].flatten().tolist() for name in ("momentum1", "prev_iter", "row_counter")}
    assert found == {"momentum1": [0.5], "prev_iter": [1.0], "row_counter": [1.0]}
