"""Checks JSON values against the annotations of a dataclass, and converts the values to an instance of it.

An annotation is int, float, str, bool, Any, a dataclass, `X | None`, `list[X]`, `dict[str, X]`, or one of these with
rules, such as `Annotated[int, InRange(0, 9)]`.
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

_Dataclass = TypeVar("_Dataclass")
_NAMES = {int: "an int", float: "a float", str: "a string", bool: "true or false", list: "a list", dict: "an object"}
MAX_INT64 = 2**63 - 1


class Rule(Protocol):
    """A condition that a value must meet in addition to its type."""

    def problem(self, value: Any) -> str | None:
        """Returns None if `value` meets the rule, else a description of the values that do."""


@dataclass(frozen=True)
class InRange:
    """Rule for a number: from `minimum` to `maximum`, both included."""

    minimum: int
    maximum: int = MAX_INT64

    def problem(self, value: int) -> str | None:
        return None if self.minimum <= value <= self.maximum else f"a number from {self.minimum} to {self.maximum}"


_pattern = functools.cache(re.compile)


@dataclass(frozen=True)
class Matches:
    """Rule for a string: it fully matches the regular expression `pattern`. Errors use `description`."""

    pattern: str
    description: str

    def problem(self, value: str) -> str | None:
        return None if _pattern(self.pattern).fullmatch(value) else self.description


@dataclass(frozen=True)
class OneOf:
    """Rule for a string: it is one of `values`."""

    values: tuple[str, ...]

    def problem(self, value: str) -> str | None:
        return None if value in self.values else f"one of {list(self.values)}"


@dataclass(frozen=True)
class ScalarOrList:
    """Rule for a value of any type: it is a scalar or a list of scalars, and numbers are finite."""

    def problem(self, value: Any) -> str | None:
        valid = all(map(_is_scalar, value if isinstance(value, list) else [value]))
        return None if valid else "a finite number, a string, true, false, null, or a list of these"


def _is_scalar(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, str) or (isinstance(value, int) and abs(value) <= MAX_INT64)


def decode(cls: type[_Dataclass], value: object, where: str) -> _Dataclass:
    """Converts a JSON object to the dataclass `cls`. Unknown fields are ignored.

    Args:
        cls: a dataclass, or another annotation.
        value: the parsed JSON.
        where: name of the value in errors.

    Raises:
        ValueError: a field is missing, has another type, or violates a rule.
    """
    hashable_class: Any = cls  # mypy does not know that type[_Dataclass] is hashable, as functools.cache requires
    try:
        decoded: _Dataclass = _decoder(hashable_class)(value)
    except _DecodeError as error:
        raise ValueError(error.text(where)) from None
    return decoded


class _DecodeError(Exception):
    """Exception for a wrong value. Each enclosing value adds itself to the position of the wrong value.

    The text is built only when an error is reported, because a manifest has many values.
    """

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self._problem = problem
        self._path: list[tuple[str, object]] = []

    def inside(self, form: str, position: object) -> _DecodeError:
        """Adds an enclosing value to the front of the position.

        Args:
            form: format string for the name of the enclosing value and `position`.
            position: field, index or key of the wrong value.
        """
        self._path.append((form, position))
        return self

    def text(self, where: str) -> str:
        """Returns the error message: the wrong value's position and the problem. `where` names the outermost value."""
        for form, position in reversed(self._path):
            where = form.format(where, position).lstrip(".")
        return f"{where or 'it'} {self._problem}"


Decoder = Callable[[Any], Any]
"""Function that converts a JSON value to the annotated type."""


def _dataclass_decoder(cls: Any) -> Decoder:
    annotations = typing.get_type_hints(cls, include_extras=True)
    unset = dataclasses.MISSING
    fields = [
        (
            each.name,
            *_valid_scalars(annotations[each.name]),
            _decoder(annotations[each.name]),
            each.default is unset and each.default_factory is unset,
        )
        for each in dataclasses.fields(cls)
    ]

    def decode(value: Any) -> Any:
        if type(value) is not dict:
            raise _expected(value, _NAMES[dict])
        decoded, name = {}, ""
        try:
            for name, valid_type, least, most, decode_field, required in fields:
                if name in value:
                    item = value[name]
                    kind = type(item)
                    is_valid = kind is valid_type or (kind is int and least <= item <= most)
                    decoded[name] = item if is_valid else decode_field(item)
                elif required:
                    break
            else:
                return cls(**decoded)
        except _DecodeError as error:
            raise error.inside("{}.{}", name) from None
        raise _DecodeError(f"has no {name!r}")

    return decode


def _valid_scalars(annotation: Any) -> tuple[type | None, int, int]:
    """Returns which scalars are valid for an annotation without a call of its decoder; a manifest has many scalars.

    Returns:
        The type of valid scalars, or None; and the smallest and the largest valid int (1 and 0 if there are none).
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        return _valid_scalars(arguments[0])
    if origin is typing.Annotated and arguments[0] is int and len(arguments) == 2 and isinstance(arguments[1], InRange):
        return None, arguments[1].minimum, arguments[1].maximum
    return (annotation if annotation in (int, float, str, bool) else None), 1, 0


@functools.cache
def _decoder(annotation: Any) -> Decoder:
    """Returns the decoder of an annotation. Decoders are cached, because a manifest has many values per annotation."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _with_rules(_decoder(arguments[0]), arguments[1:])
    if origin in (types.UnionType, typing.Union):
        decode_value = _decoder(arguments[0])
        return lambda value: None if value is None else decode_value(value)
    if annotation is Any:
        return lambda value: value
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return _dataclass_decoder(annotation)
    if origin is list:
        return _list_decoder(_decoder(arguments[0]))
    if origin is dict:
        return _dict_decoder(arguments[0], arguments[1])

    def scalar(value: Any) -> Any:
        if type(value) is not annotation:  # types are compared exactly, because isinstance would accept True as an int
            raise _expected(value, _NAMES[annotation])
        return value

    return scalar


def _with_rules(decode_value: Decoder, rules: Sequence[Rule]) -> Decoder:
    problems = [rule.problem for rule in rules]

    def decode(value: Any) -> Any:
        decoded = decode_value(value)
        for problem_of in problems:
            problem = problem_of(decoded)
            if problem is not None:
                raise _expected(value, problem)
        return decoded

    return decode


def _list_decoder(inner: Decoder) -> Decoder:
    def decode(value: Any) -> Any:
        if type(value) is not list:
            raise _expected(value, _NAMES[list])
        decoded: list[Any] = []
        try:
            decoded.extend(map(inner, value))
        except _DecodeError as error:
            raise error.inside("{}[{}]", len(decoded)) from None
        return decoded

    return decode


def _dict_decoder(key_annotation: Any, annotation: Any) -> Decoder:
    decode_key, inner = _decoder(key_annotation), _decoder(annotation)
    key_type, _, _ = _valid_scalars(key_annotation)
    valid_type, least, most = _valid_scalars(annotation)

    def decode(value: Any) -> Any:
        if type(value) is not dict:
            raise _expected(value, _NAMES[dict])
        decoded, form, position = {}, "", None
        try:
            for key, each in value.items():
                form, position = "a key of {}", key
                name = key if type(key) is key_type else decode_key(key)
                form = "{}[{!r}]"
                kind = type(each)
                is_valid = kind is valid_type or (kind is int and least <= each <= most)
                decoded[name] = each if is_valid else inner(each)
        except _DecodeError as error:
            raise error.inside(form, position) from None
        return decoded

    return decode


def _expected(value: object, expected: str) -> _DecodeError:
    text = repr(value)
    return _DecodeError(f"is {text if len(text) <= 80 else f'{text[:80]}...'}, expected {expected}")
