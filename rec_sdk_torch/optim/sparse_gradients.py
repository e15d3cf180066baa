"""An optimizer of tables that updates nothing: gradients are handed out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class SparseGradients(torch.optim.Optimizer):
    """The backward pass aggregates a table's gradients per row, and leaves its rows alone.

    `collection.take_gradients()` gives what was aggregated since it was last called. For tables only.
    """

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Raises RuntimeError: other parameters keep their gradients without it."""
        raise RuntimeError("SparseGradients is for embedding tables: other parameters have their grad without it")
