"""Deprecated fields of `TableLifecycle`, replaced by rule objects. They work for one version, with a warning."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from ...rules.flat_options import OPTIONS, rules_from_options
from ...rules.rule import Rule
from ...runtime.warn import DeprecatedWarning, warn

_KEPT = ("default_value", "keep_evicted")

Class = TypeVar("Class", bound=type)


def accepts_former_fields(table_lifecycle: Class) -> Class:
    """Decorates `TableLifecycle` to accept and return its former fields, with a warning that shows the new code."""
    make = vars(table_lifecycle)["__init__"]

    @functools.wraps(make)
    def init(self: Any, *values: Any, **keywords: Any) -> None:
        former = dict(zip(OPTIONS, values, strict=False))
        if len(values) > len(OPTIONS) or former.keys() & keywords.keys():
            names = ", ".join(keywords)
            raise TypeError(f"TableLifecycle: {len(values)} positional arguments and {names}: too many, or one twice")
        former |= {name: keywords.pop(name) for name in OPTIONS if name in keywords and (values or name not in _KEPT)}
        if not former:
            make(self, **keywords)
            return
        new = [name for name, value in keywords.items() if name not in _KEPT and value]
        if not {each.name for each in fields(self)}.issuperset(new):
            make(self, **keywords)  # raises TypeError for an unknown name
        if new:
            both = f"{', '.join(former)} beside {', '.join(new)}"
            raise TypeError(
                f"TableLifecycle: {both}: pass rules only (docs/admission_eviction.md), also to dataclasses.replace"
            )
        kept = {name: keywords[name] for name in _KEPT if name in keywords}
        make(self, **rules_from_options("TableLifecycle", **former | kept))
        warn(f"TableLifecycle({', '.join(former)}) takes rules as objects: write {to_code(self)}", DeprecatedWarning)

    def read(self: Any, name: str) -> Any:
        if name not in OPTIONS:
            raise AttributeError(f"TableLifecycle has no attribute {name!r}")
        default, number, kinds = OPTIONS[name]
        found = [getattr(rule, number) for rule in self.rules if isinstance(rule, kinds)]
        value = self.every if name == "evict_step_interval" else found[0] if found else default
        warn(f"TableLifecycle.{name} is read from its rules, which are {to_code(self)}", DeprecatedWarning)
        return value

    def restore(self: Any, state: Mapping[str, Any]) -> None:  # pickles may have former fields or present ones
        init(self, **state)

    for name, method in {"__init__": init, "__getattr__": read, "__setstate__": restore}.items():
        setattr(table_lifecycle, name, method)
    return table_lifecycle


def to_code(value: Any) -> str:
    """Returns Python code for a `TableLifecycle`, a rule, a list of rules or a number."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(to_code, value))}]"
    if not is_dataclass(value):
        return repr(value)
    values = {each.name: getattr(value, each.name) for each in fields(value)}
    changed = [each.name for each in fields(value) if values[each.name] != each.default]
    name = f"{'rules.' * isinstance(value, Rule)}{type(value).__name__}"
    return f"{name}({', '.join(f'{each}={to_code(values[each])}' for each in changed)})"
