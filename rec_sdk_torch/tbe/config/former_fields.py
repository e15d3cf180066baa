"""The fields that `TableLife` had before it took rules as objects: they work for one version, with a warning."""

from __future__ import annotations

import functools
import inspect
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from ...rules import Age, Bytes, Count, Idle, Norm, Probability, Rows, Score, Share, ShowClick, Sketch
from ...rules.flat import rules_of
from ...rules.rule import Rule
from ...runtime.warn import DeprecatedWarning, warn

FORMER = {name: each.default for name, each in list(inspect.signature(rules_of).parameters.items())[1:]}
"""Former fields and their defaults, in order."""
_KEPT = ("default_value", "keep_evicted")
_RULES: dict[str, tuple[tuple[type[Rule], ...], str]] = {
    "admit_threshold": ((Count, ShowClick, Sketch), "threshold"),
    "alpha": ((ShowClick, Sketch, Score), "alpha"),
    "beta": ((ShowClick, Score), "beta"),
    "evict_share": ((Share,), "share"),
    "score_decay": ((Score,), "decay"),
    "evict_age": ((Age,), "seconds"),
    "evict_idle_steps": ((Idle,), "batches"),
    "max_rows": ((Rows,), "most"),
    "max_bytes": ((Bytes,), "most"),
    "admit_probability": ((Probability,), "probability"),
    "evict_norm": ((Norm,), "least"),
    "score_half_life": ((Score,), "half_life"),
    "sketch_bytes": ((Sketch,), "bytes"),
    "sketch_depth": ((Sketch,), "depth"),
    "sketch_halve_after": ((Sketch,), "halve_after"),
}
"""Classes of rules that have the number of a former field, and its name there."""

Class = TypeVar("Class", bound=type)


def accepts_former_fields(table_life: Class) -> Class:
    """Lets `TableLife` take and return its former fields, with a warning that has the new spelling."""
    make = vars(table_life)["__init__"]

    @functools.wraps(make)
    def init(self: Any, *values: Any, **given: Any) -> None:
        former = dict(zip(FORMER, values, strict=False))
        former |= {name: given.pop(name) for name in FORMER if name in given and (values or name not in _KEPT)}
        if not former:
            make(self, **given)
            return
        new = [name for name, value in given.items() if name not in _KEPT and value]
        if new:
            raise TypeError(f"TableLife: {', '.join(former)} beside {', '.join(new)}: give rules alone, docs/life.md")
        make(self, **rules_of("TableLife", **former | {name: given[name] for name in _KEPT if name in given}))
        warn(f"TableLife({', '.join(former)}) takes rules as objects: write {spelling(self)}", DeprecatedWarning)

    def read(self: Any, name: str) -> Any:
        if name == "evict_step_interval":
            value = self.every
        elif name in _RULES:
            kinds, number = _RULES[name]
            found = [getattr(rule, number) for rule in self.rules if isinstance(rule, kinds)]
            value = found[0] if found else FORMER[name]
        else:
            raise AttributeError(f"TableLife has no attribute {name!r}")
        warn(f"TableLife.{name} is read from its rules, which are {spelling(self)}", DeprecatedWarning)
        return value

    table_life.__init__, table_life.__getattr__ = init, read  # type: ignore[misc, attr-defined]
    table_life.__setstate__ = lambda self, state: init(self, **state)  # type: ignore[attr-defined]  # former pickles too
    return table_life


def spelling(value: Any) -> str:
    """Returns the code that makes a `TableLife`, its rules, or a number."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(spelling, value))}]"
    if not is_dataclass(value):
        return repr(value)
    given = {each.name: getattr(value, each.name) for each in fields(value)}
    changed = [each.name for each in fields(value) if given[each.name] != each.default]
    name = f"{'rules.' * isinstance(value, Rule)}{type(value).__name__}"
    return f"{name}({', '.join(f'{each}={spelling(given[each])}' for each in changed)})"
