"""The way of output gradients to the rows: a check that they are finite, and loss scaling undone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ...runtime.warn import TrainingWarning, warn
from ..options import Scaler


class PeerRanks(Protocol):
    """Ranks that have parts of the same tables, and do the same steps."""

    def any_failed(self, failed: bool) -> bool: ...

    def raise_together(self, error: Exception | None) -> None: ...


class GradientGuard:
    """Looks at the gradients of one backward pass before any row changes.

    Attributes:
        check_finite: `off`, `warn` (the update is applied all the same) or `raise`.
        scaler: what scaled the loss; its scale is divided out, and an overflow skips the update.
        skipped: updates that were skipped.
        peers: skip and raise together with this one; None: there are none.
    """

    def __init__(self) -> None:
        self.check_finite = "off"
        self.scaler: Scaler | None = None
        self.skipped = 0
        self.peers: PeerRanks | None = None

    def check(
        self, grads: Sequence[torch.Tensor | None], tables: Callable[[Sequence[bool]], list[str]]
    ) -> list[torch.Tensor | None] | None:
        """The gradients that rows are updated with; None when the update is to be skipped.

        Args:
            grads: of the outputs, float32.
            tables: names of tables that outputs belong to, given for each output whether it is meant.

        Raises:
            FloatingPointError: `check_finite="raise"` and a gradient is NaN or infinite.
        """
        scaler = self.scaler if self.scaler is not None and self.scaler.is_enabled() else None
        if scaler is None and self.check_finite == "off":
            return list(grads)
        bad = [grad is not None and not bool(torch.isfinite(grad).all()) for grad in grads]
        if scaler is not None:
            # As GradScaler.step does for dense parameters; an overflow is its business, not an error.
            if self._on_any_rank(any(bad)):
                self.skipped += 1
                return None
            scale = scaler.get_scale()
            return [None if grad is None else grad / scale for grad in grads]
        if self.check_finite == "raise":
            if self._on_any_rank(any(bad)):
                self._raise(tables(bad) if any(bad) else None)
        elif any(bad):
            self._warn(tables(bad))
        return list(grads)

    def _on_any_rank(self, bad: bool) -> bool:
        return bad if self.peers is None else self.peers.any_failed(bad)

    def _raise(self, tables: list[str] | None) -> None:
        error = None
        if tables is not None:
            problem = f"the gradient of tables {tables} has NaN or infinite elements"
            error = FloatingPointError(f"{problem}; no row was changed (check_finite='raise')")
        if self.peers is not None:
            self.peers.raise_together(error)
        if error is not None:
            raise error

    def _warn(self, tables: list[str]) -> None:
        problem = f"the gradient of tables {tables} has NaN or infinite elements"
        warn(f"{problem}; the rows of this batch take them up (check_finite='warn')", TrainingWarning)
