"""Numbers that users give as options."""

from __future__ import annotations

import math
import operator
from typing import SupportsFloat


def as_int(value: object) -> int | None:
    """`value` as an int if it is an integer of any library; None for everything else, bools too."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def as_float(value: SupportsFloat) -> float:
    """Returns a number as a float, which is infinite for an int that no float can hold."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf  # type: ignore[operator]


def is_number(value: object) -> bool:
    """Whether `value` is a number that a float can hold, or a tensor or an array of one: no bool, no text."""
    if isinstance(value, (bool, str, bytes)):
        return False
    try:
        float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return False
    return True
