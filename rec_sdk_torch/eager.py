"""What torch.compile leaves to Python."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch._compile import _disable_dynamo

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


def eager(function: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
    """`function`, which is one graph break under torch.compile and costs two calls elsewhere.

    `torch.compiler.disable` alone makes a dozen calls each time, and imports the compiler at the first.
    """
    disabled = _disable_dynamo(function)

    @functools.wraps(function)
    def called(*args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        if torch.compiler.is_dynamo_compiling():
            return disabled(*args, **kwargs)
        return function(*args, **kwargs)

    return called
