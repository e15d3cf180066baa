"""Adam and its variants, which use moving averages of the gradient and of its square."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from .rows import Rows, root
from .spec import (
    ACCUMULATE,
    ACCUMULATE_TORCHREC,
    TORCHREC,
    Coefficients,
    Formula,
    OptimizerSpec,
    Options,
    StateSpec,
    sign,
    with_l2,
)

STATES = (StateSpec("exp_avg"), StateSpec("exp_avg_sq"))
PARTIAL_STATES = (StateSpec("exp_avg"), StateSpec("exp_avg_sq", rowwise=True))
MOMENTS = "beta1 one_minus_beta1 beta2 one_minus_beta2"
CORRECTED = f"lr eps {MOMENTS} inv_bias_correction1 inv_sqrt_bias_correction2"
DECAY_OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
"""Defaults of FBGEMM's optimizers; TorchRec's classes have no defaults."""
_STEP = f"step_size eps {MOMENTS} inv_sqrt_bias_correction2"


def first_moment(r: Rows) -> torch.Tensor:
    """Updates state 0, the moving average of the gradient, and returns it."""
    r.states[0] = r.states[0] * r.c.beta1 + r.c.one_minus_beta1 * r.g
    return r.states[0]


def second_moment(r: Rows) -> torch.Tensor:
    """Updates state 1, the moving average of the gradient's square, and returns it."""
    r.states[1] = r.states[1] * r.c.beta2 + r.c.one_minus_beta2 * r.g * r.g
    return r.states[1]


def second_moment_of_row(r: Rows) -> torch.Tensor:
    """Updates state 1, the moving average of the mean square of a row's gradient `[rows, 1]`, and returns it."""
    r.states[1] = r.states[1] * r.c.beta2 + r.mean_of_squares(r.g) * r.c.one_minus_beta2
    return r.states[1]


def _adam(r: Rows) -> None:
    m, v = first_moment(r), second_moment(r)
    r.w = r.w - r.c.step_size * (m / (root(v) * r.c.inv_sqrt_bias_correction2 + r.c.eps))


def _adamw(r: Rows) -> None:
    r.w = r.w * (1.0 - r.c.decoupled)
    _adam(r)


def _partial_rowwise_adam(r: Rows) -> None:
    m, v, c = first_moment(r), second_moment_of_row(r), r.c
    rate = c.lr * c.inv_bias_correction1 / (root(v) * c.inv_sqrt_bias_correction2 + c.eps)
    r.w = r.w * (1.0 - c.decoupled) - rate * m


def _betas(options: Options) -> Coefficients:
    b1, b2 = options["betas"]
    return {"eps": options["eps"], "beta1": b1, "one_minus_beta1": 1 - b1, "beta2": b2, "one_minus_beta2": 1 - b2}


def _signed_betas(options: Options) -> Coefficients:
    """Returns the coefficients of both averages; with `maximize`, the first average is an average of `-g`."""
    betas = _betas(options)
    return {**betas, "one_minus_beta1": sign(options) * betas["one_minus_beta1"]}


def _adam_coefficients(options: Options, t: int) -> Coefficients:
    beta1, beta2 = options["betas"]
    step_size = options["lr"] / (1 - beta1**t)
    return {**_signed_betas(options), "step_size": step_size, "inv_sqrt_bias_correction2": 1 / math.sqrt(1 - beta2**t)}


def _sparse_adam_coefficients(options: Options, t: int) -> Coefficients:
    beta1, beta2 = options["betas"]
    step_size = options["lr"] * math.sqrt(1 - beta2**t) / (1 - beta1**t)
    return {**_signed_betas(options), "step_size": step_size, "inv_sqrt_bias_correction2": 1.0}


def corrected_coefficients(options: Options, t: int) -> Coefficients:
    """Returns coefficients in which the learning rate and the bias corrections for update number `t` are separate."""
    beta1, beta2 = options["betas"]
    return {
        **_betas(options),
        "lr": options["lr"],
        "inv_bias_correction1": 1 / (1 - beta1**t),
        "inv_sqrt_bias_correction2": 1 / math.sqrt(1 - beta2**t),
    }


ADAM = OptimizerSpec(
    Formula("adam", _adam, _STEP, STATES),
    "Adam",
    ("torch.optim.adam.Adam", f"{TORCHREC}.Adam"),
    {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "maximize": False},
    _adam_coefficients,
)
SPARSE_ADAM = replace(
    ADAM,
    classes=("torch.optim.sparse_adam.SparseAdam",),
    coefficients=_sparse_adam_coefficients,
    accumulate_class=f"{ACCUMULATE}.AccumulateAdam",
)
ADAMW = OptimizerSpec(
    Formula("adamw", _adamw, f"{_STEP} decoupled", STATES, ADAM.kernel),
    "AdamW",
    ("torch.optim.adamw.AdamW",),
    {**ADAM.options, "weight_decay": 1e-2},
    lambda options, t: {**_adam_coefficients(options, t), "decoupled": options["lr"] * options["weight_decay"]},
    f"{ACCUMULATE}.AccumulateAdamW",
    neutral={"decoupled_weight_decay": (True,)},  # torch implements AdamW as Adam with this option
)
PARTIAL_ROWWISE_ADAM = OptimizerSpec(
    Formula("partial_rowwise_adam", _partial_rowwise_adam, f"{CORRECTED} decoupled", PARTIAL_STATES),
    "PartialRowWiseAdam",
    (f"{TORCHREC}.PartialRowWiseAdam",),
    DECAY_OPTIONS,
    lambda options, t: {**corrected_coefficients(options, t), "decoupled": options["lr"] * options["weight_decay"]},
    f"{ACCUMULATE_TORCHREC}.AccumulatePartialRowWiseAdam",
)
SPECS = (ADAM, SPARSE_ADAM, with_l2(ADAM), ADAMW, PARTIAL_ROWWISE_ADAM)
