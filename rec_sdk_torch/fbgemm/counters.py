"""Cache counters of FBGEMM's module."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import torch

from ..tbe import TableBatchedEmbedding
from .enums import RecordCacheMetrics

logger = logging.getLogger(__name__)

UVM_STATS = ("num_calls", "num_requested_indices", "num_unique_indices", "num_unique_misses")
"""Names of the values of `get_uvm_cache_stats`; two conflict counts follow, which are always 0 for this cache."""

_COUNTERS = ("batches", "lookups", "unique_rows", "unique_misses")


class CountsCache(torch.nn.Module):
    """Methods of FBGEMM's cache counters. They count training batches; prefetched batches count when planned."""

    tables: TableBatchedEmbedding
    record_cache_metrics: RecordCacheMetrics
    gather_uvm_cache_stats: bool

    def start_counting(self, record: RecordCacheMetrics, gather: bool) -> None:
        """Resets this class's counters to 0 and sets which counters are recorded."""
        self.record_cache_metrics = record
        self.gather_uvm_cache_stats = gather
        self._missing_forwards = 0
        self._local = [0] * len(_COUNTERS)
        self._printed = [0] * len(_COUNTERS)

    def _counts(self) -> list[int]:
        """Returns the numbers of calls, lookups, distinct rows and misses."""
        stats = self.tables.cache_stats()
        calls = stats["batches"] // max(1, len(self.tables.groups))
        return [calls, *(stats[name] for name in _COUNTERS[1:])]

    @contextlib.contextmanager
    def count_forward(self) -> Iterator[None]:
        """Counts the forward pass that runs inside the context."""
        if not (self.gather_uvm_cache_stats or self.record_cache_metrics.record_cache_miss_counter):
            yield
            return
        before = self._counts()
        yield
        self._local = [now - then for now, then in zip(self._counts(), before, strict=True)]
        self._missing_forwards += self._local[-1] > 0

    def get_cache_miss_counter(self) -> torch.Tensor:
        """Returns the number of forward passes with misses, and the number of distinct missing rows, int64 `[2]`.

        Both are 0 if `record_cache_metrics.record_cache_miss_counter` is False.
        """
        if not self.record_cache_metrics.record_cache_miss_counter:
            return torch.zeros(2, dtype=torch.int64, device="cpu")
        return torch.tensor([self._missing_forwards, self._counts()[-1]], device="cpu")

    def get_table_wise_cache_miss(self) -> torch.Tensor:
        """Returns the number of distinct missing rows of each table, int64 `[T]`.

        The tensor is empty if `record_cache_metrics.record_tablewise_cache_miss` is False.
        """
        if not self.record_cache_metrics.record_tablewise_cache_miss:
            return torch.zeros(0, dtype=torch.int64, device="cpu")
        misses = [self.tables.cache_stats(table.name).get("unique_misses", 0) for table in self.tables.tables]
        return torch.tensor(misses, dtype=torch.int64, device="cpu")

    def _check_gathered(self) -> None:
        if not self.gather_uvm_cache_stats:
            raise RuntimeError("the cache's statistics need gather_uvm_cache_stats=True")

    def get_uvm_cache_stats(self, use_local_cache: bool = False) -> torch.Tensor:
        """Returns FBGEMM's six counters, int64 `[6]`: totals, or with `use_local_cache` those for the last forward.

        They are `num_calls`, `num_requested_indices`, `num_unique_indices`, `num_unique_misses`, and two zeros for
        conflicts, which this cache does not have.

        Raises:
            RuntimeError: `gather_uvm_cache_stats` is False.
        """
        self._check_gathered()
        return torch.tensor([*(self._local if use_local_cache else self._counts()), 0, 0], device="cpu")

    def reset_uvm_cache_stats(self) -> None:
        """Resets all cache counters to 0.

        Raises:
            RuntimeError: `gather_uvm_cache_stats` is False.
        """
        self._check_gathered()
        self.tables.reset_cache_stats()
        self.start_counting(self.record_cache_metrics, self.gather_uvm_cache_stats)

    def print_uvm_cache_stats(self, use_local_cache: bool = False) -> None:
        """Logs the number of calls, and the other counters per call.

        The counters cover the time since the last call of this method, or with `use_local_cache` the last forward.

        Raises:
            RuntimeError: `gather_uvm_cache_stats` is False.
        """
        self._check_gathered()
        counts = self._local
        if not use_local_cache:
            now = self._counts()
            counts, self._printed = [a - b for a, b in zip(now, self._printed, strict=True)], now
        calls = max(1, counts[0])
        per_call = {name: count / calls for name, count in zip(UVM_STATS[1:], counts[1:], strict=True)}
        logger.info("uvm_cache_stats: %d calls, per call %s", counts[0], per_call)
