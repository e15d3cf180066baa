"""Adagrad: the step is the gradient divided by the root of the sum of all squared gradients."""

from __future__ import annotations

from .rows import Rows, root
from .spec import ACCUMULATE, TORCHREC, Coefficients, Formula, OptimizerSpec, Options, StateSpec, with_l2

ADAGRAD_OPTIONS = {"lr": 1e-2, "lr_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10}


def _adagrad(r: Rows) -> None:
    r.states[0] = r.states[0] + r.g * r.g
    r.w = r.w - r.c.lr * (r.g / (root(r.states[0]) + r.c.eps))


def decayed_rate(options: Options, t: int) -> Coefficients:
    """Returns `eps` and, for update number `t`, the learning rate `lr`, negated if the optimizer maximizes."""
    lr = options["lr"] / (1 + (t - 1) * options["lr_decay"])
    return {"lr": -lr if options.get("maximize") else lr, "eps": options["eps"]}


ADAGRAD = OptimizerSpec(
    Formula("adagrad", _adagrad, "lr eps", (StateSpec("sum"),)),
    "Adagrad",
    ("torch.optim.adagrad.Adagrad", f"{TORCHREC}.Adagrad"),
    {**ADAGRAD_OPTIONS, "maximize": False},
    decayed_rate,
    f"{ACCUMULATE}.AccumulateAdagrad",
)
SPECS = (ADAGRAD, with_l2(ADAGRAD))
