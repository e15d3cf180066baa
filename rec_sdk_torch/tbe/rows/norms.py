"""Norms of the gradients of the last update, of all tables of an embedding."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace

from ..cache.norms import NORMS
from ..options import EmbeddingOptions
from .layout import Layout


class CountedNorms:
    """The part of an embedding that has to do with norms that updates count.

    Attributes:
        layout: has the tables.
    """

    layout: Layout

    @abstractmethod
    def _set_options(self, options: EmbeddingOptions) -> None:
        """Makes these the options."""

    def count_grad_norms(self, on: bool = True) -> None:
        """Lets updates in the backward pass count the norms of their gradients for `counted_norms`, or no more.

        The next update is the first that does. Rows and outputs are the same.

        Raises:
            ValueError: with `update="step"`, where gradients can be looked at before the update.
        """
        layout = self.layout
        options = replace(layout.options, grad_norms=on)
        with layout.locks.exclusive():
            if options.grad_norms is not layout.options.grad_norms:
                for group in layout.built:
                    group.count_norms(options.grad_norms)
            self._set_options(options)

    @property
    def counts_grad_norms(self) -> bool:
        """Whether there are norms for `counted_norms`."""
        return self.layout.options.grad_norms and not self._handed_out()

    def _handed_out(self) -> list[str]:
        """Tables whose gradients no update sees."""
        given = zip(self.layout.tables, self.layout.optimizers, strict=True)
        return [table.name for table, optimizer in given if optimizer is not None and optimizer.spec.hands_out]

    def counted_norms(self, norm_type: float = 2.0) -> dict[str, float]:
        """The norm of each table's gradient in the last update of its rows: of the sum that a row's lookups have.

        It is that of the gradient before `max_gradient` bounds it, unscaled where there is a GradScaler, and of the
        whole window where gradients are accumulated. 0 where the table had no gradient, is frozen, or no update came
        since counting began. A skipped update leaves the norms as they were. The host waits for the device.

        Args:
            norm_type: p of the norm, 2 or infinity.

        Raises:
            RuntimeError: nothing is counted, or not of such tables: their gradients are handed out.
            ValueError: another norm.
        """
        layout, norm_type = self.layout, float(norm_type)
        if not layout.options.grad_norms:
            raise RuntimeError(
                "the gradients of these tables are used up in the backward pass: call count_grad_norms() before it, or "
                "make the tables with update='step'"
            )
        if self._handed_out():
            raise RuntimeError(f"tables {self._handed_out()} hand their gradients out: take_gradients() has them")
        if norm_type not in NORMS:
            raise ValueError(f"norm_type is {norm_type}, updates count those of {list(NORMS)}")
        norms = dict.fromkeys((table.name for table in layout.tables), 0.0)
        layout.locks.catch_up()
        with layout.locks.launch:
            layout.locks.complete()
            for group in layout.built:
                if group.norms is None:
                    continue
                group.swap.transfers.follow()
                norms.update(zip(group.places, group.norms.of_tables(len(group.members), norm_type), strict=True))
        return norms | dict.fromkeys(layout.options.frozen, 0.0)
