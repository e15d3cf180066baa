"""Numbers that the kernels' float32 cannot hold are refused by name, when they are given and later."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torchrec
from jagged import apply, assert_trains, bag_config, bags_collection

import rec_sdk_torch as rst
from rec_sdk_torch.formulas import SPECS, OptimizerSpec
from rec_sdk_torch.rules import Count
from rec_sdk_torch.tbe import TableConfig, TableLife, TableOptimizer
from rec_sdk_torch.tbe.config.optimizer import check_options

ADAM, ADAGRAD, ADAMW = torch.optim.Adam, torch.optim.Adagrad, torch.optim.AdamW
LAMB, LARS, ROWWISE = torchrec.optim.LAMB, torchrec.optim.LarsSGD, torchrec.optim.RowWiseAdagrad
COUNTED = {"weight_decay_mode": "counter"}


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.classes[0].rpartition('.')[2]}-{spec.kernel}")
def test_every_number_of_every_optimizer(spec: OptimizerSpec) -> None:
    numbers = [name for name, value in spec.options.items() if type(value) is float]
    assert "lr" in numbers or spec.hands_out
    check_options("here", spec, spec.options)
    for name in numbers:
        for value in (1e39, torch.tensor(1e39, dtype=torch.float64), 10**400):
            with pytest.raises(ValueError, match=f"here: {name} is "):
                check_options("here", spec, {**spec.options, name: value})
    whole = [name for name, value in spec.options.items() if type(value) is int]
    for name in whole:
        with pytest.raises(ValueError, match=f"here: {name} is 1000.*, must be"):
            check_options("here", spec, {**spec.options, name: 10**400})


@pytest.mark.parametrize(("cls", "options", "message"), [
    (torch.optim.SGD, {"lr": 1e39}, r"lr is 1e\+39, which is inf in float32"),
    (torch.optim.SGD, {"gradient_clipping": True, "max_gradient": 1e39}, r"max_gradient is 1e\+39"),
    (ADAM, {"betas": (0.9, 1 - 1e-9)}, r"betas\[1\] is 0\.999999999, which is 1\.0 in float32, must be in \[0"),
    (LARS, {"momentum": 1 - 1e-9}, r"momentum is 0\.999999999, which is 1\.0"),
    (ADAM, {"eps": 1e-50}, r"eps is 1e-50, which is 0\.0 in float32"),
    (ADAGRAD, {"initial_accumulator_value": 1e-50}, r"initial_accumulator_value is 1e-50, which is 0\.0"),
    (ADAGRAD, {"initial_accumulator_value": 7e4, "state_dtypes": {"sum": torch.float16}},
     r"initial_accumulator_value is 70000\.0, which is inf in torch\.float16"),
    (ROWWISE, {**COUNTED, "max_counter": 3e9}, r"max_counter is 3000000000\.0, must be in"),
])  # fmt: skip
def test_refused_when_given(cls: type, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TableOptimizer.create(cls, options)


@pytest.mark.parametrize(("cls", "options", "message"), [
    (ADAM, {"lr": 3e38}, r"step_size of update 1 is 3.*e\+39, which is inf in float32: .*'lr': 3e\+38"),
    (ADAMW, {"lr": 1e30, "weight_decay": 1e30}, r"decoupled of update 1 is 1\.0.*e\+60"),
    (torchrec.optim.PartialRowWiseAdam, {"lr": 1e30, "weight_decay": 1e30}, r"decoupled of update 1 is 1\.0.*e\+60"),
    (LARS, {"lr": 1e30, "eta": 1e30}, r"scaled_lr of update 1 is 1\.0.*e\+60"),
    (ROWWISE, {**COUNTED, "counter_halflife": 2**40, "weight_decay": 1e30, "counter_weight_decay_mode": "l2"},
     r"faded_l2 of update 1 is"),
])  # fmt: skip
def test_what_an_update_makes_of_them(cls: type, options: dict[str, Any], message: str) -> None:
    """Each is a float32, their product is none."""
    optimizer = TableOptimizer.create(cls, options)
    with pytest.raises(ValueError, match=message):
        optimizer.coefficients()


def test_the_largest_and_smallest_are_held() -> None:
    largest = torch.finfo(torch.float32).max
    assert TableOptimizer.create(torch.optim.SGD, {"lr": largest}).coefficients()[1] == largest
    assert TableOptimizer.create(torch.optim.SGD, {"lr": 3.4028235e38}).coefficients()[1] == pytest.approx(largest)
    tiny = TableOptimizer.create(ADAM, {"lr": 1e-60, "eps": 1e-45, "betas": (1e-60, 0.9999999)})  # 0 is what it means
    assert torch.tensor(tiny.coefficients())[1:].isfinite().all()
    assert TableOptimizer.create(ADAGRAD, {"eps": 0.0}).coefficients()[0] == math.inf  # without clipping


def test_a_refused_optimizer_leaves_the_tables_without_one(device: torch.device) -> None:
    collection = bags_collection(device)
    with pytest.raises(ValueError, match=r"lr is 1e\+39"):
        rst.apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": 1e39})
    apply(collection)
    assert_trains(collection)


@pytest.mark.parametrize(("options", "message"), [
    ({"init_max": 1e39}, r"table 't': uniform initial weights .* max 1e\+39"),
    ({"init_max": 1e5, "weight_dtype": torch.float16}, r"max 100000\.0, needs finite ones of torch\.float16"),
    ({"init_max": 1e5, "cache_dtype": torch.float16}, r"needs finite ones of torch\.float32 and torch\.float16"),
    ({"init_mean": 1e39}, "mean"),
    ({"init_mean": 3e38, "init_stddev": 3e38}, r"mean 3e\+38 and stddev 3e\+38"),
    ({"life": TableLife(admission=Count(2), default_value=1e39)}, r"table 't': default_value is 1e\+39"),
    ({"life": TableLife(admission=Count(2), default_value=1e5), "weight_dtype": torch.half}, "default_value is 1000"),
])  # fmt: skip
def test_numbers_of_rows(options: dict[str, Any], message: str) -> None:
    normal = {"initializer_type": rst.InitializerType.TRUNCATED_NORMAL} if "init_mean" in options else {}
    with pytest.raises(ValueError, match=message):
        TableConfig("t", num_embeddings=4, embedding_dim=4, **normal, **options)


def test_initial_weights_of_a_collection() -> None:
    with pytest.raises(ValueError, match=r"table 't0': .* max 1e\+39"):
        bags_collection(torch.device("cpu"), bag_config(weight_init_max=1e39))
