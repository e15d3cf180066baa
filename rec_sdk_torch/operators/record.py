"""The row record in Python: typed views of weight and states in a buffer of records.

The layout is that of `op_kernels/common/record.h`: weight, then state blocks at multiples of 4 bytes,
records at multiples of 16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

WEIGHT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""The types of weights and states, by their numbers in the engine and the operators."""

OVERFLOW = {
    dtype: limits.max * (1 + limits.eps / (4 - 2 * limits.eps))
    for dtype in WEIGHT_DTYPES
    for limits in [torch.finfo(dtype)]
}
"""The least number that rounds to infinity."""


def is_representable(dtype: torch.dtype, *numbers: float) -> bool:
    """Whether numbers are finite ones of a data type in `WEIGHT_DTYPES`."""
    return all(abs(number) < OVERFLOW[dtype] for number in numbers)  # False for NaN


def _round_up(value: int, step: int) -> int:
    return (value + step - 1) // step * step


def dtype_codes(dtypes: Sequence[torch.dtype]) -> list[int]:
    """As the engine and the operators name them."""
    return [WEIGHT_DTYPES.index(dtype) for dtype in dtypes]


@dataclass(frozen=True)
class RecordLayout:
    """Layout of one record.

    Attributes:
        dim: D, elements of the weight.
        weight_dtype: its dtype.
        state_elements: elements of each state block (D, or 1 when row-wise).
        state_dtypes: of each state block; empty: all are float32.
    """

    dim: int
    weight_dtype: torch.dtype
    state_elements: tuple[int, ...] = ()
    state_dtypes: tuple[torch.dtype, ...] = ()

    def state_dtype(self, index: int) -> torch.dtype:
        """The data type of one state block."""
        return self.state_dtypes[index] if self.state_dtypes else torch.float32

    def state_offset(self, index: int) -> int:
        """The first byte of a state block in a record; of the one behind the last, where the states end."""
        end = self.dim * self.weight_dtype.itemsize
        for before, elements in enumerate(self.state_elements[:index]):
            end = _round_up(end, 4) + elements * self.state_dtype(before).itemsize
        return _round_up(end, 4)

    @property
    def bytes(self) -> int:
        """Bytes of a record."""
        return _round_up(self.state_offset(len(self.state_elements)), 16)

    def weight(self, records: torch.Tensor) -> torch.Tensor:
        """View `[n, D]` of the weights in `records`, uint8 `[n, bytes]`."""
        return records.view(self.weight_dtype)[:, : self.dim]

    def state(self, records: torch.Tensor, index: int) -> torch.Tensor:
        """View `[n, D]` or `[n, 1]`, in its dtype, of one state block in `records`."""
        dtype = self.state_dtype(index)
        begin = self.state_offset(index) // dtype.itemsize
        return records.view(dtype)[:, begin : begin + self.state_elements[index]]
