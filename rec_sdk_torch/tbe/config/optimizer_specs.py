"""What the fused update knows of each optimizer.

An optimizer is one `OptimizerSpec` here, one line in `SPECS`, and one struct with the update of a row in
`op_kernels/common/optimizers.h`. Formulas: the optimizers page of the docs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

Options = Mapping[str, Any]
Coefficients = dict[str, float]


@dataclass(frozen=True)
class StateSpec:
    """One state block of the row record: `[D]`, or `[1]` when `rowwise`; a `counter` is always float32."""

    name: str
    rowwise: bool = False
    counter: bool = False

    def elements(self, dim: int) -> int:
        """Numbers of a row of `dim` columns."""
        return 1 if self.rowwise else dim


@dataclass(frozen=True)
class WholeTables:
    """What an optimizer does to all rows of its tables, some at a time, before an update.

    Attributes:
        parts: what it reads of the rows: `weight`, or names of states.
        due: (options, t) -> whether it has something to do before update t.
        rows: (options, t, parts) -> nothing, having changed the parts in place; or a number, of which the greatest
            plus 1 becomes the `option`, and the rows stay.
        option: see `rows`; None where rows change.
    """

    parts: tuple[str, ...]
    due: Callable[[Options, int], bool]
    rows: Callable[[Options, int, dict[str, torch.Tensor]], float | None]
    option: str | None = None


@dataclass(frozen=True)
class OptimizerSpec:
    """What the host side knows of an optimizer.

    Attributes:
        kernel: its name in `rec_sdk::update_rows`.
        family: classes of one family count as the same optimizer in the check against a table's
            `embedding_optimizer_cls`.
        classes: qualified names of the classes that mean it.
        options: keywords the update honours, with their defaults (those of the torch class).
        coefficients: (options, t) -> the coefficients that the kernel's struct names, in double precision.
        states: its state blocks, in the order they have in the record.
        accumulates: an Accumulate variant, with `use_accumulate` and `accumulate_step`.
        when: whether keywords mean this spec, of those of the class; the first whose answer is yes counts.
        between: what it does to whole tables, perhaps before each update.
        modes: of each option that names a mode, those that it may have, and change between.
        neutral: keywords of the class that may only have these values, in place of those that all classes have.
        hands_out: gradients are aggregated until somebody takes them: no update is made, and the kernel is not run.
    """

    kernel: str
    family: str
    classes: tuple[str, ...]
    options: Options
    coefficients: Callable[[Options, int], Coefficients]
    states: tuple[StateSpec, ...] = ()
    accumulates: bool = False
    when: Callable[[Options], bool] = lambda given: True
    modes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    neutral: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    hands_out: bool = False
    between: WholeTables | None = None

    def state_init(self, options: Options) -> list[float]:
        """Initial value of each state block."""
        start = float(options.get("initial_accumulator_value", 0.0))
        return [start if state.name == "sum" else 0.0 for state in self.states]


def mode_name(mode: object) -> str | None:
    """Of a mode's name, or of a member of an FBGEMM enum such as WeightDecayMode; None of anything else."""
    name = getattr(mode, "name", mode)
    return name.lower() if isinstance(name, str) else None


def _sgd(options: Options, t: int) -> Coefficients:
    return {"lr": options["lr"]}


def _adagrad(options: Options, t: int) -> Coefficients:
    return {"lr": options["lr"] / (1 + (t - 1) * options["lr_decay"]), "eps": options["eps"]}


def _decayed_adagrad(options: Options, t: int) -> Coefficients:
    plain, decay = _adagrad(options, t), options["weight_decay"]
    if options["weight_decay_mode"] == "l2":
        return {**plain, "l2": decay, "decoupled": 0.0}
    return {**plain, "l2": 0.0, "decoupled": plain["lr"] * decay}


def _bounded_adagrad(options: Options, t: int) -> Coefficients:
    return {**_decayed_adagrad(options, t), "max_norm": options["max_norm"] or math.inf}


def _ensemble_is_due(options: Options, t: int) -> bool:
    return bool(t % options["step_ema"] == 0 or t % options["step_swap"] == 0)


def _move_ensemble(options: Options, t: int, parts: dict[str, torch.Tensor]) -> None:
    weight, average = parts["weight"], parts["sparse_ema"]
    averages = t % options["step_ema"] == 0
    if averages:
        kept = 0.0 if t <= options["step_start"] else options["step_ema_coef"]
        average.lerp_(weight.to(average.dtype), 1.0 - kept)
    if t % options["step_swap"] == 0:
        weight.copy_(average)
    if averages and options["step_mode"] == "none":
        average.zero_()


def _globally_decayed_adagrad(options: Options, t: int) -> Coefficients:
    plain = _adagrad(options, t)
    decoupled = plain["lr"] * options["weight_decay"]
    begun = t >= options["gwd_start_iter"]
    return {
        **plain,
        "decoupled": decoupled,
        "log_missed": math.log1p(-decoupled) if begun else 0.0,
        "lower_bound": options["gwd_lower_bound"],
        "iter": t,
    }


def _log_fade(halflife: int) -> float:
    """The logarithm of what an update leaves of a count: without a half-life all, with one of 0 nothing."""
    return -math.log(2) / halflife if halflife > 0 else 0.0 if halflife < 0 else -1e9


def _cowclip_adagrad(options: Options, t: int) -> Coefficients:
    plain, mode, decay = _adagrad(options, t), options["counter_weight_decay_mode"], options["weight_decay"]
    return {
        **plain,
        "l2": decay if mode == "l2" else 0.0,
        "decoupled": plain["lr"] * decay if mode == "decouple" else 0.0,
        "log_fade": _log_fade(options["counter_halflife"]),
        "weight_norm_coefficient": options["weight_norm_coefficient"],
        "lower_bound": options["lower_bound"],
        "iter": t,
    }


def _counted_adagrad(options: Options, t: int) -> Coefficients:
    plain, decay, halflife = _adagrad(options, t), options["weight_decay"], options["counter_halflife"]
    adjusted = t > options["adjustment_iter"]
    mode = options["counter_weight_decay_mode"]
    faded = halflife * decay if adjusted else 0.0
    rates = options["learning_rate_mode"] if adjusted else "equal"
    bound, most = options["adjustment_ub"], options["max_counter"]
    tail = options["tail_id_threshold_val"]
    if options["tail_id_threshold_is_ratio"]:
        tail = math.floor(tail * most)
    return {
        **plain,
        "l2": decay if mode == "l2" else 0.0,
        "faded_l2": faded if mode == "l2" else 0.0,
        "faded_decoupled": faded * plain["lr"] if mode == "decouple" else 0.0,
        "log_fade": _log_fade(halflife),
        "power": {"tail_id_lr_increase": bound, "tail_id_lr_decrease": -bound}.get(rates, 0.0),
        "max_counter": most,
        "tail": math.inf if rates == "equal" else tail,
        "counts": float(rates == "counter_sgd"),
        "counted": bound if rates == "counter_sgd" else 0.0,
        "iter": t,
    }


def _counts_are_due(options: Options, t: int) -> bool:
    every: int = options["max_counter_update_freq"]
    return bool(options["learning_rate_mode"] != "equal" and every > 0 and t % every == 0)


def _largest_count(options: Options, t: int, parts: dict[str, torch.Tensor]) -> float:
    return float(parts["row_counter"].max())


def _counted_adagradw(options: Options, t: int) -> Coefficients:
    plain, halflife, begin = _adagrad(options, t), options["counter_halflife"], options["adjustment_iter"]
    adjusted = t > begin
    decoupled = plain["lr"] * options["weight_decay"] if adjusted else 0.0
    return {
        **plain,
        "decoupled": decoupled,
        "log_missed": math.log1p(-decoupled),
        "most_steps": t - begin if adjusted else 1.0,
        "log_fade": _log_fade(halflife),
        "by_root": float(adjusted and halflife == -1),
        "by_count": float(adjusted and halflife == -2),
        "bound": options["adjustment_ub"] if adjusted and halflife == -2 else math.inf,
        "iter": t,
    }


def _betas(options: Options) -> Coefficients:
    b1, b2 = options["betas"]
    return {"eps": options["eps"], "beta1": b1, "one_minus_beta1": 1 - b1, "beta2": b2, "one_minus_beta2": 1 - b2}


def _adam(options: Options, t: int) -> Coefficients:
    beta1, beta2 = options["betas"]
    step_size = options["lr"] / (1 - beta1**t)
    return {**_betas(options), "step_size": step_size, "inv_sqrt_bias_correction2": 1 / math.sqrt(1 - beta2**t)}


def _adamw(options: Options, t: int) -> Coefficients:
    return {**_adam(options, t), "decoupled": options["lr"] * options["weight_decay"]}


def _sparse_adam(options: Options, t: int) -> Coefficients:
    beta1, beta2 = options["betas"]
    step_size = options["lr"] * math.sqrt(1 - beta2**t) / (1 - beta1**t)
    return {**_betas(options), "step_size": step_size, "inv_sqrt_bias_correction2": 1.0}


def _corrected(options: Options, t: int) -> Coefficients:
    beta1, beta2 = options["betas"]
    return {
        **_betas(options),
        "lr": options["lr"],
        "inv_bias_correction1": 1 / (1 - beta1**t),
        "inv_sqrt_bias_correction2": 1 / math.sqrt(1 - beta2**t),
    }


def _partial_adam(options: Options, t: int) -> Coefficients:
    return {**_corrected(options, t), "decoupled": options["lr"] * options["weight_decay"]}


def _lamb(options: Options, t: int) -> Coefficients:
    return {**_corrected(options, t), "weight_decay": options["weight_decay"]}


def _lars(options: Options, t: int) -> Coefficients:
    scaled = options["lr"] * options["eta"]
    return {"scaled_lr": scaled, "momentum": options["momentum"], "weight_decay": options["weight_decay"]}


_ADAM_STATES = (StateSpec("exp_avg"), StateSpec("exp_avg_sq"))
_PARTIAL_STATES = (StateSpec("exp_avg"), StateSpec("exp_avg_sq", rowwise=True))
_ADAM_OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
_ADAGRAD_OPTIONS = {"lr": 1e-2, "lr_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10}
_DECAY_OPTIONS = {**_ADAGRAD_OPTIONS, "weight_decay": 0.0, "weight_decay_mode": "l2"}
_BOUND_OPTIONS = {**_DECAY_OPTIONS, "max_norm": 0.0}
_ENSEMBLE_OPTIONS = {
    **_BOUND_OPTIONS,
    "step_ema": 10_000,
    "step_swap": 10_000,
    "step_start": 0,
    "step_ema_coef": 0.6,
    "step_mode": "use_iter",
}
_MODE_OPTIONS = {**_ADAGRAD_OPTIONS, "weight_decay": 0.0}
_GLOBAL_OPTIONS = {
    **_MODE_OPTIONS,
    "weight_decay_mode": "decouple_global",
    "gwd_start_iter": 0,
    "gwd_lower_bound": 0.0,
}
_COWCLIP_OPTIONS = {
    **_MODE_OPTIONS,
    "weight_decay_mode": "cowclip",
    "counter_weight_decay_mode": "none",
    "counter_halflife": -1,
    "weight_norm_coefficient": 0.0,
    "lower_bound": 0.0,
}
_COUNTER_OPTIONS = {
    **_MODE_OPTIONS,
    "weight_decay_mode": "counter",
    "counter_weight_decay_mode": "none",
    "counter_halflife": -1,
    "adjustment_iter": -1,
    "adjustment_ub": 1.0,
    "learning_rate_mode": "equal",
    "grad_sum_decay": "no_decay",
    "tail_id_threshold_val": 0.0,
    "tail_id_threshold_is_ratio": False,
    "max_counter": 1.0,
    "max_counter_update_freq": 1000,
}
_COUNTER_MODES = {
    "weight_decay_mode": ("counter",),
    "counter_weight_decay_mode": ("none", "l2", "decouple"),
    "learning_rate_mode": ("equal", "tail_id_lr_increase", "tail_id_lr_decrease", "counter_sgd"),
    "grad_sum_decay": ("no_decay",),  # FBGEMM's kernels have no other
}
# FBGEMM's defaults: TorchRec's classes have none.
_LAMB_OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
_LARS_OPTIONS = {"lr": 1e-2, "eta": 1e-3, "momentum": 0.9, "weight_decay": 0.0}
_TORCHREC = "torchrec.optim.optimizers"
_ACCUMULATE = "rec_sdk_torch.optim.accumulate"
_ACCUMULATE_TORCHREC = "rec_sdk_torch.optim.accumulate_torchrec"


def _windowed(spec: OptimizerSpec, cls: str) -> OptimizerSpec:
    return replace(spec, classes=(cls,), accumulates=True)


_SGD = OptimizerSpec("sgd", "SGD", ("torch.optim.sgd.SGD", f"{_TORCHREC}.SGD"), {"lr": 1e-3}, _sgd)
_ADAGRAD = OptimizerSpec(
    "adagrad",
    "Adagrad",
    ("torch.optim.adagrad.Adagrad", f"{_TORCHREC}.Adagrad"),
    _ADAGRAD_OPTIONS,
    _adagrad,
    (StateSpec("sum"),),
)
_ADAM = OptimizerSpec(
    "adam", "Adam", ("torch.optim.adam.Adam", f"{_TORCHREC}.Adam"), _ADAM_OPTIONS, _adam, _ADAM_STATES
)
_SPARSE_ADAM = replace(_ADAM, classes=("torch.optim.sparse_adam.SparseAdam",), coefficients=_sparse_adam)
_ADAMW = OptimizerSpec(
    "adamw",
    "AdamW",
    ("torch.optim.adamw.AdamW",),
    {**_ADAM_OPTIONS, "weight_decay": 1e-2},
    _adamw,
    _ADAM_STATES,
    neutral={"decoupled_weight_decay": (True,)},  # torch has it in the group, since its AdamW is an Adam
)
_ROWWISE = OptimizerSpec(
    "rowwise_adagrad",
    "RowWiseAdagrad",
    ("torchrec.optim.rowwise_adagrad.RowWiseAdagrad",),
    _ADAGRAD_OPTIONS,
    _adagrad,
    (StateSpec("sum", rowwise=True),),
)
_DECAYED_ROWWISE = replace(
    _ROWWISE,
    kernel="decayed_rowwise_adagrad",
    options=_DECAY_OPTIONS,
    coefficients=_decayed_adagrad,
    when=lambda given: bool(given.get("weight_decay")),
    modes={"weight_decay_mode": ("l2", "decouple")},
)
_BOUNDED_ROWWISE = replace(
    _ROWWISE,
    kernel="bounded_rowwise_adagrad",
    options=_BOUND_OPTIONS,
    coefficients=_bounded_adagrad,
    when=lambda given: bool(given.get("max_norm")),
    modes={"weight_decay_mode": ("l2", "decouple")},
)
_ENSEMBLE_ROWWISE = replace(
    _BOUNDED_ROWWISE,
    kernel="ensemble_rowwise_adagrad",
    options=_ENSEMBLE_OPTIONS,
    states=(StateSpec("sparse_ema"), *_ROWWISE.states),
    when=lambda given: bool(given.keys() & (_ENSEMBLE_OPTIONS.keys() - _BOUND_OPTIONS.keys())),
    modes={"weight_decay_mode": ("l2", "decouple"), "step_mode": ("none", "use_counter", "use_iter")},
    between=WholeTables(("weight", "sparse_ema"), _ensemble_is_due, _move_ensemble),
)
_GLOBALLY_DECAYED_ROWWISE = replace(
    _ROWWISE,
    kernel="globally_decayed_rowwise_adagrad",
    options=_GLOBAL_OPTIONS,
    coefficients=_globally_decayed_adagrad,
    states=(*_ROWWISE.states, StateSpec("prev_iter", rowwise=True, counter=True)),
    when=lambda given: mode_name(given.get("weight_decay_mode")) == "decouple_global",
    modes={"weight_decay_mode": ("decouple_global",)},
)
_COWCLIP_ROWWISE = replace(
    _ROWWISE,
    kernel="cowclip_rowwise_adagrad",
    options=_COWCLIP_OPTIONS,
    coefficients=_cowclip_adagrad,
    states=(*_GLOBALLY_DECAYED_ROWWISE.states, StateSpec("row_counter", rowwise=True, counter=True)),
    when=lambda given: mode_name(given.get("weight_decay_mode")) == "cowclip",
    modes={"weight_decay_mode": ("cowclip",), "counter_weight_decay_mode": ("none", "l2", "decouple")},
)
_COUNTED_ROWWISE = replace(
    _COWCLIP_ROWWISE,
    kernel="counted_rowwise_adagrad",
    options=_COUNTER_OPTIONS,
    coefficients=_counted_adagrad,
    when=lambda given: mode_name(given.get("weight_decay_mode")) == "counter",
    modes=_COUNTER_MODES,
    between=WholeTables(("row_counter",), _counts_are_due, _largest_count, option="max_counter"),
)
_COUNTED_ADAGRADW = replace(
    _COUNTED_ROWWISE,
    kernel="counted_adagradw",
    options={**_COUNTER_OPTIONS, "counter_weight_decay_mode": "adagradw"},
    coefficients=_counted_adagradw,
    when=lambda given: _COUNTED_ROWWISE.when(given) and mode_name(given.get("counter_weight_decay_mode")) == "adagradw",
    between=None,
    modes={**_COUNTER_MODES, "counter_weight_decay_mode": ("adagradw",), "learning_rate_mode": ("equal",)},
)
_ROWWISE_SPECS = (
    _COUNTED_ADAGRADW,
    _COUNTED_ROWWISE,
    _COWCLIP_ROWWISE,
    _GLOBALLY_DECAYED_ROWWISE,
    _ENSEMBLE_ROWWISE,
    _BOUNDED_ROWWISE,
    _DECAYED_ROWWISE,
    _ROWWISE,
)
_PARTIAL_ADAM = OptimizerSpec(
    "partial_rowwise_adam",
    "PartialRowWiseAdam",
    (f"{_TORCHREC}.PartialRowWiseAdam",),
    _LAMB_OPTIONS,
    _partial_adam,
    _PARTIAL_STATES,
)
_LAMB = OptimizerSpec("lamb", "LAMB", (f"{_TORCHREC}.LAMB",), _LAMB_OPTIONS, _lamb, _ADAM_STATES)
_PARTIAL_LAMB = OptimizerSpec(
    "partial_rowwise_lamb",
    "PartialRowWiseLAMB",
    (f"{_TORCHREC}.PartialRowWiseLAMB",),
    _LAMB_OPTIONS,
    _lamb,
    _PARTIAL_STATES,
)
_NONE = OptimizerSpec(
    "sgd",
    "SparseGradients",
    ("rec_sdk_torch.optim.sparse_gradients.SparseGradients",),
    {},
    lambda options, t: {"lr": 0.0},
    hands_out=True,
)
_LARS = OptimizerSpec("lars_sgd", "LarsSGD", (f"{_TORCHREC}.LarsSGD",), _LARS_OPTIONS, _lars, (StateSpec("momentum"),))

SPECS = (
    _SGD,
    _ADAGRAD,
    _ADAM,
    _SPARSE_ADAM,
    _ADAMW,
    *_ROWWISE_SPECS,
    _PARTIAL_ADAM,
    _LAMB,
    _PARTIAL_LAMB,
    _LARS,
    _NONE,
    _windowed(_SGD, f"{_ACCUMULATE}.AccumulateSGD"),
    _windowed(_ADAGRAD, f"{_ACCUMULATE}.AccumulateAdagrad"),
    _windowed(_SPARSE_ADAM, f"{_ACCUMULATE}.AccumulateAdam"),
    _windowed(_ADAMW, f"{_ACCUMULATE}.AccumulateAdamW"),
    *(_windowed(spec, f"{_ACCUMULATE_TORCHREC}.AccumulateRowWiseAdagrad") for spec in _ROWWISE_SPECS),
    _windowed(_PARTIAL_ADAM, f"{_ACCUMULATE_TORCHREC}.AccumulatePartialRowWiseAdam"),
    _windowed(_LAMB, f"{_ACCUMULATE_TORCHREC}.AccumulateLAMB"),
    _windowed(_PARTIAL_LAMB, f"{_ACCUMULATE_TORCHREC}.AccumulatePartialRowWiseLAMB"),
    _windowed(_LARS, f"{_ACCUMULATE_TORCHREC}.AccumulateLarsSGD"),
)
_BY_CLASS: dict[str, list[OptimizerSpec]] = {}
for _spec in SPECS:
    for _name in _spec.classes:
        _BY_CLASS.setdefault(_name, []).append(_spec)


def class_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def spec_for(cls: type, given: Options | None = None) -> OptimizerSpec:
    """The spec of an optimizer class with the keywords `given`.

    Raises:
        TypeError: the fused update does not know the class; the message lists those it knows.
    """
    return next(spec for spec in _specs_of(cls) if spec.when(given or {}))


def modes_of(spec: OptimizerSpec, option: str) -> list[str]:
    """All that this option of the spec's class may be when it is applied."""
    specs = reversed(_BY_CLASS[spec.classes[0]])
    return list(dict.fromkeys(mode for spec in specs for mode in spec.modes.get(option, ())))


def _specs_of(cls: type) -> list[OptimizerSpec]:
    specs = _BY_CLASS.get(class_name(cls)) if isinstance(cls, type) else None
    if not specs:
        known = ", ".join(sorted(_BY_CLASS))
        raise TypeError(f"{cls!r} has no fused update; supported are {known}")
    return specs
