"""Gradient norms of one group's tables, which the update kernels compute."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence

import numpy as np
import torch

NORMS = (2.0, math.inf)
"""The p of the supported p-norms."""


class UpdateNorms:
    """Gradient norms of the last update: the sum of squares and the largest magnitude of each row.

    An update may consist of several kernel calls, which write these values per row. Only `table_norms` reduces them
    over rows, so that a training step need not wait for the device.
    """

    def __init__(self) -> None:
        self._calls: dict[Hashable, tuple[torch.Tensor, torch.Tensor]] = {}

    def reset(self) -> None:
        """Clears the norms before the next update."""
        self._calls = {}

    def buffer_for_call(self, call: Hashable, slots: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
        """Returns the buffer for one kernel call, `row_norms` of `rec_sdk::update_rows`.

        A kernel call that is repeated after an interrupt gets the same buffer.

        Args:
            call: a key of the call.
            slots: the slots of the rows that the call updates, `[n]`.
            tables: offsets of the tables in `slots`, int32 `[T + 1]`.

        Returns:
            float32 `[2, n]`.
        """
        if call not in self._calls:
            with torch.inference_mode(False):
                rows = torch.empty((2, len(slots)), dtype=torch.float32, device=slots.device)
            self._calls[call] = rows, tables
        return self._calls[call][0]

    def table_norms(self, count: int, norm_type: float) -> list[float]:
        """Returns the norm of each of `count` tables; blocks until the device has finished the update.

        Squares are summed in float64 in ascending order, so the result does not depend on threads, kernel cores or the
        order of rows.
        """
        parts: list[list[np.ndarray]] = [[] for _ in range(count)]
        for rows, tables in self._calls.values():
            counted, borders = rows.cpu().numpy(), tables.tolist()
            for table, (begin, end) in enumerate(itertools.pairwise(borders)):
                parts[table].append(counted[:, begin:end])
        return [_norm(table_parts, norm_type) for table_parts in parts]


def _norm(parts: Sequence[np.ndarray], norm_type: float) -> float:
    squares = float(np.sort(np.concatenate([part[0] for part in parts])).sum(dtype=np.float64)) if parts else 0.0
    if math.isnan(squares):  # a kernel's maximum may ignore a NaN, but its sum does not
        return math.nan
    if norm_type == 2:
        return math.sqrt(squares)
    return float(max((part[1].max() for part in parts if part.shape[1]), default=0.0))
