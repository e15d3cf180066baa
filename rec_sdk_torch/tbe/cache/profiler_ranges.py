"""Names for the parts of a training step in `torch.profiler`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, cast

from torch.autograd import profiler

RANGE = "rec_sdk_torch::"
"""Prefix of the range names."""


class _NullContext:
    """A context manager that does nothing; faster than `contextlib.nullcontext`, whose methods are Python functions."""

    __enter__ = __exit__ = "".format  # a C function of any arguments; its false result suppresses no exception


_NOTHING = cast(AbstractContextManager[Any], _NullContext())


def profiled(part: str) -> AbstractContextManager[Any]:
    """Returns a profiler range for `part`, a part of a training step; an empty context if the profiler is off."""
    return profiler.record_function(RANGE + part) if profiler._is_profiler_enabled else _NOTHING
