"""A training step: the lookup of a batch, whose backward pass aggregates gradients and updates the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch.autograd.function import once_differentiable

from ... import _engine
from ..._exits import BackwardOf, caller
from ...eager import eager
from ..cache.accumulation import counted
from ..cache.device_cache import Group
from ..cache.ledger import Ledger
from ..cache.plan import Plan
from ..config.optimizer import TableOptimizer
from ..rows.layout import Layout
from .gradient_check import GradientGuard
from .monitor import Monitor
from .optimizer_passes import TablePasses

T = TypeVar("T")
Grads = Sequence[Sequence[torch.Tensor | None]]


class Step:
    """One training batch: the groups it reads and the plan of each, whose pins end with this object.

    The forward is `forward`, the backward pass is `backward`. `run` is what an interrupt may break off.
    """

    def __init__(
        self,
        layout: Layout,
        guard: GradientGuard,
        monitor: Monitor,
        plans: Sequence[Plan],
        lengths: Sequence[Sequence[int]] | None,
        shape: tuple[int, int] | None,
    ) -> None:
        """
        Args:
            layout: has the tables.
            guard: checks gradients before rows change.
            monitor: counts.
            plans: of the groups of the layout.
            lengths: of each group the lookups of each of its features, whose rows are outputs of their own; None for
                one output of each group, or one of all groups when pooled.
            shape: of the output of all groups, when pooled; else None.
        """
        self._layout = layout
        self._locks = layout.locks
        self._guard = guard
        self._monitor = monitor
        self._groups = layout.groups
        self._plans = plans
        self._lengths = lengths
        self._shape = shape
        self._caller = caller()
        self._kept: dict[int, torch.Tensor] = {}
        self._ledger = Ledger()
        self._update: _Update | None = None

    def release(self) -> None:
        """Ends the pins of all plans."""
        for plan in self._plans:
            plan.release()

    # ---- forward

    def forward(
        self, weights: Sequence[torch.Tensor | None], device: torch.device, weights_grad: bool
    ) -> tuple[torch.Tensor, ...]:
        """Pooled rows `[B, total]`; or of each group, and there of each feature, rows `[n, D]`, in one piece of memory.

        The tensors are new: an autograd function may not give an input, if the caller is to write into it.

        Args:
            weights: the per-sample weights of each group.
            device: of the outputs.
            weights_grad: gradients of these weights will be wanted, of the rows as they are now.
        """
        out = new_output(self._shape, device)
        outputs: list[torch.Tensor] = []
        monitor = self._monitor
        self._locks.catch_up()
        with self._locks.launch:
            self._locks.complete()
            with monitor.waiting("stage"):
                for group, plan in zip(self._groups, self._plans, strict=True):
                    group.stage(plan)
            _engine.begin([plan.host for plan in self._plans])  # from here on the batch has come, for all groups
            for index, (group, plan, weight) in enumerate(zip(self._groups, self._plans, weights, strict=True)):
                with monitor.waiting("apply"):
                    group.apply(plan)
                with monitor.range("lookup"):
                    rows = group.lookup(plan, weight, out)
                lengths = [] if self._lengths is None else self._lengths[index]
                outputs += rows.split(lengths) if len(lengths) > 1 else [rows]
            if weights_grad:
                self._locks.watch(self)
        return tuple(outputs) if out is None else (out,)

    def keep_rows(self, groups: Sequence[Group]) -> None:
        """Keeps the rows of its lookups as they are: those of `groups` are about to change."""
        for index, group in enumerate(self._groups):
            if group in groups and index not in self._kept:
                self._kept[index] = group.copy_rows(self._plans[index])

    # ---- backward

    def backward(
        self, grads: Sequence[torch.Tensor | None], weights: Sequence[torch.Tensor | None], wanted: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """Updates the rows; gradients of the per-sample weights of each group, where they are wanted."""
        with BackwardOf(self._caller):
            ready = [None if grad is None else _ready(grad) for grad in grads]
            admitted = self._guard.admit(ready, self._tables)
            of_groups = self._by_group(ready)
            for_rows = None if admitted is None else self._by_group(admitted)
            self._locks.catch_up()
            with self._locks.launch:
                if not (self._layout.works_on_tables and self._needs_tables()):
                    return self._launch(of_groups, for_rows, weights, wanted)
            with self._locks.alone():  # rows must not move meanwhile, nor plans have rows that leave
                result = self._launch(of_groups, for_rows, weights, wanted)
            for group in self._groups:
                group.warn_of_evictions()
            return result

    def _needs_tables(self) -> bool:
        """Whether this backward pass may do something to whole tables: no plan may be made meanwhile."""
        lengths = [group.accumulate_step for group in self._groups if group.window is not None]
        counts = counted(self._layout.windows, lengths)
        return (
            any(count >= length for length, count in counts.items())
            or any(group.evicts() for group in self._groups)
            or any(optimizer.acts_after_next() for group in self._groups for optimizer in group.optimizers)
        )

    def _tables(self, meant: Sequence[bool]) -> list[str]:
        """Tables of the outputs that are meant; an output may be of several."""
        names: set[str] = set()
        for group, outputs in zip(self._groups, self._by_group(meant), strict=True):
            features = [member.config.name for member in group.members for _ in member.features]
            of_features = outputs if self._lengths is not None else outputs * len(features)
            names.update(name for name, this in zip(features, of_features, strict=True) if this)
        return sorted(names)

    def _by_group(self, of_outputs: Sequence[T]) -> list[list[T]]:
        """The outputs of each group, of what there is for every output."""
        if self._lengths is not None:
            rest = iter(of_outputs)
            return [[next(rest) for _ in lengths] for lengths in self._lengths]
        shared = len(of_outputs) < len(self._groups)
        return [list(of_outputs)] * len(self._groups) if shared else [[one] for one in of_outputs]

    def _launch(
        self, grads: Grads, for_rows: Grads | None, weights: Sequence[torch.Tensor | None], wanted: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        self._locks.complete()
        result: list[torch.Tensor | None] = []
        for index, (group, plan, want) in enumerate(zip(self._groups, self._plans, wanted, strict=True)):
            grad = grads[index][0] if want else None
            result.append(None if grad is None else group.weights_grad(plan, grad, self._kept.get(index)))
        update = None if for_rows is None else _Update(self._layout, self._groups, for_rows, weights)
        self._update = update
        self._locks.unwatch(self)
        with self._monitor.range("update"):
            if update is not None:
                self._locks.keep_rows([group for group in self._groups if id(group) in update.coefficients])
            self._locks.do(self)
        return result

    @property
    def begun(self) -> bool:
        """Whether the update has changed anything."""
        return not self._ledger.empty()

    @property
    def left(self) -> bool:
        """Whether an interrupt has left the update to be completed."""
        return self._locks.unfinished is self

    def run(self) -> None:
        """Updates the rows, or adds to the open windows; and ends the step, after which ids may leave their tables."""
        update = self._update
        if update is not None:
            parts = zip(self._groups, self._plans, update.grads, update.weights, strict=True)
            for group, plan, grads, weights in parts:
                group.update(plan, grads, weights, update.coefficients.get(id(group)), self._ledger)
            for optimizer, step in update.numbers:
                optimizer.step = step
            update.passes.run()
            self._layout.windows = {length: count % length for length, count in update.windows.items()}
        self.release()
        for group in self._groups:
            group.end_step(self._ledger)


class _Update:
    """The update of one backward pass, made ready.

    Attributes:
        grads: of each group: that of the pooled output, or one of each feature; float32 without gaps.
        weights: of each group, the per-sample weights.
        windows: backward passes of the windows of each length, with this one.
        numbers: optimizers and the steps that they have counted then.
        coefficients: by group, where rows change, and not only a window.
        passes: of optimizers over whole tables.
    """

    def __init__(
        self, layout: Layout, groups: Sequence[Group], grads: Grads, weights: Sequence[torch.Tensor | None]
    ) -> None:
        self.grads = grads
        self.weights = weights
        self.windows = counted(layout.windows, (group.accumulate_step for group in groups))
        ended = [group for group in groups if self.windows[group.accumulate_step] >= group.accumulate_step]
        optimizers = {id(optimizer): optimizer for group in ended for optimizer in group.optimizers}.values()
        self.numbers: list[tuple[TableOptimizer, int]] = [(o, o.step + 1) for o in optimizers]
        self.coefficients = {id(group): group.coefficients() for group in ended}
        self.passes = TablePasses([o for o in optimizers if o.acts_after_next()], groups)


def _ready(grad: torch.Tensor) -> torch.Tensor:
    """`grad` as the operators read it: float32 rows without gaps. One without elements may have any strides."""
    return grad.float().contiguous() if grad.numel() else grad.new_empty(grad.shape, dtype=torch.float32)


class FusedLookup(torch.autograd.Function):
    """Lookup whose backward is the fused update.

    The cache is not saved for backward, since a later swap may move rows; the plan is, and pins its rows.
    Inputs: an anchor that requires grad (the tables' handles never enter the graph), the step, and each group's
    per-sample weights.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, step: Step, *weights: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        ctx.step = step
        ctx.save_for_backward(*weights)
        ctx.set_materialize_grads(False)
        return step.forward(weights, anchor.device, any(ctx.needs_input_grad[2:]))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        # The decorator's dozen calls are for create_graph=True, which alone records a backward pass.
        return (_backward_once if torch.is_grad_enabled() else _backward)(ctx, *grads)


@eager
def _backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    step: Step | None = ctx.step
    if step is None:
        raise RuntimeError(
            "the embedding's rows were updated already: backward can run once per forward. Add the losses of one "
            "forward, and call backward() on their sum; or detach() the output that is not to train the tables; or "
            "look the batch up again"
        )
    ctx.step = None
    try:
        weight_grads = step.backward(grads, ctx.saved_tensors, ctx.needs_input_grad[2:])
    except BaseException:
        if not step.left:
            step.release()
        raise
    return (None, None, *weight_grads)


_backward_once = once_differentiable(_backward)


def new_output(shape: tuple[int, int] | None, device: torch.device) -> torch.Tensor | None:
    """Memory that pooled rows are written to; None where they are not pooled."""
    return None if shape is None else torch.empty(shape, dtype=torch.float32, device=device)


def fused_lookup(anchor: torch.Tensor, step: Step, weights: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor, ...]:
    """`Step.forward`, recorded; the outputs belong to the caller, which may write into them."""
    outputs: tuple[torch.Tensor, ...] = FusedLookup.apply(anchor, step, *weights)
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
