"""The delayed write of a default kernel whose operator must not run twice."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Write(NamedTuple):
    """Computed rows that the caller must still write, with `to[at] = rows`, as the last thing it does.

    The subscript assignment is one instruction of the interpreter, which runs no signal handler between it and the
    return to C code. With `ops.call_once`, an interrupt therefore comes before the write or after the append of its
    result, as it does with compiled kernels.

    Attributes:
        to: the matrix to change.
        at: int64 `[n]`, distinct rows of `to`.
        rows: the new rows, `[n, columns]`.
        result: the result of the operator, computed before the write.
    """

    to: torch.Tensor
    at: torch.Tensor
    rows: torch.Tensor
    result: torch.Tensor | None = None
