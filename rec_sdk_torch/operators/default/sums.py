"""Sums in the order of `op_kernels/common/aggregate.h`, so that they are bit-identical to the kernels' sums."""

from __future__ import annotations

import torch

BLOCK = 32
LANES = 16


def list_positions(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the list index of each item in consecutive lists, and the item's position in its list.

    Args:
        counts: the length of each list, int64 `[n]`.
    """
    lists = torch.repeat_interleave(counts)
    starts = counts.cumsum(0) - counts
    return lists, torch.arange(len(lists), device=counts.device) - starts[lists]


def segment_sums(terms: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Sums the rows of each segment: sequentially in blocks of 32 rows, then the sums of the blocks pairwise.

    Args:
        terms: float32 `[n, D]`.
        offsets: int64 `[segments + 1]`.

    Returns:
        float32 `[segments, D]`; zeros for a segment without rows.
    """
    lengths = offsets.diff()
    counts = (lengths + (BLOCK - 1)) // BLOCK
    sums = _block_sums(terms, offsets[:-1], lengths, counts)
    while sums.shape[0] > 0 and int(counts.max()) > 1:
        sums, counts = _add_pairs(sums, counts)
    result = terms.new_zeros((len(lengths), terms.shape[1]))
    result[counts > 0] = sums
    return result


def _block_sums(terms: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    segment, position = list_positions(counts)
    first = starts[segment] + BLOCK * position
    length = (lengths[segment] - BLOCK * position).clamp(max=BLOCK)
    sums = terms.index_select(0, first)
    for i in range(1, int(length.max()) if len(length) else 0):
        longer = (length > i).nonzero()[:, 0]
        sums[longer] += terms[first[longer] + i]
    return sums


def _add_pairs(sums: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds neighbouring sums of each segment, in the kernels' order; the last of an odd number of sums is kept."""
    halved = (counts + 1) // 2
    segment, position = list_positions(halved)
    left = (counts.cumsum(0) - counts)[segment] + 2 * position
    both = (2 * position + 1 < counts[segment]).nonzero()[:, 0]
    paired = sums.index_select(0, left)
    paired[both] += sums[left[both] + 1]
    return paired, halved


def lane_sums(terms: torch.Tensor) -> torch.Tensor:
    """Sums each row of `[n, D]` to `[n, 1]`, in the kernels' order.

    Lane l of 16 lanes sums columns l, l + 16, ...; then the upper half of the lanes is added to the lower half, until
    one lane is left.
    """
    lanes = terms.new_zeros((terms.shape[0], LANES))
    for begin in range(0, terms.shape[1], LANES):
        part = terms[:, begin : begin + LANES]
        lanes[:, : part.shape[1]] += part
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes
