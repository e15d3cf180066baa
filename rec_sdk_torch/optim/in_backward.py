"""`apply_optimizer_in_backward` for embedding tables, and for everything else as TorchRec does it."""

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

    A collection's tables get the fused update; other parameters get what
    `torch.distributed.optim._apply_optimizer_in_backward` does. Nothing is applied if a check fails.

    Args:
        optimizer_class: one of those in the table of docs/optimizers.md, such as `torch.optim.Adagrad`, or an
            Accumulate class.
        params: parameters, such as `collection.parameters()`.
        optimizer_kwargs: keywords of the class, plus `gradient_clipping` and `max_gradient` (clamp the
            aggregated gradient elementwise), `state_dtypes` (data types by name of a state, see
            docs/optimizers.md); `use_accumulate` and `accumulate_step` for the Accumulate classes.

    Raises:
        TypeError: a class or keyword that the fused update does not know, a value of the wrong type, or a
            class that is not of the family of a table's `embedding_optimizer_cls`.
        ValueError: a value out of range, or a keyword that the fused update cannot honour.
        RuntimeError: a table that has another optimizer.

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
    every = _parameters(params)
    if not isinstance(optimizer_kwargs, Mapping):
        raise TypeError(f"optimizer_kwargs is {optimizer_kwargs!r}, expected a dict of the optimizer's keywords")
    handles = [param for param in every if isinstance(param, TableParameter)]
    kwargs = dict(optimizer_kwargs)
    for handle in handles:
        optimizer_assignments.check(handle, optimizer_class, kwargs, handle.assignments())
    others = [param for param in every if not isinstance(param, TableParameter)]
    if others:
        # imported here: torch compiles eight optimizers as it imports this, a third of a second
        from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward

        _apply_optimizer_in_backward(optimizer_class, others, kwargs)
    for handle in handles:
        if not handle.assignments():
            optimizer_assignments.record(handle, optimizer_class, kwargs)


def _parameters(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the parameters as a list.

    Raises:
        TypeError: one parameter alone, or what is no parameter.
    """
    if isinstance(params, torch.Tensor) or not isinstance(params, Iterable):
        raise TypeError(
            f"params is a {type(params).__name__}, expected several parameters, as module.parameters() gives"
        )
    every = list(params)
    for param in every:
        if not isinstance(param, torch.Tensor):
            raise TypeError(f"params has a {type(param).__name__}, expected parameters, as module.parameters() gives")
    return every
