"""Output distribution: turns received rows into a collection's outputs, and sums the gradients of each row."""

from __future__ import annotations

from typing import Any

import torch
from torchrec.distributed.comm_ops import get_gradient_division

from ..operators.calls import ops, update_rows
from ..tbe import split_apart
from .dedup import Segments


def _sum_gradients(
    grad: torch.Tensor, segments: Segments, update_arguments: tuple[torch.Tensor | None, ...]
) -> torch.Tensor:
    """Sums the gradients of each received row, and averages over ranks as TorchRec does; returns float32 `[U, D]`.

    The sums are an update of zeros by SGD with a negative learning rate.
    """
    rows, constants = segments.rows, segments.constants
    dim, ranks = constants.dim, constants.world_size if get_gradient_division() else 1
    sums = grad.new_zeros((rows, (dim + 3) // 4 * 4))  # records are multiples of 16 bytes
    if rows:
        exact = ranks & (ranks - 1) == 0  # then a product has the bits of the division
        counted = torch.tensor([0, rows], dtype=torch.int32, device="cpu").to(grad.device)
        every = torch.arange(rows, dtype=torch.int32, device=grad.device)
        *lookups, hot = update_arguments
        coefficients = constants.coefficients[ranks if exact else 1]
        update_rows(
            sums.view(torch.uint8),
            [grad],
            every,
            counted,
            *lookups,
            coefficients,
            "sgd",
            dim,
            torch.float32,
            None,
            None,
            [],
            hot,
        )
        if not exact:
            sums.div_(ranks)
    return sums[:, :dim]


class RepeatRows(torch.autograd.Function):
    """Autograd function that repeats received rows for the lookups of each feature.

    The outputs, float32 `[n, D]` for each feature, are views of one tensor.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, segments: Segments) -> tuple[torch.Tensor, ...]:
        ctx.segments = segments
        result: torch.Tensor = ops.lookup_sequence(rows, segments.slots)
        return tuple(split_apart(result, segments.lookups))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad = torch.cat(grads) if len(grads) > 1 else grads[0]
        return _sum_gradients(grad.float().contiguous(), ctx.segments, ctx.segments.update_arguments(None)), None


class PoolBags(torch.autograd.Function):
    """Autograd function that pools received rows; the output is float32 `[B, total]`.

    It calls the operator that also pools unsharded tables, so that outputs are bit-identical to theirs.
    """

    @staticmethod
    def forward(
        ctx: Any, segments: list[Segments], size: int, width: int, *tensors: torch.Tensor | None
    ) -> torch.Tensor:
        """Pools the rows of each group of `segments`.

        `tensors` are the received rows of each group, then the per-sample weights of each group or None.
        """
        count = len(segments)
        rows, weights = tensors[:count], tensors[count:]
        out = torch.empty((size, width), dtype=torch.float32, device=segments[0].slots.device)
        for each, row, weight in zip(segments, rows, weights, strict=True):
            ops.lookup_pooled(
                row, each.slots, each.offsets, weight, each.constants.columns, each.constants.means, 0, out
            )
        ctx.segments = segments
        needs_rows = any(ctx.needs_input_grad[3 + count :])
        ctx.save_for_backward(*(rows if needs_rows else [None] * count), *weights)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad = grad.float().contiguous()
        segments: list[Segments] = ctx.segments
        count = len(segments)
        rows, weights = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        row_grads = [_sum_gradients(grad, s, s.update_arguments(w)) for s, w in zip(segments, weights, strict=True)]
        weight_grads: list[torch.Tensor | None] = [None] * count
        for index, each in enumerate(segments):
            if ctx.needs_input_grad[3 + count + index]:
                weight_grads[index] = ops.pooled_weights_grad(
                    rows[index], each.slots, each.offsets, grad, each.constants.columns, each.constants.means
                )
        return (None, None, None, *row_grads, *weight_grads)
