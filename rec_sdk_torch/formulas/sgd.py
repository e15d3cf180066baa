"""SGD without and with momentum, and LARS."""

from __future__ import annotations

from dataclasses import replace

from .rows import LEAST_NORM, Rows, at_least
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


def _sgd(r: Rows) -> None:
    r.w = r.w - r.c.lr * r.g


def _momentum_sgd(r: Rows) -> None:
    decayed = r.c.sign * r.g + r.c.weight_decay * r.w
    r.states[0] = r.states[0] * r.c.kept + r.c.taken * decayed
    r.w = r.w - r.c.lr * (r.c.of_gradient * decayed + r.c.of_buffer * r.states[0])


def _lars_sgd(r: Rows) -> None:
    c, length = r.c, r.norm(r.w)
    rate = c.scaled_lr * length / at_least(r.norm(r.g) + c.weight_decay * length, LEAST_NORM)
    r.states[0] = r.states[0] * c.momentum + rate * (r.g + c.weight_decay * r.w)
    r.w = r.w - r.states[0]


def _with_momentum(options: Options, t: int) -> Coefficients:
    """Returns the coefficients of torch's SGD with momentum.

    Dampening does not apply to the first update. If `momentum` is 0, the momentum buffer does not change.
    """
    momentum = options["momentum"]
    moves = {
        "kept": momentum if momentum else 1.0,
        "taken": 0.0 if not momentum else 1.0 if t == 1 else 1 - options["dampening"],
        "of_gradient": float(options["nesterov"] or not momentum),
        "of_buffer": momentum if options["nesterov"] or not momentum else 1.0,
    }
    return {"lr": options["lr"], "sign": sign(options), "weight_decay": options["weight_decay"], **moves}


def _nesterov_problem(options: Options) -> str | None:
    if options.get("nesterov") and options.get("dampening") != 0:
        return f"nesterov=True needs dampening=0, but dampening is {options['dampening']}"
    return None


def _lars_rates(options: Options, t: int) -> Coefficients:
    scaled = options["lr"] * options["eta"]
    return {"scaled_lr": scaled, "momentum": options["momentum"], "weight_decay": options["weight_decay"]}


SGD = OptimizerSpec(
    Formula("sgd", _sgd, "lr"),
    "SGD",
    ("torch.optim.sgd.SGD", f"{TORCHREC}.SGD"),
    {"lr": 1e-3, "maximize": False},
    lambda options, t: {"lr": sign(options) * options["lr"]},
    f"{ACCUMULATE}.AccumulateSGD",
)
DECAYED_SGD = with_l2(SGD)
MOMENTUM_SGD = replace(
    DECAYED_SGD,
    formula=Formula(
        "momentum_sgd",
        _momentum_sgd,
        "lr sign weight_decay kept taken of_gradient of_buffer",
        (StateSpec("momentum_buffer"),),
    ),
    options={**DECAYED_SGD.options, "momentum": 0.0, "dampening": 0.0, "nesterov": False},
    coefficients=_with_momentum,
    applies_to=lambda options: bool(options.get("momentum")),
    example={"momentum": 0.9},
    problem=_nesterov_problem,
)
SPARSE_GRADIENTS = OptimizerSpec(
    SGD.formula,
    "SparseGradients",
    ("rec_sdk_torch.optim.sparse_gradients.SparseGradients",),
    {},
    lambda options, t: {"lr": 0.0},
    collects_gradients=True,
)
LARS_SGD = OptimizerSpec(
    Formula("lars_sgd", _lars_sgd, "scaled_lr momentum weight_decay", (StateSpec("momentum"),)),
    "LarsSGD",
    (f"{TORCHREC}.LarsSGD",),
    {"lr": 1e-2, "eta": 1e-3, "momentum": 0.9, "weight_decay": 0.0},  # FBGEMM's defaults
    _lars_rates,
    f"{ACCUMULATE_TORCHREC}.AccumulateLarsSGD",
)
SPECS = (SGD, SPARSE_GRADIENTS, DECAYED_SGD, MOMENTUM_SGD, LARS_SGD)
