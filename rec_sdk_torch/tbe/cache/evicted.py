"""Rows that have left a table, until their user takes them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from ...runtime.warn import PerformanceWarning, warn

WARN_BYTES = 1 << 30
"""Rows of one table that wait take so many bytes before the first warning."""


@dataclass(frozen=True, eq=False)
class EvictedRows:
    """Rows that have left a table, as they were then. An id that left, came back and left again is there twice.

    Attributes:
        ids: int64 `[N]`, in the order in which they left; those of one eviction ascending.
        weight: `[N, D]` in the table's data type.
        states: of the optimizer, by name, `[N, D]` or `[N, 1]`.
        columns: what the table's rules keep of a row, by name, `[N]`, as `TableView.row_columns` has them.
        reason: uint8 `[N]`, an `EvictReason` of each.

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

    def __getitem__(self, chosen: torch.Tensor | slice) -> EvictedRows:
        """Some of the rows: by a mask, bool `[N]`, by their places, or a slice of them."""
        states = {name: values[chosen] for name, values in self.states.items()}
        columns = {name: values[chosen] for name, values in self.columns.items()}
        return EvictedRows(self.ids[chosen], self.weight[chosen], states, columns, self.reason[chosen])

    def latest(self) -> EvictedRows:
        """Each id once, as it was when it left last."""
        ids = self.ids.detach().cpu().flip(0).numpy()
        distinct, places = np.unique(ids, return_index=True)
        if len(distinct) == len(ids):
            return self
        return self[torch.from_numpy(np.sort(len(ids) - 1 - places))]

    @property
    def _parts(self) -> dict[str, torch.Tensor]:
        return {"ids": self.ids, "weight": self.weight, **self.states, **self.columns, "reason": self.reason}

    def length_problem(self) -> str | None:
        """Says which tensors have not one entry for each row; None when all have."""
        shapes = {name: tuple(getattr(part, "shape", ())) for name, part in self._parts.items()}
        wrong = {name: shape for name, shape in shapes.items() if shape[:1] != (len(self),)}
        return f"{wrong} are not of {len(self)} rows, as the ids are" if wrong else None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(part.nbytes for part in self._parts.values())


@dataclass(frozen=True, eq=False)
class RowSchema:
    """The parts of a row that a table keeps now: rows that left before had perhaps other states, or other columns.

    Attributes:
        weight: `[0, D]`, in the table's data type.
        states: by name, `[1, n]`: the row at first.
        columns: by name, `[1]`.
    """

    weight: torch.Tensor
    states: Mapping[str, torch.Tensor]
    columns: Mapping[str, torch.Tensor]

    def empty(self) -> EvictedRows:
        """No rows."""
        states = {name: first[:0] for name, first in self.states.items()}
        columns = {name: first[:0] for name, first in self.columns.items()}
        ids = torch.empty(0, dtype=torch.int64, device="cpu")
        return EvictedRows(ids, self.weight, states, columns, ids.to(torch.uint8))

    def fit(self, rows: EvictedRows) -> EvictedRows:
        """The rows with these states and columns, in these data types; what they lack is as in a new row."""
        states = _conform(rows.states, self.states, len(rows))
        columns = _conform(rows.columns, self.columns, len(rows))
        return EvictedRows(rows.ids, rows.weight.to(self.weight.dtype), states, columns, rows.reason)

    def concatenate(self, pieces: Sequence[EvictedRows]) -> EvictedRows:
        """All rows of some pieces, in their order: copies, since a save may still write the pieces."""
        fitting = [self.fit(piece) for piece in pieces] or [self.empty()]
        return EvictedRows(
            torch.cat([piece.ids for piece in fitting]),
            torch.cat([piece.weight for piece in fitting]),
            {name: torch.cat([piece.states[name] for piece in fitting]) for name in self.states},
            {name: torch.cat([piece.columns[name] for piece in fitting]) for name in self.columns},
            torch.cat([piece.reason for piece in fitting]),
        )


def _conform(
    given: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], rows: int
) -> dict[str, torch.Tensor]:
    found = {}
    for name, first in wanted.items():
        values = given[name] if name in given else first.expand(rows, *first.shape[1:]).contiguous()
        found[name] = values.to(first.dtype)
    return found


next_serial = itertools.count().__next__
"""Returns a number larger than all before it."""


class EvictedChunk(NamedTuple):
    """Rows that left a table together, and were not taken.

    Attributes:
        serial: larger than those of all rows that left before.
        rows: they are not changed.
    """

    serial: int
    rows: EvictedRows

    @classmethod
    def now(cls, rows: EvictedRows) -> EvictedChunk:
        """Returns the rows with the next serial."""
        return cls(next_serial(), rows)


@dataclass(eq=False)
class EvictedRowsBuffer:
    """Rows that have left one table and were not taken. Under the launch lock, but for counts.

    Attributes:
        table: its name.
        chunks: the rows, in the order in which they left.
    """

    table: str
    chunks: list[EvictedChunk] = field(default_factory=list)
    _warn_from: int = WARN_BYTES

    def rows(self) -> int:
        """How many wait."""
        return sum(len(rows) for _, rows in list(self.chunks))

    @property
    def nbytes(self) -> int:
        """Bytes of those that wait."""
        return sum(rows.nbytes for _, rows in list(self.chunks))

    def first_rows(self, at_most: int | None) -> list[EvictedRows]:
        """The first rows that wait, `at_most` so many, or all. They go on waiting."""
        chosen, left = [], self.rows() if at_most is None else at_most
        for _, rows in self.chunks:
            if not left:
                break
            chosen.append(rows if len(rows) <= left else rows[:left])
            left -= len(chosen[-1])
        return chosen

    def drop_first(self, rows: int) -> None:
        """The first `rows` of them wait no more."""
        left = []
        for piece in self.chunks:
            gone = min(rows, len(piece.rows))
            rows -= gone
            if gone < len(piece.rows):
                left.append(piece._replace(rows=piece.rows[gone:]) if gone else piece)
        self.chunks[:] = left

    def warn(self) -> None:
        """Warns where much waits; again when it is twice as much."""
        if len(self.chunks) and self.nbytes >= self._warn_from:
            self._warn_from = 2 * self.nbytes
            warn(
                f"table {self.table!r}: {self.rows()} rows that left it wait in {self.nbytes >> 20} MiB of memory: "
                "take them with take_evicted, or set keep_evicted=False",
                PerformanceWarning,
            )
