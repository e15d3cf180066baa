"""Functions that this package puts in place of those of other packages, which other libraries may replace too."""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_ours: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()
"""Known by identity: `functools.wraps` of another library copies attributes and `__wrapped__`."""

_MOST_SEARCHED = 1000


def mark(function: F) -> F:
    """Notes that `function` is this package's, and returns it."""
    _ours.add(function)
    return function


def is_ours(function: Any) -> bool:
    """Whether `function` itself was marked; a wrapper around a marked one was not."""
    return isinstance(function, types.FunctionType) and function in _ours


def callees(function: Any) -> Iterator[Any]:
    """Yields `function` and, breadth first, what it may call.

    The search follows wrapped functions, closures, defaults, globals that the code names, and attributes of objects. It
    ends after 1,000 objects.
    """
    queue, known = [function], {id(function)}
    for place in range(_MOST_SEARCHED):
        if place == len(queue):
            return
        yield queue[place]
        for each in _references(queue[place]):
            if id(each) not in known and (callable(each) or hasattr(each, "__dict__")):
                known.add(id(each))
                queue.append(each)


def _references(value: Any) -> list[Any]:
    """Returns what a function, a method or a callable object refers to; nothing for a class or a module."""
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return [*vars(value).values(), *cells, *defaults, *_globals_of(value)]
    if isinstance(value, type | types.ModuleType) or not hasattr(value, "__dict__"):
        return []
    return [*vars(value).values(), inspect.getattr_static(type(value), "__call__", None)]


def _globals_of(function: types.FunctionType) -> list[Any]:
    """Returns the globals that the code of `function` names, and attributes of modules among them that it names."""
    names = function.__code__.co_names
    found = [function.__globals__[name] for name in names if name in function.__globals__]
    for each in found:  # which grows by the modules in modules
        if isinstance(each, types.ModuleType):
            own = vars(each)
            found += [own[name] for name in names if name in own and not any(own[name] is other for other in found)]
    return found


def _is_filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
