"""Parts of a step as `torch.profiler` shows them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, cast

from torch.autograd import profiler

RANGE = "rec_sdk_torch::"
"""Begins the names of the ranges."""


class _Nothing:
    """A context that does nothing, and makes no call of Python, as `contextlib.nullcontext` does."""

    __enter__ = __exit__ = "".format  # of C; it takes any arguments, and "" lets an exception pass


_NOTHING = cast(AbstractContextManager[Any], _Nothing())


def profiled(part: str) -> AbstractContextManager[Any]:
    """A range of the profiler if it runs."""
    return profiler.record_function(RANGE + part) if profiler._is_profiler_enabled else _NOTHING
