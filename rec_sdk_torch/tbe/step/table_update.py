"""Updates that may do something to whole tables: the end of a window, evictions of ids, passes of optimizers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..cache.accumulation import count_backward_passes
from ..cache.eviction import end_step
from ..cache.plan import Plan
from ..cache.update_journal import UpdateJournal
from ..config.optimizer import TableOptimizer
from ..rows.layout import Layout
from ..rows.pending_gradients import PinningBatch
from .optimizer_passes import TablePasses

Grads = Sequence[Sequence[torch.Tensor | None]]
"""Gradients of each group: that of the pooled output, or one of each feature; float32 without gaps."""


class TableUpdate:
    """The update of one backward pass, made ready. Both locks are held where it may work on whole tables.

    Attributes:
        changing: groups whose rows change, and not only a window.
    """

    def __init__(
        self, layout: Layout, plans: Sequence[Plan], grads: Grads | None, weights: Sequence[torch.Tensor | None]
    ) -> None:
        """
        Args:
            layout: has the tables.
            plans: of the batch, for each group.
            grads: see `Grads`; None where no row changes.
            weights: of each group, the per-sample weights.
        """
        self._layout = layout
        self._groups = groups = layout.built
        self._plans = plans
        self._held: Sequence[PinningBatch] = plans
        self._grads = grads
        self._weights = weights
        self._windows = count_backward_passes(layout.windows, (group.accumulate_step for group in groups))
        ended = [group for group in groups if self._windows[group.accumulate_step] >= group.accumulate_step]
        self.changing = [] if grads is None else ended
        optimizers = {id(optimizer): optimizer for group in self.changing for optimizer in group.optimizers}
        self._numbers: list[tuple[TableOptimizer, int]] = [(o, o.step + 1) for o in optimizers.values()]
        self._coefficients = {key: optimizer.coefficients() for key, optimizer in optimizers.items()}
        passing = [optimizer for optimizer in optimizers.values() if optimizer.acts_after_next()]
        self._passes = TablePasses(passing, groups, layout.options.frozen)
        self._journal = UpdateJournal()
        for group in self.changing:
            if group.norms is not None:
                group.norms.reset()

    @property
    def started(self) -> bool:
        """Whether anything has changed."""
        return not self._journal.empty()

    def run(self) -> None:
        """Updates the rows, or adds to the open windows; and ends the step, after which ids may leave their tables."""
        if self._grads is not None:
            self._update(self._grads)
            for optimizer, step in self._numbers:
                optimizer.step = step
            self._passes.run()
            self._layout.windows = {length: count % length for length, count in self._windows.items()}
        for holder in self._held:
            holder.release()
        for group in self._groups:
            end_step(group, self._journal)

    def _update(self, of_groups: Grads) -> None:
        for group, plan, grads, weights in zip(self._groups, self._plans, of_groups, self._weights, strict=True):
            if group.accumulation_buffer is None:
                call = group.update(plan, grads, weights, self._coefficients)
                if call is not None:
                    self._journal.run(group, *call)
                continue
            group.accumulate(plan, grads, weights, self._journal)
            if group in self.changing:
                group.close_window(self._coefficients, self._journal)
