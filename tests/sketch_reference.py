"""Reference for the count-min sketch with conservative update in plain Python, as specified in
docs/admission_eviction.md.
"""

from __future__ import annotations

import math
import struct

WORD = 2**64
GOLDEN, ODD = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93


def fold(a: int, b: int) -> int:
    product = a * b
    return product % WORD ^ product // WORD


class Sketch:
    """A sketch with `depth` rows of cells, of at most `size` bytes; `enough` is the count that admits an id."""

    def __init__(self, size: int, depth: int, least_admitted_count: int) -> None:
        self.cell_bytes = 1 if least_admitted_count < 2**8 else 2 if least_admitted_count < 2**16 else 4
        self.width = max(1, size // (depth * self.cell_bytes))
        self.full = 2 ** (8 * self.cell_bytes) - 1
        self.seeds = [fold((row + 1) * GOLDEN % WORD, ODD) | 1 for row in range(depth)]
        self.rows = [[0] * self.width for _ in range(depth)]
        self.counted = 0

    def places(self, i: int) -> list[int]:
        hashed = fold(i % WORD ^ GOLDEN, ODD)
        return [fold(hashed, seed) * self.width // WORD for seed in self.seeds]

    def estimate(self, i: int) -> int:
        return min(row[place] for row, place in zip(self.rows, self.places(i), strict=True))

    def add(self, i: int, shows: int = 1) -> None:
        now = min(self.estimate(i) + shows, self.full)
        for row, place in zip(self.rows, self.places(i), strict=True):
            row[place] = max(row[place], now)
        self.counted += shows

    def halve(self) -> None:
        self.rows = [[cell // 2 for cell in row] for row in self.rows]
        self.counted //= 2

    def state(self) -> bytes:
        cells = b"".join(cell.to_bytes(self.cell_bytes, "little") for row in self.rows for cell in row)
        return struct.pack("<4q", self.width, len(self.rows), self.cell_bytes, self.counted) + cells


def least_admitted_count(threshold: float, alpha: float) -> int:
    """Computes the least count whose score reaches the threshold."""
    least = max(0, math.floor(threshold / alpha) - 2)
    while alpha * least < threshold:
        least += 1
    return least
