"""The optimizers that the fused update knows.

An optimizer is one `OptimizerSpec` here, one line in `SPECS`, and one struct with the update of a row in
`op_kernels/common/optimizers.h`. Formulas: the optimizers page of the docs.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .table import as_int

COEFFICIENTS = 8
"""Width of a table's row of coefficients in `rec_sdk::update_rows`."""

Options = Mapping[str, Any]


@dataclass(frozen=True)
class StateSpec:
    """One state block of the row record: `[D]`, or `[1]` when `rowwise`."""

    name: str
    rowwise: bool = False

    def elements(self, dim: int) -> int:
        return 1 if self.rowwise else dim


@dataclass(frozen=True)
class OptimizerSpec:
    """What the host side knows of an optimizer.

    Attributes:
        kernel: its name in `rec_sdk::update_rows`.
        family: classes of one family count as the same optimizer in the check against a table's
            `embedding_optimizer_cls`.
        classes: qualified names of the classes that mean it.
        options: keywords the update honours, with their defaults (those of the torch class).
        coefficients: (options, t) -> the row of coefficients behind `max_gradient`, in double precision.
        states: its state blocks, in the order they have in the record.
        accumulates: an Accumulate variant, with `use_accumulate` and `accumulate_step`.
    """

    kernel: str
    family: str
    classes: tuple[str, ...]
    options: Options
    coefficients: Callable[[Options, int], list[float]]
    states: tuple[StateSpec, ...] = ()
    accumulates: bool = False

    def state_init(self, options: Options) -> list[float]:
        """Initial value of each state block."""
        return [float(options.get("initial_accumulator_value", 0.0)) for _ in self.states]


def _decayed_lr(options: Options, t: int) -> list[float]:
    return [options["lr"] / (1 + (t - 1) * options["lr_decay"]), options["eps"]]


def _adam(options: Options, t: int) -> list[float]:
    beta1, beta2 = options["betas"]
    step_size = options["lr"] / (1 - beta1**t)
    return [step_size, options["eps"], 1 - beta1, 1 - beta2, 1 / math.sqrt(1 - beta2**t)]


def _sparse_adam(options: Options, t: int) -> list[float]:
    beta1, beta2 = options["betas"]
    step_size = options["lr"] * math.sqrt(1 - beta2**t) / (1 - beta1**t)
    return [step_size, options["eps"], 1 - beta1, 1 - beta2, 1.0]


def _lr(options: Options, t: int) -> list[float]:
    return [options["lr"]]


_ADAM_STATES = (StateSpec("exp_avg"), StateSpec("exp_avg_sq"))
_ADAM_OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
_ADAGRAD_OPTIONS = {"lr": 1e-2, "lr_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10}
_ACCUMULATE = "rec_sdk_torch.optim.accumulate"

SPECS = (
    OptimizerSpec("sgd", "SGD", ("torch.optim.sgd.SGD", "torchrec.optim.optimizers.SGD"), {"lr": 1e-3}, _lr),
    OptimizerSpec(
        "adagrad",
        "Adagrad",
        ("torch.optim.adagrad.Adagrad", "torchrec.optim.optimizers.Adagrad"),
        _ADAGRAD_OPTIONS,
        _decayed_lr,
        (StateSpec("sum"),),
    ),
    OptimizerSpec(
        "adam",
        "Adam",
        ("torch.optim.adam.Adam", "torchrec.optim.optimizers.Adam"),
        _ADAM_OPTIONS,
        _adam,
        _ADAM_STATES,
    ),
    OptimizerSpec("adam", "Adam", ("torch.optim.sparse_adam.SparseAdam",), _ADAM_OPTIONS, _sparse_adam, _ADAM_STATES),
    OptimizerSpec(
        "rowwise_adagrad",
        "RowWiseAdagrad",
        ("torchrec.optim.rowwise_adagrad.RowWiseAdagrad",),
        _ADAGRAD_OPTIONS,
        _decayed_lr,
        (StateSpec("sum", rowwise=True),),
    ),
    OptimizerSpec("sgd", "SGD", (f"{_ACCUMULATE}.AccumulateSGD",), {"lr": 1e-3}, _lr, accumulates=True),
    OptimizerSpec(
        "adagrad",
        "Adagrad",
        (f"{_ACCUMULATE}.AccumulateAdagrad",),
        _ADAGRAD_OPTIONS,
        _decayed_lr,
        (StateSpec("sum"),),
        accumulates=True,
    ),
    OptimizerSpec(
        "adam",
        "Adam",
        (f"{_ACCUMULATE}.AccumulateAdam",),
        _ADAM_OPTIONS,
        _sparse_adam,
        _ADAM_STATES,
        accumulates=True,
    ),
)
_BY_CLASS = {name: spec for spec in SPECS for name in spec.classes}

# Keywords of the torch classes that the fused update does not implement, with the values that ask for nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "momentum": (0,),
    "dampening": (0,),
    "weight_decay": (0,),
    "nesterov": (False,),
    "maximize": (False,),
    "amsgrad": (False,),
    "differentiable": (False,),
    "capturable": (False,),
    "decoupled_weight_decay": (False,),
}
_IRRELEVANT = {"foreach", "fused"}
"""How torch would execute the same update."""


_DEFAULTS: dict[str, Options] = {}
"""Defaults in place of the torch class's, by family."""


def use_defaults(family: str, **options: Any) -> None:
    """Sets defaults of a family's optimizers from now on, in place of torch's; without options these are back."""
    _DEFAULTS[family] = options


def class_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def spec_for(cls: type) -> OptimizerSpec:
    """The spec of an optimizer class.

    Raises:
        TypeError: the fused update does not know the class; the message lists those it knows.
    """
    spec = _BY_CLASS.get(class_name(cls)) if isinstance(cls, type) else None
    if spec is None:
        known = ", ".join(sorted(_BY_CLASS))
        raise TypeError(f"{cls!r} has no fused update; supported are {known}")
    return spec


def _checked_number(where: str, name: str, value: object, low: float = 0.0, below: float = math.inf) -> float:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{where}: {name} is {value!r}, expected a number")
    number = float(value)
    if not low <= number < below:  # also false for NaN
        raise ValueError(f"{where}: {name} is {number}, must be in [{low}, {below})")
    return number


def check_window(where: str, use_accumulate: object, accumulate_step: object) -> int:
    """The length of an accumulation window.

    Raises:
        TypeError, ValueError: the two options of the Accumulate classes are not what they must be.
    """
    if not isinstance(use_accumulate, bool):
        raise TypeError(f"{where}: use_accumulate is {use_accumulate!r}, expected a bool")
    step = as_int(accumulate_step)
    if step is None:
        raise TypeError(f"{where}: accumulate_step is {accumulate_step!r}, expected an int")
    if step < 1:
        raise ValueError(f"{where}: accumulate_step is {step}, must be at least 1")
    if step > 1 and not use_accumulate:
        raise ValueError(f"{where}: accumulate_step is {step}, which needs use_accumulate=True")
    return step


def _checked_options(where: str, spec: OptimizerSpec, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of an update, defaults filled in; raises on what it cannot honour."""
    options = {**spec.options, **_DEFAULTS.get(spec.family, {})}
    for name, value in given.items():
        if name in options:
            options[name] = value
        elif name in _NEUTRAL:
            if value not in _NEUTRAL[name]:
                raise ValueError(
                    f"{where}: {name}={value!r} is not supported by the fused update; supported are "
                    f"{sorted(spec.options)}, gradient_clipping and max_gradient"
                )
        elif name not in _IRRELEVANT:
            raise TypeError(
                f"{where}: unknown keyword {name}={value!r}; supported are {sorted(spec.options)}, "
                "gradient_clipping and max_gradient"
            )
    return options


def check_options(where: str, options: Options) -> None:
    """Raises TypeError or ValueError, naming `where` and the option, for a value no update may use."""
    for name in options.keys() & {"lr", "lr_decay", "initial_accumulator_value", "eps"}:
        _checked_number(where, name, options[name])
    betas = options.get("betas")
    if betas is not None:
        if not isinstance(betas, Sequence) or len(betas) != 2:
            raise TypeError(f"{where}: betas is {betas!r}, expected two numbers")
        for index, beta in enumerate(betas):
            _checked_number(where, f"betas[{index}]", beta, below=1.0)
    for name in options.keys() & _NEUTRAL.keys():
        if options[name] not in _NEUTRAL[name]:
            raise ValueError(
                f"{where}: {name}={options[name]!r} is not supported by the fused update, only {_NEUTRAL[name][0]!r}"
            )


_CONSTANTS = {int, float, bool, type(None)}


def _is_constant(value: object) -> bool:
    return type(value) in _CONSTANTS or (type(value) is tuple and _CONSTANTS.issuperset(map(type, value)))


def _max_gradient(where: str, given: dict[str, Any]) -> float:
    clipping = given.pop("gradient_clipping", False)
    bound = given.pop("max_gradient", None)
    if not isinstance(clipping, bool):
        raise TypeError(f"{where}: gradient_clipping is {clipping!r}, expected a bool")
    if not clipping:
        if bound is not None:
            raise ValueError(f"{where}: max_gradient is given, which needs gradient_clipping=True")
        return math.inf
    if bound is None:
        raise ValueError(f"{where}: gradient_clipping=True needs max_gradient")
    return _checked_number(where, "max_gradient", bound)


@dataclass
class TableOptimizer:
    """The optimizer of one or more tables.

    Attributes:
        cls: the class the user named.
        spec: what the fused update does for it.
        options: learning rate and hyper-parameters, read anew at every update, so whoever holds this dict (a
            scheduler, through `param_groups`) drives the update.
        max_gradient: bound of the aggregated gradient's elements; inf for none.
        accumulate_step: backward passes of one accumulation window.
        step: updates applied so far.
    """

    cls: type
    spec: OptimizerSpec
    options: dict[str, Any]
    max_gradient: float = math.inf
    accumulate_step: int = 1
    step: int = 0
    where: str = field(default="", repr=False)
    _checked: Options | None = field(default=None, init=False, repr=False, compare=False)
    """The options as `coefficients` found them in order."""

    @classmethod
    def create(cls, optimizer_class: type, kwargs: Mapping[str, Any], where: str = "") -> TableOptimizer:
        """Checks class and keywords.

        Raises:
            TypeError: unknown class or keyword, or a value of the wrong type.
            ValueError: a value out of range, or a keyword that the fused update cannot honour.
        """
        spec = spec_for(optimizer_class)
        where = where or optimizer_class.__name__
        given = dict(kwargs)
        step = 1
        if spec.accumulates:
            step = check_window(where, given.pop("use_accumulate", False), given.pop("accumulate_step", 1))
        elif given.keys() & {"use_accumulate", "accumulate_step"}:
            raise TypeError(f"{where}: use_accumulate and accumulate_step need an Accumulate optimizer class")
        bound = _max_gradient(where, given)
        options = _checked_options(where, spec, given)
        check_options(where, options)
        return cls(optimizer_class, spec, options, bound, step, 0, where)

    def coefficients(self) -> list[float]:
        """The next update's row of `COEFFICIENTS` numbers, for t = step + 1.

        Raises:
            TypeError, ValueError: an option was changed to something no update may use, such as a NaN `lr`.
        """
        constant = all(_is_constant(value) for name, value in self.options.items() if name != "params")
        if not constant or self.options != self._checked:  # others may change without becoming unequal
            check_options(self.where, self.options)
            self._checked = dict(self.options)
        row = [self.max_gradient, *self.spec.coefficients(self.options, self.step + 1)]
        return row + [0.0] * (COEFFICIENTS - len(row))
