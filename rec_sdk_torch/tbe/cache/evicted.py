"""Evicted rows, and the buffers that keep them until `take_evicted` returns them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from ...runtime.warn import PerformanceWarning, warn

WARN_BYTES = 1 << 30
"""Size in bytes of a table's buffer of evicted rows, from which on the buffer warns."""


@dataclass(frozen=True, eq=False)
class EvictedRows:
    """Evicted or removed rows of a table, with the values that they had when they were evicted or removed.

    An id that was evicted several times has several rows.

    Attributes:
        ids: int64 `[N]`, in the order of eviction; ascending within one eviction.
        weight: `[N, D]` in the table's data type.
        states: optimizer states by name, `[N, D]` or `[N, 1]`.
        columns: counts and clocks that the table's rules keep for each row, by name, `[N]`; see
            `TableView.row_columns`.
        reason: uint8 `[N]`, the `EvictReason` of each row.

    Example:
        >>> import torch
        >>> from rec_sdk_torch import EvictedRows, EvictReason
        >>> reasons = torch.tensor([EvictReason.AGE, EvictReason.BOUND], dtype=torch.uint8)
        >>> rows = EvictedRows(torch.tensor([3, 7]), torch.zeros(2, 4), {}, {}, reasons)
        >>> rows[rows.reason == EvictReason.BOUND].ids
        tensor([7])
    """

    ids: torch.Tensor
    weight: torch.Tensor
    states: Mapping[str, torch.Tensor]
    columns: Mapping[str, torch.Tensor]
    reason: torch.Tensor

    def __post_init__(self) -> None:
        for name in ("states", "columns"):
            if not isinstance(getattr(self, name), Mapping):
                raise TypeError(f"EvictedRows: {name} is {getattr(self, name)!r}, expected a dict of tensors by name")

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, selection: torch.Tensor | slice) -> EvictedRows:
        """Returns the selected rows: by a mask, bool `[N]`, by indices or by a slice."""
        states = {name: values[selection] for name, values in self.states.items()}
        columns = {name: values[selection] for name, values in self.columns.items()}
        return EvictedRows(self.ids[selection], self.weight[selection], states, columns, self.reason[selection])

    def latest(self) -> EvictedRows:
        """Returns the row of each id that was evicted last, in the order of eviction."""
        ids = self.ids.detach().cpu().flip(0).numpy()
        distinct, last = np.unique(ids, return_index=True)
        if len(distinct) == len(ids):
            return self
        return self[torch.from_numpy(np.sort(len(ids) - 1 - last))]

    @property
    def _parts(self) -> dict[str, torch.Tensor]:
        return {"ids": self.ids, "weight": self.weight, **self.states, **self.columns, "reason": self.reason}

    def length_problem(self) -> str | None:
        """Returns a message that names the tensors whose length differs from `ids`; None if all lengths are equal."""
        shapes = {name: tuple(getattr(part, "shape", ())) for name, part in self._parts.items()}
        wrong = {name: shape for name, shape in shapes.items() if shape[:1] != (len(self),)}
        return f"{wrong} are not of {len(self)} rows, as the ids are" if wrong else None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(part.nbytes for part in self._parts.values())


@dataclass(frozen=True, eq=False)
class RowSchema:
    """The parts that a table's rows have now; rows that were evicted under other settings are converted to them.

    Attributes:
        weight: `[0, D]`, an empty tensor in the table's data type.
        states: by name, `[1, n]`, the optimizer states of a new row.
        columns: by name, `[1]`, the columns of a new row.
    """

    weight: torch.Tensor
    states: Mapping[str, torch.Tensor]
    columns: Mapping[str, torch.Tensor]

    def empty(self) -> EvictedRows:
        """Returns zero rows of this schema."""
        states = {name: first[:0] for name, first in self.states.items()}
        columns = {name: first[:0] for name, first in self.columns.items()}
        ids = torch.empty(0, dtype=torch.int64, device="cpu")
        return EvictedRows(ids, self.weight, states, columns, ids.to(torch.uint8))

    def fit(self, rows: EvictedRows) -> EvictedRows:
        """Returns `rows` with the schema's states and columns; missing ones get the values of a new row."""
        states = _conform(rows.states, self.states, len(rows))
        columns = _conform(rows.columns, self.columns, len(rows))
        return EvictedRows(rows.ids, rows.weight.to(self.weight.dtype), states, columns, rows.reason)

    def concatenate(self, chunks: Sequence[EvictedRows]) -> EvictedRows:
        """Returns copies of all rows in one object; the chunks stay unchanged, since a save may still write them."""
        fitted = [self.fit(chunk) for chunk in chunks] or [self.empty()]
        return EvictedRows(
            torch.cat([chunk.ids for chunk in fitted]),
            torch.cat([chunk.weight for chunk in fitted]),
            {name: torch.cat([chunk.states[name] for chunk in fitted]) for name in self.states},
            {name: torch.cat([chunk.columns[name] for chunk in fitted]) for name in self.columns},
            torch.cat([chunk.reason for chunk in fitted]),
        )


def _conform(
    parts: Mapping[str, torch.Tensor], defaults: Mapping[str, torch.Tensor], rows: int
) -> dict[str, torch.Tensor]:
    result = {}
    for name, default in defaults.items():
        values = parts[name] if name in parts else default.expand(rows, *default.shape[1:]).contiguous()
        result[name] = values.to(default.dtype)
    return result


next_serial = itertools.count().__next__
"""Returns a serial number that is larger than all earlier serial numbers."""


class EvictedChunk(NamedTuple):
    """The rows of one eviction.

    Attributes:
        serial: a number larger than the serials of all earlier evictions.
        rows: the rows, which must not be changed in place.
    """

    serial: int
    rows: EvictedRows

    @classmethod
    def now(cls, rows: EvictedRows) -> EvictedChunk:
        """Creates a chunk with the next serial."""
        return cls(next_serial(), rows)


@dataclass(eq=False)
class EvictedRowsBuffer:
    """Buffer of the evicted rows of one table, until `take_evicted` returns them.

    All calls require the launch lock, except for `rows` and `nbytes`.

    Attributes:
        table: the table's name.
        chunks: the rows, in the order of eviction.
    """

    table: str
    chunks: list[EvictedChunk] = field(default_factory=list)
    _warn_from: int = WARN_BYTES

    def rows(self) -> int:
        """Returns the number of rows in the buffer."""
        return sum(len(rows) for _, rows in list(self.chunks))

    @property
    def nbytes(self) -> int:
        """Bytes of the rows in the buffer."""
        return sum(rows.nbytes for _, rows in list(self.chunks))

    def first_rows(self, at_most: int | None) -> list[EvictedRows]:
        """Returns the first `at_most` rows, or all, without removing them."""
        chosen, left = [], self.rows() if at_most is None else at_most
        for _, rows in self.chunks:
            if not left:
                break
            chosen.append(rows if len(rows) <= left else rows[:left])
            left -= len(chosen[-1])
        return chosen

    def drop_first(self, rows: int) -> None:
        """Removes the first `rows` rows from the buffer."""
        left = []
        for chunk in self.chunks:
            dropped = min(rows, len(chunk.rows))
            rows -= dropped
            if dropped < len(chunk.rows):
                left.append(chunk._replace(rows=chunk.rows[dropped:]) if dropped else chunk)
        self.chunks[:] = left

    def warn(self) -> None:
        """Warns if the buffer is large, and again whenever it has doubled."""
        if len(self.chunks) and self.nbytes >= self._warn_from:
            self._warn_from = 2 * self.nbytes
            warn(
                f"table {self.table!r}: {self.rows()} evicted rows take {self.nbytes >> 20} MiB of memory: "
                "take them with take_evicted, or set keep_evicted=False",
                PerformanceWarning,
            )
