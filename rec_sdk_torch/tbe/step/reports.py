"""Figures of an embedding for its users: its caches, what happened in them, and the memory that all of it takes."""

from __future__ import annotations

from collections.abc import Sequence

from ..cache.device_cache import Group
from ..rows.layout import Layout
from .monitor import Monitor, describe_table, memory_report


class Reports:
    """The part of an embedding that reports.

    Attributes:
        layout: has the tables.
        monitor: counts.
    """

    layout: Layout
    monitor: Monitor

    @property
    def cache_sizes(self) -> dict[str, int]:
        """Rows of each table that the device cache holds, or will hold.

        Raises:
            RuntimeError: the embedding is on the meta device.
        """
        return dict(zip([table.name for table in self.layout.tables], self.layout.cache_sizes(), strict=True))

    def extra_repr(self) -> str:
        """A line for each table."""
        return "\n".join(f"{table.name}: {self.describe(table.name)}" for table in self.layout.tables)

    def describe(self, name: str, optimizer: str | None = None) -> str:
        """A table in a line: rows, columns, data type, kind, cache and optimizer. Lays out nothing.

        Args:
            name: of the table.
            optimizer: in place of that which the embedding knows.
        """
        return describe_table(self.layout, name, optimizer)

    def cache_stats(self, table: str | None = None) -> dict[str, int]:
        """Exact counts since the start or `reset_cache_stats`, summed over groups, or those of one table.

        `batches`, `lookups`, `unique_rows`, `unique_misses`, `new_rows`, `rows_in`, `rows_out`, `bytes_in`,
        `bytes_out`, `bounds_errors`, `largest_batch` (the most distinct rows that a batch had of one table),
        `warmed_rows` (which came to the cache by a load or `TableView.warm`) and, now,
        `pinned_rows` (which batches in flight hold in the cache). For tables that admit or evict ids also: `admitted`
        (ids that got a row), `not_admitted_lookups` (which read the default value), `evicted` (ids that left by rule),
        and now `evicted_waiting` (rows that left and wait for `TableView.take_evicted`).
        Without `table` also `copied_batches` (batches whose ids came from a device), `depth_reached` (the most batches
        planned ahead at once), and two times of the host in microseconds: `plan_us`, planning in any thread, and
        `wait_us`, what training forwards spent on plans and swaps.

        Raises:
            KeyError: no table has this name.
        """
        return self.monitor.cache_stats(self._groups_of(table), table)

    def reset_cache_stats(self) -> None:
        """Sets every counter of `cache_stats` to zero."""
        self.monitor.reset()
        for group in self.layout.built:
            group.reset_stats()

    def memory_report(self, table: str | None = None) -> dict[str, int]:
        """Bytes of the whole embedding, or of one table; zeros before the first use.

        `device`: the cache, and the sums of an accumulation window. `host`: rows in the host store, as far as memory is
        committed. `disk`: files of a host store on disk. `index`: the maps from ids to rows. `columns`: what options
        keep per row (`track_changes`, rules by which ids leave), for all rows of an index table, with the logs of what
        changed and left. `candidates`: what is counted of ids that are not admitted. `evicted`: rows that left and wait
        for `TableView.take_evicted`. `staging`, without `table`: plans and rows on their way now.

        Raises:
            KeyError: no table has this name.
        """
        return memory_report(self._groups_of(table), table)

    def _groups_of(self, table: str | None) -> Sequence[Group]:
        self.layout.locks.check_process()
        if table is not None:
            self.layout.config(table)  # which raises for a name that is unknown
        return self.layout.built
