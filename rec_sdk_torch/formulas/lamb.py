"""LAMB: the step of Adam, scaled by the norm of the weight divided by the norm of the step (trust ratio)."""

from __future__ import annotations

import torch

from .adam import (
    CORRECTED,
    DECAY_OPTIONS,
    PARTIAL_STATES,
    STATES,
    corrected_coefficients,
    first_moment,
    second_moment,
    second_moment_of_row,
)
from .rows import LEAST_NORM, Rows, at_least, root
from .spec import ACCUMULATE_TORCHREC, TORCHREC, Coefficients, Formula, OptimizerSpec, Options


def _step_by_trust_ratio(r: Rows, step: torch.Tensor) -> None:
    rate = r.c.lr * r.norm(r.w) / at_least(r.norm(step), LEAST_NORM)
    r.w = r.w - rate * step


def _lamb(r: Rows) -> None:
    m, v, c = first_moment(r), second_moment(r), r.c
    step = m / (root(v) * c.inv_sqrt_bias_correction2 + c.eps) * c.inv_bias_correction1 + r.w * c.weight_decay
    _step_by_trust_ratio(r, step)


def _partial_rowwise_lamb(r: Rows) -> None:
    m, v, c = first_moment(r), second_moment_of_row(r), r.c
    factor = c.inv_bias_correction1 / (root(v) * c.inv_sqrt_bias_correction2 + c.eps)
    _step_by_trust_ratio(r, factor * m + r.w * c.weight_decay)


def _with_decay(options: Options, t: int) -> Coefficients:
    return {**corrected_coefficients(options, t), "weight_decay": options["weight_decay"]}


LAMB = OptimizerSpec(
    Formula("lamb", _lamb, f"{CORRECTED} weight_decay", STATES),
    "LAMB",
    (f"{TORCHREC}.LAMB",),
    DECAY_OPTIONS,
    _with_decay,
    f"{ACCUMULATE_TORCHREC}.AccumulateLAMB",
)
PARTIAL_ROWWISE_LAMB = OptimizerSpec(
    Formula("partial_rowwise_lamb", _partial_rowwise_lamb, f"{CORRECTED} weight_decay", PARTIAL_STATES),
    "PartialRowWiseLAMB",
    (f"{TORCHREC}.PartialRowWiseLAMB",),
    DECAY_OPTIONS,
    _with_decay,
    f"{ACCUMULATE_TORCHREC}.AccumulatePartialRowWiseLAMB",
)
SPECS = (LAMB, PARTIAL_ROWWISE_LAMB)
