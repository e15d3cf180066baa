"""The autograd side of a lookup: the backward pass aggregates gradients and updates the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch.autograd.function import once_differentiable

from ... import _engine
from ..._exits import BackwardOf, caller
from ...eager import eager
from ..cache.device_cache import Group
from ..cache.ledger import Ledger
from ..cache.plan import Plan
from .steps import Steps

T = TypeVar("T")


class BatchLookup:
    """One training forward: the groups it reads and the plan of each, whose pins end with this object."""

    def __init__(
        self,
        steps: Steps,
        groups: Sequence[Group],
        plans: Sequence[Plan],
        lengths: Sequence[Sequence[int]] | None,
        shape: tuple[int, int] | None,
    ) -> None:
        """
        Args:
            steps: of the embedding.
            groups, plans: side by side.
            lengths: of each group the lookups of each of its features, whose rows are outputs of their own; None for
                one output of each group, or one of all groups when pooled.
            shape: of the output of all groups, when pooled; else None.
        """
        self.steps = steps
        self.groups = groups
        self.plans = plans
        self.lengths = lengths
        self.shape = shape
        self._caller = caller()
        self._kept: dict[int, torch.Tensor] = {}

    def run(
        self, weights: Sequence[torch.Tensor | None], device: torch.device, weights_grad: bool
    ) -> tuple[torch.Tensor, ...]:
        """Pooled rows `[B, total]`; or of each group, and there of each feature, rows `[n, D]`, in one piece of memory.

        The tensors are new: an autograd function may not give an input, if the caller is to write into it.

        Args:
            weights: the per-sample weights of each group.
            device: of the outputs.
            weights_grad: gradients of these weights will be wanted, of the rows as they are now.
        """
        out = new_output(self.shape, device)
        outputs: list[torch.Tensor] = []
        monitor = self.steps.monitor
        self.steps.catch_up()
        with self.steps.launch:
            self.steps.complete()
            with monitor.waiting("stage"):
                for group, plan in zip(self.groups, self.plans, strict=True):
                    group.stage(plan)
            _engine.begin([plan.host for plan in self.plans])  # from here on the batch has come, for all groups
            for index, (group, plan, weight) in enumerate(zip(self.groups, self.plans, weights, strict=True)):
                with monitor.waiting("apply"):
                    group.apply(plan)
                with monitor.range("lookup"):
                    rows = group.lookup(plan, weight, out)
                lengths = [] if self.lengths is None else self.lengths[index]
                outputs += rows.split(lengths) if len(lengths) > 1 else [rows]
            if weights_grad:
                self.steps.watch(self)
        return tuple(outputs) if out is None else (out,)

    def keep_rows(self, index: int) -> None:
        """Keeps the rows of a group as they are: an update is about to change them."""
        if index not in self._kept:
            self._kept[index] = self.groups[index].copy_rows(self.plans[index])

    def backward(
        self, grads: Sequence[torch.Tensor | None], weights: Sequence[torch.Tensor | None], wanted: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """Updates the rows; gradients of the per-sample weights of each group, where they are wanted."""
        with BackwardOf(self._caller):
            return self._update(grads, weights, wanted)

    def _update(
        self, grads: Sequence[torch.Tensor | None], weights: Sequence[torch.Tensor | None], wanted: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        ready = [None if grad is None else _ready(grad) for grad in grads]
        admitted = self.steps.guard.admit(ready, self._tables)
        of_groups = self._by_group(ready)
        for_rows = None if admitted is None else self._by_group(admitted)
        self.steps.catch_up()
        with self.steps.launch:
            if not self.steps.needs_tables(self.groups):
                return self._backward(of_groups, for_rows, weights, wanted)
        with self.steps.alone():  # rows must not move meanwhile, nor plans have rows that leave
            result = self._backward(of_groups, for_rows, weights, wanted)
        for group in self.groups:
            group.warn_of_evictions()
        return result

    def _tables(self, meant: Sequence[bool]) -> list[str]:
        """Tables of the outputs that are meant; an output may be of several."""
        names: set[str] = set()
        for group, outputs in zip(self.groups, self._by_group(meant), strict=True):
            features = [member.config.name for member in group.members for _ in member.features]
            of_features = outputs if self.lengths is not None else outputs * len(features)
            names.update(name for name, this in zip(features, of_features, strict=True) if this)
        return sorted(names)

    def _backward(
        self,
        grads: list[list[torch.Tensor | None]],
        for_rows: list[list[torch.Tensor | None]] | None,
        weights: Sequence[torch.Tensor | None],
        wanted: Sequence[bool],
    ) -> list[torch.Tensor | None]:
        self.steps.complete()
        result: list[torch.Tensor | None] = []
        for index, (group, plan, want) in enumerate(zip(self.groups, self.plans, wanted, strict=True)):
            grad = grads[index][0] if want else None
            result.append(None if grad is None else group.weights_grad(plan, grad, self._kept.get(index)))
        if for_rows is None:
            self.steps.skip(self)
        else:
            with self.steps.monitor.range("update"):
                self.steps.update(self, for_rows, weights)
        return result

    def _by_group(self, of_outputs: Sequence[T]) -> list[list[T]]:
        """Of each group, what there is of its outputs."""
        if self.lengths is not None:
            rest = iter(of_outputs)
            return [[next(rest) for _ in lengths] for lengths in self.lengths]
        shared = len(of_outputs) < len(self.groups)
        return [list(of_outputs)] * len(self.groups) if shared else [[one] for one in of_outputs]

    def end(self, ledger: Ledger) -> None:
        """The step is done, and ids may leave their tables."""
        self.release()
        for group in self.groups:
            group.end_step(ledger)

    def release(self) -> None:
        for plan in self.plans:
            plan.release()


def _ready(grad: torch.Tensor) -> torch.Tensor:
    """`grad` as the operators read it: float32 rows without gaps. One without elements may have any strides."""
    return grad.float().contiguous() if grad.numel() else grad.new_empty(grad.shape, dtype=torch.float32)


class FusedLookup(torch.autograd.Function):
    """Lookup whose backward is the fused update.

    The cache is not saved for backward, since a later swap may move rows; the plan is, and pins its rows.
    Inputs: an anchor that requires grad (the tables' handles never enter the graph), the planned lookup, and each
    group's per-sample weights.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, call: BatchLookup, *weights: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.save_for_backward(*weights)
        ctx.set_materialize_grads(False)
        return call.run(weights, anchor.device, any(ctx.needs_input_grad[2:]))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        # The decorator's dozen calls are for create_graph=True, which alone records a backward pass.
        return (_backward_once if torch.is_grad_enabled() else _backward)(ctx, *grads)


@eager
def _backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    call: BatchLookup | None = ctx.call
    if call is None:
        raise RuntimeError(
            "the embedding's rows were updated already: backward can run once per forward. Add the losses of one "
            "forward, and call backward() on their sum; or detach() the output that is not to train the tables; or "
            "look the batch up again"
        )
    ctx.call = None
    try:
        weight_grads = call.backward(grads, ctx.saved_tensors, ctx.needs_input_grad[2:])
    except BaseException:
        if not call.steps.left(call):
            call.release()
        raise
    return (None, None, *weight_grads)


_backward_once = once_differentiable(_backward)


def new_output(shape: tuple[int, int] | None, device: torch.device) -> torch.Tensor | None:
    """Memory that pooled rows are written to; None where they are not pooled."""
    return None if shape is None else torch.empty(shape, dtype=torch.float32, device=device)


def fused_lookup(
    anchor: torch.Tensor, call: BatchLookup, weights: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor, ...]:
    """`BatchLookup.run`, recorded; the outputs are the caller's, who may write into them."""
    outputs: tuple[torch.Tensor, ...] = FusedLookup.apply(anchor, call, *weights)
    return outputs if len(outputs) == 1 else apart(outputs)


def apart(outputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The outputs of one node of autograd, each as one that may be changed in place, with a node of its own.

    Hooks of a feature that is not part of the loss are not called then. Memory is shared with `outputs`, which a view
    of them would be to autograd as well: it allows no change in place of a view that was one output of several.
    """
    return tuple(torch.ops.aten._unsafe_view.default(output, output.shape) for output in outputs)


def split_rows(of_groups: Sequence[torch.Tensor], lengths: Sequence[list[int]]) -> tuple[torch.Tensor, ...]:
    """Rows of each feature, from the rows of each group."""
    return tuple(part for rows, of_group in zip(of_groups, lengths, strict=True) for part in rows.split(of_group))
