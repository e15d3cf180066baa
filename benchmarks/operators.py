"""The operators alone, on plans that are ready and rows that are all resident."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional as F

from rec_sdk_torch.operators.calls import ops
from rec_sdk_torch.tbe.cache.plan import arrays_on_device

from .phases import TimedOurs
from .timing import Clock, Samples, no_collection
from .workload import BETAS, EPS, LEARNING_RATE, Workload

RTOL, ATOL = 1e-4, 2e-5


def operator_bytes(workload: Workload, unique_rows: float) -> dict[str, float]:
    """Bytes an operator must move: every index, gradient, output and distinct row once, a record both ways."""
    activation, weight = 4.0 * workload.lookups * workload.dim, 4.0 * workload.dim * unique_rows
    record = weight * (1 + workload.states)
    indices = 4.0 * workload.lookups
    return {
        "lookup": indices + weight + activation,
        "update": indices + 8.0 * unique_rows + activation + 2 * record,
    }


ARRAYS = (
    *("slots", "unique_slots", "table_offsets", "segment_offsets"),
    *("grad_row", "grad_source", "hot_segments"),
)
"""The arrays of a plan that operators take; the last two may be None."""


class OperatorBench:
    """Calls the operators on the cache of `ours`, which must hold every row of `batches`."""

    def __init__(self, ours: TimedOurs, batches: list[torch.Tensor], grad: torch.Tensor) -> None:
        self._ours = ours
        self._grad = grad
        self._lookups = len(grad) // ours.workload.tables.count  # of a table, which has a gradient of its own
        self._group = ours.group
        self._clock = Clock(ours.device)
        self._weights = self._group.layout.weight(self._group.swap.cache)
        (optimizer,) = self._group.optimizers
        self._optimizer = optimizer
        rows = [optimizer.coefficients()] * ours.workload.tables.count
        self._coefficients = torch.tensor(rows, dtype=torch.float32, device=ours.device)
        self._plans = [self._ready(ids) for ids in batches]

    def _ready(self, ids: torch.Tensor) -> SimpleNamespace:
        plan, device = self._ours.plan(ids), self._ours.device
        try:
            if plan.rows_in:
                raise AssertionError(f"{plan.rows_in} rows are not resident")
            of = arrays_on_device(torch.from_numpy(plan.arena), plan)
            arrays = {name: getattr(of, name) for name in ARRAYS}
            # Copies, since the plan's memory is used again.
            copies = {name: None if each is None else each.clone().to(device) for name, each in arrays.items()}
            return SimpleNamespace(**copies)
        finally:
            plan.release()

    def _lookup(self, plan: SimpleNamespace) -> torch.Tensor:
        rows: torch.Tensor = ops.lookup_sequence(self._weights, plan.slots)
        return rows

    def _update(self, plan: SimpleNamespace) -> None:
        group = self._group
        segments = (plan.unique_slots, plan.table_offsets, plan.segment_offsets, plan.grad_row)
        kernel, layout = self._optimizer.spec.kernel, group.layout
        ops.update_rows(
            group.swap.cache,
            list(self._grad.split(self._lookups)),
            *segments,
            plan.grad_source,
            None,
            None,
            self._coefficients,
            kernel,
            layout.dim,
            layout.weight_dtype,
            hot_segments=plan.hot_segments,
        )

    def check(self) -> dict[str, bool]:
        """Both operators beside torch's, from the same rows, states and step."""
        plan = self._plans[0]
        layout = self._group.layout
        before = ops.gather_rows(self._group.swap.cache, plan.unique_slots)
        looked_up = torch.equal(self._lookup(plan), self._weights[plan.slots.long()])
        self._update(plan)
        after = ops.gather_rows(self._group.swap.cache, plan.unique_slots)
        expected = self._torch_update(plan, before)
        return {
            "lookup": looked_up,
            "update": torch.allclose(layout.weight(after), expected, rtol=RTOL, atol=ATOL),
        }

    def _torch_update(self, plan: SimpleNamespace, records: torch.Tensor) -> torch.Tensor:
        """The weights of `records` after torch's own update."""
        layout = self._group.layout
        weights = torch.nn.Parameter(layout.weight(records).clone())
        rows = torch.arange(len(records), device=records.device)
        lengths = plan.segment_offsets[1:] - plan.segment_offsets[:-1]
        row_of_lookup = torch.empty_like(plan.grad_row, dtype=torch.int64)
        lookups = plan.grad_row.long()
        if plan.grad_source is not None:
            lookups = lookups + plan.grad_source.long() * self._lookups
        row_of_lookup[lookups] = rows.repeat_interleave(lengths.long())
        F.embedding(row_of_lookup, weights, sparse=True).backward(self._grad)
        optimizer: torch.optim.Optimizer
        if self._ours.workload.optimizer == "sgd":
            optimizer = torch.optim.SGD([weights], lr=LEARNING_RATE)
        else:
            optimizer = torch.optim.SparseAdam([weights], lr=LEARNING_RATE, eps=EPS, betas=BETAS)
            averages = {name: layout.state(records, i).clone() for i, name in enumerate(("exp_avg", "exp_avg_sq"))}
            optimizer.state[weights] = {"step": self._optimizer.step, **averages}
        optimizer.step()
        return weights.detach()

    def time(self) -> dict[str, dict[str, float]]:
        """Each operator alone and both together, all batches in a row, so that launches are hidden."""
        marks = []
        clock = self._clock
        with no_collection():
            for plan in (self._plans[-1], *self._plans):
                begin = clock.mark()
                rows = self._lookup(plan)
                middle = clock.mark()
                del rows
                self._update(plan)
                marks.append((begin, middle, clock.mark()))
            clock.synchronize()
        return {name: sample.summary() for name, sample in spans(clock, marks[1:]).items()}


def spans(clock: Clock, marks: Sequence[tuple[Any, Any, Any]]) -> dict[str, Samples]:
    """Seconds of the parts of steps, which are marked before the lookup, between it and the update, and after."""
    return {
        "lookup": Samples([clock.seconds(begin, middle) for begin, middle, _ in marks]),
        "update": Samples([clock.seconds(middle, end) for _, middle, end in marks]),
        "together": Samples([clock.seconds(begin, end) for begin, _, end in marks]),
    }
