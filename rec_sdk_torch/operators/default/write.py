"""The last write of an operator that must not run twice."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Write(NamedTuple):
    """Rows that have been computed and are still to be written: `to[at] = rows`.

    The caller writes them, as the last thing it does. An assignment to a subscript is one instruction of the
    interpreter, behind which it looks for no signal until it is back in C code: with `ops.call_once`, an interrupt
    comes before the call and its note, or after both, as it does with kernels.

    Attributes:
        to: a matrix.
        at: int64 `[n]`, distinct rows of it.
        rows: `[n, columns]`.
        result: of the operator, made before the write.
    """

    to: torch.Tensor
    at: torch.Tensor
    rows: torch.Tensor
    result: torch.Tensor | None = None
