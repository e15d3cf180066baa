"""Gradient accumulation: sums the gradients of several backward passes for one update."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

import numpy as np
import torch

from ... import _engine
from ...operators.calls import accumulate_rows
from .plan import Plan
from .transfers import Transfers
from .update_journal import Run, UpdateJournal, run_now

Segments = tuple[torch.Tensor | None, ...]
"""(segment_offsets, grad_row, grad_source, grad_column, scale, hot_segments): the arrays of `PlanArrays` that map
gradients to rows, in the order of the update operators' arguments."""
UpdateFromSums = Callable[
    [Hashable, Run, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor], None
]
"""(key, run, cache, sums, rows, ids, table_offsets, segment_offsets) -> None: updates `rows` of `cache`, each from
one row of `sums`. `key` is unique among the calls of one update. `ids` are the ids of the rows, or None if the group's
weights do not round stochastically."""


def count_backward_passes(windows: Mapping[int, int], lengths: Iterable[int]) -> dict[int, int]:
    """Counts the backward passes of each accumulation window, including the current backward pass.

    Args:
        windows: number of earlier backward passes in each window, by window length.
        lengths: the window lengths of all groups.

    Returns:
        The count for each window length; a window ends when its count reaches its length.
    """
    return {length: windows.get(length, 0) + 1 for length in set(lengths)}


class AccumulationBuffer:
    """Accumulated gradients of one group: on the device for rows in the cache, in the engine for all other rows.

    Attributes:
        sums: float32 `[slots, 2 * D]`, sum and rounding compensation of the row in each slot; zeros without a gradient.
    """

    def __init__(
        self, engine: _engine.Engine, slots: int, dim: int, transfers: Transfers, chunk: int, tables_with_ids: int
    ) -> None:
        """Allocates the sums on the device.

        Args:
            engine: the group's engine.
            slots: number of slots of the cache.
            dim: the embedding dimension D.
            transfers: copies to and from the device.
            chunk: maximum number of rows that are copied to the device at once.
            tables_with_ids: the number of tables if updates need the ids of rows, else 0.
        """
        self._tables_with_ids = tables_with_ids
        self._engine = engine
        self._transfers = transfers
        self._chunk = chunk
        self.sums = torch.zeros((slots, 2 * dim), dtype=torch.float32, device=transfers.device)

    def replace_engine(self, engine: _engine.Engine) -> None:
        """Replaces the engine, which stores the sums of rows outside the cache."""
        self._engine = engine

    def is_open(self) -> bool:
        """Returns whether gradients have been added since the last update."""
        return self._engine.window_open()

    def add(
        self,
        plan: Plan,
        grads: Sequence[torch.Tensor],
        unique_slots: torch.Tensor,
        segments: Segments,
        journal: UpdateJournal,
    ) -> None:
        """Adds the gradients of a backward pass to the sums of `unique_slots`, all or some of the plan's slots."""
        if journal.has((self, "add")):
            return
        all_rows = unique_slots is plan.arrays.unique_slots
        self._engine.mark(plan.host, None if all_rows else unique_slots.cpu().numpy())
        journal.run((self, "add"), accumulate_rows, self.sums, grads, unique_slots, *segments)

    def close(self, cache: torch.Tensor, update: UpdateFromSums, journal: UpdateJournal) -> None:
        """Updates every row that has accumulated gradients, and clears the sums.

        Rows outside the cache are uploaded to a temporary cache, updated there and written back, `chunk` at a time.
        All plans must be applied and all write-backs complete.
        """
        slots, tables, rows, nonresident_tables = self._engine.window_rows()
        resident_ids, nonresident_ids = self._ids(tables)
        if len(slots):
            segments = np.arange(len(slots) + 1, dtype=np.int32)
            run = functools.partial(journal.run, (self, "resident"))
            arrays = self._transfers.to_device(slots, tables, segments)
            update("resident", run, cache, self.sums, arrays[0], self._upload_ids(resident_ids), *arrays[1:])
        for begin in range(0, len(rows), self._chunk):
            end = min(begin + self._chunk, len(rows))
            if not journal.has((self, begin)):
                ids = None if nonresident_ids is None else nonresident_ids[begin:end]
                self._update_nonresident(begin, end, ids, nonresident_tables, cache.shape[1], update, journal)
        self._clear(slots)
        self._engine.close_window()

    def _ids(self, tables: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Returns the ids of cached and of uncached rows that have sums. `tables`: table offsets of the cached rows."""
        if not self._tables_with_ids:
            return None, None
        ids_of_tables = [self._engine.saves.window_ids(table) for table in range(self._tables_with_ids)]
        counts = np.diff(tables).tolist()
        resident = [ids[:count] for ids, count in zip(ids_of_tables, counts, strict=True)]
        nonresident = [ids[count:] for ids, count in zip(ids_of_tables, counts, strict=True)]
        return np.concatenate(resident), np.concatenate(nonresident)

    def _upload_ids(self, ids: np.ndarray | None) -> torch.Tensor | None:
        return None if ids is None else self._transfers.to_device(ids)[0]

    def _update_nonresident(
        self,
        begin: int,
        end: int,
        ids: np.ndarray | None,
        tables: np.ndarray,
        record_bytes: int,
        update: UpdateFromSums,
        journal: UpdateJournal,
    ) -> None:
        """Updates rows `begin` to `end` of the uncached rows; only the last call stores anything."""
        count = end - begin
        records = self._transfers.staging(count, record_bytes)
        sums = self._transfers.staging(count, self.sums.shape[1], torch.float32)
        self._engine.read_spilled(begin, end, records.numpy(), sums.numpy())
        (cache,), (device_sums,) = self._transfers.upload(records).wait(), self._transfers.upload(sums).wait()
        table_offsets = (np.clip(tables, begin, end) - begin).astype(np.int32)
        slots, segments = np.arange(count, dtype=np.int32), np.arange(count + 1, dtype=np.int32)
        arrays = self._transfers.to_device(slots, table_offsets, segments)
        update(begin, run_now, cache, device_sums, arrays[0], self._upload_ids(ids), *arrays[1:])
        journal.run(
            (self, begin), self._engine.write_spilled, begin, end, self._transfers.download(cache).wait().numpy()
        )

    def drop(self) -> None:
        """Discards the accumulated gradients. All plans must be applied and all write-backs complete."""
        self._clear(self._engine.window_rows()[0])
        self._engine.close_window()

    def _clear(self, slots: np.ndarray) -> None:
        if len(slots):
            (rows,) = self._transfers.to_device(slots.astype(np.int64))
            self.sums.index_fill_(0, rows, 0.0)
