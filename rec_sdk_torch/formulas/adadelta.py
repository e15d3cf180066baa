"""Adadelta: the gradient is scaled by the ratio of two root mean squares, of past steps and of gradients."""

from __future__ import annotations

import torch

from .rows import Rows, root
from .spec import ACCUMULATE, Coefficients, Formula, OptimizerSpec, Options, StateSpec, sign, with_l2


def _adadelta(r: Rows) -> None:
    _average_squares(r, 0, r.g)
    delta = root(r.states[1] + r.c.eps) / root(r.states[0] + r.c.eps) * r.g
    _average_squares(r, 1, delta)
    r.w = r.w - r.c.lr * delta


def _average_squares(r: Rows, state: int, values: torch.Tensor) -> None:
    """Updates state number `state`, a moving average of squares, with the squares of `values`."""
    r.states[state] = r.states[state] * r.c.rho + r.c.one_minus_rho * values * values


def _coefficients(options: Options, t: int) -> Coefficients:
    rho = options["rho"]
    return {"lr": sign(options) * options["lr"], "eps": options["eps"], "rho": rho, "one_minus_rho": 1 - rho}


ADADELTA = OptimizerSpec(
    Formula("adadelta", _adadelta, "lr eps rho one_minus_rho", (StateSpec("square_avg"), StateSpec("acc_delta"))),
    "Adadelta",
    ("torch.optim.adadelta.Adadelta",),
    {"lr": 1.0, "rho": 0.9, "eps": 1e-6, "maximize": False},
    _coefficients,
    f"{ACCUMULATE}.AccumulateAdadelta",
)
SPECS = (ADADELTA, with_l2(ADADELTA))
