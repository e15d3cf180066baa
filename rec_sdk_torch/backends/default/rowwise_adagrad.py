"""Row-wise Adagrad and what FBGEMM's adds to it, as in op_kernels/common/rowwise_adagrad.h; see `formulas.py`.

The states of a row are, the last ones of its record: the sum; prev_iter, the number of its last update; row_counter.
"""

from __future__ import annotations

import torch

from .rows import LARGEST, LEAST_NORM, Rows, at_least, at_most, root

_LOG_10 = 2.302585093
_SMALLEST = 2.0**-149


def _rate(r: Rows, squared: torch.Tensor, place: int = 0) -> torch.Tensor:
    """Lr / (sqrt(sum) + eps), when the mean of squares of `squared` is part of the sum, which is state `place`."""
    r.states[place] = r.states[place] + r.mean_of_squares(squared)
    return r.c.lr / (root(r.states[place]) + r.c.eps)


def _step(r: Rows, kept: torch.Tensor, rate: torch.Tensor) -> None:
    r.w = r.w * kept - rate * r.g


def plain(r: Rows) -> None:
    """rowwise_adagrad."""
    r.w = r.w - _rate(r, r.g) * r.g


def _decay(r: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """The factor that decays the weight, and the rate of the gradient."""
    rate = _rate(r, r.g + r.c.l2 * r.w, len(r.states) - 1)
    return (1.0 - r.c.decoupled) - r.c.l2 * rate, rate


def decayed(r: Rows) -> None:
    """decayed_rowwise_adagrad."""
    _step(r, *_decay(r))


def bounded(r: Rows) -> None:
    """bounded_rowwise_adagrad; beside an average of the weight, which it leaves alone, ensemble_rowwise_adagrad."""
    kept, rate = _decay(r)
    norm = at_most(at_least(r.norm(r.w * kept - rate * r.g), LEAST_NORM), LARGEST)
    factor = at_most(r.c.max_norm / norm, 1.0)
    _step(r, kept * factor, rate * factor)


def globally_decayed(r: Rows) -> None:
    """globally_decayed_rowwise_adagrad."""
    rate = _rate(r, r.g)
    missed, r.states[1] = _expm1_of_steps(r.states[1], r.c.iter, 1.0, r.c.log_missed)
    _step(r, at_least(missed + 1.0, r.c.lower_bound) * (1.0 - r.c.decoupled), rate)


def cowclip(r: Rows) -> None:
    """cowclip_rowwise_adagrad."""
    c, squared = r.c, r.g + r.c.l2 * r.w
    r.states[0] = r.states[0] + r.mean_of_squares(squared)
    bound = at_most(_count(r) * at_least(r.norm(r.w) * c.weight_norm_coefficient, c.lower_bound), LARGEST)
    cut = at_most(bound / at_least(r.norm(squared), LEAST_NORM), 1.0)
    rate = cut * c.lr / (root(r.states[0]) + c.eps)
    _step(r, (1.0 - c.decoupled) - c.l2 * rate, rate)


def _count(r: Rows) -> torch.Tensor:
    """The count of the row's updates, which has faded since the last one, with this one; which is then the last one."""
    faded, r.states[1] = _expm1_of_steps(r.states[1], r.c.iter, 0.0, r.c.log_fade)
    r.states[2] = r.states[2] + (r.states[2] * faded + 1.0)
    return r.states[2]


def counted(r: Rows) -> None:
    """counted_rowwise_adagrad."""
    c, squared = r.c, r.g + r.c.l2 * r.w
    r.states[0] = r.states[0] + r.mean_of_squares(squared)
    size, count = root(r.states[0]), _count(r)
    eps_of_decay = torch.where(c.faded_l2 == 0, 1.0, c.eps)
    eps_of_count = torch.where(c.counts == 0, 1.0, torch.where(c.eps == 0, _SMALLEST, c.eps))

    grown = _logarithm(at_least(c.max_counter / (count + 1.0), 1.0)) * c.power
    in_tail = _above(count, c.tail)
    change = _expm1_of_256th(at_least(at_most(grown, _LOG_10), -_LOG_10) * (1 / 256) * in_tail)
    by_count = in_tail * c.counts
    rate = c.lr / (size + by_count + c.eps)
    rate = rate - by_count * rate
    rate = rate + by_count * c.lr / (root(count * c.counted) + eps_of_count)
    faded = c.faded_l2 * c.lr / (size + eps_of_decay) + c.faded_decoupled
    kept = 1.0 - faded / count
    r.states[1] = count * 0.0 + c.iter  # no number where the count is none
    _step(r, kept, (change + 1.0) * rate)


def counted_adagradw(r: Rows) -> None:
    """counted_adagradw."""
    c = r.c
    r.states[0] = r.states[0] + r.mean_of_squares(r.g)
    missed = at_most(_steps_since(r.states[1], c.iter), c.most_steps) - 1.0
    kept = _expm1_of_256th(at_least(missed * c.log_missed, -80.0) * (1 / 256))
    count = _count(r)
    grown = root(count) * c.by_root + (1.0 - c.by_root - c.by_count)
    rate = at_most((grown + count * c.by_count) * c.lr, c.bound) / (root(r.states[0]) + c.eps)
    _step(r, (kept + 1.0) * (1.0 - c.decoupled), rate * (kept + 1.0))


def _steps_since(last: torch.Tensor, iteration: torch.Tensor) -> torch.Tensor:
    """Updates of the table since the row's last one; 1 for a row without one."""
    return at_most(last, 1.0) * ((iteration - 1.0) - last) + 1.0


def _expm1_of_256th(y: torch.Tensor) -> torch.Tensor:
    """exp(256 * y) - 1: the series at y, and then eight times that of twice the argument."""
    e = y * (1 / 720) + 1 / 120
    for term in (1 / 24, 1 / 6, 0.5, 1.0):
        e = e * y + term
    e = e * y
    for _ in range(8):
        e = e * (2.0 + e)
    return e


def _expm1_of_steps(
    last: torch.Tensor, iteration: torch.Tensor, uncounted: float, log: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """exp(log * (steps - uncounted)) - 1, and the row's last update, which is this one."""
    x = at_least((_steps_since(last, iteration) - uncounted) * log, -80.0) * (1 / 256)
    return _expm1_of_256th(x), x * 0.0 + iteration


def _above(values: torch.Tensor, bound: torch.Tensor | float) -> torch.Tensor:
    """1 where a value is above the bound, else 0."""
    return at_most(at_least((values - bound) * 1e30, 0.0), 1.0)


def _logarithm(x: torch.Tensor) -> torch.Tensor:
    """Logarithm of numbers from 1 to 2^31: powers of two by halving, the rest by the series of the area tangent."""
    log = x * 0.0
    powers = {65536.0: 11.090354889, 256.0: 5.545177444, 16.0: 2.772588722, 4.0: 1.386294361, 2.0: 0.693147181}
    for power, its_logarithm in powers.items():
        there = _above(x, power)
        log = log + there * its_logarithm
        x = x * (there * (1 / power - 1.0) + 1.0)
    t = (x - 1.0) / (x + 1.0)
    square = t * t
    series = square * (1 / 13)
    for term in (1 / 11, 1 / 9, 1 / 7, 1 / 5, 1 / 3):
        series = (series + term) * square
    return log + (series + 1.0) * (t * 2.0)
