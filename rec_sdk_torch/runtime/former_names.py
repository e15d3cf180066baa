"""Public names that have changed: the former ones work for one version, with a warning that says the new one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from .warn import DeprecatedWarning, warn

CLASSES = {"TableLife": "TableLifecycle"}
"""New name of each public class that had another one."""

Class = TypeVar("Class", bound=type)


def current_name(package: str, name: str) -> str:
    """Returns the name that `name` of a package has now, and warns if it has changed."""
    if name not in CLASSES:
        return name
    warn(f"{package}.{name} is now named {CLASSES[name]}", DeprecatedWarning)
    return CLASSES[name]


def accepts_former_name(former: str, field: str) -> Callable[[Class], Class]:
    """Returns a decorator of a dataclass whose field `field` had the name `former`: both can be given and read."""

    def decorate(cls: Class) -> Class:
        make = vars(cls)["__init__"]

        @functools.wraps(make)
        def init(self: Any, *values: Any, **fields: Any) -> None:
            if former in fields:
                warn(f"{cls.__name__}.{former} is now named {field}", DeprecatedWarning)
                fields[field] = fields.pop(former)
            make(self, *values, **fields)

        def read(self: Any) -> Any:
            """The field by its former name."""
            warn(f"{cls.__name__}.{former} is now named {field}", DeprecatedWarning)
            return getattr(self, field)

        for name, value in {"__init__": init, former: property(read)}.items():
            setattr(cls, name, value)
        return cls

    return decorate
