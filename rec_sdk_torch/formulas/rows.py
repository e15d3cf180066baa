"""The rows of an update, and the arithmetic that formulas share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

LEAST_NORM = 3e-23
"""A norm that a formula divides by is at least this."""
LARGEST = torch.finfo(torch.float32).max


class Coefficients:
    """The columns of a batch's coefficients, float32 `[rows, 16]`, as `[rows, 1]` by their names: `c.lr`."""

    def __init__(self, columns: torch.Tensor, names: str) -> None:
        self._columns, self._places = columns, {name: i for i, name in enumerate(names.split(), 1)}

    def __getattr__(self, name: str) -> torch.Tensor:
        place = self._places[name]
        return self._columns[:, place : place + 1]


@dataclass
class Rows:
    """Weights and states in float32, to which a formula assigns new tensors.

    Attributes:
        w: weights, `[rows, D]`.
        g: aggregated gradients, clipped, `[rows, D]`.
        states: `[rows, D]`, or `[rows, 1]` where a row has one number.
        c: coefficients by name, `[rows, 1]` each.
        sum_of_row: the sum of each row of `[rows, D]`, `[rows, 1]`, in the order of the kernels.
    """

    w: torch.Tensor
    g: torch.Tensor
    states: list[torch.Tensor]
    c: Coefficients
    sum_of_row: Callable[[torch.Tensor], torch.Tensor]

    def mean_of_squares(self, values: torch.Tensor) -> torch.Tensor:
        """`[rows, 1]` of `[rows, D]`."""
        dim = torch.full((1, 1), float(values.shape[1]), device=values.device)  # division by a number may be a product
        return self.sum_of_row(values * values) / dim

    def norm(self, values: torch.Tensor) -> torch.Tensor:
        """`[rows, 1]` of `[rows, D]`."""
        return root(self.sum_of_row(values * values))


@functools.cache
def _has_float64(device_type: str) -> bool:
    try:
        torch.zeros(1, dtype=torch.float64, device=device_type)
    except (RuntimeError, TypeError):
        return False
    return True


def root(values: torch.Tensor) -> torch.Tensor:
    """The square root of float32, correctly rounded.

    torch's own is not everywhere: on the CPU one in five is the next number. That of float64 is close enough to round
    to the right one. A device without float64 has its own.
    """
    return values.double().sqrt().float() if _has_float64(values.device.type) else values.sqrt()


def at_most(values: torch.Tensor, bound: torch.Tensor | float) -> torch.Tensor:
    """A NaN among the values stays a NaN."""
    return torch.where(values > bound, bound, values)


def at_least(values: torch.Tensor, bound: torch.Tensor | float) -> torch.Tensor:
    """A NaN among the values stays a NaN."""
    return torch.where(values < bound, bound, values)
