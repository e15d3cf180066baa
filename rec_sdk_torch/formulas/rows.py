"""The arguments of a formula (`Rows`, `Coefficients`), and arithmetic shared by formulas."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

LEAST_NORM = 3e-23
"""The smallest divisor that formulas use in place of a norm."""
LARGEST = torch.finfo(torch.float32).max


class Coefficients:
    """The coefficients, float32 `[rows, 16]`, with their columns as attributes, such as `lr`, `[rows, 1]`."""

    def __init__(self, columns: torch.Tensor, names: str) -> None:
        self._columns, self._indices = columns, {name: i for i, name in enumerate(names.split(), 1)}

    def __getattr__(self, name: str) -> torch.Tensor:
        index = self._indices[name]
        return self._columns[:, index : index + 1]


@dataclass
class Rows:
    """The rows of one update in float32. A formula assigns new tensors to `w` and to elements of `states`.

    Attributes:
        w: weights, `[rows, D]`.
        g: summed and clipped gradients, `[rows, D]`.
        states: state blocks, `[rows, D]`, or `[rows, 1]` if rowwise.
        c: coefficients by name, `[rows, 1]` each.
        sum_of_row: a function that sums each row of `[rows, D]` in the order of the kernels; returns `[rows, 1]`.
    """

    w: torch.Tensor
    g: torch.Tensor
    states: list[torch.Tensor]
    c: Coefficients
    sum_of_row: Callable[[torch.Tensor], torch.Tensor]

    def mean_of_squares(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the mean square of each row of `[rows, D]`, as `[rows, 1]`."""
        # The divisor is a tensor, because torch may multiply by the reciprocal of a Python number instead of dividing.
        dim = torch.full((1, 1), float(values.shape[1]), device=values.device)
        return self.sum_of_row(values * values) / dim

    def norm(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the 2-norm of each row of `[rows, D]`, as `[rows, 1]`."""
        return root(self.sum_of_row(values * values))


@functools.cache
def _has_float64(device_type: str) -> bool:
    try:
        torch.zeros(1, dtype=torch.float64, device=device_type)
    except (RuntimeError, TypeError):
        return False
    return True


def root(values: torch.Tensor) -> torch.Tensor:
    """Returns the correctly rounded square root of float32 values.

    torch's float32 root is not correctly rounded everywhere: on the CPU, one in five results is a neighbouring number.
    The float64 root, rounded to float32, is correctly rounded. A device without float64 uses its own float32 root.
    """
    return values.double().sqrt().float() if _has_float64(values.device.type) else values.sqrt()


def at_most(values: torch.Tensor, bound: torch.Tensor | float) -> torch.Tensor:
    """Returns the elementwise minimum of `values` and `bound`; NaN where a value is NaN."""
    return torch.where(values > bound, bound, values)


def at_least(values: torch.Tensor, bound: torch.Tensor | float) -> torch.Tensor:
    """Returns the elementwise maximum of `values` and `bound`; NaN where a value is NaN."""
    return torch.where(values < bound, bound, values)
