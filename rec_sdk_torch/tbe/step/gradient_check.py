"""Checks that output gradients are finite, and undoes loss scaling, before the gradients change any row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ...runtime.warn import TrainingWarning, warn
from ..options import Scaler


class PeerRanks(Protocol):
    """The other ranks of a sharded collection, which skip an update or raise an error together with this rank."""

    def any_failed(self, failed: bool) -> bool: ...

    def raise_on_all_ranks(self, error: Exception | None) -> None: ...


class GradientGuard:
    """Checks of one embedding's output gradients, made before any row changes.

    Attributes:
        check_finite: `off`; `warn`, which still applies the update; or `raise`.
        scaler: the GradScaler that scaled the loss. Gradients are divided by its scale; an overflow skips the update.
        skipped: how many updates were skipped.
        peers: the other ranks of a sharded collection; None: there are none.
    """

    def __init__(self) -> None:
        self.check_finite = "off"
        self.scaler: Scaler | None = None
        self.skipped = 0
        self.peers: PeerRanks | None = None

    def check(
        self, grads: Sequence[torch.Tensor | None], tables: Callable[[Sequence[bool]], list[str]]
    ) -> list[torch.Tensor | None] | None:
        """Checks and unscales gradients; returns None if the update must be skipped.

        Args:
            grads: the gradient of each output, float32; None for an output that is not part of the loss.
            tables: a function for messages. It takes one bool for each output, and returns the names of the tables with
                outputs that have True.

        Raises:
            FloatingPointError: with `check_finite="raise"`, a gradient of some rank has a NaN or infinite element.
        """
        scaler = self.scaler if self.scaler is not None and self.scaler.is_enabled() else None
        if scaler is None and self.check_finite == "off":
            return list(grads)
        bad = [grad is not None and not bool(torch.isfinite(grad).all()) for grad in grads]
        if scaler is not None:
            # An overflow skips the update and is not an error. GradScaler.step does the same for dense parameters.
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
            self.peers.raise_on_all_ranks(error)
        if error is not None:
            raise error

    def _warn(self, tables: list[str]) -> None:
        problem = f"the gradient of tables {tables} has NaN or infinite elements"
        warn(f"{problem}; the rows of this batch are updated with them (check_finite='warn')", TrainingWarning)
