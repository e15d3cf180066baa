"""Recognizes this package's replacements for functions of other packages, even if another library has wrapped them."""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_ours: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()
"""The marked functions. They have no attribute as a mark, since `functools.wraps` in another library would copy it."""

_MOST_SEARCHED = 1000


def mark(function: F) -> F:
    """Marks `function` as a function of this package and returns it."""
    _ours.add(function)
    return function


def is_ours(function: Any) -> bool:
    """Returns whether `function` itself was marked; False for another library's wrapper around it."""
    return isinstance(function, types.FunctionType) and function in _ours


def callees(function: Any) -> Iterator[Any]:
    """Yields `function` and the objects that it may call, breadth first.

    The search follows wrapped functions, closures, default arguments, globals that the code names, and attributes of
    objects. It ends after 1,000 objects.
    """
    queue, visited = [function], {id(function)}
    for index in range(_MOST_SEARCHED):
        if index == len(queue):
            return
        yield queue[index]
        for each in _references(queue[index]):
            if id(each) not in visited and (callable(each) or hasattr(each, "__dict__")):
                visited.add(id(each))
                queue.append(each)


def _references(value: Any) -> list[Any]:
    """Returns the objects that a function, a method or a callable object refers to; none for a class or a module."""
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return [*vars(value).values(), *cells, *defaults, *_named_objects(value)]
    if isinstance(value, type | types.ModuleType) or not hasattr(value, "__dict__"):
        return []
    return [*vars(value).values(), inspect.getattr_static(type(value), "__call__", None)]


def _named_objects(function: types.FunctionType) -> list[Any]:
    """Returns globals that the code of `function` names and, for globals that are modules, attributes it names."""
    names = function.__code__.co_names
    values = [function.__globals__[name] for name in names if name in function.__globals__]
    for each in values:  # the list grows during the loop, so that modules inside modules are searched too
        if isinstance(each, types.ModuleType):
            own = vars(each)
            values += [own[name] for name in names if name in own and not any(own[name] is other for other in values)]
    return values


def _is_filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
