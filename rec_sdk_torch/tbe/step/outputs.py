"""The outputs of a lookup, as its caller gets them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_BelowAutograd = torch._C._AutoDispatchBelowADInplaceOrView


def split_apart(rows: torch.Tensor, lengths: Sequence[int]) -> Sequence[torch.Tensor]:
    """The rows of each feature, in the memory of `rows`: outputs of one node of autograd that may be changed in place.

    Autograd does not learn that they share memory: it allows no change in place of a view that is one output of
    several. A node for each of them would do as well, and takes more time than all else that is done for an output.
    """
    with _BelowAutograd():
        return rows.split_with_sizes(lengths)
