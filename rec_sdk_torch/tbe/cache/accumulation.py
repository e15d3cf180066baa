"""Accumulation windows: the gradients of several backward passes, one update."""

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
"""The arrays of a plan that an update takes behind the gradients: segment_offsets, grad_row, grad_source, grad_column,
scale, hot_segments."""
UpdateFromSums = Callable[
    [Hashable, Run, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor], None
]
"""(key, run, cache, sums, rows, ids, table_offsets, segment_offsets) -> nothing: updates `rows` of `cache` from one row
of `sums` each. key: another for each call of a window. ids: of the rows, where the group's weights round
stochastically."""


def count_backward_passes(windows: Mapping[int, int], lengths: Iterable[int]) -> dict[int, int]:
    """Backward passes of the open window of each length, with the one that comes now; the length where it ends."""
    return {length: windows.get(length, 0) + 1 for length in set(lengths)}


class AccumulationBuffer:
    """The window of one group: sums of its resident rows beside the cache, and of the others in the engine.

    Attributes:
        sums: float32 `[slots, 2 * D]`, sum and compensation; zeros where no gradient waits.
    """

    def __init__(
        self, engine: _engine.Engine, slots: int, dim: int, transfers: Transfers, chunk: int, tables_with_ids: int
    ) -> None:
        """`chunk`: most rows that pass through a staging buffer. `tables_with_ids`: the number of tables if updates
        need the ids of rows, else 0.
        """
        self._tables_with_ids = tables_with_ids
        self._engine = engine
        self._transfers = transfers
        self._chunk = chunk
        self.sums = torch.zeros((slots, 2 * dim), dtype=torch.float32, device=transfers.device)

    def adopt(self, engine: _engine.Engine) -> None:
        """The rows, with those of their sums that are not resident, are this engine's from now on."""
        self._engine = engine

    def is_open(self) -> bool:
        """Whether gradients wait for the end of the window."""
        return self._engine.window_open()

    def add(
        self,
        plan: Plan,
        grads: Sequence[torch.Tensor],
        unique_slots: torch.Tensor,
        segments: Segments,
        journal: UpdateJournal,
    ) -> None:
        """Adds the gradients of a backward pass to the rows in `unique_slots`, all of the plan's or some."""
        if journal.has((self, "add")):
            return
        whole = unique_slots is plan.arrays.unique_slots
        self._engine.mark(plan.host, None if whole else unique_slots.cpu().numpy())
        journal.run((self, "add"), accumulate_rows, self.sums, grads, unique_slots, *segments)

    def close(self, cache: torch.Tensor, update: UpdateFromSums, journal: UpdateJournal) -> None:
        """Updates every row of the window, and empties it. Rows that left the cache pass through a small one.

        All plans must be applied and all rows landed.
        """
        slots, tables, rows, away = self._engine.window_rows()
        resident, absent = self._ids(tables)
        if len(slots):
            borders = np.arange(len(slots) + 1, dtype=np.int32)
            run = functools.partial(journal.run, (self, "resident"))
            rows_there, tables_there, borders_there = self._transfers.to_device(slots, tables, borders)
            update("resident", run, cache, self.sums, rows_there, self._put_ids(resident), tables_there, borders_there)
        for begin in range(0, len(rows), self._chunk):
            end = min(begin + self._chunk, len(rows))
            if not journal.has((self, begin)):
                ids = None if absent is None else absent[begin:end]
                self._update_nonresident(begin, end, ids, away, cache.shape[1], update, journal)
        self._clear(slots)
        self._engine.close_window()

    def _ids(self, tables: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Ids of the window's resident rows, which `tables` divides, and of its rows that left the cache."""
        if not self._tables_with_ids:
            return None, None
        of_tables = [self._engine.saves.window_ids(table) for table in range(self._tables_with_ids)]
        counts = np.diff(tables).tolist()
        resident = [ids[:count] for ids, count in zip(of_tables, counts, strict=True)]
        absent = [ids[count:] for ids, count in zip(of_tables, counts, strict=True)]
        return np.concatenate(resident), np.concatenate(absent)

    def _put_ids(self, ids: np.ndarray | None) -> torch.Tensor | None:
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
        """Updates the begin-th to end-th of the rows that left the cache; nothing is changed before the last call."""
        count = end - begin
        records = self._transfers.staging(count, record_bytes)
        sums = self._transfers.staging(count, self.sums.shape[1], torch.float32)
        self._engine.read_away(begin, end, records.numpy(), sums.numpy())
        (cache,), (there,) = self._transfers.upload(records).wait(), self._transfers.upload(sums).wait()
        borders = (np.clip(tables, begin, end) - begin).astype(np.int32)
        places, segments = np.arange(count, dtype=np.int32), np.arange(count + 1, dtype=np.int32)
        places_there, borders_there, segments_there = self._transfers.to_device(places, borders, segments)
        update(begin, run_now, cache, there, places_there, self._put_ids(ids), borders_there, segments_there)
        journal.run((self, begin), self._engine.write_away, begin, end, self._transfers.download(cache).wait().numpy())

    def drop(self) -> None:
        """Forgets the gradients. All plans must be applied and all rows landed."""
        self._clear(self._engine.window_rows()[0])
        self._engine.close_window()

    def _clear(self, slots: np.ndarray) -> None:
        if len(slots):
            (rows,) = self._transfers.to_device(slots.astype(np.int64))
            self.sums.index_fill_(0, rows, 0.0)
