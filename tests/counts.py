"""Counters that two runs can be compared by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NO_SUMS = {"plan_us", "wait_us", "largest_batch", "pinned_rows", "evicted_waiting", "depth_reached"}


def exact_counts(tables: Any) -> dict[str, int]:
    """`cache_stats` of a collection or an embedding, as far as they are sums over batches."""
    return sums(tables.cache_stats())


def sums(counted: Mapping[str, int]) -> dict[str, int]:
    """The counts among `cache_stats` that are sums."""
    return {name: count for name, count in counted.items() if name not in NO_SUMS}
