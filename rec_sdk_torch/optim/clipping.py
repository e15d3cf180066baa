"""A change of torch's `clip_grad_norm_` and `clip_grad_value_`: what they do to tables is said, and done over ranks.

With `update="backward"` a table's gradients are used up in the backward pass, so these functions would leave tables out
without a word. With `update="step"` they clip the gradients that wait; of a table whose rows are on several ranks the
norm is that of all of them. The functions stay the ones that programs have imported by name: only what they call is
wrapped. Done when the first collection is made, not on import. Where another library has put a function of its own in
place of torch's, the change reaches it through torch's, if it calls that; if it does not, a warning says so.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.utils import clip_grad, clip_grads_with_norm_, get_total_norm

from ..runtime.patching import callees, is_ours, mark
from ..runtime.warn import ConfigurationWarning, warn
from .handles import Ranks, TableParameter
from .norms import combined_norm
from .torchrec_hooks import CLIP_INSTEAD, warn_tables_not_clipped

_FUNCTIONS = ("clip_grad_norm_", "clip_grad_value_")
_wrapped_functions: dict[tuple[str, str], Any] = {}
"""The function that was found last under each name in each module of torch."""


def wrap_clipping() -> None:
    """Lets torch's clipping look for tables among its parameters; warns of functions in its place that cannot."""
    for module in (clip_grad, torch.nn.utils):
        for name in _FUNCTIONS:
            place, function = (module.__name__, name), getattr(module, name)
            if _wrapped_functions.get(place) is not function:
                _wrapped_functions[place] = function
                if not any(_wrap(each, name) for each in callees(function)):
                    _warn_not_wrapped(".".join(place), function)


def _wrap(function: Any, name: str) -> bool:
    """Wraps what a function of torch's calls under no_grad; False where this is not torch's function `name`."""
    if not isinstance(function, types.FunctionType) or function.__globals__ is not vars(clip_grad):
        return False
    if function.__name__ != name or not function.__closure__:
        return False
    (cell,) = function.__closure__
    if not is_ours(cell.cell_contents):
        cell.cell_contents = _with_tables(cell.cell_contents, name)
    return True


def _warn_not_wrapped(place: str, function: Any) -> None:
    known = f"{getattr(function, '__module__', None)}.{getattr(function, '__qualname__', type(function).__name__)}"
    warn(
        f"{place} is {known}, which does not call torch's function: it does not say which tables it leaves out, and "
        "where ranks share tables it clips on each rank by another norm, so that dense parameters grow apart. Let it "
        "call torch's function, or scale gradients by collection.grad_norm()",
        ConfigurationWarning,
    )


def _with_tables(clip: Callable[..., Any], name: str) -> Callable[..., Any]:
    @mark
    @functools.wraps(clip)
    def with_tables(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(parameters, torch.Tensor):
            parameters = [parameters]
        given = list(parameters)
        handles = [parameter for parameter in given if isinstance(parameter, TableParameter)]
        _check(name, handles, only_tables=len(handles) == len(given))
        if name == "clip_grad_norm_" and any(handle.ranks is not None for handle in handles if handle.updates_at_step):
            return _clip_across_ranks(given, *args, **kwargs)
        empty = not given and isinstance(parameters, types.GeneratorType)
        return clip(parameters if empty else given, *args, **kwargs)

    return with_tables


def _check(function: str, handles: Sequence[TableParameter], only_tables: bool) -> None:
    """Raises for tables that a function of torch's cannot clip, and warns once of those beside other parameters."""
    updated = [handle.table for handle in handles if not handle.updates_at_step]
    if updated and only_tables and len(updated) == len(handles):
        raise ValueError(
            f"{function} cannot clip the gradients of tables {updated}, which are used up in the backward "
            f"pass: {CLIP_INSTEAD} instead"
        )
    if updated:
        warn_tables_not_clipped()
    differing = [handle.table for handle in handles if handle.differs_by_rank and handle.updates_at_step]
    if differing and function == "clip_grad_norm_":
        raise ValueError(
            f"{function} cannot clip tables {differing} by a norm with dense parameters: DistributedDataParallel has "
            "these on all ranks, and each rank has other tables, so that dense parameters would grow apart. Clip the "
            "dense parameters alone, or shard the model with DistributedModelParallel"
        )


def _clip_across_ranks(
    given: Sequence[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """`clip_grad_norm_` where ranks have other rows of some tables. All of them must call it.

    The norms of ranks are put together in float64, in the order of the ranks: all of them have the same bits.
    """
    norm_type = float(norm_type)
    here: list[torch.Tensor] = []
    divided: dict[Ranks, list[torch.Tensor]] = {}
    for parameter in given:
        grad = parameter.grad
        if grad is not None:
            ranks = parameter.ranks if isinstance(parameter, TableParameter) else None
            (here if ranks is None else divided.setdefault(ranks, [])).append(grad)
    norms = [float(get_total_norm(here, norm_type, False, foreach))]
    for ranks, grads in divided.items():
        own = float(get_total_norm(grads, norm_type, False, foreach))
        norms += [norm for (norm,) in ranks.gather_numbers([own], "norms of gradients")]
    grads = [*here, *(grad for of_ranks in divided.values() for grad in of_ranks)]
    device = grads[0].device if grads else torch.device("cpu")
    total = torch.tensor(combined_norm(norms, norm_type), dtype=torch.float32, device=device)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients of all ranks is {float(total)}: it cannot clip them"
        )
    clip_grads_with_norm_(given, max_norm, total, foreach)
    return total
