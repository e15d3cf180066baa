"""A training step: the lookup of a batch, whose backward pass aggregates gradients and updates the rows."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Sequence
from itertools import islice, starmap
from typing import Any, TypeVar

import torch
from torch.autograd.function import once_differentiable

from ... import _engine
from ...operators.calls import empty_output
from ...runtime.eager import eager
from ...runtime.exits import calling_thread
from ..cache.device_cache import Group
from ..cache.plan import Plan
from ..cache.profiler_ranges import profiled
from ..cache.update_journal import Call
from ..rows.layout import Layout
from ..rows.parameter_edges import graph_task, will_execute
from .gradient_check import GradientGuard
from .monitor import Monitor
from .outputs import split_apart
from .table_update import Grads, TableUpdate

T = TypeVar("T")
_host_of = operator.attrgetter("host")


class Step:
    """One training batch: the groups it reads and the plan of each, whose pins end with this object.

    An update is a list of calls of C that run as one: no signal handler comes between them. Where a call raises, the
    next step begins with those that are left.

    Attributes:
        many_backwards: whether several backward passes may come.
        edges: to the tables' parameters.
        keeps_rows_for_recompute: whether its rows may be read again as they were, see `RecomputedStep`.
    """

    many_backwards = False
    keeps_rows_for_recompute = False

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
        self.edges = layout.edges
        self._locks = layout.locks
        self._guard = guard
        self._monitor = monitor
        self._groups = layout.built
        self._plans = plans
        self._lengths = lengths
        self._shape = shape
        self._forward_thread = calling_thread()
        self._row_copies: dict[int, torch.Tensor] = {}
        self._calls: list[Call] = []
        self._call_results: list[Any] = []  # what the calls gave that were made
        self._table_update: TableUpdate | None = None
        self._released = False

    @property
    def finished(self) -> bool:
        """Whether its rows were updated, or will not be: they may have left the cache."""
        return self._released or bool(self._calls) or self._table_update is not None

    def release(self) -> None:
        """Ends the pins of all plans; no backward pass can come after it."""
        self._released = True
        for plan in self._plans:
            plan.release()

    # ---- forward

    def forward(
        self, weights: Sequence[torch.Tensor | None], device: torch.device, weights_grad: bool
    ) -> tuple[torch.Tensor, ...]:
        """Pooled rows `[B, total]`; or of each group, and there of each feature, rows `[n, D]`, in one piece of memory.

        The tensors are new: an autograd function may not give an input, if the caller is to write into it.

        Args:
            weights: the per-sample weights of each group; none where there are none.
            device: of the outputs.
            weights_grad: gradients of these weights will be wanted, of the rows as they are now.
        """
        locks = self._locks
        out = None if self._shape is None else empty_output(self._shape, device)
        outputs: list[torch.Tensor] = []
        if locks.unfinished is not None:
            locks.catch_up()
        with locks.launch:
            if locks.unfinished is not None:
                locks.complete()
            groups, plans, lengths = self._groups, self._plans, self._lengths
            engine_plans = list(map(_host_of, plans))
            resident = _engine.pass_plans(engine_plans)  # without rows that come a batch has nothing to wait for
            if not resident:
                self._stage_misses(engine_plans)
            for index, group in enumerate(groups):
                look_up = group.lookup_resident if resident else group.lookup
                rows = look_up(plans[index], weights[index] if weights else None, out)
                if lengths is not None and len(lengths[index]) > 1:
                    outputs += split_apart(rows, lengths[index])
                else:
                    outputs.append(rows)
            if weights_grad or self.keeps_rows_for_recompute:
                locks.watch(self)
        return tuple(outputs) if out is None else (out,)

    def _stage_misses(self, engine_plans: Sequence[_engine.Plan]) -> None:
        """Makes ready what comes to the caches. The batch has come then, for all groups."""
        begin = time.perf_counter_ns()
        with profiled("stage"):
            for group, plan in zip(self._groups, self._plans, strict=True):
                group.stage(plan)
        self._monitor.wait_ns += time.perf_counter_ns() - begin
        _engine.begin(engine_plans)

    def keep_rows(self, groups: Sequence[Group]) -> None:
        """Keeps the rows of its lookups as they are: those of `groups` are about to change."""
        for index, group in enumerate(self._groups):
            if group in groups and index not in self._row_copies:
                self._row_copies[index] = group.copy_rows(self._plans[index])

    # ---- backward

    def backward(
        self,
        grads: Sequence[torch.Tensor | None],
        weights: Sequence[torch.Tensor | None],
        wanted: Sequence[bool],
        tables: frozenset[str] | None = None,
    ) -> list[torch.Tensor | None]:
        """Updates the rows of `tables`, by default of all; returns the gradients of the per-sample weights.

        Args:
            grads: of the outputs.
            weights: the per-sample weights of each group.
            wanted: whether the gradient of each of them is returned, or None.
            tables: those that train. Where there are none the step stays as it is, and a later call may train.
        """
        # A thread of autograd may run this, which is no call that it makes: the thread of the forward waits for it.
        thread = calling_thread()
        thread.depth += 1
        try:
            ready = list(grads)
            float32 = torch.float32
            for place, grad in enumerate(grads):  # which the operators read as float32 rows without gaps
                if grad is not None and not (grad.is_contiguous() and grad.dtype is float32):
                    ready[place] = grad.float().contiguous()
            guard, locks = self._guard, self._locks
            weights = weights or (None,) * len(self._groups)
            of_groups: Grads = self._by_group(ready)
            if tables is not None and not tables:
                return self._only_weights(of_groups, wanted)
            for_rows: Grads | None = of_groups
            if guard.scaler is not None or guard.check_finite != "off":
                checked = guard.check(ready, self._tables)
                for_rows = None if checked is None else self._by_group(checked)
            if tables is not None and for_rows is not None:
                for_rows = self._mask_other_tables(for_rows, tables)
            if locks.unfinished is not None:
                locks.catch_up()
            with locks.launch:
                if not (self._layout.works_on_tables and self._needs_tables()):
                    return self._update(of_groups, for_rows, weights, wanted)
            with locks.without_pending_plans():  # rows must not move meanwhile, nor plans have rows that leave
                result = self._update(of_groups, for_rows, weights, wanted)
            for group in self._groups:
                group.warn_of_evictions()
            return result
        finally:
            thread.depth -= 1
            thread.last_exit = self._forward_thread.last_exit = time.monotonic()

    def _needs_tables(self) -> bool:
        """Whether this backward pass may do something to whole tables: no plan may be made meanwhile."""
        return (
            self._layout.ends_window()
            or any(group.evicts() for group in self._groups)
            or any(optimizer.acts_after_next() for group in self._groups for optimizer in group.optimizers)
        )

    def _tables(self, selected: Sequence[bool]) -> list[str]:
        """Tables of the outputs that are selected; an output may be of several."""
        names: set[str] = set()
        for group, outputs in zip(self._groups, self._by_group(selected), strict=True):
            features = [member.config.name for member in group.members for _ in member.features]
            of_features = outputs if self._lengths is not None else outputs * len(features)
            names.update(name for name, this in zip(features, of_features, strict=True) if this)
        return sorted(names)

    def _by_group(self, of_outputs: Sequence[T]) -> list[list[T]]:
        """The outputs of each group, of what there is for every output."""
        if len(self._groups) == 1:
            return [list(of_outputs)]
        if self._lengths is not None:
            rest = iter(of_outputs)
            return [list(islice(rest, len(lengths))) for lengths in self._lengths]
        if len(of_outputs) == 1:  # all groups share it
            return [list(of_outputs)] * len(self._groups)
        return [[one] for one in of_outputs]

    def _mask_other_tables(self, of_groups: Grads, tables: frozenset[str]) -> Grads:
        """Replaces the gradients of other tables by None, as `touched_rows` reads them."""
        result: list[Sequence[torch.Tensor | None]] = []
        for group, grads in zip(self._groups, of_groups, strict=True):
            names = [member.config.name for member in group.members]
            if self._lengths is not None:
                names = [member.config.name for member in group.members for _ in member.features]
            elif tables.issuperset(names):
                names = names[:1]
            of_names = grads if len(grads) == len(names) else list(grads) * len(names)
            result.append([grad if name in tables else None for name, grad in zip(names, of_names, strict=True)])
        return result

    def _only_weights(self, grads: Grads, wanted: Sequence[bool]) -> list[torch.Tensor | None]:
        """Returns the gradients of the per-sample weights, and changes nothing."""
        self._locks.catch_up()
        with self._locks.launch:
            self._locks.complete()
            return self._weights_grads(grads, wanted)

    def _weights_grads(self, grads: Grads, wanted: Sequence[bool]) -> list[torch.Tensor | None]:
        """Returns the gradients of the per-sample weights of each group, None where they are not wanted."""
        result: list[torch.Tensor | None] = [None] * len(wanted)
        for index, want in enumerate(wanted):
            grad = grads[index][0] if want else None
            if grad is not None:
                result[index] = self._groups[index].weights_grad(self._plans[index], grad, self._row_copies.get(index))
        return result

    def _update(
        self, grads: Grads, for_rows: Grads | None, weights: Sequence[torch.Tensor | None], wanted: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """Launches the update and, before it, the gradients of the per-sample weights."""
        locks = self._locks
        if locks.unfinished is not None:
            locks.complete()
        result: list[torch.Tensor | None] = [None] * len(wanted)
        if True in wanted:
            result = self._weights_grads(grads, wanted)
        if locks.readers:
            locks.readers.pop(id(self), None)
        with profiled("update"):
            if self._layout.works_on_tables:
                self._table_update = TableUpdate(self._layout, self._plans, for_rows, weights)
                locks.keep_rows(self._table_update.changing)
                locks.run_resumable(self._table_update)
            else:
                self._make_calls(for_rows, weights)
        return result

    def _make_calls(self, for_rows: Grads | None, weights: Sequence[torch.Tensor | None]) -> None:
        locks, calls, optimizers = self._locks, self._calls, self._layout.used_optimizers
        if for_rows is not None:
            coefficients = {}
            for optimizer in optimizers:  # all that can fail comes before the first change
                coefficients[id(optimizer)] = optimizer.coefficients()
            if locks.readers:
                locks.keep_rows(self._groups)
            for group, plan, grads, weight in zip(self._groups, self._plans, for_rows, weights, strict=True):
                if group.norms is not None:
                    group.norms.reset()
                call = group.update(plan, grads, weight, coefficients)
                if call is not None:
                    calls.append(call)
            for optimizer in optimizers:
                calls.append((setattr, optimizer, "step", optimizer.step + 1))
        for plan in self._plans:
            calls.append((plan.host.release,))
        locks.unfinished = self  # before the calls: nothing comes between their end and what is noted here
        try:
            self.run()
        finally:
            if not self._call_results or len(self._call_results) == len(calls):
                locks.unfinished = None

    @property
    def started(self) -> bool:
        """Whether the update has changed anything."""
        return bool(self._call_results)

    def run(self) -> None:
        """Makes the calls that are left."""
        done = self._call_results
        done.extend(starmap(operator.call, self._calls[len(done) :]))

    def must_stay_pinned(self) -> bool:
        """Whether its rows have to stay in the cache: an interrupt has left the update to be completed."""
        unfinished = self._locks.unfinished
        return unfinished is not None and (unfinished is self or unfinished is self._table_update)


class FusedLookup(torch.autograd.Function):
    """Lookup whose backward is the fused update.

    The cache is not saved for backward, since a later swap may move rows; the plan is, and pins its rows.
    Inputs: the anchor of `ParameterEdges`, the step, and each group's per-sample weights, if there are some.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, step: Step, *weights: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        ctx.step = step
        ctx.set_materialize_grads(False)
        if step.many_backwards:
            ctx.save_for_backward(anchor, *weights)  # torch refuses a second pass then, unless the graph is retained
        elif weights:
            ctx.save_for_backward(*weights)
        return step.forward(weights, anchor.device, bool(weights) and True in ctx.needs_input_grad[2:])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        # The decorators' calls are for create_graph=True, which alone records a backward pass, and for torch.compile.
        plain = not torch.is_grad_enabled() and not torch.compiler.is_dynamo_compiling()
        return (_backward if plain else _backward_once)(ctx, *grads)


def _backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    step: Step | None = ctx.step
    if step is None:
        raise RuntimeError(
            "the embedding's rows were updated already: backward can run once per forward. Add the losses of one "
            "forward, and call backward() on their sum; or detach() the output that is not to train the tables; or "
            "look the batch up again"
        )
    tables = None  # all
    if graph_task() == -1 or not will_execute(step.edges.private):
        tables = step.edges.requested()
    wanted, saved = ctx.needs_input_grad[2:], ctx.saved_tensors
    if step.many_backwards:
        saved = saved[1:]
    if tables is not None and not tables:
        return (None, None, *step.backward(grads, saved, wanted, tables))
    if not step.many_backwards:
        ctx.step = None
    try:
        weight_grads = step.backward(grads, saved, wanted, tables)
    except BaseException:
        if not step.must_stay_pinned():
            step.release()
        raise
    return (None, None, *weight_grads)


_backward_once = once_differentiable(eager(_backward))

look_up: Callable[..., tuple[torch.Tensor, ...]] = super(torch.autograd.Function, FusedLookup).apply
"""`FusedLookup.apply` of lookups without weights, less nine calls for torch.func: it transforms no lookups."""
