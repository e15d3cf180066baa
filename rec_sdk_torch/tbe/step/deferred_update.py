"""Training with `update="step"`: backward passes aggregate gradients, which wait for `step()` of the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from ...runtime.exits import calls
from ..cache.pending_gradients import GroupGradients, add_gradients
from ..cache.plan import Plan
from ..cache.profiler_ranges import profiled
from ..rows.layout import Layout
from ..rows.pending_gradients import PendingGradients, combine_checksums
from ..rows.user_tensors import tensor_problem
from .step import Step
from .table_update import Grads, TableUpdate

_SET_TO_NONE = 1
"""The checksum of the change of a table whose gradient was set to None."""


class DeferredStep(Step):
    """A training batch that may have several backward passes. Its rows stay in the cache until their update."""

    many_backwards = True

    def backward(
        self,
        grads: Sequence[torch.Tensor | None],
        weights: Sequence[torch.Tensor | None],
        wanted: Sequence[bool],
        tables: frozenset[str] | None = None,
    ) -> list[torch.Tensor | None]:
        """Aggregates the gradients, and returns the gradients of the per-sample weights; see `Step.backward`."""
        if self.finished:
            raise RuntimeError(
                "the embedding's rows were updated by step() after this forward and a backward through it: look the "
                "batch up again"
            )
        return super().backward(grads, weights, wanted, tables)

    def must_stay_pinned(self) -> bool:
        """Whether its rows have to stay in the cache though its backward pass failed."""
        return self in self._layout.pending_gradients.pinning_batches or super().must_stay_pinned()

    def _needs_tables(self) -> bool:
        return False

    def _update(
        self, grads: Grads, for_rows: Grads | None, weights: Sequence[torch.Tensor | None], wanted: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        readers = self._locks.readers
        reading = readers.get(id(self))
        result = super()._update(grads, for_rows, weights, wanted)
        if reading is not None:
            readers[id(self)] = reading  # another backward pass may come when other rows have changed
        return result

    def _make_calls(self, for_rows: Grads | None, weights: Sequence[torch.Tensor | None]) -> None:
        """Adds the gradients to those that wait: all of them, or after an interrupt none."""
        assert for_rows is not None, "with update='step' nothing skips an update before step()"
        layout = self._layout
        waiting = _without_left_out(layout)
        before = waiting.rows or (None,) * len(self._groups)
        rows = []
        for group, plan, grads, weight, of_group in zip(
            self._groups, self._plans, for_rows, weights, before, strict=True
        ):
            group.swap.transfers.follow_previous_stream()
            rows.append(add_gradients(of_group, plan, grads, weight, group.layout.dim))
        holders = waiting.pinning_batches if self in waiting.pinning_batches else (*waiting.pinning_batches, self)
        layout.pending_gradients = waiting._replace(
            rows=rows, pinning_batches=holders, backward_passes=waiting.backward_passes + 1
        )


class DeferredUpdate(TableUpdate):
    """The update of the rows that wait; or, without `rows`, what ends the training step beside it."""

    def __init__(self, layout: Layout, rows: Sequence[GroupGradients | None] | None, after: PendingGradients) -> None:
        """`after`: what waits when it is done."""
        groups = layout.built
        plans = cast(Sequence[Plan], rows or ())  # which they stand for
        grads = None if rows is None else [[None if each is None else each.gradient] for each in rows]
        super().__init__(layout, plans, grads, [None] * len(groups))
        self._held = layout.pending_gradients.pinning_batches if rows is not None else ()
        self._after = after

    def run(self) -> None:
        """As that of a batch."""
        super().run()
        self._layout.pending_gradients = self._after


def _without_left_out(layout: Layout) -> PendingGradients:
    """The gradients that wait, without those of tables that were left out; changes in them are noted."""
    waiting = layout.pending_gradients
    if not waiting.backward_passes or not (waiting.skipped_tables or layout.replicated):
        return waiting
    rows, changes = [], {}
    for group, of_group in zip(layout.built, waiting.rows, strict=True):
        places = {name: group.table_indices[name] for name in waiting.skipped_tables & group.table_indices.keys()}
        if of_group is not None:
            for name in layout.replicated & group.table_indices.keys():
                left_out = name in places and of_group.count(places[name])
                changes[name] = _SET_TO_NONE if left_out else of_group.checksum_of_change(group.table_indices[name])
        rows.append(of_group.exclude_tables(places.values()) if of_group is not None and places else of_group)
    return waiting._replace(rows=rows, skipped_tables=frozenset(), changes=combine_checksums(waiting.changes, changes))


def _end_step(layout: Layout, apply: bool) -> None:
    """Ends the training step that backward passes have begun, if there were some."""
    locks = layout.locks
    if not layout.pending_gradients.backward_passes:
        return
    with calls:
        locks.catch_up()
        groups = layout.built
        works_on_tables = any(
            group.evicts() or (apply and any(optimizer.acts_after_next() for optimizer in group.optimizers))
            for group in groups
            if group.works_on_tables
        )
        with locks.without_pending_plans() if works_on_tables else locks.launch:
            locks.complete()
            waiting = _without_left_out(layout)
            if not waiting.backward_passes:
                return
            for group in groups:
                group.swap.transfers.follow_previous_stream()
            with profiled("update"):
                update = DeferredUpdate(layout, waiting.rows if apply else None, waiting.cleared(apply))
                locks.keep_rows(update.changing)
                locks.run_resumable(update)
        for group in groups:
            group.warn_of_evictions()


class PendingGradientMethods:
    """The part of an embedding that has to do with gradients that wait for `step()`.

    Attributes:
        layout: has the tables.
    """

    layout: Layout

    def apply_gradients(self) -> None:
        """Makes one update of all tables with the gradients of the backward passes since the last one.

        For `update="step"`. Nothing happens where there was no backward pass.

        Raises:
            ValueError, TypeError: an option of an optimizer that no update may use; nothing was changed.
        """
        _end_step(self.layout, apply=True)

    def drop_gradients(self) -> None:
        """Forgets the gradients that wait for `apply_gradients`."""
        _end_step(self.layout, apply=False)

    def gradient(self, table: str) -> torch.Tensor | None:
        """The gradient of the rows of a table that wait for `apply_gradients`; None where none does.

        A change in it counts, until another backward pass comes, after which this gives another tensor.

        Returns:
            float32 `[n, D]` on the device of the cache, each row once, in the order of their ids; a row of zeros where
            the table has none.
        """
        layout = self.layout
        with layout.locks.launch:
            waiting = layout.pending_gradients
            if not waiting.backward_passes or table in waiting.skipped_tables or table in layout.options.frozen:
                return None
            group, place = layout.find_table(table)
            group.swap.transfers.follow_previous_stream()
            index = layout.built.index(group)
            rows = waiting.rows[index]
            if rows is not None and rows.values is None:
                rows = rows.with_editable_values()
                layout.pending_gradients = waiting._replace(
                    rows=[*waiting.rows[:index], rows, *waiting.rows[index + 1 :]]
                )
            part = None if rows is None else rows.table_gradients()[place]
            if part is None or not len(part):  # norms and ranks go by a gradient that has elements
                part = torch.zeros((1, group.layout.dim), dtype=torch.float32, device=layout.device)
            return part

    def set_gradient(self, table: str, value: torch.Tensor | None) -> None:
        """Replaces the gradient of a table; with None its rows are left out of the next update.

        Args:
            table: its name.
            value: float32 `[n, D]`, as large as `gradient` gives it; None, or a tensor without elements, for none.

        Raises:
            TypeError: neither a tensor nor None.
            ValueError: another shape, layout or data type than `gradient` has, on the meta device, or none waits.
        """
        problem = None if value is None else tensor_problem(value)
        if problem is not None:
            error = ValueError if isinstance(value, torch.Tensor) else TypeError
            raise error(f"table {table!r}: its gradient {problem}")
        if value is None or not value.numel():
            self._leave_out(table)
            return
        now = self.gradient(table)
        expected = None if now is None else (tuple(now.shape), now.dtype)
        if now is None or (tuple(value.shape), value.dtype) != expected:
            raise ValueError(
                f"table {table!r}: a gradient of shape {tuple(value.shape)} and {value.dtype} cannot be set, "
                + ("since no backward pass waits for step()" if expected is None else f"expected are {expected}")
            )
        if now is not value:
            now.copy_(value.detach())

    def _leave_out(self, table: str) -> None:
        layout = self.layout
        waiting = layout.pending_gradients
        left_out = waiting.skipped_tables | {table}
        if (left_out | layout.options.frozen).issuperset(config.name for config in layout.tables):
            self.drop_gradients()
        elif waiting.backward_passes:
            layout.pending_gradients = waiting._replace(skipped_tables=left_out)
