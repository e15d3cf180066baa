"""Updates that may work on whole tables: they end accumulation windows, evict ids and make optimizers' table passes."""

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
"""Contiguous float32 gradients of each group: one for the pooled output, or one for each feature."""


class TableUpdate:
    """A prepared update of one backward pass. It can be resumed after an interrupt.

    The caller holds both locks of the embedding if the update may work on whole tables.

    Attributes:
        changing: the groups whose rows change; the other groups only add to their accumulation buffers.
    """

    def __init__(
        self, layout: Layout, plans: Sequence[Plan], grads: Grads | None, weights: Sequence[torch.Tensor | None]
    ) -> None:
        """Prepares the update; nothing changes yet.

        Args:
            layout: the tables.
            plans: the batch's plan for each group.
            grads: the gradients; None: no row changes, but the training step ends.
            weights: the per-sample weights of each group.
        """
        self._layout = layout
        self._groups = groups = layout.built
        self._plans = plans
        self._pinning_batches: Sequence[PinningBatch] = plans
        self._grads = grads
        self._weights = weights
        self._windows = count_backward_passes(layout.windows, (group.accumulate_step for group in groups))
        ended = [group for group in groups if self._windows[group.accumulate_step] >= group.accumulate_step]
        self.changing = [] if grads is None else ended
        optimizers = {id(optimizer): optimizer for group in self.changing for optimizer in group.optimizers}
        self._next_steps: list[tuple[TableOptimizer, int]] = [(o, o.step + 1) for o in optimizers.values()]
        self._coefficients = {key: optimizer.coefficients() for key, optimizer in optimizers.items()}
        passing = [optimizer for optimizer in optimizers.values() if optimizer.has_table_pass_after_next()]
        self._passes = TablePasses(passing, groups, layout.options.frozen)
        self._journal = UpdateJournal()
        for group in self.changing:
            if group.norms is not None:
                group.norms.reset()

    @property
    def started(self) -> bool:
        """Whether the update has changed anything yet."""
        return not self._journal.empty()

    def run(self) -> None:
        """Updates rows and accumulation buffers, unpins the batch's rows, and evicts ids where an eviction is due."""
        if self._grads is not None:
            self._update(self._grads)
            for optimizer, step in self._next_steps:
                optimizer.step = step
            self._passes.run()
            self._layout.windows = {length: count % length for length, count in self._windows.items()}
        for batch in self._pinning_batches:
            batch.release()
        for group in self._groups:
            end_step(group, self._journal)

    def _update(self, grads_by_group: Grads) -> None:
        for group, plan, grads, weights in zip(self._groups, self._plans, grads_by_group, self._weights, strict=True):
            if group.accumulation_buffer is None:
                call = group.update_call(plan, grads, weights, self._coefficients)
                if call is not None:
                    self._journal.run(group, *call)
                continue
            group.accumulate(plan, grads, weights, self._journal)
            if group in self.changing:
                group.close_window(self._coefficients, self._journal)
