"""Checks and conversions of numbers that users pass as options."""

from __future__ import annotations

import math
import operator
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt


def as_int(value: Any) -> int | None:
    """Converts an integer type of any library to an int; returns None for everything else, including bools."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def as_float(value: Any) -> float:
    """Converts a number to a float; returns infinity for an int beyond the range of floats."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def is_number(value: Any) -> bool:
    """Returns whether `value` is a number in the range of floats, or a tensor or array with one such number.

    Bools and text are not numbers.
    """
    if isinstance(value, (bool, str, bytes)):
        return False
    try:
        float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return False
    return True


def int_field(least: int, most: int = 2**63 - 1) -> dict[str, Any]:
    """Returns the metadata of a dataclass field that must be an int from `least` to `most`; see `check_fields`."""

    def check(value: object) -> int:
        number = as_int(value)
        if number is None:
            raise TypeError("expected an int")
        if not least <= number <= most:
            raise ValueError(f"must be at least {least} and {'below 2^63' if most == 2**63 - 1 else f'at most {most}'}")
        return number

    return {"check": check}


def float_field(least: float = -math.inf, most: float = math.inf, above: float = -math.inf) -> dict[str, Any]:
    """Returns the metadata of a dataclass field that must be finite, from `least` to `most`, and above `above`."""

    def check(value: Any) -> float:
        if not is_number(value) and as_int(value) is None:
            raise TypeError("expected a number")
        number = as_float(value)
        if not (least <= number <= most and number > above) or math.isinf(number):  # NaN fails the first comparison
            raise ValueError(f"must be finite and in {f'({above}' if above > least else f'[{least}'}, {most}]")
        return number

    return {"check": check}


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError("expected a bool")
    return value


BOOL_FIELD = {"check": _flag}
"""The metadata of a dataclass field that must be a bool."""


def check_fields(options: Any, *, optional: bool = False) -> None:
    """Checks the fields of a dataclass by their metadata, and converts their values to Python's int, float and bool.

    Args:
        options: an instance of the dataclass; it may be frozen.
        optional: whether a field may be None.

    Raises:
        TypeError, ValueError: a field has another type or is out of range; the message names class and field.
    """
    for each in fields(options):
        value = getattr(options, each.name)
        if "check" in each.metadata and not (optional and value is None):
            try:
                # object.__setattr__ works for frozen dataclasses too.
                object.__setattr__(options, each.name, each.metadata["check"](value))
            except (TypeError, ValueError) as error:
                raise type(error)(f"{type(options).__name__}: {each.name} is {value!r}, {error}") from None


def cast_in_range(
    name: str, values: npt.NDArray[Any], dtype: type[np.signedinteger[Any]], least: int | None
) -> npt.NDArray[Any]:
    """Converts integers to `dtype` after a check of their range.

    Args:
        name: the name of the values in the error message.
        values: integers of any shape.
        dtype: a signed integer type.
        least: the least allowed value; None: all values are allowed, and negative ones become -1.

    Raises:
        ValueError: a value is less than `least`, or more than `dtype` can represent.
    """
    most = int(np.iinfo(dtype).max)
    if values.size:
        lowest, highest = values.min().item(), values.max().item()
        wrong = highest if highest > most else lowest if least is not None and lowest < least else None
        if wrong is not None:
            allowed = f"{least}" if least is not None else "0, or a negative number for none,"
            raise ValueError(f"{name} has {wrong!r} among them, allowed are {allowed} to {most}")
        if least is None and lowest < -1:
            values = np.maximum(values, -1)
    return values.astype(dtype, copy=False)
