"""The optimizers under test, one row each, with test arguments and a reference implementation."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

import reference_optimizers as formulas
import torch

from rec_sdk_torch.formulas import OptimizerSpec
from rec_sdk_torch.tbe import TableOptimizer


@dataclass(frozen=True)
class Row:
    """An optimizer under test.

    Attributes:
        name: the row's name in tests and scenarios.
        cls: qualified name of a class that selects the optimizer.
        reference: the class itself if it is torch's, else its formula, applied to rows.
        options: keywords that select the optimizer. They keep its formula well conditioned: a large `eps` shows
            wherever it belongs, and keeps the first step of Adam, lr * g / (|g| + eps), from magnifying the rounding of
            a gradient whose terms cancel.
        tolerance: relative and absolute tolerance of float32 against the reference in float32 after 20 updates.
        extremes: sets of keywords for tests with extreme numbers; those tests add betas, eps and lr where a set lacks
            them.
        exact: the implementation that tests with extreme numbers run in float64, if not `reference`.
    """

    name: str
    cls: str
    reference: type[torch.optim.Optimizer]
    options: dict[str, Any]
    tolerance: float = 1e-6
    extremes: tuple[dict[str, Any], ...] = field(default=({},))
    exact: type[torch.optim.Optimizer] | None = None

    def optimizer(self, **more: Any) -> TableOptimizer:
        """Builds the table optimizer, with the row's keywords and `more`."""
        return TableOptimizer.create(class_named(self.cls), {**self.options, **more})

    @property
    def spec(self) -> OptimizerSpec:
        """The optimizer's spec."""
        return self.optimizer().spec

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the per-row states."""
        return tuple(state.name for state in self.spec.states)

    def coefficients(self, t: int) -> torch.Tensor:
        """Returns the coefficients of update t, `[1, 16]`."""
        optimizer = self.optimizer()
        optimizer.step = t - 1
        return torch.tensor([optimizer.coefficients()], dtype=torch.float32)

    def on_rows(self, weight: torch.nn.Parameter, **more: Any) -> formulas.RowOptimizer:
        """Builds the reference for the rows of `weight` that a sparse gradient names, with the row's keywords and
        `more`.
        """
        options = {**self.options, **more}
        if issubclass(self.reference, formulas.RowOptimizer):
            return self.reference([weight], **options)
        return formulas.on_rows_by(self.reference, self.states)([weight], **options)

    def class_of(self, window: int) -> type:
        """Returns the optimizer's class, or its Accumulate class for a window of several backward passes."""
        return class_named(self.spec.accumulate_class if window > 1 else self.cls)


def class_named(name: str) -> type:
    """Imports the class; if it is TorchRec's and TorchRec is not installed, creates a class with its name."""
    module, _, short = name.rpartition(".")
    if "torchrec" in module:
        return type(short, (), {"__module__": module})
    cls: type = getattr(importlib.import_module(module), short)
    return cls


EPS = 1e-3
_ROWWISE = "torchrec.optim.rowwise_adagrad.RowWiseAdagrad"
_ADAM = {"lr": 0.05, "betas": (0.8, 0.95), "eps": EPS}
_ADAGRAD = {"lr": 0.2, "lr_decay": 0.1, "initial_accumulator_value": 0.1, "eps": EPS}
_DECAY = {"weight_decay": 0.1}
_GROWING = {"weight_decay": 0.1, "maximize": True}
_DECAYS = ({"weight_decay": 0.06}, {"weight_decay": 0.06, "maximize": True})
"""Weight decays that no gradient cancels, with either sign of `maximize`."""
_ADADELTA = {"lr": 0.5, "rho": 0.8, "eps": EPS}
_RHOS = tuple({"rho": rho} for rho in (0.0, 1e-3, 0.9, 0.999999, 1.0))
_COWCLIP = {
    "lr": 0.2,
    "eps": EPS,
    "weight_decay": 0.1,
    "weight_decay_mode": "cowclip",
    "counter_weight_decay_mode": "decouple",
    "counter_halflife": 4,
    "weight_norm_coefficient": 0.25,
    "lower_bound": 0.0625,
}
_COUNTED = {
    "lr": 0.2,
    "eps": EPS,
    "weight_decay": 0.1,
    "weight_decay_mode": "counter",
    "counter_weight_decay_mode": "l2",
    "counter_halflife": 4,
    "adjustment_iter": 2,
    "adjustment_ub": 0.75,
    "tail_id_threshold_val": 1.3,
    "max_counter": 9.0,
    "max_counter_update_freq": -1,
    "initial_accumulator_value": 0.1,
}
_ADAGRADW = {
    "lr": 0.2,
    "eps": EPS,
    "weight_decay": 0.25,
    "weight_decay_mode": "counter",
    "counter_weight_decay_mode": "adagradw",
    "counter_halflife": -2,
    "adjustment_iter": 2,
    "adjustment_ub": 0.5,
    "initial_accumulator_value": 0.1,
}
_EXTREME_COWCLIP = {**_COWCLIP, "counter_halflife": 3, "weight_norm_coefficient": 0.5, "lower_bound": 0.01}
_EXTREME_COUNTED = {**_DECAY, "weight_decay_mode": "counter", "adjustment_ub": 0.75, "max_counter": 9.0}


def _of_modes(options: dict[str, Any], modes: tuple[str, ...]) -> tuple[dict[str, Any], ...]:
    return tuple({**options, "counter_weight_decay_mode": mode} for mode in modes)


def _counted(rates: str) -> Row:
    extreme = tuple(
        {**_EXTREME_COUNTED, "counter_weight_decay_mode": decay, "learning_rate_mode": rates, **tail}
        for decay in ("none", "l2")
        for tail in ({"tail_id_threshold_val": 0.5}, {"tail_id_threshold_val": 1.5})
    )
    options = {**_COUNTED, "learning_rate_mode": rates}
    return Row(f"{rates} of rowwise_adagrad", _ROWWISE, formulas.CountedRowWiseAdagrad, options, 5e-6, extreme)


def _rmsprop(kind: dict[str, Any]) -> Row:
    options = {"lr": 0.05, "alpha": 0.9, "eps": 1e-2, "weight_decay": 0.1, "maximize": True, **kind}
    # with alpha 0, the centered variance would be 0
    alphas = (1e-3, 0.9, 0.999999) if "centered" in kind else (0.0, 1e-3, 0.9, 0.999999)
    eps = {"eps": 1e-8} if "centered" in kind else {}  # avoids a division by 0 if the variance underflows
    extremes = tuple(
        {"alpha": alpha, **kind, **eps, **more}
        for alpha in alphas
        for more in ({}, {"weight_decay": 0.06, "maximize": True})  # a decay unlike the gradient
    )
    name = "_".join([*kind, "rmsprop"])
    exact = formulas.CenteredRmsProp if "centered" in kind else None
    return Row(name, "torch.optim.rmsprop.RMSprop", torch.optim.RMSprop, options, 1e-5, extremes, exact)


def _rowwise(name: str, formula: type, options: dict[str, Any], extremes: Any = ({},), tolerance: float = 1e-6) -> Row:
    return Row(name, _ROWWISE, formula, {"lr": 0.2, "eps": EPS, **options}, tolerance, extremes)


def _torchrec(name: str, cls: str, formula: type, options: dict[str, Any], *extremes: dict[str, Any]) -> Row:
    return Row(name, f"torchrec.optim.optimizers.{cls}", formula, {**options, "weight_decay": 0.1}, 1e-5, extremes)


_SGD = "torch.optim.sgd.SGD", torch.optim.SGD
_TORCHS_ADAGRAD = "torch.optim.adagrad.Adagrad", torch.optim.Adagrad
_TORCHS_ADADELTA = "torch.optim.adadelta.Adadelta", torch.optim.Adadelta
_MOMENTA = tuple({"momentum": momentum} for momentum in (1e-3, 0.9, 0.999999))
_DAMPENED = {"dampening": 0.5, **_GROWING}
_MOMENTUM = {"lr": 0.1, "momentum": 0.8, "dampening": 0.4, **_GROWING}
_ENSEMBLE = {"step_ema": 2, "step_swap": 3, "step_start": 4, "step_ema_coef": 0.75, "initial_accumulator_value": 0.1}
_SCALED = {"step_ema": 3, "step_swap": 6, "step_mode": "none", "step_ema_coef": 0.5}
_DECOUPLED = {"weight_decay": 0.1, "weight_decay_mode": "decouple"}
_GLOBAL = {"weight_decay": 0.25, "weight_decay_mode": "decouple_global", "gwd_start_iter": 3, "gwd_lower_bound": 0.875}
_CLIPS = _of_modes(_EXTREME_COWCLIP, ("none", "l2", "decouple"))
_COUNTS = tuple({**_of_modes(_EXTREME_COUNTED, ("adagradw",))[0], "counter_halflife": h} for h in (-1, -2))
_EACH_RHO = tuple({**rho, **decay} for rho in _RHOS for decay in _DECAYS)
_BOUND = {"weight_decay": 0.1, "max_norm": 0.5}
_START = {"initial_accumulator_value": 0.1}
_SPARSE_ADAM = "torch.optim.sparse_adam.SparseAdam", torch.optim.SparseAdam
ROWS = (
    Row("sgd", *_SGD, {"lr": 0.5}),
    Row("growing_sgd", *_SGD, {"lr": 0.5, "maximize": True}),
    Row("decayed_sgd", *_SGD, {"lr": 0.5, **_GROWING}, extremes=_DECAYS),
    Row("momentum_sgd", *_SGD, _MOMENTUM, extremes=tuple({**m, **more} for m in _MOMENTA for more in ({}, _DAMPENED))),
    Row(
        "nesterov_sgd",
        *_SGD,
        {"lr": 0.1, "momentum": 0.8, "nesterov": True},
        extremes=tuple({**momentum, "nesterov": True} for momentum in _MOMENTA),
    ),
    _torchrec("lars_sgd", "LarsSGD", formulas.LarsSgd, {"lr": 0.5, "eta": 0.1, "momentum": 0.5}, {}, _DECAY),
    Row("adagrad", *_TORCHS_ADAGRAD, _ADAGRAD),
    Row("decayed_adagrad", *_TORCHS_ADAGRAD, {**_ADAGRAD, **_GROWING}, extremes=_DECAYS),
    _rowwise("rowwise_adagrad", formulas.RowWiseAdagrad, _ADAGRAD),
    _rowwise("l2_rowwise_adagrad", formulas.RowWiseAdagrad, {**_DECAY, **_START}, (_DECAY,)),
    _rowwise("decoupled_rowwise_adagrad", formulas.RowWiseAdagrad, _DECOUPLED, (_DECOUPLED,)),
    _rowwise("bounded_rowwise_adagrad", formulas.BoundedRowWiseAdagrad, _BOUND, ({"max_norm": 1.0},), 2e-6),
    _rowwise(
        "ensemble_rowwise_adagrad", formulas.EnsembleRowWiseAdagrad, {**_BOUND, **_ENSEMBLE}, ({"step_ema": 99},), 2e-6
    ),
    _rowwise("scaled_ensemble", formulas.EnsembleRowWiseAdagrad, _SCALED, ({"step_ema": 99, "max_norm": 1.0},), 2e-6),
    _rowwise(
        "globally_decayed_rowwise_adagrad",
        formulas.GloballyDecayedRowWiseAdagrad,
        {**_GLOBAL, **_START},
        ({**_DECAY, "weight_decay_mode": "decouple_global"},),
    ),
    _rowwise("cowclip_rowwise_adagrad", formulas.CowClipRowWiseAdagrad, _COWCLIP, _CLIPS, 5e-6),
    *map(_counted, ("equal", "tail_id_lr_increase", "tail_id_lr_decrease", "counter_sgd")),
    _rowwise("counted_adagradw", formulas.CountedRowWiseAdagrad, _ADAGRADW, _COUNTS, 5e-6),
    Row("adam", "torch.optim.adam.Adam", torch.optim.Adam, _ADAM, 1e-5),
    Row("decayed_adam", "torch.optim.adam.Adam", torch.optim.Adam, {**_ADAM, **_GROWING}, 1e-5, _DECAYS),
    Row("sparse_adam", *_SPARSE_ADAM, {**_ADAM, "maximize": True}, 1e-5, exact=formulas.SparseAdam),
    Row("adamw", "torch.optim.adamw.AdamW", torch.optim.AdamW, {**_ADAM, **_GROWING}, 1e-5, (_DECAY, _GROWING)),
    _torchrec("partial_rowwise_adam", "PartialRowWiseAdam", formulas.PartialRowWiseAdam, _ADAM, _DECAY),
    *map(_rmsprop, ({}, {"momentum": 0.8}, {"centered": True}, {"momentum": 0.8, "centered": True})),
    Row("adadelta", *_TORCHS_ADADELTA, {**_ADADELTA, "maximize": True}, 1e-5, _RHOS),
    Row("decayed_adadelta", *_TORCHS_ADADELTA, {**_ADADELTA, **_GROWING}, 1e-5, _EACH_RHO),
    _torchrec("lamb", "LAMB", formulas.Lamb, _ADAM, {}, _DECAY),
    _torchrec("partial_rowwise_lamb", "PartialRowWiseLAMB", formulas.PartialRowWiseLamb, _ADAM, {}, _DECAY),
)
BY_NAME = {row.name: row for row in ROWS}
