"""Norms of the gradients of rows, which the updates of one group count while they run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence

import numpy as np
import torch

NORMS = (2.0, math.inf)
"""p of the norms that updates count."""


class UpdateNorms:
    """The counts of the last update: the sum of squares of each row, and its largest magnitude.

    An update may be several calls. They add nothing across rows: `of_tables` does, so that no step waits for its
    device.
    """

    def __init__(self) -> None:
        self._calls: dict[Hashable, tuple[torch.Tensor, torch.Tensor]] = {}

    def reset(self) -> None:
        """Another update comes."""
        self._calls = {}

    def buffer_for_call(self, call: Hashable, slots: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
        """Where a call of the update counts, `row_norms` of `rec_sdk::update_rows`.

        A call that is made again after an interrupt, or is passed over since it was made, finds the same tensor.
        `tables`: the borders of tables among the rows in `slots`, int32 `[T + 1]`.
        """
        if call not in self._calls:
            with torch.inference_mode(False):
                rows = torch.empty((2, len(slots)), dtype=torch.float32, device=slots.device)
            self._calls[call] = rows, tables
        return self._calls[call][0]

    def table_norms(self, count: int, norm_type: float) -> list[float]:
        """The norm of each of `count` tables; the host waits for the device.

        Sums over rows are of float64, from the smallest square to the largest: threads, cores of the kernels and the
        order of rows do not change them.
        """
        parts: list[list[np.ndarray]] = [[] for _ in range(count)]
        for rows, tables in self._calls.values():
            counted, borders = rows.cpu().numpy(), tables.tolist()
            for table, (begin, end) in enumerate(itertools.pairwise(borders)):
                parts[table].append(counted[:, begin:end])
        return [_norm(of_table, norm_type) for of_table in parts]


def _norm(parts: Sequence[np.ndarray], norm_type: float) -> float:
    squares = float(np.sort(np.concatenate([part[0] for part in parts])).sum(dtype=np.float64)) if parts else 0.0
    if math.isnan(squares):  # kernels may lose a NaN among magnitudes, but not in a sum
        return math.nan
    if norm_type == 2:
        return math.sqrt(squares)
    return float(max((part[1].max() for part in parts if part.shape[1]), default=0.0))
