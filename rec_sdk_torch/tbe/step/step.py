"""A training step: the lookup of a batch, and the backward pass that aggregates gradients and updates the rows."""

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
from ..rows.parameter_edges import LISTED, graph_task, is_set, will_execute
from .gradient_check import GradientGuard
from .monitor import Monitor
from .outputs import split_apart
from .table_update import Grads, TableUpdate

T = TypeVar("T")
_host_of = operator.attrgetter("host")


class Step:
    """One training batch. Its plans, one for each group, pin the batch's rows in the cache while this object lives.

    An update is a list of C calls that one C call makes, so that no signal handler runs between them. If a call raises,
    the next step first makes the remaining calls.

    Attributes:
        many_backwards: whether several backward passes are allowed.
        edges: the autograd edges to the tables' parameters.
        keeps_rows_for_recompute: whether the rows are copied before they change, for a `RecomputedStep`.
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
        """Stores the plans of a batch; launches nothing yet.

        Args:
            layout: the tables.
            guard: the checks of gradients, made before rows change.
            monitor: the counters, which include the time spent waiting.
            plans: one plan for each group of the layout.
            lengths: for each group, the number of lookups of each feature, if each feature is a separate output.
                None: there is one output for each group, or one pooled output of all groups.
            shape: `[B, total]` of the pooled output; None if the tables are not pooled.
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
        self._call_results: list[Any] = []  # one result for each of `_calls` that has run
        self._table_update: TableUpdate | None = None
        self._released = False

    @property
    def finished(self) -> bool:
        """Whether the rows have been updated or will never be, so that they may no longer be in the cache."""
        return self._released or bool(self._calls) or self._table_update is not None

    def release(self) -> None:
        """Unpins the rows of all plans. No backward pass is possible afterwards."""
        self._released = True
        for plan in self._plans:
            plan.release()

    # ---- forward

    def forward(
        self, weights: Sequence[torch.Tensor | None], device: torch.device, weights_grad: bool
    ) -> tuple[torch.Tensor, ...]:
        """Returns the rows of the lookups; first copies missing rows into the cache.

        The outputs are new tensors: autograd forbids in-place changes of an output that is also an input.

        Args:
            weights: the per-sample weights of each group, or an empty sequence.
            device: the device of the outputs.
            weights_grad: whether the backward pass needs gradients of the weights, computed from the present rows.

        Returns:
            The pooled rows, float32 `[B, total]`; without pooling, rows float32 `[n, D]` for each group or, with
            `lengths`, for each feature of each group. The features of a group share memory.
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
            resident = _engine.apply_without_swap(engine_plans)  # without misses there are no copies to wait for
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
                locks.add_reader(self)
        return tuple(outputs) if out is None else (out,)

    def _stage_misses(self, engine_plans: Sequence[_engine.Plan]) -> None:
        """Stages the missing rows of all groups and starts the plans, after which the plans cannot be dropped."""
        begin = time.perf_counter_ns()
        with profiled("stage"):
            for group, plan in zip(self._groups, self._plans, strict=True):
                group.stage(plan)
        self._monitor.wait_ns += time.perf_counter_ns() - begin
        _engine.start_plans(engine_plans)

    def keep_rows(self, groups: Sequence[Group]) -> None:
        """Copies the looked-up rows of `groups`, which are about to change, for later reads of their present values."""
        for index, group in enumerate(self._groups):
            if group in groups and index not in self._row_copies:
                self._row_copies[index] = group.copy_rows(self._plans[index])

    # ---- backward

    def backward(
        self,
        grads: Sequence[torch.Tensor | None],
        weights: Sequence[torch.Tensor | None],
        needs_grad: Sequence[bool],
        tables: frozenset[str] | None = None,
    ) -> list[torch.Tensor | None]:
        """Updates the rows of `tables`, and returns the gradients of the per-sample weights.

        Args:
            grads: the gradient of each output; None for an output that is not part of the loss.
            weights: the per-sample weights of each group.
            needs_grad: for each of `weights`, whether its gradient is needed; else None is returned for it.
            tables: names of the tables to train; None: all tables. If empty, no row changes and a later call may train.
        """
        # Autograd may run this in its own thread, which must count as inside a call; see `runtime/exits.py`.
        thread = calling_thread()
        thread.depth += 1
        try:
            converted = list(grads)  # the operators require contiguous float32 gradients
            float32 = torch.float32
            for index, grad in enumerate(grads):
                if grad is not None and not (grad.is_contiguous() and grad.dtype is float32):
                    converted[index] = grad.float().contiguous()
            guard, locks = self._guard, self._locks
            weights = weights or (None,) * len(self._groups)
            grads_by_group: Grads = self._by_group(converted)
            if tables is not None and not tables:
                return self._only_weights(grads_by_group, needs_grad)
            row_grads: Grads | None = grads_by_group
            if guard.scaler is not None or guard.check_finite != "off":
                checked = guard.check(converted, self._selected_tables)
                row_grads = None if checked is None else self._by_group(checked)
            if tables is not None and row_grads is not None:
                row_grads = self._mask_other_tables(row_grads, tables)
            if locks.unfinished is not None:
                locks.catch_up()
            with locks.launch:
                if not (self._layout.works_on_tables and self._needs_tables()):
                    return self._update(grads_by_group, row_grads, weights, needs_grad)
            with locks.without_pending_plans():  # meanwhile, no plan may move rows or choose victims
                result = self._update(grads_by_group, row_grads, weights, needs_grad)
            for group in self._groups:
                group.warn_of_evictions()
            return result
        finally:
            thread.depth -= 1
            thread.last_exit = self._forward_thread.last_exit = time.monotonic()

    def _needs_tables(self) -> bool:
        """Returns whether this backward pass may work on whole tables, so that no plan may be made meanwhile."""
        return (
            self._layout.ends_window()
            or any(group.evicts_at_step_end() for group in self._groups)
            or any(optimizer.has_table_pass_after_next() for group in self._groups for optimizer in group.optimizers)
        )

    def _selected_tables(self, selected: Sequence[bool]) -> list[str]:
        """Returns the names of the tables whose outputs are selected; an output may belong to several tables."""
        names: set[str] = set()
        for group, outputs in zip(self._groups, self._by_group(selected), strict=True):
            features = [member.config.name for member in group.members for _ in member.features]
            by_feature = outputs if self._lengths is not None else outputs * len(features)
            names.update(name for name, is_selected in zip(features, by_feature, strict=True) if is_selected)
        return sorted(names)

    def _by_group(self, per_output: Sequence[T]) -> list[list[T]]:
        """Divides a list with one element for each output into one list for each group of tables."""
        if len(self._groups) == 1:
            return [list(per_output)]
        if self._lengths is not None:
            rest = iter(per_output)
            return [list(islice(rest, len(lengths))) for lengths in self._lengths]
        if len(per_output) == 1:  # all groups share one pooled output
            return [list(per_output)] * len(self._groups)
        return [[one] for one in per_output]

    def _mask_other_tables(self, grads_by_group: Grads, tables: frozenset[str]) -> Grads:
        """Replaces the gradients of tables that are not in `tables` by None, in the form that `touched_rows` takes."""
        result: list[Sequence[torch.Tensor | None]] = []
        for group, grads in zip(self._groups, grads_by_group, strict=True):
            names = [member.config.name for member in group.members]
            if self._lengths is not None:
                names = [member.config.name for member in group.members for _ in member.features]
            elif tables.issuperset(names):
                names = names[:1]
            per_table = grads if len(grads) == len(names) else list(grads) * len(names)
            result.append([grad if name in tables else None for name, grad in zip(names, per_table, strict=True)])
        return result

    def _only_weights(self, grads: Grads, needs_grad: Sequence[bool]) -> list[torch.Tensor | None]:
        """Returns the gradients of the per-sample weights; no row changes."""
        self._locks.catch_up()
        with self._locks.launch:
            self._locks.complete()
            return self._weights_grads(grads, needs_grad)

    def _weights_grads(self, grads: Grads, needs_grad: Sequence[bool]) -> list[torch.Tensor | None]:
        """Returns the gradient of each group's per-sample weights; None for a group that does not need it."""
        result: list[torch.Tensor | None] = [None] * len(needs_grad)
        for index, want in enumerate(needs_grad):
            grad = grads[index][0] if want else None
            if grad is not None:
                result[index] = self._groups[index].weights_grad(self._plans[index], grad, self._row_copies.get(index))
        return result

    def _update(
        self, grads: Grads, row_grads: Grads | None, weights: Sequence[torch.Tensor | None], needs_grad: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """Launches the gradients of the per-sample weights, which read the old rows, and then the update."""
        locks = self._locks
        if locks.unfinished is not None:
            locks.complete()
        result: list[torch.Tensor | None] = [None] * len(needs_grad)
        if True in needs_grad:
            result = self._weights_grads(grads, needs_grad)
        if locks.readers:
            locks.readers.pop(id(self), None)
        with profiled("update"):
            if self._layout.works_on_tables:
                self._table_update = TableUpdate(self._layout, self._plans, row_grads, weights)
                locks.keep_rows(self._table_update.changing)
                locks.run_resumable(self._table_update)
            else:
                self._make_calls(row_grads, weights)
        return result

    def _make_calls(self, row_grads: Grads | None, weights: Sequence[torch.Tensor | None]) -> None:
        locks, calls, optimizers = self._locks, self._calls, self._layout.used_optimizers
        if row_grads is not None:
            coefficients = {}
            for optimizer in optimizers:  # computed first: an invalid option must raise before anything changes
                coefficients[id(optimizer)] = optimizer.coefficients()
            if locks.readers:
                locks.keep_rows(self._groups)
            for group, plan, grads, weight in zip(self._groups, self._plans, row_grads, weights, strict=True):
                if group.norms is not None:
                    group.norms.reset()
                call = group.update_call(plan, grads, weight, coefficients)
                if call is not None:
                    calls.append(call)
            for optimizer in optimizers:
                calls.append((setattr, optimizer, "step", optimizer.step + 1))
        for plan in self._plans:
            calls.append((plan.host.release,))
        # `unfinished` is set before the calls: after an interrupt it stays set, and the next step completes the update.
        locks.unfinished = self
        try:
            self.run()
        finally:
            if not self._call_results or len(self._call_results) == len(calls):
                locks.unfinished = None

    @property
    def started(self) -> bool:
        """Whether at least one call of the update has run."""
        return bool(self._call_results)

    def run(self) -> None:
        """Makes the calls of the update that have not run yet."""
        done = self._call_results
        done.extend(starmap(operator.call, self._calls[len(done) :]))

    def must_stay_pinned(self) -> bool:
        """Returns whether the rows must stay pinned, because an interrupted update is still to be completed."""
        unfinished = self._locks.unfinished
        return unfinished is not None and (unfinished is self or unfinished is self._table_update)


class FusedLookup(torch.autograd.Function):
    """The autograd function of a lookup; its backward updates the rows.

    It holds the step, whose plans pin the rows, and does not hold the cache: a later swap may move other rows.
    Inputs: the anchor of `ParameterEdges`, the step, and each group's per-sample weights, if there are any.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, step: Step, *weights: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        ctx.step = step
        ctx.set_materialize_grads(False)
        if step.many_backwards:
            # Because a tensor is saved, torch requires retain_graph=True for a second backward pass.
            ctx.save_for_backward(anchor, *weights)
        elif weights:
            ctx.save_for_backward(*weights)
        return step.forward(weights, anchor.device, bool(weights) and True in ctx.needs_input_grad[2:])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        # These decorators cost time, and are needed only for create_graph=True and torch.compile.
        if torch.is_grad_enabled() or torch.compiler.is_dynamo_compiling():
            return _backward_once(ctx, *grads)
        step: Step | None = ctx.step
        if step is None:
            raise RuntimeError(
                "the embedding's rows were updated already: backward can run once per forward. Add the losses of one "
                "forward, and call backward() on their sum; or detach() the output that is not to train the tables; or "
                "look the batch up again"
            )
        tables = None  # all tables
        edges = step.edges
        if graph_task() == -1 or is_set(LISTED) or not will_execute(edges.node):
            tables = edges.tables_in_inputs()
        needs_grad, saved = ctx.needs_input_grad[2:], ctx.saved_tensors
        if step.many_backwards:
            saved = saved[1:]
        if tables is not None and not tables:
            return (None, None, *step.backward(grads, saved, needs_grad, tables))
        if not step.many_backwards:
            ctx.step = None
        try:
            weight_grads = step.backward(grads, saved, needs_grad, tables)
        except BaseException:
            if not step.must_stay_pinned():
                step.release()
            raise
        return (None, None, *weight_grads)


_backward_once = once_differentiable(eager(FusedLookup.backward))

look_up: Callable[..., tuple[torch.Tensor, ...]] = super(torch.autograd.Function, FusedLookup).apply
"""`FusedLookup.apply` for lookups without weights, without its nine Python calls for torch.func."""
