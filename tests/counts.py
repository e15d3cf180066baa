"""Cache counters that must be equal in two runs of the same batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NO_SUMS = {"plan_us", "wait_us", "largest_batch", "pinned_rows", "evicted_waiting", "depth_reached"}


def exact_counts(tables: Any) -> dict[str, int]:
    """Returns those entries of a collection's or embedding's `cache_stats` that are sums over batches."""
    return sums(tables.cache_stats())


def sums(counted: Mapping[str, int]) -> dict[str, int]:
    """Filters `cache_stats` to the entries that are sums over batches."""
    return {name: count for name, count in counted.items() if name not in NO_SUMS}
