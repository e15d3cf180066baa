"""dynamicemb's optimizers: the equivalent optimizer classes of torch and TorchRec, and their arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

DEFAULTS: dict[str, Any] = {
    "optimizer": EmbOptimType.SGD,
    "learning_rate": 0.01,
    "eps": 1.0e-8,
    "initial_accumulator_value": 0.0,
    "beta1": 0.9,
    "beta2": 0.999,
    "weight_decay": 0.0,
    "gradient_clipping": False,
    "max_gradient": 1.0,
    "max_norm": 0.0,
}
"""Default values of dynamicemb's optimizer arguments, for the arguments that updates here use."""

_READS: dict[EmbOptimType, tuple[type[torch.optim.Optimizer], tuple[str, ...], str]] = {
    EmbOptimType.SGD: (torch.optim.SGD, (), "sgd"),
    EmbOptimType.EXACT_SGD: (torch.optim.SGD, (), "sgd"),
    EmbOptimType.ADAM: (torch.optim.AdamW, ("beta1", "beta2", "eps", "weight_decay"), "adam"),
    EmbOptimType.EXACT_ADAGRAD: (torch.optim.Adagrad, ("eps", "initial_accumulator_value"), "exact_adagrad"),
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: (
        RowWiseAdagrad,
        ("eps", "initial_accumulator_value"),
        "exact_row_wise_adagrad",
    ),
}
"""Each optimizer's class, the arguments that it uses besides the learning rate, and its name in dumps."""

_IRRELEVANT = {
    "prefetch_pipeline",
    "enforce_hbm",
    "bounds_check_mode",
    "stochastic_rounding",
    "momentum",
    "eta",
    "cache_precision",
    "use_index_dedup",
}
"""Accepted arguments without effect: no optimizer above uses them, or the tables always behave as they request."""

_FLOAT32 = (None, torch.float32, SparseType.FP32)


def check_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `DEFAULTS` updated with `arguments`; `lr` is accepted as another name of `learning_rate`.

    Raises:
        NotImplementedError: an argument or a value is not supported.
        ValueError: `lr` and `learning_rate` differ.
    """
    options = dict(DEFAULTS)
    rate = arguments.get("lr")
    if rate is not None and arguments.get("learning_rate", rate) != rate:
        raise ValueError(
            f"lr is {rate} and learning_rate is {arguments['learning_rate']}, which mean the same: give one"
        )
    for key, value in arguments.items():
        name = "learning_rate" if key == "lr" and value is not None else key
        if name in DEFAULTS:
            options[name] = value
        elif (name == "output_dtype" and value in _FLOAT32) or (
            name == "weight_decay_mode" and getattr(value, "name", None) == "NONE"
        ):
            continue
        elif value is not None and name not in _IRRELEVANT:
            raise NotImplementedError(f"{name} is {value!r}, which is not supported: leave it out")
    kind = options["optimizer"]
    if kind not in _READS:
        raise NotImplementedError(f"optimizer is {kind}, allowed are {[each.name for each in _READS]}")
    if options["max_norm"]:
        raise NotImplementedError(f"max_norm is {options['max_norm']}, which is not supported: leave it out")
    if options["weight_decay"] and "weight_decay" not in _READS[kind][1]:
        raise NotImplementedError(f"weight_decay is {options['weight_decay']}: only ADAM supports it")
    return options


def torch_optimizer(options: Mapping[str, Any]) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Returns the optimizer class and its keywords for `apply_optimizer_in_backward`.

    `options` is the result of `check_arguments`.
    """
    cls, reads, _ = _READS[options["optimizer"]]
    keywords: dict[str, Any] = {"lr": options["learning_rate"]}
    keywords |= {name: options[name] for name in reads if not name.startswith("beta")}
    if "beta1" in reads:
        keywords["betas"] = (options["beta1"], options["beta2"])
    if options["gradient_clipping"]:
        keywords |= {"gradient_clipping": True, "max_gradient": options["max_gradient"]}
    return cls, keywords


def name_in_dumps(cls: type) -> str | None:
    """Returns the name of an optimizer class in dumps; None if dynamicemb does not have the optimizer."""
    names = {each.__name__: name for each, _, name in _READS.values()} | {"Adam": "adam"}
    return names.get(cls.__name__)
