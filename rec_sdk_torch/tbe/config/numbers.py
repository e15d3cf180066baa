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
