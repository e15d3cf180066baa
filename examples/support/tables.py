"""How many rows a table has, and how many of them its device cache."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TableSize:
    """One table's rows, and how many of them the device cache holds at a time."""

    rows: int
    cache_rows: int


def table_size(rows: int, fraction: float, lookups_per_batch: int) -> TableSize:
    """Room for the fraction asked for, and for whatever one batch can touch.

    A batch needs all its rows on the device at the same time, so a small table may have to be held whole.
    """
    return TableSize(rows, min(rows, max(int(fraction * rows), lookups_per_batch)))
