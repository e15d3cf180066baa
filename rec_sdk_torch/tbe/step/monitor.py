"""Statistics of an embedding: cache counters, memory, and the host time of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...runtime.warn import PerformanceWarning, warn
from ..cache.device_cache import Group
from ..rows.layout import Layout

FIRST_CHECK = 8
"""Number of training forwards before the first check for a too small cache; each later check has 8 times as many."""

MIN_BATCHES = 32
"""Least number of batches per group for a check of misses: over fewer batches, a hit rate is not significant."""


class Monitor:
    """Counters of one embedding that the engines do not have.

    Attributes:
        copied_batches: number of batches whose ids were copied from a device.
        plan_ns: nanoseconds spent on planning, in any thread.
        wait_ns: nanoseconds that training forwards spent, in their own thread, on plans and on staging missing rows.
        depth_reached: the largest number of batches that were planned ahead at once.
        forwards: number of training forwards so far.
        next_check: number of forwards at which `check` must be called.
    """

    def __init__(self) -> None:
        self.reset()
        self.forwards = 0
        self.next_check = FIRST_CHECK
        self._last_counts = (0, 0, 0)
        self._warned: set[str] = set()

    def reset(self) -> None:
        """Sets the counters that `cache_stats` returns to zero."""
        self.copied_batches = self.plan_ns = self.wait_ns = self.depth_reached = 0

    # ---- reports

    def cache_stats(self, groups: Sequence[Group], table: str | None) -> dict[str, int]:
        """Returns the result of `TableBatchedEmbedding.cache_stats` for one table or, with None, for all tables."""
        total = dict.fromkeys(COUNTERS, 0)
        for group, index in _groups_with(groups, table):
            counted = group.stats(index)
            total["largest_batch"] = max(total["largest_batch"], counted.pop("largest_batch"))
            for name, value in counted.items():
                total[name] += value
        if table is None:
            total |= {"copied_batches": self.copied_batches, "depth_reached": self.depth_reached}
            waited = self.wait_ns + sum(group.swapping_ns for group in groups)
            total |= {"plan_us": self.plan_ns // 1000, "wait_us": waited // 1000}
        return total

    def check(self, groups: Sequence[Group]) -> None:
        """Warns if the cache is too small, but only once for the same reason; sets `next_check`."""
        self.next_check *= 8
        self._warn_of_two_batches(groups)
        self._warn_of_misses(groups)

    def _warn_of_two_batches(self, groups: Sequence[Group]) -> None:
        small = []
        for group in groups:
            for index, member in enumerate(group.members):
                stats = group.stats(index)
                if stats["rows_out"] and 2 * stats["largest_batch"] > member.slots:
                    small.append(f"{member.config.name!r} ({stats['largest_batch']} rows of {member.slots})")
        if small:
            self._warn(
                "two",
                f"the device cache does not hold two batches of tables {', '.join(small)}: nothing can be prefetched "
                "while such a batch is trained. Enlarge cache=, or use smaller batches",
            )

    def _warn_of_misses(self, groups: Sequence[Group]) -> None:
        """Warns if over half of the batches' rows since the last check were misses. New rows do not count."""
        stats = self.cache_stats(groups, None)
        now = stats["batches"], stats["unique_rows"] - stats["new_rows"], stats["unique_misses"] - stats["new_rows"]
        batches, rows, misses = (
            new - old if new >= old else new for new, old in zip(now, self._last_counts, strict=True)
        )
        self._last_counts = now
        if batches >= MIN_BATCHES * len(groups) and 2 * misses > rows:
            self._warn(
                "misses",
                f"{misses / rows:.0%} of the rows that batches looked up were not in the device cache (of {rows}, "
                "not counting new rows). Enlarge cache= if the device has memory; cache_stats(table) shows misses by "
                "table",
            )

    def _warn(self, what: str, message: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            warn(message, PerformanceWarning)


COUNTERS = (
    "batches",
    "lookups",
    "unique_rows",
    "unique_misses",
    "new_rows",
    "rows_in",
    "rows_out",
    "bytes_in",
    "bytes_out",
    "bounds_errors",
    "largest_batch",
    "warmed_rows",
    "pinned_rows",
    "admitted",
    "not_admitted_lookups",
    "evicted",
    "evicted_waiting",
)


def memory_report(groups: Sequence[Group], table: str | None) -> dict[str, int]:
    """Returns the result of `TableBatchedEmbedding.memory_report` for one table or, with None, for all tables."""
    report = dict.fromkeys(("device", "host", "disk", "index", "columns", "candidates", "evicted"), 0)
    for group, index in _groups_with(groups, table):
        members = group.members if index is None else [group.members[index]]
        memory = group.memory(index)
        report["device"] += sum(member.cache_slots for member in members) * group.swap.slot_bytes()
        report["host"] += memory["store_bytes"]
        report["disk"] += memory["disk_bytes"]
        report["index"] += memory["id_map_bytes"]
        report["columns"] += memory["column_bytes"]
        report["candidates"] += memory["candidate_bytes"]
        report["evicted"] += sum(buffer.nbytes for buffer in group.evicted_buffers(index))
    if table is None:
        report["staging"] = sum(group.swap.staging_bytes() for group in groups)
    return report


def _groups_with(groups: Sequence[Group], table: str | None) -> Iterator[tuple[Group, int | None]]:
    """Yields pairs: the group of `table` and the table's index in it; without `table`, each group and None."""
    for group in groups:
        names = [member.config.name for member in group.members]
        if table is None:
            yield group, None
        elif table in names:
            yield group, names.index(table)


def describe_table(layout: Layout, name: str, requested: Sequence[tuple[type, Mapping[str, Any]]]) -> str:
    """Returns the one-line description of `TableBatchedEmbedding.describe`."""
    table, own = layout.config(name), layout.optimizer_of(name)
    dtype = str(table.weight_dtype).removeprefix("torch.")
    if table.cache_dtype not in (None, table.weight_dtype):
        dtype += f" ({str(table.cache_dtype).removeprefix('torch.')} in the cache)"
    kind = "ids of any value" if table.hashed else "ids are rows"
    parts = [f"{table.num_embeddings} x {table.embedding_dim}", dtype, kind, _describe_cache(layout, name)]
    used = requested[:1] if own is None else [(own.cls, own.options)]
    optimizers = [f"{cls.__name__}(lr={options['lr']})" if "lr" in options else cls.__name__ for cls, options in used]
    return ", ".join([*parts, *(optimizers or ["no optimizer"])])


def _describe_cache(layout: Layout, name: str) -> str:
    for group in layout.built:
        for member in group.members:
            if member.config.name == name:
                return f"cache of {member.slots} rows"
    option = layout.options.cache
    if isinstance(option, Mapping):
        option = option.get(name)
    return f"cache={option!r}"
