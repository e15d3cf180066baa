"""The optimizers of update_rows, by name: what each does to rows, in plain torch.

To add one: a function, and its line in `FORMULAS`. It is the operator on devices without a kernel, and the reference of
the kernels, whose structs are in `op_kernels/common/optimizers.h`: it rounds where they round, so that both have the
same bits. So a formula is written in their order, `a * b / c` being `(a * b) / c`; and it does not use torch's fused
operators (`addcmul`, an `alpha`), which may round once where the kernels round twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from . import rowwise_adagrad
from .rows import LEAST_NORM, Rows, at_least, root

__all__ = ["FORMULAS", "Formula"]


@dataclass(frozen=True)
class Formula:
    """An optimizer.

    Attributes:
        update: changes rows: their weights and states.
        coefficients: names of a table's coefficients, from `[1]` on, as in the kernel's struct.
        element_states: states of `[D]` in the record.
        row_states: states of one number, behind them.
    """

    update: Callable[[Rows], None]
    coefficients: str
    element_states: int = 0
    row_states: int = 0

    def state_elements(self, dim: int) -> tuple[int, ...]:
        """Elements of each state of a row."""
        return (dim,) * self.element_states + (1,) * self.row_states


def _sgd(r: Rows) -> None:
    r.w = r.w - r.c.lr * r.g


def _adagrad(r: Rows) -> None:
    r.states[0] = r.states[0] + r.g * r.g
    r.w = r.w - r.c.lr * (r.g / (root(r.states[0]) + r.c.eps))


def _first_moment(r: Rows) -> torch.Tensor:
    r.states[0] = r.states[0] * r.c.beta1 + r.c.one_minus_beta1 * r.g
    return r.states[0]


def _second_moment(r: Rows) -> torch.Tensor:
    r.states[1] = r.states[1] * r.c.beta2 + r.c.one_minus_beta2 * r.g * r.g
    return r.states[1]


def _second_moment_of_row(r: Rows) -> torch.Tensor:
    r.states[1] = r.states[1] * r.c.beta2 + r.mean_of_squares(r.g) * r.c.one_minus_beta2
    return r.states[1]


def _adam(r: Rows) -> None:
    m, v = _first_moment(r), _second_moment(r)
    r.w = r.w - r.c.step_size * (m / (root(v) * r.c.inv_sqrt_bias_correction2 + r.c.eps))


def _adamw(r: Rows) -> None:
    r.w = r.w * (1.0 - r.c.decoupled)
    _adam(r)


def _partial_rowwise_adam(r: Rows) -> None:
    m, v, c = _first_moment(r), _second_moment_of_row(r), r.c
    rate = c.lr * c.inv_bias_correction1 / (root(v) * c.inv_sqrt_bias_correction2 + c.eps)
    r.w = r.w * (1.0 - c.decoupled) - rate * m


def _as_long_as_the_weight(r: Rows, step: torch.Tensor) -> None:
    rate = r.c.lr * r.norm(r.w) / at_least(r.norm(step), LEAST_NORM)
    r.w = r.w - rate * step


def _lamb(r: Rows) -> None:
    m, v, c = _first_moment(r), _second_moment(r), r.c
    step = m / (root(v) * c.inv_sqrt_bias_correction2 + c.eps) * c.inv_bias_correction1 + r.w * c.weight_decay
    _as_long_as_the_weight(r, step)


def _partial_rowwise_lamb(r: Rows) -> None:
    m, v, c = _first_moment(r), _second_moment_of_row(r), r.c
    factor = c.inv_bias_correction1 / (root(v) * c.inv_sqrt_bias_correction2 + c.eps)
    _as_long_as_the_weight(r, factor * m + r.w * c.weight_decay)


def _lars_sgd(r: Rows) -> None:
    c, length = r.c, r.norm(r.w)
    rate = c.scaled_lr * length / at_least(r.norm(r.g) + c.weight_decay * length, LEAST_NORM)
    r.states[0] = r.states[0] * c.momentum + rate * (r.g + c.weight_decay * r.w)
    r.w = r.w - r.states[0]


_MOMENTS = "beta1 one_minus_beta1 beta2 one_minus_beta2"
_ADAM = f"step_size eps {_MOMENTS} inv_sqrt_bias_correction2"
_CORRECTED = f"lr eps {_MOMENTS} inv_bias_correction1 inv_sqrt_bias_correction2"

FORMULAS: Mapping[str, Formula] = {
    "sgd": Formula(_sgd, "lr"),
    "adagrad": Formula(_adagrad, "lr eps", element_states=1),
    "rowwise_adagrad": Formula(rowwise_adagrad.plain, "lr eps", row_states=1),
    "decayed_rowwise_adagrad": Formula(rowwise_adagrad.decayed, "lr eps l2 decoupled", row_states=1),
    "bounded_rowwise_adagrad": Formula(rowwise_adagrad.bounded, "lr eps l2 decoupled max_norm", row_states=1),
    "ensemble_rowwise_adagrad": Formula(
        rowwise_adagrad.bounded, "lr eps l2 decoupled max_norm", element_states=1, row_states=1
    ),
    "globally_decayed_rowwise_adagrad": Formula(
        rowwise_adagrad.globally_decayed, "lr eps decoupled log_missed lower_bound iter", row_states=2
    ),
    "cowclip_rowwise_adagrad": Formula(
        rowwise_adagrad.cowclip,
        "lr eps l2 decoupled log_fade weight_norm_coefficient lower_bound iter",
        row_states=3,
    ),
    "counted_rowwise_adagrad": Formula(
        rowwise_adagrad.counted,
        "lr eps l2 faded_l2 faded_decoupled log_fade power max_counter tail counts counted iter",
        row_states=3,
    ),
    "counted_adagradw": Formula(
        rowwise_adagrad.counted_adagradw,
        "lr eps decoupled log_missed most_steps log_fade by_root by_count bound iter",
        row_states=3,
    ),
    "adam": Formula(_adam, _ADAM, element_states=2),
    "adamw": Formula(_adamw, f"{_ADAM} decoupled", element_states=2),
    "partial_rowwise_adam": Formula(_partial_rowwise_adam, f"{_CORRECTED} decoupled", element_states=1, row_states=1),
    "lamb": Formula(_lamb, f"{_CORRECTED} weight_decay", element_states=2),
    "partial_rowwise_lamb": Formula(
        _partial_rowwise_lamb, f"{_CORRECTED} weight_decay", element_states=1, row_states=1
    ),
    "lars_sgd": Formula(_lars_sgd, "scaled_lr momentum weight_decay", element_states=1),
}
"""By the names, and in the order, of the kernels' list."""
