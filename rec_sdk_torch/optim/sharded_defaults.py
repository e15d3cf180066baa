"""Optimizers of TorchRec's sharded tables, which are FBGEMM's: their defaults, and Adam's decoupled weight decay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..formulas import class_name

_DEFAULTS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 1e-2},
    "Adagrad": {"lr": 1e-2, "eps": 1e-8},
    "RowWiseAdagrad": {"lr": 1e-2, "eps": 1e-8},
    "Adam": {"lr": 1e-2},
}
"""FBGEMM's defaults that are not those of the class, by its name."""


def _is_torchs(cls: type) -> bool:
    """Whether TorchRec makes one of FBGEMM's optimizers of the class."""
    return class_name(cls).startswith(("torch.optim.", "torchrec.optim.")) and cls.__name__ in _DEFAULTS


def decouples(cls: type, keywords: Mapping[str, Any], sharded: bool) -> bool:
    """Whether it is Adam with weight decay of a sharded table, which FBGEMM decouples as AdamW does.

    torch adds it to the gradient, and so does a table that is not sharded.
    """
    return sharded and cls.__name__ == "Adam" and _is_torchs(cls) and bool(keywords.get("weight_decay"))


def as_updated(cls: type, keywords: Mapping[str, Any], sharded: bool) -> tuple[type, dict[str, Any]]:
    """The class whose formula the update has, and the keywords, with FBGEMM's defaults if the table is sharded."""
    defaults = _DEFAULTS[cls.__name__] if sharded and _is_torchs(cls) else {}
    options = {**defaults, **keywords}
    if not decouples(cls, keywords, sharded):
        return cls, options
    options.pop("decoupled_weight_decay", None)  # torch's Adam has it, as False
    return torch.optim.AdamW, options
