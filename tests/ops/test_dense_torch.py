"""Tables compared with torch's optimizers of dense parameters, for combinations of all optimizer keywords.

Every batch contains every row.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from test_extremes import Tables

from rec_sdk_torch.formulas import spec_for
from rec_sdk_torch.tbe import TableOptimizer

ROWS, DIM, STEPS = 6, 5, 30
ADAM: dict[str, tuple[Any, ...]] = {
    "lr": (0.01,),
    "betas": ((0.0, 0.5), (0.5, 0.9), (0.9, 0.999)),
    "eps": (1e-3, 1e-2),
    "weight_decay": (0.0, 0.1),
    "maximize": (False, True),
}
VALUES: dict[type[torch.optim.Optimizer], dict[str, tuple[Any, ...]]] = {
    torch.optim.SGD: {
        "lr": (0.1,),
        "momentum": (0.0, 0.1, 0.9),
        "dampening": (0.0, 0.5, 1.0),
        "weight_decay": (0.0, 0.1),
        "nesterov": (False, True),
        "maximize": (False, True),
    },
    torch.optim.RMSprop: {
        "lr": (0.01,),
        "alpha": (0.5, 0.9, 0.99),
        "eps": (1e-8, 1e-2),
        "momentum": (0.0, 0.1, 0.9),
        "weight_decay": (0.0, 0.1),
        "centered": (False, True),
        "maximize": (False, True),
    },
    torch.optim.Adagrad: {
        "lr": (0.1,),
        "lr_decay": (0.0, 0.1),
        "eps": (1e-8, 1e-2),
        "weight_decay": (0.0, 0.1),
        "maximize": (False, True),
    },
    torch.optim.Adadelta: {
        "lr": (0.5,),
        "rho": (0.0, 0.5, 0.9, 1.0),
        "eps": (1e-3, 1e-2),
        "weight_decay": (0.0, 0.1),
        "maximize": (False, True),
    },
    torch.optim.Adam: ADAM,
    torch.optim.AdamW: ADAM,
}


def accepted(cls: type[torch.optim.Optimizer], options: dict[str, Any]) -> bool:
    """Returns whether both torch and tables accept this combination of keywords."""
    if cls is not torch.optim.SGD:
        return True
    alone = options["momentum"] or not (options["dampening"] or options["nesterov"])
    return bool(alone and not (options["nesterov"] and options["dampening"]))


def grid(cls: type[torch.optim.Optimizer], kernel: str) -> list[dict[str, Any]]:
    every = (dict(zip(VALUES[cls], values, strict=True)) for values in itertools.product(*VALUES[cls].values()))
    return [options for options in every if accepted(cls, options) and spec_for(cls, options).kernel == kernel]


KERNELS = [
    (torch.optim.SGD, "sgd"),
    (torch.optim.SGD, "decayed_sgd"),
    *((torch.optim.Adagrad, f"{kind}adagrad") for kind in ("", "decayed_")),
    *((torch.optim.Adadelta, f"{kind}adadelta") for kind in ("", "decayed_")),
    *((torch.optim.Adam, f"{kind}adam") for kind in ("", "decayed_")),
    (torch.optim.AdamW, "adamw"),
    (torch.optim.SGD, "momentum_sgd"),
    *((torch.optim.RMSprop, f"{kind}rmsprop") for kind in ("", "momentum_", "centered_", "centered_momentum_")),
]


@pytest.mark.parametrize(("cls", "kernel"), KERNELS, ids=[kernel for _, kernel in KERNELS])
def test_equals_dense_torch_in_float64(cls: type[torch.optim.Optimizer], kernel: str, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(ROWS, DIM, generator=generator) * 0.3
    options = grid(cls, kernel)
    assert len(options) > 1
    tables = Tables([TableOptimizer.create(cls, each) for each in options], weights, device)
    dense = [torch.nn.Parameter(weights.double().clone()) for _ in options]
    # type: ignore[call-arg]
    references: list[Any] = [cls([weight], **each) for weight, each in zip(dense, options, strict=True)]
    for t in range(1, STEPS + 1):
        g = torch.randn(ROWS, DIM, generator=generator) * 0.5
        found = tables.step(g)
        for weight, reference, optimizer in zip(dense, references, tables.optimizers, strict=True):
            weight.grad = g.double()
            reference.step()
            optimizer.step = t
    names = ["weight", *(state.name for state in tables.optimizers[0].spec.states)]
    for name, parts in zip(names, found, strict=True):
        for each, ours, weight, reference in zip(options, parts.split(ROWS), dense, references, strict=True):
            exact = weight.detach() if name == "weight" else reference.state[weight][name]
            assert torch.allclose(ours.double(), exact, rtol=1e-5, atol=1e-5), f"{name} of {each}"


def test_dampening_applies_to_rows_touched_later(device: torch.device) -> None:
    """As with zero gradients in a dense parameter, dampening is omitted only in the first step of the whole parameter,
    not in a row's first step.
    """
    options = {"lr": 1.0, "momentum": 0.5, "dampening": 0.25}
    tables = Tables([TableOptimizer.create(torch.optim.SGD, options)], torch.zeros(2, 1), device)
    dense = torch.nn.Parameter(torch.zeros(2, 1, dtype=torch.float64))
    reference = torch.optim.SGD([dense], **options)  # type: ignore[arg-type]
    for t, g in enumerate((torch.tensor([[1.0], [0.0]]), torch.tensor([[0.0], [1.0]])), 1):
        weight, buffer = tables.step(g)
        tables.optimizers[0].step = t
        dense.grad = g.double()
        reference.step()
    assert buffer.flatten().tolist() == [0.5, 0.75] == reference.state[dense]["momentum_buffer"].flatten().tolist()
    assert weight.flatten().tolist() == [-1.5, -0.75] == dense.flatten().tolist()


def test_disabling_momentum_matches_torch(device: torch.device) -> None:
    """While momentum is 0, torch keeps the momentum buffer unchanged, and uses it again later."""
    options = {"lr": 0.1, "momentum": 0.5, "dampening": 0.25, "weight_decay": 0.1}
    tables = Tables([TableOptimizer.create(torch.optim.SGD, options)], torch.ones(2, 2), device)
    dense = torch.nn.Parameter(torch.ones(2, 2, dtype=torch.float64))
    reference = torch.optim.SGD([dense], **options)
    for t, momentum in enumerate((0.5, 0.75, 0.0, 0.0, 0.5), 1):
        tables.optimizers[0].options["momentum"] = reference.param_groups[0]["momentum"] = momentum
        g = torch.full((2, 2), 0.5 * t)
        weight, buffer = tables.step(g)
        tables.optimizers[0].step = t
        dense.grad = g.double()
        reference.step()
    torch.testing.assert_close(weight.double(), dense.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(buffer.double(), reference.state[dense]["momentum_buffer"], rtol=1e-6, atol=1e-6)
