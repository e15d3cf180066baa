"""Aliases of renamed public names. A former name works for one more version, with a warning that gives the new one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from .warn import DeprecatedWarning, warn

CLASSES = {"TableLife": "TableLifecycle"}
"""The present name of each renamed public class, by its former name."""

Class = TypeVar("Class", bound=type)


def current_name(package: str, name: str) -> str:
    """Returns the present name for `name`, and warns if `name` is a former one."""
    if name not in CLASSES:
        return name
    warn(f"{package}.{name} is now named {CLASSES[name]}", DeprecatedWarning)
    return CLASSES[name]


def accepts_former_members(**members: str) -> Callable[[Class], Class]:
    """Returns a decorator of classes that adds former names of attributes and methods; `members`: former="present"."""

    def decorate(cls: Class) -> Class:
        def reader(former: str, present: str) -> property:
            def read(self: Any) -> Any:
                """Returns the member that is read by its former name, with a warning."""
                warn(f"{cls.__name__}.{former} is now named {present}", DeprecatedWarning)
                return getattr(self, present)

            return property(read)

        for former, present in members.items():
            setattr(cls, former, reader(former, present))
        return cls

    return decorate


def accepts_former_name(former: str, field: str) -> Callable[[Class], Class]:
    """Returns a decorator of dataclasses that adds `former`, the former name of `field`, as argument and attribute."""

    def decorate(cls: Class) -> Class:
        make = vars(cls)["__init__"]

        @functools.wraps(make)
        def init(self: Any, *values: Any, **fields: Any) -> None:
            if former in fields:
                warn(f"{cls.__name__}.{former} is now named {field}", DeprecatedWarning)
                fields[field] = fields.pop(former)
            make(self, *values, **fields)

        def read(self: Any) -> Any:
            """Returns the field that is read by its former name, with a warning."""
            warn(f"{cls.__name__}.{former} is now named {field}", DeprecatedWarning)
            return getattr(self, field)

        for name, value in {"__init__": init, former: property(read)}.items():
            setattr(cls, name, value)
        return cls

    return decorate
