"""The outputs of a lookup, as its caller gets them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_unsafe_view = torch.ops.aten._unsafe_view.default._op


def apart(outputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The outputs of one node of autograd, each as one that may be changed in place, with a node of its own.

    Hooks of a feature that is not part of the loss are not called then. Memory is shared with `outputs`, which a view
    of them would be to autograd as well: it allows no change in place of a view that was one output of several.
    """
    return tuple(map(_unsafe_view, outputs, [output.shape for output in outputs]))


def split_rows(of_groups: Sequence[torch.Tensor], lengths: Sequence[list[int]]) -> tuple[torch.Tensor, ...]:
    """Rows of each feature, from the rows of each group."""
    return tuple(part for rows, of_group in zip(of_groups, lengths, strict=True) for part in rows.split(of_group))
