"""Streams of random ids: uniform, power-law, drifting and scanning."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
_Float = npt.NDArray[np.float64]


def _power_integral(x: _Float, alpha: float) -> _Float:
    """Computes the integral of t**-alpha from 1 to x."""
    log_x = np.log(x)
    if abs(alpha - 1.0) < 1e-12:
        return log_x
    return np.asarray(np.expm1((1.0 - alpha) * log_x) / (1.0 - alpha))


def _inverse_integral(y: _Float, alpha: float) -> _Float:
    if abs(alpha - 1.0) < 1e-12:
        return np.exp(y)
    return np.asarray(np.exp(np.log1p(np.maximum((1.0 - alpha) * y, -1.0)) / (1.0 - alpha)))


def power_law_ranks(rng: np.random.Generator, rows: int, alpha: float, count: int) -> Int64Array:
    """Draws `count` ranks in [0, rows) with P(rank) proportional to (rank + 1)**-alpha; alpha 0 is uniform.

    Rejection-inversion (Hoermann and Derflinger, ACM TOMACS 6(3), 1996) is exact and needs no table of the rows.
    """
    if alpha == 0.0 or rows == 1:
        return rng.integers(0, rows, count, dtype=np.int64)
    low = float(_power_integral(np.array(1.5), alpha)) - 1.0
    high = float(_power_integral(np.array(rows + 0.5), alpha))
    squeeze = 2.0 - float(_inverse_integral(_power_integral(np.array(2.5), alpha) - 2.0**-alpha, alpha))
    parts: list[Int64Array] = []
    missing = count
    while missing:
        u = rng.uniform(low, high, missing + missing // 8 + 16)
        x = _inverse_integral(u, alpha)
        k = np.clip(np.floor(x + 0.5), 1, rows)
        taken = (k - x <= squeeze) | (u >= _power_integral(k + 0.5, alpha) - k**-alpha)
        parts.append(k[taken][:missing].astype(np.int64) - 1)
        missing -= len(parts[-1])
    return np.concatenate(parts)


def scatter(ranks: Int64Array, rows: int, shift: int = 0) -> Int64Array:
    """Maps [0, rows) to itself so that neighbouring ranks are far apart and hot rows share no cache line."""
    step = max(1, round(rows * 0.6180339887498949))
    while math.gcd(step, rows) != 1:
        step += 1
    return (ranks * step + shift) % rows


@dataclass(frozen=True)
class Distribution:
    """A distribution of the ids of a batch: a bounded power law, or uniform if alpha is 0."""

    alpha: float

    @classmethod
    def parse(cls, text: str) -> Distribution:
        """Parses `uniform` or an exponent.

        Raises:
            argparse.ArgumentTypeError: the text is neither `uniform` nor a number.
        """
        try:
            alpha = 0.0 if text == "uniform" else float(text)
        except ValueError:
            alpha = math.nan
        if not 0.0 <= alpha < 10.0:
            raise argparse.ArgumentTypeError(f"{text!r} is neither 'uniform' nor an exponent in [0, 10)")
        return cls(alpha)

    @property
    def name(self) -> str:
        return f"power law {self.alpha:g}" if self.alpha else "uniform"

    def draw(self, rng: np.random.Generator, rows: int, count: int, table: int = 0) -> Int64Array:
        """Draws `count` ids in [0, rows). The frequent ids differ from table to table."""
        return scatter(power_law_ranks(rng, rows, self.alpha, count), rows, shift=table * 7919)


STREAMS = ("stationary", "drifting", "scan")


def stream(kind: str, rows: int, batch: int, alpha: float, seed: int) -> Iterator[Int64Array]:
    """Yields endless batches of ids in [0, rows).

    `stationary`: a power law. `drifting`: a power law whose ranks are shifted by 1% of the rows every 10 batches.
    `scan`: all ids in sequence.
    """
    rng = np.random.default_rng(seed)
    step = 0
    while True:
        if kind == "scan":
            yield (np.arange(batch, dtype=np.int64) + step * batch) % rows
        else:
            turned = (step // 10) * max(1, rows // 100) if kind == "drifting" else 0
            ranks = power_law_ranks(rng, rows, alpha, batch)
            yield scatter((ranks + turned) % rows, rows)
        step += 1
