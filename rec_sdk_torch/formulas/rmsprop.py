"""RMSprop: the step is the gradient divided by the root of a moving average of its square."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from .rows import LARGEST, Rows, at_least, at_most, root
from .spec import ACCUMULATE, Coefficients, Formula, OptimizerSpec, Options, StateSpec, sign

_NAMES = "lr eps alpha one_minus_alpha sign weight_decay"
_SQUARES, _BUFFER, _AVERAGE = StateSpec("square_avg"), StateSpec("momentum_buffer"), StateSpec("grad_avg")


def _gradient(r: Rows) -> torch.Tensor:
    """Returns the gradient, negated if the optimizer maximizes, plus the weight decay."""
    return r.c.sign * r.g + r.c.weight_decay * r.w


def _update_square_average(r: Rows, decayed: torch.Tensor) -> None:
    r.states[0] = r.states[0] * r.c.alpha + r.c.one_minus_alpha * decayed * decayed


def _rms_step(r: Rows) -> torch.Tensor:
    decayed = _gradient(r)
    _update_square_average(r, decayed)
    return decayed / (root(r.states[0]) + r.c.eps)


def _centered_step(r: Rows) -> torch.Tensor:
    """Updates the averages of the gradient and of its square; returns the gradient divided by the root of the variance.

    The variance belongs to the new averages, but is computed from the old averages and the gradient.
    """
    decayed, average = _gradient(r), r.states[-1]
    distance = decayed - average
    old = at_least(r.states[0] - at_most(average * average, LARGEST), 0.0)
    variance = r.c.alpha * (old + r.c.one_minus_alpha * distance * distance)
    _update_square_average(r, decayed)
    r.states[-1] = average * r.c.alpha + r.c.one_minus_alpha * decayed
    return decayed / (root(variance) + r.c.eps)


def _rmsprop(step: Callable[[Rows], torch.Tensor], momentum: bool = False) -> Callable[[Rows], None]:
    """Returns the formula that subtracts lr times the step; with `momentum`, lr times a momentum buffer of steps."""

    def update(r: Rows) -> None:
        moved = step(r)
        if momentum:
            moved = r.states[1] = r.states[1] * r.c.momentum + moved
        r.w = r.w - r.c.lr * moved

    return update


def _coefficients(options: Options, t: int) -> Coefficients:
    alpha = options["alpha"]
    return {
        "lr": options["lr"],
        "eps": options["eps"],
        "alpha": alpha,
        "one_minus_alpha": 1 - alpha,
        "sign": sign(options),
        "weight_decay": options["weight_decay"],
    }


def _centered_problem(options: Options) -> str | None:
    return None if options.get("centered") is True else f"centered is {options.get('centered')!r}, must stay True"


RMSPROP = OptimizerSpec(
    Formula("rmsprop", _rmsprop(_rms_step), _NAMES, (_SQUARES,)),
    "RMSprop",
    ("torch.optim.rmsprop.RMSprop",),
    {"lr": 1e-2, "alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0, "maximize": False},
    _coefficients,
    f"{ACCUMULATE}.AccumulateRMSprop",
)
_MOMENTUM = replace(
    RMSPROP,
    formula=Formula("momentum_rmsprop", _rmsprop(_rms_step, True), f"{_NAMES} momentum", (_SQUARES, _BUFFER)),
    options={**RMSPROP.options, "momentum": 0.0},
    coefficients=lambda options, t: {**_coefficients(options, t), "momentum": options["momentum"]},
    applies_to=lambda options: bool(options.get("momentum")),
    example={"momentum": 0.9},
)
_CENTERED = replace(
    RMSPROP,
    formula=Formula("centered_rmsprop", _rmsprop(_centered_step), _NAMES, (_SQUARES, _AVERAGE)),
    options={**RMSPROP.options, "centered": True},
    applies_to=lambda options: bool(options.get("centered")),
    example={"centered": True},
    problem=_centered_problem,
)
_CENTERED_MOMENTUM = replace(
    _MOMENTUM,
    formula=Formula(
        "centered_momentum_rmsprop",
        _rmsprop(_centered_step, True),
        f"{_NAMES} momentum",
        (_SQUARES, _BUFFER, _AVERAGE),
    ),
    options={**_MOMENTUM.options, "centered": True},
    applies_to=lambda options: _MOMENTUM.applies_to(options) and _CENTERED.applies_to(options),
    example={"momentum": 0.9, "centered": True},
    problem=_centered_problem,
)
SPECS = (RMSPROP, _MOMENTUM, _CENTERED, _CENTERED_MOMENTUM)
