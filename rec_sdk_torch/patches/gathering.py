"""Patches TorchRec's `state_dict_gather`, so that it also gathers sharded tables of this package.

On each rank, the state dict of such a table holds the rows and ids that the rank owns, in plain tensors instead of a
`ShardedTensor`. TorchRec's function copies such a tensor as if it were the whole table: it raises an error if the sizes
differ, and copies wrong rows otherwise.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

from ..runtime.imports import after_import

_MODULES = ("torchrec.inference.state_dict_transform", "torchrec.inference.inference_legacy.state_dict_transform")

_originals: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], None]] = {}
"""TorchRec's original functions, by the name of their module."""


def install() -> None:
    """Patches the function in both modules that define it, now or as soon as they are imported."""
    for name in _MODULES:
        after_import(name, _gather_by_ids)


def _gather_by_ids(module: Any) -> None:
    """Replaces the code of the function, since scripts may have imported the function itself before this package."""
    function = module.state_dict_gather
    if module.__name__ in _originals:
        return
    _originals[module.__name__] = types.FunctionType(function.__code__, function.__globals__, function.__name__)
    function.__code__ = _state_dict_gather.__code__


def _state_dict_gather(src: Any, dst: Any) -> None:
    from rec_sdk_torch.patches.gathering import gather_for

    gather_for(__name__, src, dst)  # with the globals of TorchRec's module, `__name__` is its name


def gather_for(module: str, src: Mapping[str, Any], dst: Mapping[str, Any]) -> None:
    """Gathers tables of this package by ids, and everything else with the original function of TorchRec's `module`."""
    from ..distributed.gathering import gather

    gather(src, dst, _originals[module])
