"""Arithmetic on the number of a row's last update; op_kernels/common/row_steps.h has the same functions."""

from __future__ import annotations

import torch

from .rows import at_least, at_most


def steps_since(last: torch.Tensor, iteration: torch.Tensor) -> torch.Tensor:
    """Counts the table's updates since the row's last update; the result is 1 for a row that was never updated."""
    return at_most(last, 1.0) * ((iteration - 1.0) - last) + 1.0


def expm1_of_256_times(y: torch.Tensor) -> torch.Tensor:
    """Computes exp(256 * y) - 1: sums a power series for exp(y) - 1, then doubles the exponent eight times."""
    e = y * (1 / 720) + 1 / 120
    for term in (1 / 24, 1 / 6, 0.5, 1.0):
        e = e * y + term
    e = e * y
    for _ in range(8):
        e = e * (2.0 + e)
    return e


def expm1_of_steps(
    last: torch.Tensor, iteration: torch.Tensor, uncounted: float, log: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes exp(log * (steps - uncounted)) - 1, where steps is `steps_since(last, iteration)`.

    Returns:
        The values, and the new number of the row's last update, both `[rows, 1]`.
    """
    x = at_least((steps_since(last, iteration) - uncounted) * log, -80.0) * (1 / 256)
    return expm1_of_256_times(x), x * 0.0 + iteration


def above(values: torch.Tensor, bound: torch.Tensor | float) -> torch.Tensor:
    """Returns 1.0 for a value above the bound, else 0.0."""
    return at_most(at_least((values - bound) * 1e30, 0.0), 1.0)


def logarithm(x: torch.Tensor) -> torch.Tensor:
    """Computes the natural logarithm of numbers from 1 to 2^31: divides by powers of two, then sums artanh's series."""
    log = x * 0.0
    powers = {65536.0: 11.090354889, 256.0: 5.545177444, 16.0: 2.772588722, 4.0: 1.386294361, 2.0: 0.693147181}
    for power, log_of_power in powers.items():
        is_above = above(x, power)
        log = log + is_above * log_of_power
        x = x * (is_above * (1 / power - 1.0) + 1.0)
    t = (x - 1.0) / (x + 1.0)
    square = t * t
    series = square * (1 / 13)
    for term in (1 / 11, 1 / 9, 1 / 7, 1 / 5, 1 / 3):
        series = (series + term) * square
    return log + (series + 1.0) * (t * 2.0)
