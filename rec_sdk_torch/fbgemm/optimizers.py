"""Translation of FBGEMM's optimizers and their arguments to `TableOptimizer`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ..operators.record import is_representable
from ..tbe import TableOptimizer
from .enums import EnsembleModeDefinition, OptimType, WeightDecayMode, member, sparse_type
from .states import state_names

_TORCHREC = "torchrec.optim.optimizers"
_ROWWISE_CLASS = "torchrec.optim.rowwise_adagrad.RowWiseAdagrad"


_ROWWISE = ("eps", "weight_decay", "weight_decay_mode", "max_norm")
_ADAM = ("beta1", "beta2", "eps", "weight_decay")
_REGULARIZATIONS = ("counter_based_regularization", "cowclip_regularization", "global_weight_decay")
_OPTIMIZERS: dict[OptimType, tuple[str, tuple[str, ...]]] = {
    OptimType.EXACT_SGD: ("torch.optim.sgd.SGD", ()),
    OptimType.EXACT_ADAGRAD: ("torch.optim.adagrad.Adagrad", ("eps",)),
    OptimType.EXACT_ROWWISE_ADAGRAD: (_ROWWISE_CLASS, (*_ROWWISE, *_REGULARIZATIONS)),
    OptimType.EMAINPLACE_ROWWISE_ADAGRAD: (_ROWWISE_CLASS, (*_ROWWISE, "emainplace_mode")),
    OptimType.ENSEMBLE_ROWWISE_ADAGRAD: (_ROWWISE_CLASS, (*_ROWWISE, "ensemble_mode")),
    OptimType.ADAM: ("torch.optim.adamw.AdamW", _ADAM),
    OptimType.LAMB: (f"{_TORCHREC}.LAMB", _ADAM),
    OptimType.PARTIAL_ROWWISE_ADAM: (f"{_TORCHREC}.PartialRowWiseAdam", _ADAM),
    OptimType.PARTIAL_ROWWISE_LAMB: (f"{_TORCHREC}.PartialRowWiseLAMB", _ADAM),
    OptimType.NONE: ("rec_sdk_torch.optim.sparse_gradients.SparseGradients", ()),
    OptimType.LARS_SGD: (f"{_TORCHREC}.LarsSGD", ("eta", "momentum", "weight_decay")),
}
"""Supported optimizers: qualified class name, and the arguments of FBGEMM that it uses.

All except NONE use `learning_rate` too.
"""
HYPER_PARAMETERS = frozenset().union(*(reads for _, reads in _OPTIMIZERS.values()))
"""Arguments of FBGEMM's constructor that at least one optimizer uses."""

_UNSUPPORTED = {
    OptimType.SGD: "FBGEMM no longer supports it: use EXACT_SGD",
    OptimType.ROWWISE_ADAGRAD: "FBGEMM no longer supports it: use EXACT_ROWWISE_ADAGRAD",
}


def options_read_by(kind: OptimType) -> tuple[str, ...]:
    """Returns the arguments in `HYPER_PARAMETERS` that the optimizer uses."""
    return _OPTIMIZERS[kind][1]


def table_optimizer(kind: OptimType, arguments: Mapping[str, Any]) -> TableOptimizer:
    """Returns the optimizer that all tables use.

    Args:
        kind: FBGEMM's optimizer type.
        arguments: arguments of FBGEMM's constructor.

    Raises:
        NotImplementedError: the optimizer or a mode is not supported; the message gives the reason.
        TypeError, ValueError: an argument is invalid.
    """
    if kind not in _OPTIMIZERS:
        why = _UNSUPPORTED.get(kind, "FBGEMM's training module does not have it either")
        raise NotImplementedError(f"optimizer {kind.name}: {why}. There are {[known.name for known in _OPTIMIZERS]}")
    options: dict[str, Any] = {} if kind is OptimType.NONE else {"lr": arguments["learning_rate"]}
    cls_name, read = _OPTIMIZERS[kind]
    options |= {name: arguments[name] for name in ("eps", "eta", "momentum") if name in read}
    if "beta1" in read:
        options["betas"] = (arguments["beta1"], arguments["beta2"])
    if "ensemble_mode" in read:
        options["ensemble_mode"] = arguments["ensemble_mode"] or EnsembleModeDefinition()
    if "weight_decay_mode" in read:
        options |= _regularization(kind, arguments)
    elif "weight_decay" in read:
        options["weight_decay"] = arguments["weight_decay"]
    module, _, name = cls_name.rpartition(".")
    # Tables and saves identify an optimizer by its class name, so a class with that name is enough, without TorchRec.
    cls = type(name, (), {"__module__": module})
    optimizer = TableOptimizer.create(cls, options, kind.name)
    dtypes = _state_dtypes(arguments["optimizer_state_dtypes"] or {}, optimizer)
    return TableOptimizer.create(cls, options | {"state_dtypes": dtypes}, kind.name) if dtypes else optimizer


def gradient_bound(arguments: Mapping[str, Any]) -> float | None:
    """Returns the bound to which the output's gradient is clamped; None if gradients are not clipped.

    Raises:
        ValueError: `max_gradient` is not a positive number in float32's range.
    """
    bound = arguments["max_gradient"]
    if not arguments["gradient_clipping"]:
        return None
    if isinstance(bound, bool) or not isinstance(bound, (int, float)) or not bound > 0:
        raise ValueError(f"max_gradient is {bound!r}, must be a number above 0")
    if not math.isinf(bound) and not is_representable(torch.float32, bound):
        raise ValueError(f"max_gradient is {bound!r}, which is inf in float32, must be a number above 0 within float32")
    return float(bound)


def _state_dtypes(arguments: Mapping[str, Any], optimizer: TableOptimizer) -> dict[str, torch.dtype]:
    """Converts the keys of state dtypes from FBGEMM's state names to this package's state names."""
    names = {theirs: own for own, theirs in state_names(optimizer).items()}
    dtypes = {}
    for name, value in arguments.items():
        dtype = sparse_type(f"optimizer_state_dtypes[{name!r}]", value).as_dtype()
        if name in names:
            dtypes[names[name]] = dtype
        elif dtype is not torch.float32:
            has = ", ".join(names) or "none"
            raise ValueError(f"optimizer_state_dtypes: {optimizer.where} has no state {name}, it has {has}")
    return dtypes


def _regularization(kind: OptimType, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the optimizer's options for `weight_decay_mode` and `max_norm`."""
    mode = member(WeightDecayMode, "weight_decay_mode", arguments["weight_decay_mode"])
    definitions = {
        WeightDecayMode.COUNTER: "counter_based_regularization",
        WeightDecayMode.COWCLIP: "cowclip_regularization",
        WeightDecayMode.DECOUPLE_GLOBAL: "global_weight_decay",
    }
    for of_mode, name in definitions.items():
        if (mode is of_mode) != (arguments[name] is not None):
            raise ValueError(
                f"weight_decay_mode is {mode.name}, {name} is {arguments[name]!r}: only {of_mode.name} has it, and "
                "requires it"
            )
    if mode in definitions and kind is not OptimType.EXACT_ROWWISE_ADAGRAD:
        raise NotImplementedError(
            f"weight_decay_mode {mode.name} is only supported by EXACT_ROWWISE_ADAGRAD, not by {kind.name}"
        )
    options: dict[str, Any] = {"max_norm": arguments["max_norm"]} if arguments["max_norm"] else {}
    if mode is WeightDecayMode.NONE:
        return options
    options |= {"weight_decay": arguments["weight_decay"], "weight_decay_mode": mode.name.lower()}
    if mode in definitions:
        options[definitions[mode]] = arguments[definitions[mode]]
    return options
