"""Row-wise Adagrad that counts the updates of each row: CowClip, and FBGEMM's counter-based regularization.

A row has three states: `sum`, the sum of mean squares; `prev_iter`, the number of the row's last update; and
`row_counter`, a decaying count of the row's updates. The kernels' formulas are in op_kernels/common/rowwise_adagrad.h.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from .adagrad import decayed_rate
from .rows import LARGEST, LEAST_NORM, Rows, at_least, at_most, root
from .rowwise_adagrad import MODE_OPTIONS, PREV_ITER, ROWWISE, SUM, apply_step
from .spec import Coefficients, Formula, Options, StateSpec, TablePass, mode_name
from .steps_since import above, expm1_of_256_times, expm1_of_steps, logarithm, steps_since

_LOG_10 = 2.302585093
_SMALLEST = 2.0**-149


def _cowclip(r: Rows) -> None:
    c, squared = r.c, r.g + r.c.l2 * r.w
    r.states[0] = r.states[0] + r.mean_of_squares(squared)
    bound = at_most(_count_update(r) * at_least(r.norm(r.w) * c.weight_norm_coefficient, c.lower_bound), LARGEST)
    cut = at_most(bound / at_least(r.norm(squared), LEAST_NORM), 1.0)
    rate = cut * c.lr / (root(r.states[0]) + c.eps)
    apply_step(r, (1.0 - c.decoupled) - c.l2 * rate, rate)


def _count_update(r: Rows) -> torch.Tensor:
    """Decays the row's counter once for each update of the table since the row's last update; adds 1 and returns it.

    Also sets state 1, the number of the row's last update.
    """
    faded, r.states[1] = expm1_of_steps(r.states[1], r.c.iter, 0.0, r.c.log_fade)
    r.states[2] = r.states[2] + (r.states[2] * faded + 1.0)
    return r.states[2]


def _counted_adagrad(r: Rows) -> None:
    c, squared = r.c, r.g + r.c.l2 * r.w
    r.states[0] = r.states[0] + r.mean_of_squares(squared)
    size, count = root(r.states[0]), _count_update(r)
    eps_of_decay = torch.where(c.faded_l2 == 0, 1.0, c.eps)
    eps_of_count = torch.where(c.counts == 0, 1.0, torch.where(c.eps == 0, _SMALLEST, c.eps))

    grown = logarithm(at_least(c.max_counter / (count + 1.0), 1.0)) * c.power
    in_tail = above(count, c.tail)
    change = expm1_of_256_times(at_least(at_most(grown, _LOG_10), -_LOG_10) * (1 / 256) * in_tail)
    by_count = in_tail * c.counts
    rate = c.lr / (size + by_count + c.eps)
    rate = rate - by_count * rate
    rate = rate + by_count * c.lr / (root(count * c.counted) + eps_of_count)
    faded = c.faded_l2 * c.lr / (size + eps_of_decay) + c.faded_decoupled
    kept = 1.0 - faded / count
    r.states[1] = count * 0.0 + c.iter  # a NaN count makes this state NaN
    apply_step(r, kept, (change + 1.0) * rate)


def _adagradw(r: Rows) -> None:
    c = r.c
    r.states[0] = r.states[0] + r.mean_of_squares(r.g)
    missed = at_most(steps_since(r.states[1], c.iter), c.most_steps) - 1.0
    kept = expm1_of_256_times(at_least(missed * c.log_missed, -80.0) * (1 / 256))
    count = _count_update(r)
    grown = root(count) * c.by_root + (1.0 - c.by_root - c.by_count)
    rate = at_most((grown + count * c.by_count) * c.lr, c.bound) / (root(r.states[0]) + c.eps)
    apply_step(r, (kept + 1.0) * (1.0 - c.decoupled), rate * (kept + 1.0))


def _log_fade(halflife: int) -> float:
    """Returns the logarithm of a counter's decay factor per update: 0 if `halflife` is negative, -1e9 if it is 0."""
    return -math.log(2) / halflife if halflife > 0 else 0.0 if halflife < 0 else -1e9


def _cowclip_coefficients(options: Options, t: int) -> Coefficients:
    plain, mode, decay = decayed_rate(options, t), options["counter_weight_decay_mode"], options["weight_decay"]
    return {
        **plain,
        "l2": decay if mode == "l2" else 0.0,
        "decoupled": plain["lr"] * decay if mode == "decouple" else 0.0,
        "log_fade": _log_fade(options["counter_halflife"]),
        "weight_norm_coefficient": options["weight_norm_coefficient"],
        "lower_bound": options["lower_bound"],
        "iter": t,
    }


def _counted_coefficients(options: Options, t: int) -> Coefficients:
    plain, decay, halflife = decayed_rate(options, t), options["weight_decay"], options["counter_halflife"]
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


def _adagradw_coefficients(options: Options, t: int) -> Coefficients:
    plain, halflife, begin = decayed_rate(options, t), options["counter_halflife"], options["adjustment_iter"]
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


_COWCLIP_OPTIONS = {
    **MODE_OPTIONS,
    "weight_decay_mode": "cowclip",
    "counter_weight_decay_mode": "none",
    "counter_halflife": -1,
    "weight_norm_coefficient": 0.0,
    "lower_bound": 0.0,
}
_COUNTER_OPTIONS = {
    **MODE_OPTIONS,
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
    "grad_sum_decay": ("no_decay",),  # the only mode of FBGEMM's kernels
}
_STATES = (SUM, PREV_ITER, StateSpec("row_counter", rowwise=True, counter=True))

_COWCLIP = replace(
    ROWWISE,
    formula=Formula(
        "cowclip_rowwise_adagrad",
        _cowclip,
        "lr eps l2 decoupled log_fade weight_norm_coefficient lower_bound iter",
        _STATES,
    ),
    options=_COWCLIP_OPTIONS,
    coefficients=_cowclip_coefficients,
    applies_to=lambda options: mode_name(options.get("weight_decay_mode")) == "cowclip",
    example={"weight_decay_mode": "cowclip", "counter_halflife": 100},
    modes={"weight_decay_mode": ("cowclip",), "counter_weight_decay_mode": ("none", "l2", "decouple")},
)
_COUNTED = replace(
    ROWWISE,
    formula=Formula(
        "counted_rowwise_adagrad",
        _counted_adagrad,
        "lr eps l2 faded_l2 faded_decoupled log_fade power max_counter tail counts counted iter",
        _STATES,
    ),
    options=_COUNTER_OPTIONS,
    coefficients=_counted_coefficients,
    applies_to=lambda options: mode_name(options.get("weight_decay_mode")) == "counter",
    example={"weight_decay_mode": "counter", "counter_halflife": 100},
    modes=_COUNTER_MODES,
    table_pass=TablePass(("row_counter",), _counts_are_due, _largest_count, option="max_counter"),
)
_ADAGRADW = replace(
    _COUNTED,
    formula=Formula(
        "counted_adagradw",
        _adagradw,
        "lr eps decoupled log_missed most_steps log_fade by_root by_count bound iter",
        _STATES,
    ),
    options={**_COUNTER_OPTIONS, "counter_weight_decay_mode": "adagradw"},
    coefficients=_adagradw_coefficients,
    applies_to=lambda options: (
        _COUNTED.applies_to(options) and mode_name(options.get("counter_weight_decay_mode")) == "adagradw"
    ),
    example={"weight_decay_mode": "counter", "counter_weight_decay_mode": "adagradw", "weight_decay": 0.01},
    table_pass=None,
    modes={**_COUNTER_MODES, "counter_weight_decay_mode": ("adagradw",), "learning_rate_mode": ("equal",)},
)
SPECS = (_COWCLIP, _COUNTED, _ADAGRADW)
