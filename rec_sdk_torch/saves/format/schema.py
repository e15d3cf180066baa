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
    try:
        found: _Record = _decoder(of_class)(value)
    except _WrongError as wrong:
        raise ValueError(wrong.text(where)) from None
    return found


class _WrongError(Exception):
    """A wrong value, on its way out of what it is in. Only then is its place made: a manifest has many values."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self._problem = problem
        self._places: list[tuple[str, object]] = []

    def inside(self, form: str, place: object) -> _WrongError:
        """The same, whose value is at a place in another one. `form`: for the name of that one, and the place."""
        self._places.append((form, place))
        return self

    def text(self, where: str) -> str:
        """The problem, with the name of the value, which is in one called `where`."""
        for form, place in reversed(self._places):
            where = form.format(where, place).lstrip(".")
        return f"{where or 'it'} {self._problem}"


Decoder = Callable[[Any], Any]
"""Converts a value of JSON to the annotated type."""


def _record_decoder(cls: Any) -> Decoder:
    kinds = typing.get_type_hints(cls, include_extras=True)
    unset = dataclasses.MISSING
    fields = [
        (each.name, _decoder(kinds[each.name]), each.default is unset and each.default_factory is unset)
        for each in dataclasses.fields(cls)
    ]

    def decode(value: Any) -> Any:
        if type(value) is not dict:
            raise _expected(value, _NAMES[dict])
        found, name = {}, ""
        try:
            for name, of_field, required in fields:
                if name in value:
                    found[name] = of_field(value[name])
                elif required:
                    break
            else:
                return cls(**found)
        except _WrongError as wrong:
            raise wrong.inside("{}.{}", name) from None
        raise _WrongError(f"has no {name!r}")

    return decode


@functools.cache
def _decoder(kind: Any) -> Decoder:
    """Makes the check of an annotation, once: a manifest has many values of each."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _with_rules(_decoder(arguments[0]), arguments[1:])
    if origin in (types.UnionType, typing.Union):
        some = _decoder(arguments[0])
        return lambda value: None if value is None else some(value)
    if kind is Any:
        return lambda value: value
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _record_decoder(kind)
    if origin is list:
        return _list_decoder(_decoder(arguments[0]))
    if origin is dict:
        return _dict_decoder(_decoder(arguments[0]), _decoder(arguments[1]))

    def scalar(value: Any) -> Any:
        if type(value) is not kind:  # a bool is no int here
            raise _expected(value, _NAMES[kind])
        return value

    return scalar


def _with_rules(plain: Decoder, rules: Sequence[Rule]) -> Decoder:
    problems = [rule.problem for rule in rules]

    def decode(value: Any) -> Any:
        found = plain(value)
        for problem_of in problems:
            problem = problem_of(found)
            if problem is not None:
                raise _expected(value, problem)
        return found

    return decode


def _list_decoder(inner: Decoder) -> Decoder:
    def decode(value: Any) -> Any:
        if type(value) is not list:
            raise _expected(value, _NAMES[list])
        found: list[Any] = []
        try:
            found.extend(map(inner, value))
        except _WrongError as wrong:
            raise wrong.inside("{}[{}]", len(found)) from None
        return found

    return decode


def _dict_decoder(of_key: Decoder, inner: Decoder) -> Decoder:
    def decode(value: Any) -> Any:
        if type(value) is not dict:
            raise _expected(value, _NAMES[dict])
        found, form, place = {}, "", None
        try:
            for key, each in value.items():
                form, place = "a key of {}", key
                name = of_key(key)
                form = "{}[{!r}]"
                found[name] = inner(each)
        except _WrongError as wrong:
            raise wrong.inside(form, place) from None
        return found

    return decode


def _expected(value: object, expected: str) -> _WrongError:
    text = repr(value)
    return _WrongError(f"is {text if len(text) <= 80 else f'{text[:80]}...'}, expected {expected}")
