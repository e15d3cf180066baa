"""A patch of torch's `clip_grad_norm_` and `clip_grad_value_` that handles tables among the parameters.

With `update="backward"` a table's gradients are used up in the backward pass; torch's functions would silently skip the
table, so the patch raises an error or warns. With `update="step"` the functions clip the pending gradients; the norm of
a sharded table covers its rows on all ranks.

The patch is made when the first collection is created. It wraps what the functions call, because programs may have
imported the functions by name. If another library has replaced torch's functions, the patch still works if the
replacements call torch's functions; otherwise a warning is issued.
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
"""The function that the last `wrap_clipping` found, by module of torch and function name."""


def wrap_clipping() -> None:
    """Makes torch's clipping functions handle tables; warns of replacements that do not call torch's functions."""
    for module in (clip_grad, torch.nn.utils):
        for name in _FUNCTIONS:
            location, function = (module.__name__, name), getattr(module, name)
            if _wrapped_functions.get(location) is not function:
                _wrapped_functions[location] = function
                if not any(_wrap_function(each, name) for each in callees(function)):
                    _warn_not_wrapped(".".join(location), function)


def _wrap_function(function: Any, name: str) -> bool:
    """Wraps the body of torch's function, which runs under no_grad; returns False if `function` is not torch's."""
    if not isinstance(function, types.FunctionType) or function.__globals__ is not vars(clip_grad):
        return False
    if function.__name__ != name or not function.__closure__:
        return False
    (cell,) = function.__closure__
    if not is_ours(cell.cell_contents):
        cell.cell_contents = _handle_tables(cell.cell_contents, name)
    return True


def _warn_not_wrapped(location: str, function: Any) -> None:
    known = f"{getattr(function, '__module__', None)}.{getattr(function, '__qualname__', type(function).__name__)}"
    warn(
        f"{location} is {known}, which does not call torch's function: it skips tables silently, and where "
        "ranks share tables it clips by a different norm on each rank, so that dense parameters diverge. Let it "
        "call torch's function, or scale gradients by collection.grad_norm()",
        ConfigurationWarning,
    )


def _handle_tables(clip: Callable[..., Any], name: str) -> Callable[..., Any]:
    @mark
    @functools.wraps(clip)
    def handle_tables(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(parameters, torch.Tensor):
            parameters = [parameters]
        parameters_list = list(parameters)
        handles = [parameter for parameter in parameters_list if isinstance(parameter, TableParameter)]
        _check_tables(name, handles, only_tables=len(handles) == len(parameters_list))
        if name == "clip_grad_norm_" and any(handle.ranks is not None for handle in handles if handle.updates_at_step):
            return _clip_across_ranks(parameters_list, *args, **kwargs)
        empty = not parameters_list and isinstance(parameters, types.GeneratorType)
        return clip(parameters if empty else parameters_list, *args, **kwargs)

    return handle_tables


def _check_tables(function: str, handles: Sequence[TableParameter], only_tables: bool) -> None:
    """Checks for tables that cannot be clipped: warns once if there are any, raises if there are no other parameters.

    Raises:
        ValueError: all parameters are such tables, or a norm would include tables that differ between ranks.
    """
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
            "these on all ranks, and each rank has other tables, so that dense parameters would diverge. Clip the "
            "dense parameters alone, or shard the model with DistributedModelParallel"
        )


def _clip_across_ranks(
    parameters_list: Sequence[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Clips like `clip_grad_norm_`, but the norm includes sharded tables' rows on all ranks (collective).

    The ranks' norms are combined in float64 in rank order, so the result is bit-identical on all ranks.
    """
    norm_type = float(norm_type)
    local: list[torch.Tensor] = []
    divided: dict[Ranks, list[torch.Tensor]] = {}
    for parameter in parameters_list:
        grad = parameter.grad
        if grad is not None:
            ranks = parameter.ranks if isinstance(parameter, TableParameter) else None
            (local if ranks is None else divided.setdefault(ranks, [])).append(grad)
    norms = [float(get_total_norm(local, norm_type, False, foreach))]
    for ranks, grads in divided.items():
        own = float(get_total_norm(grads, norm_type, False, foreach))
        norms += [norm for (norm,) in ranks.gather_numbers([own], "norms of gradients")]
    grads = [*local, *(grad for of_ranks in divided.values() for grad in of_ranks)]
    device = grads[0].device if grads else torch.device("cpu")
    total = torch.tensor(combined_norm(norms, norm_type), dtype=torch.float32, device=device)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients of all ranks is {float(total)}: it cannot clip them"
        )
    clip_grads_with_norm_(parameters_list, max_norm, total, foreach)
    return total
