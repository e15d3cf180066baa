"""A change of torch's `clip_grad_norm_` and `clip_grad_value_`: they say that they pass tables over.

A table's gradients are used up in the backward pass, so these functions would leave tables out without a word. The
functions stay the ones that programs have imported by name: only what they call is wrapped. Done when the first
collection is made, not on import.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils import clip_grad

from ..optim.handles import TableParameter
from ..optim.torchrec_hooks import CLIP_INSTEAD, warn_tables_not_clipped


def look_for_tables() -> None:
    """Lets torch's clipping raise where all of its parameters are tables, and warn once where some are."""
    functions: list[Any] = [clip_grad.clip_grad_norm_, clip_grad.clip_grad_value_]
    for function in functions:
        clip = getattr(function, "__wrapped__", None)  # what torch's decorator calls under no_grad
        if clip is None or hasattr(clip, "looks_for_tables"):
            continue
        for cell in function.__closure__ or ():  # none is it where other code has replaced the function
            if cell.cell_contents is clip:
                cell.cell_contents = function.__wrapped__ = _looking(clip)


def _looking(clip: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(clip)
    def looking(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(parameters, torch.Tensor):
            parameters = [parameters]
        given = list(parameters)
        tables = [parameter.table for parameter in given if isinstance(parameter, TableParameter)]
        if tables and len(tables) == len(given):
            raise ValueError(
                f"{clip.__name__} cannot clip the gradients of tables {tables}, which are used up in the backward "
                f"pass: {CLIP_INSTEAD} instead"
            )
        if tables:
            warn_tables_not_clipped()
        empty = not given and isinstance(parameters, types.GeneratorType)
        return clip(parameters if empty else given, *args, **kwargs)

    looking.looks_for_tables = True  # type: ignore[attr-defined]
    return looking
