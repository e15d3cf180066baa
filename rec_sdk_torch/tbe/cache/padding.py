"""Batches whose features have batch sizes of their own: the tables look up one in which all have the largest."""

from __future__ import annotations

import torch


def padded_places(sizes: torch.Tensor) -> torch.Tensor:
    """The places of the padded offsets' values among the offsets of the batch.

    Features have empty bags behind their own.

    Args:
        sizes: the batch size of each feature, int64 `[F]`; not empty.

    Returns:
        int64 `[F * max(sizes) + 1]`.
    """
    ends = sizes.cumsum(0)
    within = torch.arange(int(sizes.max()), device=sizes.device)[None, :].minimum(sizes[:, None])
    return torch.cat([((ends - sizes)[:, None] + within).reshape(-1), ends[-1:]])
