"""The optimizer of tables: checks its options and computes the coefficients of its next update."""

from __future__ import annotations

import ctypes
import functools
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...formulas import OptimizerSpec, Options, mode_name, modes_of, spec_for, specs_of_class
from ...operators.record import OVERFLOW, WEIGHT_DTYPES, is_representable
from ...operators.schemas import COEFFICIENTS, coefficient_names
from ...runtime.former_names import accepts_former_members
from ...runtime.numbers import as_float, as_int

_ENDLESS = 2**62
"""Length of an accumulation window that never ends, for optimizers that return gradients instead of applying them."""

# Keywords of torch's classes that the fused update does not implement, with the values at which they have no effect.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "momentum": (0,),
    "dampening": (0,),
    "weight_decay": (0,),
    "max_norm": (0,),
    "centered": (False,),
    "nesterov": (False,),
    "maximize": (False,),
    "amsgrad": (False,),
    "differentiable": (False,),
    "capturable": (False,),
    "decoupled_weight_decay": (False,),
}
_IRRELEVANT = {"foreach", "fused"}
"""Keywords that only select one of torch's implementations of an update; they are ignored."""
_LEAST = {"gwd_start_iter": 0, "max_counter": 1, "max_counter_update_freq": -1, "step_ema": 1, "step_swap": 1}
"""Lower bounds of options other than the default, which is 0 for floats and -2^31 for ints."""
_BELOW = {
    "alpha": 1.0,
    "rho": math.nextafter(1.0, 2.0),
    "momentum": 1.0,
    "step_ema_coef": math.nextafter(1.0, 2.0),
    "gwd_lower_bound": math.nextafter(1.0, 2.0),
    "max_counter": 2.0**31 + 1,  # the range of the kernel's logarithm ends here
}
"""Exclusive upper bounds of options; the default is infinity for floats and 2^63 for ints."""
_NOT_ROUNDED_TO_ZERO = {"eps", "initial_accumulator_value"}
"""Options that prevent division by 0: a positive value that underflows to 0 in float32 is an error."""
_DEFINITIONS = {
    "global_weight_decay": {"start_iter": "gwd_start_iter", "lower_bound": "gwd_lower_bound"},
    "cowclip_regularization": {
        name: name
        for name in ("counter_weight_decay_mode", "counter_halflife", "weight_norm_coefficient", "lower_bound")
    },
    "counter_based_regularization": {
        name: name
        for name in (
            "counter_weight_decay_mode",
            "counter_halflife",
            "adjustment_iter",
            "adjustment_ub",
            "learning_rate_mode",
            "grad_sum_decay",
            "tail_id_threshold",
            "max_counter_update_freq",
        )
    },
    "ensemble_mode": {name: name for name in ("step_ema", "step_swap", "step_start", "step_ema_coef", "step_mode")},
    "tail_id_threshold": {"val": "tail_id_threshold_val", "is_ratio": "tail_id_threshold_is_ratio"},
}
"""FBGEMM's definition objects and the option that each of their fields sets; an object precedes those it contains."""

_DEFAULTS: dict[str, Options] = {}
"""Defaults that replace the defaults of torch's classes, by optimizer family."""


def use_defaults(family: str, **options: Any) -> None:
    """Replaces torch's defaults for later optimizers of a family; a call without options restores them."""
    _DEFAULTS[family] = options


def _checked_number(where: str, name: str, value: object, low: float = 0.0, below: float = math.inf) -> float:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{where}: {name} is {value!r}, expected a number")
    number = as_float(value)
    if not low <= number < below:  # the comparison is also false for NaN
        raise ValueError(f"{where}: {name} is {number}, must be in [{low}, {below})")
    stored = ctypes.c_float(number).value
    if not stored < below or (stored == 0 != number and name in _NOT_ROUNDED_TO_ZERO):
        allowed = "0 or more than 7e-46" if stored == 0 else f"in [{low}, {below})"
        raise ValueError(f"{where}: {name} is {number}, which is {stored} in float32, must be {allowed}")
    return number


def check_window(where: str, use_accumulate: object, accumulate_step: object) -> int:
    """Checks the options of an Accumulate class, and returns the window's length; 1 for a class without accumulation.

    Raises:
        TypeError, ValueError: invalid options of an Accumulate class; the message begins with `where`.
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


def _float_to_int(value: object) -> object:
    """Converts a float with an integral value to an int, since FBGEMM declares some int options as floats."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _expand_definitions(where: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces FBGEMM's definition objects, or equivalent mappings, among the keywords by the options that they set.

    Raises:
        TypeError: a definition has no known field or an unknown one, or sets an option that is also a keyword.
    """
    options = dict(kwargs)
    for keyword, names in _DEFINITIONS.items():
        definition = options.pop(keyword, None)
        if definition is None:
            continue
        fields = (
            dict(definition)
            if isinstance(definition, Mapping)
            else {name: getattr(definition, name) for name in names if hasattr(definition, name)}
        )
        if not fields or fields.keys() - names.keys() or options.keys() & {names[field] for field in fields}:
            raise TypeError(
                f"{where}: {keyword} is {definition!r}, expected FBGEMM's definition or a mapping, with some of "
                f"{list(names)} that are not keywords too"
            )
        options |= {names[field]: _float_to_int(value) for field, value in fields.items()}
    return options


def _checked_options(where: str, spec: OptimizerSpec, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of an update, including defaults; raises for keywords that the update does not support."""
    options = {**spec.options, **_DEFAULTS.get(spec.family, {})}
    for name, value in keywords.items():
        if name in options:
            options[name] = _mode(where, spec, name, value) if name in spec.modes else value
        elif name in _NEUTRAL:
            if value not in spec.neutral.get(name, _NEUTRAL[name]):
                needed = [list(other.example) for other in specs_of_class(spec) if name in other.options]
                without = f" without {' and '.join(needed[0])}" if needed and needed[0] != [name] else ""
                raise ValueError(
                    f"{where}: {name}={value!r} is not supported by the fused update{without}; "
                    f"supported are {sorted(spec.options)}, gradient_clipping and max_gradient"
                )
        elif name not in _IRRELEVANT:
            raise TypeError(
                f"{where}: unknown keyword {name}={value!r}; supported are {sorted(spec.options)}, "
                "gradient_clipping and max_gradient"
            )
    return options


def _mode(where: str, spec: OptimizerSpec, option: str, mode: object) -> str:
    """Returns the name of a mode, from a name or a member of FBGEMM's enum."""
    name = mode_name(mode)
    if name is None or name not in spec.modes[option]:
        supported = modes_of(spec, option) if option == "weight_decay_mode" else spec.modes[option]
        raise ValueError(f"{where}: {option} is {mode!r}, supported are {list(supported)}")
    return name


def _check_kind(where: str, spec: OptimizerSpec, name: str, value: object) -> None:
    """Checks an option against the type of its default: a mode, a bool, an int or a float. `betas` are not checked."""
    default = spec.options[name]
    if name in spec.modes:
        if value not in spec.modes[name]:
            raise ValueError(f"{where}: {name} is {value!r}, may change only within {list(spec.modes[name])}")
    elif isinstance(default, bool):
        if not isinstance(value, bool):
            raise TypeError(f"{where}: {name} is {value!r}, expected a bool")
    elif isinstance(default, float):
        _checked_number(where, name, value, _LEAST.get(name, 0.0), _BELOW.get(name, math.inf))
    elif isinstance(default, int):
        number, least = as_int(value), _LEAST.get(name, -(2**31))
        if number is None:
            raise TypeError(f"{where}: {name} is {value!r}, expected an int")
        if not least <= number < 2**63:
            raise ValueError(f"{where}: {name} is {number}, must be at least {least} and below 2^63")


def check_options(where: str, spec: OptimizerSpec, options: Options) -> None:
    """Checks the options of an update.

    Raises:
        TypeError, ValueError: an invalid value; the message names `where` and the option.
    """
    known = spec.options.keys()
    for name in options.keys() & known:
        _check_kind(where, spec, name, options[name])
    if "gwd_lower_bound" in known or options.get("counter_weight_decay_mode") == "adagradw":
        _checked_number(where, "lr * weight_decay", float(options["lr"]) * float(options["weight_decay"]), below=1.0)
    betas = options.get("betas")
    if betas is not None or "betas" in options.keys() & known:
        if not isinstance(betas, Sequence) or len(betas) != 2:
            raise TypeError(f"{where}: betas is {betas!r}, expected two numbers")
        for index, beta in enumerate(betas):
            _checked_number(where, f"betas[{index}]", beta, below=1.0)
    problem = spec.problem(options)
    if problem is not None:
        raise ValueError(f"{where}: {problem}")
    for name in (options.keys() & _NEUTRAL.keys()) - known:
        allowed = spec.neutral.get(name, _NEUTRAL[name])
        if options[name] not in allowed:
            hint = f": {name} selects another kernel and cannot be turned on later; apply the optimizer with "
            known_elsewhere = any(name in other.options for other in specs_of_class(spec))
            raise ValueError(
                f"{where}: {name}={options[name]!r} is not supported by the fused update, only {allowed[0]!r}"
                f"{hint + name if known_elsewhere else ''}"
            )


_CONSTANTS = {int, float, bool, str, type(None)}


def plain(value: Any) -> Any:
    """Converts an option from a tensor or a NumPy number to a Python number; a list or tuple to a tuple."""
    if isinstance(value, torch.Tensor):
        return value.item()
    if isinstance(value, (list, tuple)):
        return tuple(map(plain, value))
    if type(value) in _CONSTANTS or not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def _max_gradient(where: str, keywords: dict[str, Any]) -> float:
    clipping = keywords.pop("gradient_clipping", False)
    bound = keywords.pop("max_gradient", None)
    if not isinstance(clipping, bool):
        raise TypeError(f"{where}: gradient_clipping is {clipping!r}, expected a bool")
    if not clipping:
        if bound is not None:
            raise ValueError(f"{where}: max_gradient is given, which needs gradient_clipping=True")
        return math.inf
    if bound is None:
        raise ValueError(f"{where}: gradient_clipping=True needs max_gradient")
    return _checked_number(where, "max_gradient", bound)


def _state_dtypes(where: str, spec: OptimizerSpec, keywords: dict[str, Any]) -> tuple[torch.dtype, ...]:
    """Returns the data type of each optimizer state; () if all are float32."""
    requested = keywords.pop("state_dtypes", None) or {}
    if not isinstance(requested, Mapping):
        raise TypeError(
            f"{where}: state_dtypes is {requested!r}, expected a mapping from names of states to data types"
        )
    names = [state.name for state in spec.states]
    for name, dtype in requested.items():
        if name not in names:
            raise ValueError(f"{where}: state_dtypes names {name!r}, the states are {names}")
        if dtype not in WEIGHT_DTYPES:
            raise ValueError(f"{where}: state_dtypes[{name!r}] is {dtype!r}, allowed are {WEIGHT_DTYPES}")
        if spec.states[names.index(name)].counter and dtype is not torch.float32:
            raise ValueError(f"{where}: state_dtypes[{name!r}] is {dtype}, counters are always torch.float32")
    if all(dtype is torch.float32 for dtype in requested.values()):
        return ()
    return tuple(requested.get(name, torch.float32) for name in names)


_coefficient_names = functools.cache(coefficient_names)


@accepts_former_members(check_step="check_deferrable", acts_after_next="has_table_pass_after_next")
@dataclass
class TableOptimizer:
    """The optimizer of one or more tables.

    Attributes:
        cls: the optimizer class that the user passed.
        spec: the fused update for the class and its keywords.
        options: learning rate and hyperparameters, read at every update, so that schedulers that change them through
            `param_groups` take effect.
        max_gradient: bound of the absolute values of the aggregated gradient's elements; inf: no bound.
        accumulate_step: backward passes of one accumulation window.
        step: number of updates so far.
        state_dtypes: data types of the states, in the order of a row's record; empty if all are float32.
        where: the beginning of error messages, such as the table and the class.

    Raises:
        TypeError, ValueError: `create` raises these for an unsupported class or invalid keywords.

    Example:
        >>> import torch
        >>> from rec_sdk_torch import TableOptimizer
        >>> adam = TableOptimizer.create(torch.optim.Adam, {"lr": 0.1})
        >>> adam.options["lr"], [state.name for state in adam.spec.states]
        (0.1, ['exp_avg', 'exp_avg_sq'])
    """

    cls: type
    spec: OptimizerSpec
    options: dict[str, Any]
    max_gradient: float = math.inf
    accumulate_step: int = 1
    step: int = 0
    where: str = field(default="", repr=False)
    state_dtypes: tuple[torch.dtype, ...] = ()
    _checked: Options | None = field(default=None, init=False, repr=False, compare=False)
    """Copy of the options that `coefficients` checked last; None before the first call."""
    _row: list[float] | None = field(default=None, init=False, repr=False, compare=False)
    """The coefficients for the options in `_checked`, if they do not depend on the step; else None."""
    _steady: bool | None = field(default=None, init=False, repr=False, compare=False)
    """Whether the coefficients do not depend on the step; None if not known yet."""

    def __post_init__(self) -> None:
        self._names = _coefficient_names(self.spec.kernel)

    def uses_step(self) -> bool:
        """Returns whether, under the current options, an update depends on its number."""
        if self.spec.table_pass is not None or any(state.counter for state in self.spec.states):
            return True
        first, *others = (self.spec.coefficients(self.options, number) for number in (1, 2, 1000))
        return any(each != first for each in others)

    @classmethod
    def create(cls, optimizer_class: type, kwargs: Mapping[str, Any], where: str = "") -> TableOptimizer:
        """Creates a table optimizer from an optimizer class and its keywords, which are checked.

        Args:
            optimizer_class: an optimizer class of torch or of this package.
            kwargs: keywords of the class. `state_dtypes`, which torch does not have, maps names of states to the data
                types in which they are stored: float32 (the default), float16 or bfloat16. States are computed in
                float32 and rounded to nearest; see docs/optimizers.md.
            where: the beginning of error messages; "" for the name of the class.

        Raises:
            TypeError: an unknown class or keyword, or a value of the wrong type.
            ValueError: a value out of range, or a keyword value that the fused update does not support.
        """
        spec_for(optimizer_class)
        where = where or optimizer_class.__name__
        keywords = _expand_definitions(where, kwargs)
        spec = spec_for(optimizer_class, keywords)
        step = _ENDLESS if spec.collects_gradients else 1
        if spec.accumulates:
            step = check_window(where, keywords.pop("use_accumulate", False), keywords.pop("accumulate_step", 1))
        elif keywords.keys() & {"use_accumulate", "accumulate_step"}:
            raise TypeError(f"{where}: use_accumulate and accumulate_step need an Accumulate optimizer class")
        bound = _max_gradient(where, keywords)
        dtypes = _state_dtypes(where, spec, keywords)
        options = _checked_options(where, spec, keywords)
        check_options(where, spec, options)
        for start, dtype in zip(spec.state_init(options), dtypes, strict=False):
            if not is_representable(dtype, start):
                raise ValueError(f"{where}: initial_accumulator_value is {start}, which is inf in {dtype}")
        return cls(optimizer_class, spec, options, bound, step, 0, where, dtypes)

    def state_dtype(self, name: str) -> torch.dtype:
        """Returns the data type in which a state is stored."""
        names = [state.name for state in self.spec.states]
        return self.state_dtypes[names.index(name)] if self.state_dtypes else torch.float32

    def check_deferrable(self) -> None:
        """Checks that the optimizer supports `update="step"`.

        Raises:
            ValueError: the optimizer collects gradients for `take_gradients`, or accumulates gradients by itself.
        """
        if self.spec.collects_gradients:
            raise ValueError(
                f"{self.where}: take_gradients() returns gradients, which needs update='backward'; with update='step' "
                "gradients are the grad of a table's parameter"
            )
        if self.accumulate_step > 1:
            raise ValueError(
                f"{self.where}: accumulate_step is {self.accumulate_step}, which needs update='backward'; with "
                "update='step' call step() after so many backward passes"
            )

    def check_options(self, options: Options, where: str = "") -> None:
        """Checks options for this optimizer.

        Raises:
            TypeError, ValueError: an invalid value; the message begins with `where`.
        """
        check_options(where or self.where, self.spec, options)

    def plain_options(self) -> dict[str, Any]:
        """Returns the options without `params`, as Python numbers."""
        return {name: plain(value) for name, value in self.options.items() if name != "params"}

    def has_table_pass_after_next(self) -> bool:
        """Returns whether the optimizer makes a pass over whole tables right after its next update."""
        table_pass = self.spec.table_pass
        return table_pass is not None and table_pass.due(self.options, self.step + 2)

    def has_constant_options(self) -> bool:
        """Returns whether all options are immutable, so that options that compare equal have not changed."""
        return all(
            type(value) in _CONSTANTS or (type(value) is tuple and _CONSTANTS.issuperset(map(type, value)))
            for name, value in self.options.items()
            if name != "params"
        )

    def coefficients(self) -> list[float]:
        """Returns the kernel's coefficients for the next update, number `step + 1`: `COEFFICIENTS` floats.

        Raises:
            TypeError, ValueError: an option has been changed to an invalid value, such as a NaN `lr`, or a coefficient
                overflows float32.
        """
        constant = True
        for value in self.options.values():
            if type(value) not in _CONSTANTS:
                constant = self.has_constant_options()
                break
        # A mutable option can change and still compare equal.
        if not constant or self.options != self._checked:
            check_options(self.where, self.spec, self.options)
            self._checked, self._row, self._steady = dict(self.options), None, None
        elif self._row is not None:
            return self._row
        elif self._steady is None:  # only for options that did not change: a schedule changes them in every step
            self._steady = not self.uses_step()
        options: Options = self.options
        if not constant:  # converts to Python floats, which have double precision
            options = {name: plain(value) for name, value in options.items() if name in self.spec.options}
        values, names = self.spec.coefficients(options, self.step + 1), self._names
        row = list(map(float, map(values.__getitem__, names)))
        if not max(map(abs, row)) < OVERFLOW[torch.float32]:
            self._check_coefficients(dict(zip(names, row, strict=True)))
        row = [float(self.max_gradient), *row, *[0.0] * (COEFFICIENTS - 1 - len(row))]
        if self._steady:
            self._row = row
        return row

    def _check_coefficients(self, values: Mapping[str, float]) -> None:
        """Raises ValueError for a coefficient that overflows float32; infinite ones, which mean no bound, are valid."""
        for name, value in values.items():
            if not is_representable(torch.float32, value) and not math.isinf(value):
                options = {option: self.options[option] for option in self.spec.options}
                raise ValueError(
                    f"{self.where}: {name} of update {self.step + 1} is {float(value)}, which is inf in float32: it is "
                    f"computed from {options}"
                )
