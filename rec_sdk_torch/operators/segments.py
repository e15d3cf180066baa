"""Hot segments: rows with so many lookups in a batch that their gradients are summed in several parts."""

from __future__ import annotations

import numpy as np

HOT_LOOKUPS = 128
"""A row with more lookups is summed in chunks of this size: `kHotLookups` of op_kernels/common/arguments.h."""
HOT_SEGMENT_FIELDS = 4


def hot_segments(segment_offsets: np.ndarray) -> np.ndarray:
    """Computes the argument `hot_segments` of `update_rows` and `accumulate_rows`.

    Args:
        segment_offsets: index of each row's first lookup, and finally the total number of lookups, int32 `[U + 1]`.

    Returns:
        int32 `[H, 4]`, one line for each row with more than `HOT_LOOKUPS` lookups, in ascending order. A line has the
        row, its first lookup, its number of full chunks of `HOT_LOOKUPS`, and the sum of the chunks of earlier lines.
    """
    lengths = np.diff(segment_offsets)
    rows = np.flatnonzero(lengths > HOT_LOOKUPS)
    chunks = lengths[rows] // HOT_LOOKUPS
    columns = (rows, segment_offsets[rows], chunks, np.cumsum(chunks) - chunks)
    return np.ascontiguousarray(np.stack(columns, axis=1), dtype=np.int32)
