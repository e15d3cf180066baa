"""Changes TorchRec's `state_dict_gather`: it gathers sharded tables of this package too.

Their state dicts have on each rank the rows and the ids that are at home there, and no `ShardedTensor`. TorchRec's
function copies such a tensor as if it were the whole one: an error where the sizes differ, else wrong rows.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

from ..runtime.imports import after_import

_MODULES = ("torchrec.inference.state_dict_transform", "torchrec.inference.inference_legacy.state_dict_transform")

_originals: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], None]] = {}
"""TorchRec's functions by the name of their module."""


def install() -> None:
    """Changes the function of both modules that have it: now where they are imported, else when they will be."""
    for name in _MODULES:
        after_import(name, _gather_by_ids)


def _gather_by_ids(module: Any) -> None:
    """Puts other code into the function, which scripts may have imported by its name before this package."""
    function = module.state_dict_gather
    if module.__name__ in _originals:
        return
    _originals[module.__name__] = types.FunctionType(function.__code__, function.__globals__, function.__name__)
    function.__code__ = _state_dict_gather.__code__


def _state_dict_gather(src: Any, dst: Any) -> None:
    from rec_sdk_torch.patches.gathering import gather_for

    gather_for(__name__, src, dst)  # the name of TorchRec's module, whose globals this code is given


def gather_for(module: str, src: Mapping[str, Any], dst: Mapping[str, Any]) -> None:
    """Gathers tables of this package by ids, and everything else by the function that TorchRec's `module` had."""
    from ..distributed.gathering import gather

    gather(src, dst, _originals[module])
