"""`apply_optimizer_in_backward`: a fused update for embedding tables, and TorchRec's behavior for other parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from . import optimizer_assignments
from .handles import TableParameter


def apply_optimizer_in_backward(
    optimizer_class: type[torch.optim.Optimizer], params: Iterable[torch.nn.Parameter], optimizer_kwargs: dict[str, Any]
) -> None:
    """Makes the backward pass update `params` with `optimizer_class`.

    The tables of a collection get the fused update; other parameters are passed to
    `torch.distributed.optim._apply_optimizer_in_backward`. If a check fails, nothing is applied.

    Args:
        optimizer_class: a class that docs/optimizers.md lists, such as `torch.optim.Adagrad`, or an Accumulate class.
        params: parameters, such as `collection.parameters()`.
        optimizer_kwargs: keywords of the class. Also `gradient_clipping` and `max_gradient` (clamp the aggregated
            gradient elementwise), `state_dtypes` (data types by state name, see docs/optimizers.md), and for the
            Accumulate classes `use_accumulate` and `accumulate_step`.

    Raises:
        TypeError: the fused update does not support the class or a keyword, a value has the wrong type, or the class is
            not of the family of a table's `embedding_optimizer_cls`.
        ValueError: a value is out of range, or a keyword is not supported by the fused update.
        RuntimeError: a table has another optimizer.

    Example:
        >>> import torch
        >>> from rec_sdk_torch import EmbCacheEmbeddingBagCollection, EmbCacheEmbeddingBagConfig
        >>> from rec_sdk_torch import apply_optimizer_in_backward
        >>> config = EmbCacheEmbeddingBagConfig(name="t", num_embeddings=100, embedding_dim=4, feature_names=["item"])
        >>> tables = EmbCacheEmbeddingBagCollection([config], cache=10, device="cpu")
        >>> apply_optimizer_in_backward(torch.optim.Adam, tables.parameters(), {"lr": 0.1})
        >>> tables.fused_optimizer.param_groups[0]["lr"]
        0.1
    """
    parameters = _parameters(params)
    if not isinstance(optimizer_kwargs, Mapping):
        raise TypeError(f"optimizer_kwargs is {optimizer_kwargs!r}, expected a dict of the optimizer's keywords")
    handles = [param for param in parameters if isinstance(param, TableParameter)]
    kwargs = dict(optimizer_kwargs)
    for handle in handles:
        optimizer_assignments.check_assignment(handle, optimizer_class, kwargs, handle.assignments())
    dense = [param for param in parameters if not isinstance(param, TableParameter)]
    if dense:
        # Imported only when needed: the import makes torch compile eight optimizers, which takes a third of a second.
        from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward

        _apply_optimizer_in_backward(optimizer_class, dense, kwargs)
    for handle in handles:
        if not handle.assignments():
            optimizer_assignments.add_assignment(handle, optimizer_class, kwargs)


def _parameters(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the parameters as a list.

    Raises:
        TypeError: `params` is a single parameter, or an element is not a tensor.
    """
    if isinstance(params, torch.Tensor) or not isinstance(params, Iterable):
        raise TypeError(
            f"params is a {type(params).__name__}, expected several parameters, as module.parameters() gives"
        )
    parameters = list(params)
    for param in parameters:
        if not isinstance(param, torch.Tensor):
            raise TypeError(f"params has a {type(param).__name__}, expected parameters, as module.parameters() gives")
    return parameters
