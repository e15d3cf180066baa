"""Row-wise Adagrad with weight decay, norm bounds and ensembles, as in op_kernels/common/rowwise_adagrad.h.

A row's states end with `sum`, the sum of mean squares, or with `sum` and `prev_iter`, the number of the row's last
update.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from .adagrad import ADAGRAD_OPTIONS, decayed_rate
from .rows import LARGEST, LEAST_NORM, Rows, at_least, at_most, root
from .spec import ACCUMULATE_TORCHREC, Coefficients, Formula, OptimizerSpec, Options, StateSpec, TablePass, mode_name
from .steps_since import expm1_of_steps

SUM = StateSpec("sum", rowwise=True)
PREV_ITER = StateSpec("prev_iter", rowwise=True, counter=True)


def adagrad_rate(r: Rows, squared: torch.Tensor, state: int = 0) -> torch.Tensor:
    """Adds the mean square of `squared` to the row's sum in state number `state`; returns lr / (sqrt(sum) + eps)."""
    r.states[state] = r.states[state] + r.mean_of_squares(squared)
    return r.c.lr / (root(r.states[state]) + r.c.eps)


def apply_step(r: Rows, kept: torch.Tensor, rate: torch.Tensor) -> None:
    """Multiplies the weight by `kept`, then subtracts `rate` times the gradient."""
    r.w = r.w * kept - rate * r.g


def _rowwise_adagrad(r: Rows) -> None:
    r.w = r.w - adagrad_rate(r, r.g) * r.g


def _decay_and_rate(r: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the factor that weight decay applies to the weight, and the factor of the gradient."""
    rate = adagrad_rate(r, r.g + r.c.l2 * r.w, len(r.states) - 1)
    return (1.0 - r.c.decoupled) - r.c.l2 * rate, rate


def _bounded(r: Rows) -> None:
    """Updates rows, and scales the weight of each row down to a norm of at most `max_norm`.

    Ensembles use this formula too. Their other state, an average of the weight, changes only in the table pass.
    """
    kept, rate = _decay_and_rate(r)
    norm = at_most(at_least(r.norm(r.w * kept - rate * r.g), LEAST_NORM), LARGEST)
    factor = at_most(r.c.max_norm / norm, 1.0)
    apply_step(r, kept * factor, rate * factor)


def _globally_decayed(r: Rows) -> None:
    rate = adagrad_rate(r, r.g)
    missed, r.states[1] = expm1_of_steps(r.states[1], r.c.iter, 1.0, r.c.log_missed)
    apply_step(r, at_least(missed + 1.0, r.c.lower_bound) * (1.0 - r.c.decoupled), rate)


def _with_decay(options: Options, t: int) -> Coefficients:
    plain, decay = decayed_rate(options, t), options["weight_decay"]
    if options["weight_decay_mode"] == "l2":
        return {**plain, "l2": decay, "decoupled": 0.0}
    return {**plain, "l2": 0.0, "decoupled": plain["lr"] * decay}


def _average_and_swap(options: Options, t: int, parts: dict[str, torch.Tensor]) -> None:
    weight, average = parts["weight"], parts["sparse_ema"]
    averages = t % options["step_ema"] == 0
    if averages:
        kept = 0.0 if t <= options["step_start"] else options["step_ema_coef"]
        average.lerp_(weight.to(average.dtype), 1.0 - kept)
    if t % options["step_swap"] == 0:
        weight.copy_(average)
    if averages and options["step_mode"] == "none":
        average.zero_()


def _with_global_decay(options: Options, t: int) -> Coefficients:
    plain = decayed_rate(options, t)
    decoupled = plain["lr"] * options["weight_decay"]
    decays = t >= options["gwd_start_iter"]
    return {
        **plain,
        "decoupled": decoupled,
        "log_missed": math.log1p(-decoupled) if decays else 0.0,
        "lower_bound": options["gwd_lower_bound"],
        "iter": t,
    }


MODE_OPTIONS = {**ADAGRAD_OPTIONS, "weight_decay": 0.0}
_DECAY_OPTIONS = {**MODE_OPTIONS, "weight_decay_mode": "l2"}
_BOUND_OPTIONS = {**_DECAY_OPTIONS, "max_norm": 0.0}
_ENSEMBLE_OPTIONS = {
    **_BOUND_OPTIONS,
    "step_ema": 10_000,
    "step_swap": 10_000,
    "step_start": 0,
    "step_ema_coef": 0.6,
    "step_mode": "use_iter",
}
_GLOBAL_OPTIONS = {**MODE_OPTIONS, "weight_decay_mode": "decouple_global", "gwd_start_iter": 0, "gwd_lower_bound": 0.0}
_DECAY_MODES = {"weight_decay_mode": ("l2", "decouple")}

ROWWISE = OptimizerSpec(
    Formula("rowwise_adagrad", _rowwise_adagrad, "lr eps", (SUM,)),
    "RowWiseAdagrad",
    ("torchrec.optim.rowwise_adagrad.RowWiseAdagrad",),
    ADAGRAD_OPTIONS,
    decayed_rate,
    f"{ACCUMULATE_TORCHREC}.AccumulateRowWiseAdagrad",
)
_DECAYED = replace(
    ROWWISE,
    formula=Formula(
        "decayed_rowwise_adagrad", lambda r: apply_step(r, *_decay_and_rate(r)), "lr eps l2 decoupled", (SUM,)
    ),
    options=_DECAY_OPTIONS,
    coefficients=_with_decay,
    applies_to=lambda options: bool(options.get("weight_decay")),
    example={"weight_decay": 0.01},
    modes=_DECAY_MODES,
)
_BOUNDED = replace(
    ROWWISE,
    formula=Formula("bounded_rowwise_adagrad", _bounded, "lr eps l2 decoupled max_norm", (SUM,)),
    options=_BOUND_OPTIONS,
    coefficients=lambda options, t: {**_with_decay(options, t), "max_norm": options["max_norm"] or math.inf},
    applies_to=lambda options: bool(options.get("max_norm")),
    example={"max_norm": 1.0},
    modes=_DECAY_MODES,
)
_ENSEMBLE = replace(
    _BOUNDED,
    formula=Formula(
        "ensemble_rowwise_adagrad", _bounded, "lr eps l2 decoupled max_norm", (StateSpec("sparse_ema"), SUM)
    ),
    options=_ENSEMBLE_OPTIONS,
    applies_to=lambda options: bool(options.keys() & (_ENSEMBLE_OPTIONS.keys() - _BOUND_OPTIONS.keys())),
    example={"step_ema": 10_000},
    modes={**_DECAY_MODES, "step_mode": ("none", "use_counter", "use_iter")},
    table_pass=TablePass(
        ("weight", "sparse_ema"),
        lambda options, t: t % options["step_ema"] == 0 or t % options["step_swap"] == 0,
        _average_and_swap,
    ),
)
_GLOBALLY_DECAYED = replace(
    ROWWISE,
    formula=Formula(
        "globally_decayed_rowwise_adagrad",
        _globally_decayed,
        "lr eps decoupled log_missed lower_bound iter",
        (SUM, PREV_ITER),
    ),
    options=_GLOBAL_OPTIONS,
    coefficients=_with_global_decay,
    applies_to=lambda options: mode_name(options.get("weight_decay_mode")) == "decouple_global",
    example={"weight_decay": 0.01, "weight_decay_mode": "decouple_global"},
    modes={"weight_decay_mode": ("decouple_global",)},
)
SPECS = (ROWWISE, _DECAYED, _BOUNDED, _ENSEMBLE, _GLOBALLY_DECAYED)
