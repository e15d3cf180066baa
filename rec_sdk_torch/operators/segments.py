"""Rows with so many lookups in a batch that a device sums them in parts."""

from __future__ import annotations

import numpy as np

HOT_LOOKUPS = 128
"""Devices sum a row of more lookups in chunks of as many: `kHotLookups` of op_kernels/common/arguments.h."""
HOT_SEGMENT_FIELDS = 4


def hot_segments(segment_offsets: np.ndarray) -> np.ndarray:
    """The `hot_segments` of `update_rows` and `accumulate_rows` for `segment_offsets`, int32 `[U + 1]`.

    Returns:
        int32 `[H, 4]`, of each row with more than `HOT_LOOKUPS` lookups, ascending: the row, its first lookup, its
        whole chunks of `HOT_LOOKUPS`, and those of the rows before it.
    """
    lengths = np.diff(segment_offsets)
    rows = np.flatnonzero(lengths > HOT_LOOKUPS)
    chunks = lengths[rows] // HOT_LOOKUPS
    columns = (rows, segment_offsets[rows], chunks, np.cumsum(chunks) - chunks)
    return np.ascontiguousarray(np.stack(columns, axis=1), dtype=np.int32)
