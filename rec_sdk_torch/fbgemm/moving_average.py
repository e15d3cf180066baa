"""Moving average of EMAINPLACE_ROWWISE_ADAGRAD: the second half of a row is the moving average of the first half."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..tbe import WEIGHT, TableBatchedEmbedding
from .placement import EmbeddingSpec

ROWS_AT_ONCE = 1 << 16
"""Number of rows of a cached table that are read and written at a time."""


class MovingAverage:
    """Moving average within rows: `slow += coefficient * (fast - slow)`.

    `fast` is the first half of a row, `slow` the second; the loss should use only `fast`. The average is updated in
    the forward before every `step_ema`-th update, from update `step_start` on.
    """

    def __init__(self, definition: Any, specs: Sequence[EmbeddingSpec]) -> None:
        """Validates the parameters.

        Args:
            definition: an `EmainplaceModeDefinition` of this package or of FBGEMM.
            specs: specs of the tables.

        Raises:
            ValueError: a table has an odd dim, or a parameter is invalid.
        """
        self._every = int(definition.step_ema)
        self._start = int(definition.step_start)
        self._coefficient = float(definition.step_ema_coef)
        self._specs = specs
        self._moved_at = 0
        if self._every < 1 or not 0 <= self._coefficient <= 1:
            raise ValueError(f"emainplace_mode is {definition!r}: step_ema must be at least 1, step_ema_coef in [0, 1]")
        odd = [spec.dim for spec in specs if spec.dim % 2]
        if odd:
            raise ValueError(f"EMAINPLACE_ROWWISE_ADAGRAD divides rows into halves, but tables have odd dims {odd}")

    def before_forward(self, tables: TableBatchedEmbedding, number: int) -> None:
        """Updates the averages of all tables if they are due before update `number`.

        Updates are numbered from 1. A second forward before the same update changes nothing.
        """
        if number % self._every or number < self._start or number == self._moved_at:
            return
        self._moved_at = number
        for table, spec in zip(tables.tables, self._specs, strict=True):
            view = tables.view(table.name)
            if spec.is_resident():
                self._move_average(view.in_place()[WEIGHT])
                continue
            for begin in range(0, spec.rows, ROWS_AT_ONCE):
                ids = torch.arange(begin, min(begin + ROWS_AT_ONCE, spec.rows), device="cpu")
                rows = view.read(ids, [WEIGHT]).parts[WEIGHT]
                self._move_average(rows)
                view.write(ids, {WEIGHT: rows})

    @torch.no_grad()
    def _move_average(self, rows: torch.Tensor) -> None:
        fast, slow = rows.chunk(2, dim=1)
        slow.lerp_(fast, self._coefficient)
