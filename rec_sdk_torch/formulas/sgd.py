"""SGD, and LARS."""

from __future__ import annotations

from .rows import LEAST_NORM, Rows, at_least
from .spec import ACCUMULATE, ACCUMULATE_TORCHREC, TORCHREC, Coefficients, Formula, OptimizerSpec, Options, StateSpec


def _sgd(r: Rows) -> None:
    r.w = r.w - r.c.lr * r.g


def _lars_sgd(r: Rows) -> None:
    c, length = r.c, r.norm(r.w)
    rate = c.scaled_lr * length / at_least(r.norm(r.g) + c.weight_decay * length, LEAST_NORM)
    r.states[0] = r.states[0] * c.momentum + rate * (r.g + c.weight_decay * r.w)
    r.w = r.w - r.states[0]


def _rate(options: Options, t: int) -> Coefficients:
    return {"lr": options["lr"]}


def _lars_rates(options: Options, t: int) -> Coefficients:
    scaled = options["lr"] * options["eta"]
    return {"scaled_lr": scaled, "momentum": options["momentum"], "weight_decay": options["weight_decay"]}


SGD = OptimizerSpec(
    Formula("sgd", _sgd, "lr"),
    "SGD",
    ("torch.optim.sgd.SGD", f"{TORCHREC}.SGD"),
    {"lr": 1e-3},
    _rate,
    f"{ACCUMULATE}.AccumulateSGD",
)
SPARSE_GRADIENTS = OptimizerSpec(
    SGD.formula,
    "SparseGradients",
    ("rec_sdk_torch.optim.sparse_gradients.SparseGradients",),
    {},
    lambda options, t: {"lr": 0.0},
    hands_out=True,
)
LARS_SGD = OptimizerSpec(
    Formula("lars_sgd", _lars_sgd, "scaled_lr momentum weight_decay", (StateSpec("momentum"),)),
    "LarsSGD",
    (f"{TORCHREC}.LarsSGD",),
    {"lr": 1e-2, "eta": 1e-3, "momentum": 0.9, "weight_decay": 0.0},  # FBGEMM's defaults: TorchRec's class has none
    _lars_rates,
    f"{ACCUMULATE_TORCHREC}.AccumulateLarsSGD",
)
SPECS = (SGD, SPARSE_GRADIENTS, LARS_SGD)
