"""Training with `update="step"`: backward passes add to pending gradients; `step()` of the optimizer applies them."""

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
"""The checksum that represents a gradient that was set to None."""


class DeferredStep(Step):
    """A training batch with any number of backward passes. The batch's rows stay pinned until `step()` updates them."""

    many_backwards = True

    def backward(
        self,
        grads: Sequence[torch.Tensor | None],
        weights: Sequence[torch.Tensor | None],
        needs_grad: Sequence[bool],
        tables: frozenset[str] | None = None,
    ) -> list[torch.Tensor | None]:
        """Adds `grads` to the pending gradients; returns the gradients of the per-sample weights, see `Step`."""
        if self.finished:
            raise RuntimeError(
                "the embedding's rows were updated by step() after this forward and a backward through it: look the "
                "batch up again"
            )
        return super().backward(grads, weights, needs_grad, tables)

    def must_stay_pinned(self) -> bool:
        """Returns whether the rows must stay pinned after a failed backward pass."""
        return self in self._layout.pending_gradients.pinning_batches or super().must_stay_pinned()

    def _needs_tables(self) -> bool:
        return False

    def _update(
        self, grads: Grads, row_grads: Grads | None, weights: Sequence[torch.Tensor | None], needs_grad: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        readers = self._locks.readers
        reading = readers.get(id(self))
        result = super()._update(grads, row_grads, weights, needs_grad)
        if reading is not None:
            readers[id(self)] = reading  # a later backward pass needs the present values of the rows
        return result

    def _make_calls(self, row_grads: Grads | None, weights: Sequence[torch.Tensor | None]) -> None:
        """Adds the gradients of all groups to the pending gradients; after an interrupt, of no group."""
        assert row_grads is not None, "with update='step' nothing skips an update before step()"
        layout = self._layout
        pending = _without_skipped_tables(layout)
        before = pending.rows or (None,) * len(self._groups)
        rows = []
        for group, plan, grads, weight, gradients in zip(
            self._groups, self._plans, row_grads, weights, before, strict=True
        ):
            group.swap.transfers.follow_previous_stream()
            rows.append(add_gradients(gradients, plan, grads, weight, group.layout.dim))
        batches = pending.pinning_batches if self in pending.pinning_batches else (*pending.pinning_batches, self)
        layout.pending_gradients = pending._replace(
            rows=rows, pinning_batches=batches, backward_passes=pending.backward_passes + 1
        )


class DeferredUpdate(TableUpdate):
    """The update of `step()`, which applies the pending gradients and ends the training step."""

    def __init__(self, layout: Layout, rows: Sequence[GroupGradients | None] | None, after: PendingGradients) -> None:
        """Prepares the update; nothing changes yet.

        Args:
            layout: the tables.
            rows: the pending gradients of each group; None: the gradients are discarded, and no row changes.
            after: the layout's pending gradients after the update.
        """
        groups = layout.built
        plans = cast(Sequence[Plan], rows or ())  # a group's gradients have the interface of a plan
        grads = None if rows is None else [[None if each is None else each.gradient] for each in rows]
        super().__init__(layout, plans, grads, [None] * len(groups))
        self._pinning_batches = layout.pending_gradients.pinning_batches if rows is not None else ()
        self._after = after

    def run(self) -> None:
        """Updates the rows, and then clears the pending gradients; see `TableUpdate.run`."""
        super().run()
        self._layout.pending_gradients = self._after


def _without_skipped_tables(layout: Layout) -> PendingGradients:
    """Returns the pending gradients without skipped tables.

    For each replicated table, `changes` of the result includes a checksum of the user's changes to its gradient.
    """
    pending = layout.pending_gradients
    if not pending.backward_passes or not (pending.skipped_tables or layout.replicated):
        return pending
    rows, changes = [], {}
    for group, gradients in zip(layout.built, pending.rows, strict=True):
        indices = {name: group.table_indices[name] for name in pending.skipped_tables & group.table_indices.keys()}
        if gradients is not None:
            for name in layout.replicated & group.table_indices.keys():
                left_out = name in indices and gradients.count(indices[name])
                changes[name] = _SET_TO_NONE if left_out else gradients.checksum_of_change(group.table_indices[name])
        rows.append(gradients.exclude_tables(indices.values()) if gradients is not None and indices else gradients)
    return pending._replace(rows=rows, skipped_tables=frozenset(), changes=combine_checksums(pending.changes, changes))


def _end_step(layout: Layout, apply: bool) -> None:
    """Ends the training step of the pending backward passes, if there are any.

    Args:
        layout: the tables.
        apply: True to update the rows with the gradients, False to discard the gradients.
    """
    locks = layout.locks
    if not layout.pending_gradients.backward_passes:
        return
    with calls:
        locks.catch_up()
        groups = layout.built
        works_on_tables = any(
            group.evicts_at_step_end() or (apply and any(each.has_table_pass_after_next() for each in group.optimizers))
            for group in groups
            if group.works_on_tables
        )
        with locks.without_pending_plans() if works_on_tables else locks.launch:
            locks.complete()
            pending = _without_skipped_tables(layout)
            if not pending.backward_passes:
                return
            for group in groups:
                group.swap.transfers.follow_previous_stream()
            with profiled("update"):
                update = DeferredUpdate(layout, pending.rows if apply else None, pending.cleared(apply))
                locks.keep_rows(update.changing)
                locks.run_resumable(update)
        for group in groups:
            group.warn_of_evictions()


class PendingGradientMethods:
    """Methods of an embedding with `update="step"`, which read, replace, apply and discard the pending gradients.

    Attributes:
        layout: the tables.
    """

    layout: Layout

    def apply_gradients(self) -> None:
        """Updates all tables once, with the gradients of all backward passes since the last update.

        Requires `update="step"`. Does nothing if there has been no backward pass since.

        Raises:
            ValueError, TypeError: an optimizer has an invalid option; no row has changed.
        """
        _end_step(self.layout, apply=True)

    def drop_gradients(self) -> None:
        """Discards the pending gradients, and ends the training step without an update."""
        _end_step(self.layout, apply=False)

    def gradient(self, table: str) -> torch.Tensor | None:
        """Returns a table's pending gradient, which the next `apply_gradients` uses.

        The gradient may be changed in place. After another backward pass, this method returns a new tensor, which
        includes the changes.

        Returns:
            float32 `[n, D]` on the device of the cache, one row for each row of the table with a gradient, in the
            order of the ids; a single row of zeros if no row has one. None: there was no backward pass, the table is
            frozen, or its gradient was set to None.
        """
        layout = self.layout
        with layout.locks.launch:
            pending = layout.pending_gradients
            if not pending.backward_passes or table in pending.skipped_tables or table in layout.options.frozen:
                return None
            group, table_index = layout.find_table(table)
            group.swap.transfers.follow_previous_stream()
            index = layout.built.index(group)
            rows = pending.rows[index]
            if rows is not None and rows.values is None:
                rows = rows.with_editable_values()
                layout.pending_gradients = pending._replace(
                    rows=[*pending.rows[:index], rows, *pending.rows[index + 1 :]]
                )
            part = None if rows is None else rows.table_gradients()[table_index]
            if part is None or not len(part):  # a norm over tables and ranks needs a gradient with elements
                part = torch.zeros((1, group.layout.dim), dtype=torch.float32, device=layout.device)
            return part

    def set_gradient(self, table: str, value: torch.Tensor | None) -> None:
        """Replaces a table's pending gradient.

        Args:
            table: the name of the table.
            value: float32 `[n, D]`, of the shape that `gradient` returns. With None, or a tensor without elements, the
                next update skips the table.

        Raises:
            TypeError: `value` is neither a tensor nor None.
            ValueError: `value` has another shape, layout or data type than `gradient` returns, or is on the meta
                device; or no gradient is pending.
        """
        problem = None if value is None else tensor_problem(value)
        if problem is not None:
            error = ValueError if isinstance(value, torch.Tensor) else TypeError
            raise error(f"table {table!r}: its gradient {problem}")
        if value is None or not value.numel():
            self._skip_table(table)
            return
        current = self.gradient(table)
        expected = None if current is None else (tuple(current.shape), current.dtype)
        if current is None or (tuple(value.shape), value.dtype) != expected:
            raise ValueError(
                f"table {table!r}: a gradient of shape {tuple(value.shape)} and {value.dtype} cannot be set, "
                + ("since no gradient is pending" if expected is None else f"expected are {expected}")
            )
        if current is not value:
            current.copy_(value.detach())

    def _skip_table(self, table: str) -> None:
        layout = self.layout
        pending = layout.pending_gradients
        skipped = pending.skipped_tables | {table}
        if (skipped | layout.options.frozen).issuperset(config.name for config in layout.tables):
            self.drop_gradients()
        elif pending.backward_passes:
            layout.pending_gradients = pending._replace(skipped_tables=skipped)
