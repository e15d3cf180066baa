"""Parts of a step as `torch.profiler` shows them."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

from torch.autograd import profiler

RANGE = "rec_sdk_torch::"
"""Begins the names of the ranges."""

_NOTHING = contextlib.nullcontext()


def profiled(part: str) -> AbstractContextManager[Any]:
    """A range of the profiler if it runs."""
    return profiler.record_function(RANGE + part) if profiler._is_profiler_enabled else _NOTHING
