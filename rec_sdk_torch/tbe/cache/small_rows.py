"""Rows that leave as their weights are small. The cache has newer weights than the host, the engine has neither."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ...rules import Norm
from .device_cache import Group
from .records import read_known


def norms(weight: torch.Tensor) -> npt.NDArray[np.float64]:
    """The 2-norms of rows `[n, D]` on the host, float64 `[n]`: elements in their order, the same bits everywhere.

    NumPy's square root is rounded correctly, which torch's is not in all of its builds.
    """
    total = np.zeros(len(weight), np.float64)
    for column in weight.double().T.contiguous().numpy():
        total += column * column
    return np.sqrt(total)


def mark_small_rows(group: Group, tables: Sequence[int]) -> None:
    """Tells the engine which rows of these tables leave with the next eviction, by the weights that they have now.

    Batches may be in flight. No plan may be made until then.
    """
    if not tables:
        return
    group.swap.settle()
    for table in tables:
        config = group.members[table].config
        rule = config.life and config.life.rule(Norm)
        assert rule
        small = [np.empty(0, np.int64)]
        ids = group.engine.table_rows(table)[0]
        for begin in range(0, len(ids), group.chunk):
            some = ids[begin : begin + group.chunk]
            rows, slots = group.engine.find_rows(table, some)
            records = read_known(group, table, some, rows, slots)
            weight = group.layout.weight(records).to(config.weight_dtype)
            small.append(rows[norms(weight) < rule.least])
        group.engine.mark_small(table, np.concatenate(small))
