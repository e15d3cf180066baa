"""Changes TorchRec's `state_dict_gather`: it gathers sharded tables of this package too.

Their state dicts have on each rank the rows and the ids that are at home there, and no `ShardedTensor`. TorchRec's
function copies such a tensor as if it were the whole one: an error where the sizes differ, else wrong rows.
"""

from __future__ import annotations

import functools
from typing import Any

from ._imports import after_import

_MODULES = ("torchrec.inference.state_dict_transform", "torchrec.inference.inference_legacy.state_dict_transform")


def install() -> None:
    """Wraps the function in both modules that have it: now where they are imported, else when they will be."""
    for name in _MODULES:
        after_import(name, _gather_by_ids)


def _gather_by_ids(module: Any) -> None:
    rest = module.state_dict_gather

    @functools.wraps(rest)
    def state_dict_gather(src: Any, dst: Any) -> None:
        from .distributed.gathering import gather

        gather(src, dst, rest)

    module.state_dict_gather = state_dict_gather
