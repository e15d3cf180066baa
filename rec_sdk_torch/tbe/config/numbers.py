"""Numbers that users give as options."""

from __future__ import annotations

import operator


def as_int(value: object) -> int | None:
    """`value` as an int if it is an integer of any library; None for everything else, bools too."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def is_number(value: object) -> bool:
    """Whether `value` is a number, or a tensor or an array of one: no bool, no text."""
    if isinstance(value, (bool, str, bytes)):
        return False
    try:
        float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return False
    return True
