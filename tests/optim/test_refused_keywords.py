"""Keywords that table optimizers refuse by name, when applied or when changed later, and refused numbers of rows."""

from __future__ import annotations

import enum
import math
from typing import Any

import pytest
import torch
import torchrec
from collection_factory import apply, bag_config, bags_collection
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    CounterBasedRegularizationDefinition,
    CowClipDefinition,
)
from training import assert_trains

import rec_sdk_torch as rst
from rec_sdk_torch.formulas import SPECS, OptimizerSpec
from rec_sdk_torch.rules import Count
from rec_sdk_torch.tbe import TableConfig, TableLifecycle, TableOptimizer
from rec_sdk_torch.tbe.config.optimizer import check_options

SGD, ADAM, ADAGRAD, RMSPROP = torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad, torch.optim.RMSprop
ADADELTA, ADAMW, SPARSE_ADAM = torch.optim.Adadelta, torch.optim.AdamW, torch.optim.SparseAdam
LAMB, LARS, ROWWISE = torchrec.optim.LAMB, torchrec.optim.LarsSGD, torchrec.optim.RowWiseAdagrad
HALF = torch.float16
GLOBAL = {"weight_decay": 0.5, "weight_decay_mode": "decouple_global"}
COWCLIP, COUNTER = {"weight_decay_mode": "cowclip"}, {"weight_decay_mode": "counter"}
ADAGRADW = {**COUNTER, "counter_weight_decay_mode": "adagradw"}
MODES = r"supported are \['l2', 'decouple', 'decouple_global', 'cowclip', 'counter'\]"


class Mode(enum.IntEnum):  # an enum like FBGEMM's WeightDecayMode
    NONE = 0
    DECOUPLE = 2


REFUSED: list[tuple[type, dict[str, Any], type[Exception], str]] = [
    # options that the fused update does not support
    (SGD, {"dampening": 0.1}, ValueError, "dampening=0.1 is not supported by the fused update without momentum"),
    (SGD, {"weight_decay": -0.1}, ValueError, r"weight_decay is -0\.1, must be in \[0\.0, inf\)"),
    (SGD, {"weight_decay": "much"}, TypeError, "weight_decay is 'much', expected a number"),
    (SGD, {"weight_decay": 1e39}, ValueError, "weight_decay is 1e\\+39, which is inf in float32"),
    (SGD, {"maximize": 1}, TypeError, "maximize is 1, expected a bool"),
    (SGD, {"nesterov": True}, ValueError, "nesterov=True is not supported by the fused update without momentum"),
    (SGD, {"momentum": 0.9, "nesterov": True, "dampening": 0.1}, ValueError, "nesterov=True needs dampening=0, but"),
    (ADAM, {"betas": None}, TypeError, "betas is None, expected two numbers"),
    (SGD, {"momentum": 10**400}, ValueError, r"momentum is inf, must be in \[0\.0, 1\.0\)"),
    (SGD, {"momentum": 1.0}, ValueError, r"momentum is 1\.0, must be in \[0\.0, 1\.0\)"),
    (RMSPROP, {"alpha": 1.0}, ValueError, r"alpha is 1\.0, must be in \[0\.0, 1\.0\)"),
    (RMSPROP, {"centered": 0.5}, TypeError, "centered is 0.5, expected a bool"),
    (RMSPROP, {"capturable": True}, ValueError, "capturable=True is not supported"),
    (RMSPROP, {"use_accumulate": True}, TypeError, "need an Accumulate optimizer class"),
    (ADAM, {"amsgrad": True}, ValueError, "amsgrad=True"),
    (ADAM, {"weight_decay": 0.1, "amsgrad": True}, ValueError, "amsgrad=True"),
    (ADAM, {"weight_decay": 0.1, "decoupled_weight_decay": True}, ValueError, "decoupled_weight_decay=True"),
    (ADAGRAD, {"maximize": "yes"}, TypeError, "maximize is 'yes', expected a bool"),
    (ADADELTA, {"rho": 1.1}, ValueError, r"rho is 1\.1, must be in"),
    (ADADELTA, {"eps": 1e-60}, ValueError, "eps is 1e-60, which is 0.0 in float32"),
    (ADADELTA, {"capturable": True}, ValueError, "capturable=True is not supported"),
    (SPARSE_ADAM, {"weight_decay": 0.1}, ValueError, "weight_decay=0.1 is not supported"),
    (rst.AccumulateSGD, {"dampening": 0.9}, ValueError, "dampening=0.9"),
    (SGD, {"learning_rate": 0.1}, TypeError, "learning_rate=0.1"),
    (SGD, {"eps": 0.1}, TypeError, "eps=0.1"),
    # values out of range
    (SGD, {"lr": -0.1}, ValueError, "lr is -0.1"),
    (SGD, {"lr": math.nan}, ValueError, "lr is nan"),
    (SGD, {"lr": math.inf}, ValueError, "lr is inf"),
    (SGD, {"lr": "fast"}, TypeError, "lr is 'fast'"),
    (SGD, {"lr": None}, TypeError, "lr is None"),
    (SGD, {"lr": True}, TypeError, "lr is True"),
    (ADAM, {"betas": (1.0, 0.9)}, ValueError, r"betas\[0\] is 1.0"),
    (ADAM, {"betas": (0.9, -0.1)}, ValueError, r"betas\[1\] is -0.1"),
    (ADAM, {"betas": (0.9, math.nan)}, ValueError, r"betas\[1\] is nan"),
    (ADAM, {"betas": (0.9,)}, TypeError, "betas is"),
    (ADAM, {"betas": 0.9}, TypeError, "betas is 0.9"),
    (ADAM, {"betas": "ab"}, TypeError, "betas"),
    (ADAM, {"eps": -1e-8}, ValueError, "eps is -1e-08"),
    (ADAGRAD, {"lr_decay": -1.0}, ValueError, "lr_decay is -1.0"),
    (ADAGRAD, {"initial_accumulator_value": -1.0}, ValueError, "initial_accumulator_value is -1.0"),
    # clipping
    (SGD, {"max_gradient": 1.0}, ValueError, "max_gradient.*gradient_clipping=True"),
    (SGD, {"gradient_clipping": True}, ValueError, "gradient_clipping=True needs max_gradient"),
    (SGD, {"gradient_clipping": 1, "max_gradient": 1.0}, TypeError, "gradient_clipping is 1"),
    (SGD, {"gradient_clipping": True, "max_gradient": -1.0}, ValueError, "max_gradient is -1.0"),
    (SGD, {"gradient_clipping": True, "max_gradient": "1"}, TypeError, "max_gradient is '1'"),
    # accumulation windows
    (rst.AccumulateSGD, {"accumulate_step": 2}, ValueError, "accumulate_step is 2.*use_accumulate=True"),
    (rst.AccumulateSGD, {"use_accumulate": True, "accumulate_step": 0}, ValueError, "accumulate_step is 0"),
    (rst.AccumulateAdam, {"use_accumulate": True, "accumulate_step": -3}, ValueError, "accumulate_step is -3"),
    (rst.AccumulateAdagrad, {"use_accumulate": True, "accumulate_step": 2.0}, TypeError, "accumulate_step is 2.0"),
    (rst.AccumulateSGD, {"use_accumulate": True, "accumulate_step": True}, TypeError, "accumulate_step is True"),
    (rst.AccumulateSGD, {"use_accumulate": True, "accumulate_step": "2"}, TypeError, "accumulate_step is '2'"),
    (rst.AccumulateSGD, {"use_accumulate": 1, "accumulate_step": 2}, TypeError, "use_accumulate is 1"),
    (rst.AccumulateSGD, {"use_accumulate": None}, TypeError, "use_accumulate is None"),
    (SGD, {"use_accumulate": True, "accumulate_step": 2}, TypeError, "Accumulate"),
    (ADAM, {"use_accumulate": False}, TypeError, "Accumulate"),
    (SGD, {"accumulate_step": 1}, TypeError, "Accumulate"),
    # values outside the range of float32
    (SGD, {"lr": 1e39}, ValueError, r"lr is 1e\+39, which is inf in float32"),
    (SGD, {"gradient_clipping": True, "max_gradient": 1e39}, ValueError, r"max_gradient is 1e\+39"),
    (ADAM, {"betas": (0.9, 1 - 1e-9)}, ValueError, r"betas\[1\] is 0\.999999999, which is 1\.0 in float32, must be in"),
    (LARS, {"momentum": 1 - 1e-9}, ValueError, r"momentum is 0\.999999999, which is 1\.0"),
    (ADAM, {"eps": 1e-50}, ValueError, r"eps is 1e-50, which is 0\.0 in float32"),
    (ADAGRAD, {"initial_accumulator_value": 1e-50}, ValueError, r"initial_accumulator_value is 1e-50, which is 0\.0"),
    (
        ADAGRAD,
        {"initial_accumulator_value": 7e4, "state_dtypes": {"sum": HALF}},
        ValueError,
        "70000.0, which is inf in torch.float16",
    ),
    # types of states
    (ROWWISE, {**COWCLIP, "state_dtypes": {"momentum": HALF}}, ValueError, r"'momentum', the states are \['sum'"),
    (ROWWISE, {**COWCLIP, "state_dtypes": {"sum": torch.float64}}, ValueError, r"\['sum'\] is torch.float64, allowed"),
    (ROWWISE, {**COWCLIP, "state_dtypes": {"row_counter": HALF}}, ValueError, "counters are always torch.float32"),
    (ROWWISE, {**COWCLIP, "state_dtypes": [HALF]}, TypeError, "expected a mapping"),
    # modes of row-wise Adagrad
    *(
        (ROWWISE, {"weight_decay": 0.25, "weight_decay_mode": mode}, ValueError, f"weight_decay_mode is .*{MODES}")
        for mode in ("adagradw", Mode.NONE, 1, None)
    ),
    (ROWWISE, {**GLOBAL, "lr": 2.0}, ValueError, r"lr \* weight_decay is 1\.0"),
    (ROWWISE, {**GLOBAL, "gwd_lower_bound": 1.5}, ValueError, "gwd_lower_bound is 1.5"),
    (ROWWISE, {**GLOBAL, "gwd_start_iter": -1}, ValueError, "gwd_start_iter is -1"),
    (ROWWISE, {**GLOBAL, "gwd_start_iter": 0.5}, TypeError, "gwd_start_iter is 0.5"),
    (ROWWISE, {**GLOBAL, "max_norm": 1.0}, ValueError, "max_norm=1.0 is not supported"),
    (ROWWISE, {**GLOBAL, "global_weight_decay": 3}, TypeError, "global_weight_decay is 3"),
    (ROWWISE, {**GLOBAL, "global_weight_decay": {"start": 3}}, TypeError, "global_weight_decay is .*start"),
    (ROWWISE, {**GLOBAL, "gwd_start_iter": 1, "global_weight_decay": {"start_iter": 3}}, TypeError, "_decay is"),
    (ROWWISE, {"weight_decay": 0.5, "global_weight_decay": {"start_iter": 3}}, TypeError, "keyword gwd_start_iter"),
    (ROWWISE, {**COWCLIP, "counter_weight_decay_mode": "adagradw"}, ValueError, "are .'none'"),
    (ROWWISE, {**COWCLIP, "counter_halflife": True}, TypeError, "counter_halflife is True"),
    (ROWWISE, {**COWCLIP, "weight_norm_coefficient": -1.0}, ValueError, "weight_norm_coefficient is -1.0"),
    (ROWWISE, {"cowclip_regularization": CowClipDefinition()}, TypeError, "unknown keyword counter_weight_decay_mode"),
    (ROWWISE, {"max_norm": -1.0}, ValueError, "max_norm is -1.0"),
    (ROWWISE, {"max_norm": math.nan}, ValueError, "max_norm is nan"),
    (
        ROWWISE,
        {**COUNTER, "counter_weight_decay_mode": "cowclip"},
        ValueError,
        "counter_weight_decay_mode is 'cowclip'",
    ),
    (ROWWISE, {**COUNTER, "learning_rate_mode": 0}, ValueError, "learning_rate_mode is 0, supported are .'equal'"),
    (ROWWISE, {**COUNTER, "grad_sum_decay": "ctr_decay"}, ValueError, "grad_sum_decay is 'ctr_decay', supported"),
    (ROWWISE, {**COUNTER, "adjustment_ub": -1.0}, ValueError, "adjustment_ub is -1.0"),
    (ROWWISE, {**COUNTER, "adjustment_iter": 0.5}, TypeError, "adjustment_iter is 0.5"),
    (ROWWISE, {**COUNTER, "max_counter": 0.5}, ValueError, "max_counter is 0.5"),
    (ROWWISE, {**COUNTER, "tail_id_threshold": 3.0}, TypeError, "tail_id_threshold is 3.0"),
    (
        ROWWISE,
        {**COUNTER, "tail_id_threshold": {"val": 3.0, "is_ratio": 1}},
        TypeError,
        "tail_id_threshold_is_ratio is 1",
    ),
    (ROWWISE, {**COUNTER, "max_norm": 1.0}, ValueError, "max_norm=1.0 is not supported"),
    (ROWWISE, {**ADAGRADW, "learning_rate_mode": "counter_sgd"}, ValueError, "learning_rate_mode is 'counter_sgd'"),
    (ROWWISE, {**ADAGRADW, "lr": 2.0, "weight_decay": 0.5}, ValueError, r"lr \* weight_decay is 1.0"),
    (ROWWISE, {"counter_based_regularization": CounterBasedRegularizationDefinition()}, TypeError, "unknown keyword"),
]


@pytest.mark.parametrize(("cls", "options", "error", "message"), REFUSED)
def test_invalid_keywords_are_refused(
    device: torch.device, cls: type, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    collection = bags_collection(device)
    with pytest.raises(error, match=message) as raised:
        rst.apply_optimizer_in_backward(cls, collection.parameters(), options)
    assert cls.__name__ in str(raised.value)
    assert not any(hasattr(handle, "_optimizer_classes") for handle in collection.parameters())


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.classes[0].rpartition('.')[2]}-{spec.kernel}")
def test_every_number_of_every_optimizer(spec: OptimizerSpec) -> None:
    numbers = [name for name, value in spec.options.items() if type(value) is float]
    assert "lr" in numbers or spec.collects_gradients
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
    (ADAM, {"lr": 3e38}, r"step_size of update 1 is 3.*e\+39, which is inf in float32: .*'lr': 3e\+38"),
    (ADAMW, {"lr": 1e30, "weight_decay": 1e30}, r"decoupled of update 1 is 1\.0.*e\+60"),
    (torchrec.optim.PartialRowWiseAdam, {"lr": 1e30, "weight_decay": 1e30}, r"decoupled of update 1 is 1\.0.*e\+60"),
    (LARS, {"lr": 1e30, "eta": 1e30}, r"scaled_lr of update 1 is 1\.0.*e\+60"),
    (ROWWISE, {**COUNTER, "counter_halflife": 2**40, "weight_decay": 1e30, "counter_weight_decay_mode": "l2"},
     r"faded_l2 of update 1 is"),
])  # fmt: skip
def test_products_that_overflow_are_refused(cls: type, options: dict[str, Any], message: str) -> None:
    """Each value is a valid float32, but their product is not."""
    optimizer = TableOptimizer.create(cls, options)
    with pytest.raises(ValueError, match=message):
        optimizer.coefficients()


def test_extreme_float32_values_are_accepted() -> None:
    largest = torch.finfo(torch.float32).max
    assert TableOptimizer.create(torch.optim.SGD, {"lr": largest}).coefficients()[1] == largest
    assert TableOptimizer.create(torch.optim.SGD, {"lr": 3.4028235e38}).coefficients()[1] == pytest.approx(largest)
    # a value of 0 is valid
    tiny = TableOptimizer.create(ADAM, {"lr": 1e-60, "eps": 1e-45, "betas": (1e-60, 0.9999999)})
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
    ({"init_max": 1e5, "weight_dtype": torch.float16}, r"max 100000\.0, must be finite in torch\.float16"),
    ({"init_max": 1e5, "cache_dtype": torch.float16}, r"must be finite in torch\.float32 and torch\.float16"),
    ({"init_mean": 1e39}, "mean"),
    ({"init_mean": 3e38, "init_stddev": 3e38}, r"mean 3e\+38 and stddev 3e\+38"),
    ({"lifecycle": TableLifecycle(admission=Count(2), default_value=1e39)}, r"table 't': default_value is 1e\+39"),
    ({"lifecycle": TableLifecycle(admission=Count(2), default_value=1e5), "weight_dtype": torch.half}, "is 100000"),
])  # fmt: skip
def test_invalid_row_values_are_refused(options: dict[str, Any], message: str) -> None:
    normal = {"initializer_type": rst.InitializerType.TRUNCATED_NORMAL} if "init_mean" in options else {}
    with pytest.raises(ValueError, match=message):
        TableConfig("t", num_embeddings=4, embedding_dim=4, **normal, **options)


def test_initial_weights_of_a_collection() -> None:
    with pytest.raises(ValueError, match=r"table 't0': .* max 1e\+39"):
        bags_collection(torch.device("cpu"), bag_config(weight_init_max=1e39))


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (torchrec.optim.LAMB, {"weight_decay": -1.0}),
        (torchrec.optim.LarsSGD, {"momentum": 1.0}),
        (torchrec.optim.LarsSGD, {"eta": math.nan}),
        (torchrec.optim.RowWiseAdagrad, {"weight_decay": math.inf}),
        (torchrec.optim.PartialRowWiseAdam, {"betas": (0.9, 1.0)}),
    ],
)
def test_invalid_changed_values_are_refused(cls: type, options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=name):
        TableOptimizer.create(cls, options)
    optimizer = TableOptimizer.create(cls, {name: 0.5} if name != "betas" else {})
    optimizer.options |= options
    with pytest.raises(ValueError, match=name):
        optimizer.coefficients()


def test_a_decay_that_begins_later_is_refused() -> None:
    optimizer = TableOptimizer.create(torchrec.optim.RowWiseAdagrad, {"lr": 0.5})
    optimizer.options["weight_decay"] = 0.5
    with pytest.raises(ValueError, match=r"weight_decay=0\.5"):
        optimizer.coefficients()


@pytest.mark.parametrize("options", [GLOBAL, COWCLIP, {"max_norm": 1.0}])
def test_changing_to_an_unsupported_mode_is_refused(options: dict[str, Any]) -> None:
    optimizer = TableOptimizer.create(ROWWISE, options)
    wrong = "decouple" if "weight_decay_mode" in options else "cowclip"
    optimizer.options["weight_decay_mode"] = wrong
    with pytest.raises(ValueError, match=f"weight_decay_mode is '{wrong}', may change only within"):
        optimizer.coefficients()
