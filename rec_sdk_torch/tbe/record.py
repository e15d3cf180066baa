"""The row record in Python: typed views of weight and states in a buffer of records.

The layout is that of `op_kernels/common/record.h`: weight, then float32 state blocks at multiples of 4 bytes,
records at multiples of 16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


def _round_up(value: int, step: int) -> int:
    return (value + step - 1) // step * step


@dataclass(frozen=True)
class RecordLayout:
    """Layout of one record.

    Attributes:
        dim: D, elements of the weight.
        weight_dtype: its dtype.
        state_elements: elements of each float32 state block (D, or 1 when row-wise).
    """

    dim: int
    weight_dtype: torch.dtype
    state_elements: tuple[int, ...] = ()

    @property
    def _first_state(self) -> int:
        return _round_up(self.dim * self.weight_dtype.itemsize, 4)

    @property
    def bytes(self) -> int:
        """Bytes of a record."""
        return _round_up(self._first_state + 4 * sum(self.state_elements), 16)

    def weight(self, records: torch.Tensor) -> torch.Tensor:
        """View `[n, D]` of the weights in `records`, uint8 `[n, bytes]`."""
        return records.view(self.weight_dtype)[:, : self.dim]

    def state(self, records: torch.Tensor, index: int) -> torch.Tensor:
        """View `[n, D]` or `[n, 1]`, float32, of one state block in `records`."""
        begin = self._first_state // 4 + sum(self.state_elements[:index])
        return records.view(torch.float32)[:, begin : begin + self.state_elements[index]]
