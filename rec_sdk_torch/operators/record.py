"""The record of a row: typed views of weight and states in a buffer of records.

The layout is defined in `op_kernels/common/record.h`: the weight, then state blocks at offsets that are multiples of 4
bytes. Records begin at multiples of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

WEIGHT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""The dtypes of weights and states. The engine and the operators identify a dtype by its index here."""

OVERFLOW = {
    dtype: limits.max * (1 + limits.eps / (4 - 2 * limits.eps))
    for dtype in WEIGHT_DTYPES
    for limits in [torch.finfo(dtype)]
}
"""The smallest number that rounds to infinity, by dtype."""


def is_representable(dtype: torch.dtype, *numbers: float) -> bool:
    """Returns whether all numbers are finite in `dtype`, one of `WEIGHT_DTYPES`."""
    return all(abs(number) < OVERFLOW[dtype] for number in numbers)  # a NaN gives False


def _round_up(value: int, step: int) -> int:
    return (value + step - 1) // step * step


def dtype_codes(dtypes: Sequence[torch.dtype]) -> list[int]:
    """Returns the index of each dtype in `WEIGHT_DTYPES`, by which the engine and the operators identify it."""
    return [WEIGHT_DTYPES.index(dtype) for dtype in dtypes]


@dataclass(frozen=True)
class RecordLayout:
    """The layout of one record.

    Attributes:
        dim: the number D of elements of the weight.
        weight_dtype: the dtype of the weight.
        state_elements: the number of elements of each state block: D, or 1 if row-wise.
        state_dtypes: the dtype of each state block; empty: all are float32.
    """

    dim: int
    weight_dtype: torch.dtype
    state_elements: tuple[int, ...] = ()
    state_dtypes: tuple[torch.dtype, ...] = ()

    def state_dtype(self, index: int) -> torch.dtype:
        """Returns the dtype of state block `index`."""
        return self.state_dtypes[index] if self.state_dtypes else torch.float32

    def state_offset(self, index: int) -> int:
        """Returns the byte offset of state block `index`; with the number of blocks as `index`, the end of the last."""
        end = self.dim * self.weight_dtype.itemsize
        for before, elements in enumerate(self.state_elements[:index]):
            end = _round_up(end, 4) + elements * self.state_dtype(before).itemsize
        return _round_up(end, 4)

    @property
    def bytes(self) -> int:
        """The size of a record in bytes."""
        return _round_up(self.state_offset(len(self.state_elements)), 16)

    def weight(self, records: torch.Tensor) -> torch.Tensor:
        """Returns a view `[n, D]` of the weights in `records`, uint8 `[n, bytes]`."""
        return records.view(self.weight_dtype)[:, : self.dim]

    def state(self, records: torch.Tensor, index: int) -> torch.Tensor:
        """Returns a view, `[n, D]` or `[n, 1]`, of state block `index` in `records`, uint8 `[n, bytes]`."""
        dtype = self.state_dtype(index)
        begin = self.state_offset(index) // dtype.itemsize
        return records.view(dtype)[:, begin : begin + self.state_elements[index]]
