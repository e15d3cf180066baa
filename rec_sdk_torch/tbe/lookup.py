"""The autograd side of a lookup: the backward pass aggregates gradients and updates the rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from .group import Group
from .swap import PlannedBatch


@dataclass
class PlannedLookup:
    """One training forward: the groups it reads and the batch of each, whose pins end with this object."""

    groups: Sequence[Group]
    batches: list[PlannedBatch]
    width: int
    """Columns of the pooled output; 0 for a sequence."""
    batch_size: int
    advance: Callable[[], dict[int, torch.Tensor]]
    """Counts one backward pass; coefficients by group index of those groups whose window it ends."""
    lock: AbstractContextManager[object]
    """Held while rows are updated."""

    def run(self, weights: Sequence[torch.Tensor | None], device: torch.device) -> tuple[torch.Tensor, ...]:
        out = torch.empty((self.batch_size, self.width), device=device) if self.width else None
        outputs = [
            group.lookup(batch, weight, out)
            for group, batch, weight in zip(self.groups, self.batches, weights, strict=True)
        ]
        return (out,) if out is not None else tuple(outputs)

    def weight_grads(self, grads: Sequence[torch.Tensor | None], wanted: Sequence[bool]) -> list[torch.Tensor | None]:
        """Gradients of the per-sample weights, where they are wanted."""
        return [
            group.weights_grad(batch, grad) if want and grad is not None else None
            for group, batch, grad, want in zip(self.groups, self.batches, grads, wanted, strict=True)
        ]

    def update(self, grads: Sequence[torch.Tensor | None], weights: Sequence[torch.Tensor | None]) -> None:
        """Updates the rows, or adds to the open window."""
        coefficients = self.advance()
        steps = zip(self.groups, self.batches, grads, weights, strict=True)
        for index, (group, batch, grad, weight) in enumerate(steps):
            group.update(batch, grad, weight, coefficients.get(index))

    def release(self) -> None:
        for batch in self.batches:
            batch.plan.release()


class FusedLookup(torch.autograd.Function):
    """Lookup whose backward is the fused update.

    The cache is not saved for backward, since a later swap may move rows; the plan is, and pins its rows.
    Inputs: an anchor that requires grad (the tables' handles never enter the graph), the planned lookup,
    and each group's per-sample weights.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, call: PlannedLookup, *weights: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.save_for_backward(*weights)
        ctx.set_materialize_grads(False)
        return call.run(weights, anchor.device)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        # The decorator's dozen calls are for create_graph=True, which alone records a backward pass.
        return (_backward_once if torch.is_grad_enabled() else _backward)(ctx, *grads)


def _backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    call: PlannedLookup | None = ctx.call
    if call is None:
        raise RuntimeError("the embedding's rows were updated already: backward can run once per forward")
    ctx.call = None
    group_grads = [_ready(grad) for grad in (grads * len(call.groups) if call.width else grads)]
    try:
        with call.lock:
            weight_grads = call.weight_grads(group_grads, ctx.needs_input_grad[2:])
            call.update(group_grads, ctx.saved_tensors)
    finally:
        call.release()
    return (None, None, *weight_grads)


_backward_once = once_differentiable(_backward)


def _ready(grad: torch.Tensor | None) -> torch.Tensor | None:
    """`grad` as the operators read it: float32 rows without gaps."""
    return None if grad is None else grad.float().contiguous()


def fused_lookup(
    anchor: torch.Tensor, call: PlannedLookup, weights: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor, ...]:
    outputs: tuple[torch.Tensor, ...] = FusedLookup.apply(anchor, call, *weights)
    return outputs
