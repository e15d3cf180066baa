"""Every class that tables accept, with each of its keywords, tested with each function that applies an optimizer.

Either the call refuses a keyword, or the rows equal the result of the class itself, which updates a dense parameter
with the same gradients. Values are from torch's own list (`optim_db`). Execution options are tested too; they change
no result. A test fails if torch adds a keyword that is missing here.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import optimizer_table
import pytest
import torch
import torchrec
from batches import jagged
from collection_factory import bags_collection
from torch.distributed.optim import _apply_optimizer_in_backward as torchs_apply
from torchrec import EmbeddingBagConfig
from torchrec.optim import apply_optimizer_in_backward as torchrecs_apply

import rec_sdk_torch as rst
from rec_sdk_torch.formulas import SPECS, spec_for

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "ours": rst.apply_optimizer_in_backward,
    "torch": torchs_apply,
    "torchrec": torchrecs_apply,
}
NOTES = ("_in_backward_optimizers", "_optimizer_classes", "_optimizer_kwargs")
ROWS, DIM, STEPS = 4, 4, 3

CLASSES: list[Any] = [
    pkgutil.resolve_name(name) for name in dict.fromkeys(name for spec in SPECS for name in spec.classes)
]
CLASSES.remove(rst.SparseGradients)  # it has no keywords


def has_step(cls: Any) -> bool:
    """Returns whether the class has a `step` of its own; other classes only select an update of tables."""
    bases = [base for base in cls.__mro__ if base is not torch.optim.Optimizer]
    return any(base.__module__.startswith("torch.optim.") or base is torchrec.optim.RowWiseAdagrad for base in bases)


EXECUTION = ("foreach", "fused")
"""Keywords that choose how torch computes the same result."""
VALUES: dict[str, list[Any]] = {
    "lr": [0.01, 0.002, torch.tensor(0.001), np.float64(0.01), torch.tensor([0.01])],
    "betas": [(0.5, 0.9), [0.5, 0.9], (torch.tensor(0.9), torch.tensor(0.99))],
    "eps": [1e-3, 1e-8],
    "weight_decay": [0, 0.1, torch.tensor(0.0), torch.tensor(0.1)],
    "lr_decay": [0, 0.5],
    "initial_accumulator_value": [0, 0.1],
    "momentum": [0, 0.9],
    "dampening": [0, 0.5],
    "eta": [0.1],
    "alpha": [0.5, torch.tensor(0.75)],
    "rho": [0, 0.5, torch.tensor(0.75), 1],
    "centered": [False, True],
    **{name: [None, False, True] for name in EXECUTION},
    **{
        name: [False, True]
        for name in ("nesterov", "maximize", "amsgrad", "capturable", "differentiable", "decoupled_weight_decay")
    },
    "use_accumulate": [False, True],
    "accumulate_step": [1],
}
TOGETHER: list[dict[str, Any]] = [
    {},
    {"use_accumulate": True, "accumulate_step": 2},
    {"lr": torch.tensor(0.001), "foreach": False, "capturable": False},
    {"lr": torch.tensor(0.001), "capturable": True},
    {"lr": torch.tensor(0.001), "amsgrad": True, "capturable": True},
    {"lr": torch.tensor(0.001), "betas": (torch.tensor([[[0.9]]]), torch.tensor([[0.99]])), "foreach": False},
    {"lr": torch.tensor(0.001), "betas": (torch.tensor(0.9), torch.tensor(0.99)), "capturable": True},
    {"lr": 0.1, "lr_decay": 0.5, "initial_accumulator_value": 0.1},
    {"weight_decay": 0.1, "maximize": True},
    {"weight_decay": 0.1, "decoupled_weight_decay": True},
    {"weight_decay": 0.1, "rho": 0.5, "maximize": True},
    {"weight_decay": 0.1, "lr_decay": 0.5, "initial_accumulator_value": 0.1, "maximize": True},
    {"weight_decay": 0.1, "betas": (0.5, 0.9), "maximize": True},
    {"momentum": 0.9, "dampening": 0.5},
    {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1, "maximize": True},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    {"momentum": 0.9, "nesterov": True, "dampening": 0.5},
    {"momentum": torch.tensor(0.9), "dampening": torch.tensor(0.5)},
    {"momentum": 0.9, "centered": True, "weight_decay": 0.1, "maximize": True},
    {"alpha": 0.5, "centered": True, "eps": 1e-3},
    {"alpha": 0.5, "momentum": 0.9},
]


def keywords(cls: Any) -> set[str]:
    """Returns the keywords that the class's constructors or tables accept."""
    found = set(spec_for(cls).options)
    for base in cls.__mro__:
        if issubclass(base, torch.optim.Optimizer) and base is not torch.optim.Optimizer and "__init__" in vars(base):
            kinds = inspect.signature(base.__init__).parameters.values()
            found |= {each.name for each in kinds if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)}
    return found - {"self", "params", "defaults"}


def values(name: str) -> list[Any]:
    """Returns the values to test for a keyword: from the list above, or else from `optimizer_table`."""
    of_rows = [row.options[name] for row in optimizer_table.ROWS if name in row.options]
    return VALUES.get(name, of_rows)


@pytest.mark.parametrize("cls", CLASSES)
def test_every_keyword_has_values(cls: Any) -> None:
    assert [name for name in keywords(cls) if not values(name)] == []


def keyword_sets(cls: Any) -> Iterator[dict[str, Any]]:
    names = keywords(cls)
    every = [{name: value} for name in sorted(names) for value in values(name)]
    every += [each for each in TOGETHER if each.keys() <= names]
    yield from every


def gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(ROWS, DIM, generator=generator) for _ in range(STEPS)]


WEIGHT = torch.linspace(-0.5, 0.5, ROWS * DIM).view(ROWS, DIM)


def expected(cls: Any, options: dict[str, Any]) -> torch.Tensor | None:
    """Returns the weights after updates by the class itself; None if the class refuses the keywords."""
    if not has_step(cls):
        return None
    parameter = torch.nn.Parameter(WEIGHT.clone())
    try:
        optimizer = cls([parameter], **options)
        for gradient in gradients():
            parameter.grad = gradient.to_sparse(1) if cls is torch.optim.SparseAdam else gradient.clone()
            optimizer.step()
    except (TypeError, ValueError, RuntimeError, AssertionError):
        return None
    return parameter.detach()


def accepted(cls: Any, handle: Any, options: dict[str, Any], function: str) -> bool:
    """Returns whether the call accepts the keywords. If not, checks that it changed nothing, and applies SGD."""
    try:
        FUNCTIONS[function](cls, [handle], dict(options))
    except (TypeError, ValueError, RuntimeError):
        assert not any(hasattr(handle, name) for name in NOTES)
        FUNCTIONS[function](torch.optim.SGD, [handle], {"lr": 0.1})
        return False
    return True


def trained(device: torch.device, cls: Any, cases: list[tuple[dict[str, Any], str]]) -> list[torch.Tensor | None]:
    """Trains a table for each case (keywords and function), starting from WEIGHT; returns its rows, or None if the
    case is refused.
    """
    names = [f"t{number}" for number in range(len(cases))]
    tables = [EmbeddingBagConfig(ROWS, DIM, name, init_fn=lambda rows: rows.copy_(WEIGHT)) for name in names]
    collection = bags_collection(device, *tables)
    handles = list(collection.parameters())
    takes = [accepted(cls, handle, *case) for handle, case in zip(handles, cases, strict=True)]
    batch = jagged({name: [[row] for row in range(ROWS)] for name in names})
    for gradient in gradients():
        output = collection(batch).values().view(ROWS, len(names), DIM)
        (output * gradient.to(device)[:, None]).sum().backward()
    rows = collection.state_dict().values()
    return [row if took else None for row, took in zip(rows, takes, strict=True)]


@pytest.mark.parametrize("cls", CLASSES)
def test_equal_or_refused_at_the_call(device: torch.device, cls: Any) -> None:
    every, functions, compared = list(keyword_sets(cls)), list(FUNCTIONS), 0
    found = trained(device, cls, [(options, function) for options in every for function in functions])
    for number, options in enumerate(every):
        ours, *others = found[number * len(functions) : (number + 1) * len(functions)]
        if ours is None:
            assert others == [None, None], f"{options}: refused by our function alone"
            assert options.keys() - {"lr", "eps", *EXECUTION}, f"{options} is refused"
            continue
        assert options or None not in others, "defaults are refused"
        assert not torch.equal(ours, WEIGHT)
        for other in others:
            assert other is None or torch.equal(other, ours), f"{options}: other rows than by our function"
        reference = expected(cls, options)
        if reference is not None:
            close = torch.allclose(ours, reference, rtol=1e-5, atol=1e-6)
            assert close, f"{options}: the rows differ from the class"
            compared += None not in others
    assert compared > 10 or not has_step(cls)
