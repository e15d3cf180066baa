"""Values that were read from JSON, held to the annotations of a dataclass.

An annotation is int, float, str, bool, Any, a dataclass, `X | None`, `list[X]`, `dict[str, X]`, or one of these with
rules: `Annotated[int, Within(0, 9)]`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

_Record = TypeVar("_Record")
_NAMES = {int: "an int", float: "a float", str: "a string", bool: "true or false", list: "a list", dict: "an object"}
MOST = 2**63 - 1


class Rule(Protocol):
    """A condition that a value has to meet beside its type."""

    def problem(self, value: Any) -> str | None:
        """Says which value is expected instead; None where it is right."""


@dataclass(frozen=True)
class Within:
    """A number from `least` to `most`."""

    least: int
    most: int = MOST

    def problem(self, value: int) -> str | None:
        return None if self.least <= value <= self.most else f"a number from {self.least} to {self.most}"


_pattern = functools.cache(re.compile)


@dataclass(frozen=True)
class Matches:
    """A string that the pattern describes as a whole; `what` says so in words."""

    pattern: str
    what: str

    def problem(self, value: str) -> str | None:
        return None if _pattern(self.pattern).fullmatch(value) else self.what


@dataclass(frozen=True)
class OneOf:
    """One of some strings."""

    values: tuple[str, ...]

    def problem(self, value: str) -> str | None:
        return None if value in self.values else f"one of {list(self.values)}"


@dataclass(frozen=True)
class Plain:
    """A scalar, or a list of scalars; numbers are finite."""

    def problem(self, value: Any) -> str | None:
        right = all(map(_is_plain, value if isinstance(value, list) else [value]))
        return None if right else "a finite number, a string, true, false, null, or a list of these"


def _is_plain(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, str) or (isinstance(value, int) and abs(value) <= MOST)


def record(cls: type[_Record], value: object, where: str) -> _Record:
    """The dataclass that a JSON object is. Fields that the class does not know are left out.

    Args:
        where: what the value is called in an error.

    Raises:
        ValueError: a field is missing, of another type, or against a rule.
    """
    of_class: Any = cls  # mypy takes a class of a type variable for nothing that can be hashed
    found: _Record = _decoder(of_class)(value, (where,) if where else ())
    return found


Where = tuple[Any, ...]
"""The place of a value: a name; or the place that it is in, and a string with a blank for what follows. It is made
readable only in an error: a manifest has many values.
"""
Decoder = Callable[[Any, Where], Any]
"""Converts a value of JSON to the annotated type; the place names the value in an error."""


def _name(where: Where) -> str:
    """A place in words."""
    if len(where) < 3:
        return str(where[0]) if where else ""
    outer, form, inner = where
    name: str = form.format(_name(outer), inner).lstrip(".")
    return name


def _record_decoder(cls: Any) -> Decoder:
    kinds = typing.get_type_hints(cls, include_extras=True)
    unset = dataclasses.MISSING
    fields = [
        (each.name, _decoder(kinds[each.name]), each.default is unset and each.default_factory is unset)
        for each in dataclasses.fields(cls)
    ]

    def decode(value: Any, where: Where) -> Any:
        if not isinstance(value, dict):
            raise _wrong(where, value, _NAMES[dict])
        found = {}
        for name, of_field, required in fields:
            if name in value:
                found[name] = of_field(value[name], (where, "{}.{}", name))
            elif required:
                raise ValueError(f"{_name(where) or 'it'} has no {name!r}")
        return cls(**found)

    return decode


@functools.cache
def _decoder(kind: Any) -> Decoder:
    """Makes the check of an annotation, once: a manifest has many values of each."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _with_rules(_decoder(arguments[0]), arguments[1:])
    if origin in (types.UnionType, typing.Union):
        some = _decoder(arguments[0])
        return lambda value, where: None if value is None else some(value, where)
    if kind is Any:
        return lambda value, where: value
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _record_decoder(kind)
    return _of_type(origin or kind, tuple(_decoder(each) for each in arguments))


def _with_rules(plain: Decoder, rules: Sequence[Rule]) -> Decoder:
    problems = [rule.problem for rule in rules]

    def decode(value: Any, where: Where) -> Any:
        found = plain(value, where)
        for problem_of in problems:
            problem = problem_of(found)
            if problem is not None:
                raise _wrong(where, value, problem)
        return found

    return decode


def _of_type(kind: Any, inner: Sequence[Decoder]) -> Decoder:
    def check(value: Any, where: Where) -> None:
        if type(value) is not kind:  # a bool is no int here
            raise _wrong(where, value, _NAMES[kind])

    def scalar(value: Any, where: Where) -> Any:
        check(value, where)
        return value

    def of_list(value: Any, where: Where) -> Any:
        check(value, where)
        return [inner[0](each, (where, "{}[{}]", place)) for place, each in enumerate(value)]

    def of_dict(value: Any, where: Where) -> Any:
        check(value, where)
        return {
            inner[0](key, (where, "a key of {}", "")): inner[1](each, (where, "{}[{!r}]", key))
            for key, each in value.items()
        }

    return {list: of_list, dict: of_dict}.get(kind, scalar)


def _wrong(where: Where, value: object, expected: str) -> ValueError:
    text = repr(value)
    return ValueError(
        f"{_name(where) or 'it'} is {text if len(text) <= 80 else f'{text[:80]}...'}, expected {expected}"
    )
