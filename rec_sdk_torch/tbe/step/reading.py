"""Lookups that do not train: no row changes, and only per-sample weights have gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ..cache.batch import Batch
from ..cache.device_cache import Group
from .outputs import split_apart


class ReadPooled(torch.autograd.Function):
    """The autograd function of a pooled lookup that does not train.

    Inputs: the groups, the batch, the output tensor, and each group's per-sample weights. The rows are saved for
    the backward pass, since training may change the tables' rows before it.
    """

    @staticmethod
    def forward(
        ctx: Any, groups: Sequence[Group], batch: Batch, out: torch.Tensor, *weights: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.groups, ctx.batch = groups, batch
        ctx.save_for_backward(*(group.read(batch, None, None) for group in groups))
        for group, weight in zip(groups, weights, strict=True):
            group.read(batch, weight, out)
        ctx.mark_dirty(out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad = grad.float().contiguous()
        pairs = zip(ctx.groups, ctx.saved_tensors, strict=True)
        return (None, None, None, *(group.read_weights_grad(ctx.batch, rows, grad) for group, rows in pairs))


def read_batch(
    groups: Sequence[Group],
    batch: Batch,
    weights: Sequence[torch.Tensor | None],
    lengths: Sequence[list[int]] | None,
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """Looks up a batch without training. The caller holds both locks.

    Args:
        groups: the groups of tables.
        batch: the lookups.
        weights: the per-sample weights of each group.
        lengths: number of lookups of each feature of each group; None: see `Step`.
        out: float32 memory for the pooled rows `[B, total]`; None: the tables are not pooled.
    """
    in_graph = torch.is_grad_enabled() and any(weight is not None and weight.requires_grad for weight in weights)
    if out is not None and in_graph:
        return (ReadPooled.apply(groups, batch, out, *weights),)
    read = [group.read(batch, weight, out) for group, weight in zip(groups, weights, strict=True)]
    if lengths is not None:
        pairs = zip(read, lengths, strict=True)
        return tuple(part for rows, group_lengths in pairs for part in split_apart(rows, group_lengths))
    return tuple(read) if out is None else (out,)
