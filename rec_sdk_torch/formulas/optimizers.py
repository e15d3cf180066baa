"""The list of all optimizers, collected from the `SPECS` of each family's module."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

from . import adadelta, adagrad, adam, counted_adagrad, lamb, rmsprop, rowwise_adagrad, sgd
from .spec import Formula, OptimizerSpec, Options

_FAMILIES = (sgd, adagrad, rowwise_adagrad, counted_adagrad, adam, rmsprop, adadelta, lamb)
UPDATES: tuple[OptimizerSpec, ...] = tuple(spec for family in _FAMILIES for spec in family.SPECS)
"""The optimizers without an accumulation buffer. If a class has several specs, the one with fewest options is first."""

SPECS = UPDATES + tuple(
    replace(spec, classes=(spec.accumulate_class,), accumulates=True) for spec in UPDATES if spec.accumulate_class
)
"""All optimizers: `UPDATES`, and their variants with an accumulation buffer."""

FORMULAS: Mapping[str, Formula] = {spec.kernel: spec.formula for spec in UPDATES}
"""The formulas by kernel name, in the order of the list in `op_kernels/common/optimizers.h`."""


@functools.cache
def same_states(kernel: str, other: str) -> bool:
    """Returns whether two named kernels have the same states, that is, differ at most in weight decay."""
    first, second = (FORMULAS[name].undecayed or name if name in FORMULAS else name for name in (kernel, other))
    return first == second


_BY_CLASS: dict[str, list[OptimizerSpec]] = {}
for _spec in SPECS:
    for _name in _spec.classes:
        _BY_CLASS.setdefault(_name, []).append(_spec)


def class_name(cls: type) -> str:
    """Returns the qualified name of a class, such as "torch.optim.sgd.SGD"."""
    return f"{cls.__module__}.{cls.__qualname__}"


def spec_for(cls: type, options: Options | None = None) -> OptimizerSpec:
    """Returns the spec that an optimizer class and its keywords `options` select.

    Raises:
        TypeError: there is no fused update for the class; the message lists the supported classes.
    """
    return next(spec for spec in reversed(_specs_by_class(cls)) if spec.applies_to(options or {}))


def specs_of_class(spec: OptimizerSpec) -> list[OptimizerSpec]:
    """Returns all specs of the optimizer class of `spec`; the spec with the fewest options is first."""
    return _BY_CLASS[spec.classes[0]]


def modes_of(spec: OptimizerSpec, option: str) -> list[str]:
    """Returns all modes that `option` may have, in any spec of the optimizer class of `spec`."""
    return list(dict.fromkeys(mode for other in specs_of_class(spec) for mode in other.modes.get(option, ())))


def _specs_by_class(cls: type) -> list[OptimizerSpec]:
    specs = _BY_CLASS.get(class_name(cls)) if isinstance(cls, type) else None
    if not specs:
        known = ", ".join(sorted(_BY_CLASS))
        raise TypeError(f"{cls!r} has no fused update; supported are {known}")
    return specs
