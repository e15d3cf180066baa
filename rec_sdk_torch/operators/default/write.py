"""The delayed write of a default kernel whose operator must not run twice."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Write(NamedTuple):
    """Computed rows that the caller must still write, by `to[at] = rows` as its last statement before the return.

    The assignment is one instruction of the interpreter, which runs no signal handler between this instruction and the
    return to C code. With `call_once`, an interrupt therefore happens either before the write or after the append of
    the result, as it does with compiled kernels.

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
