"""Records of rows that a group has, wherever they are."""

from __future__ import annotations

import numpy as np
import torch

from .batch import Int64Array
from .device_cache import Group


def read_known(group: Group, table: int, ids: Int64Array, rows: Int64Array, slots: np.ndarray) -> torch.Tensor:
    """Records of `ids`, uint8 `[n, bytes]` on the host, whose rows and slots the engine gave. All must be settled."""
    records = torch.empty((len(rows), group.layout.bytes), dtype=torch.uint8, device="cpu")
    group.engine.read_rows(table, ids, rows, records.numpy())
    resident = np.flatnonzero(slots >= 0)
    if len(resident):
        records[torch.from_numpy(resident)] = group.gather(slots[resident])
    return records
