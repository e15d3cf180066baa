"""Splits the rows and lengths of a lookup into the parts of features."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_BelowAutograd = torch._C._AutoDispatchBelowADInplaceOrView


def split_apart(rows: torch.Tensor, lengths: Sequence[int]) -> Sequence[torch.Tensor]:
    """Splits `rows`, without a copy, into tensors that the caller may change in place.

    Autograd forbids in-place changes of a view that is one of several outputs of a node. The split is therefore hidden
    from autograd. A node for each output would also work, but would take more time than all other work for an output.
    Without views, torch also allocates less for each part.
    """
    with _BelowAutograd():
        return rows.split_with_sizes(lengths)
