"""Sums of each row's gradients, for update_rows and accumulate_rows, and the kernel of accumulate_rows."""

from __future__ import annotations

import itertools

import torch

from ..segments import HOT_LOOKUPS, HOT_SEGMENT_FIELDS
from .checks import MAX_DIM, Checker
from .sums import segment_sums
from .write import Write

_Optional = torch.Tensor | None


class Gradients:
    """The gradients of a batch's lookups, grouped by row. op_kernels/update_rows/README.md describes the arguments.

    Attributes:
        slots: int64 `[U]`, the cache slot of each row; set by `check_contents`.
    """

    def __init__(
        self,
        check: Checker,
        grads: list[torch.Tensor],
        dim: int,
        unique_slots: torch.Tensor,
        segment_offsets: torch.Tensor,
        grad_row: torch.Tensor,
        grad_source: _Optional,
        grad_column: _Optional,
        scale: _Optional,
        hot_segments: _Optional,
    ) -> None:
        check.vector("unique_slots", unique_slots, torch.int32)
        check.vector("segment_offsets", segment_offsets, torch.int32, unique_slots.shape[0] + 1)
        check.vector("grad_row", grad_row, torch.int32)
        count = grad_row.shape[0]
        for i, grad in enumerate(grads):
            read = count > 0 and grad.shape[0] > 0
            columns = grad.shape[1]
            check.require(not read or columns >= dim, f"grads[{i}] must have at least {dim} columns, got {columns}")
        which = f"grad_source must say which of the {len(grads)} grads each lookup reads, got None"
        check.require(grad_source is not None or len(grads) == 1, which)
        for name, values in (("grad_source", grad_source), ("grad_column", grad_column)):
            if values is not None:
                check.vector(name, values, torch.int32, count)
        if scale is not None:
            check.vector("scale", scale, torch.float32, count)
        if hot_segments is not None:
            check.tensor("hot_segments", hot_segments, torch.int32, 2)
            check.contiguous("hot_segments", hot_segments)
            fields = hot_segments.shape[1]
            wanted = f"hot_segments must have {HOT_SEGMENT_FIELDS} columns, got {fields}"
            check.require(fields == HOT_SEGMENT_FIELDS, wanted)
        self._grads, self._dim, self._scale = grads, dim, scale
        self._index_tensors = unique_slots, segment_offsets, grad_row, grad_source, grad_column, hot_segments

    def check_contents(self, check: Checker, slots: int) -> None:
        """Checks that all indices are in range, and that cache slots are below `slots`."""
        unique_slots, segment_offsets, grad_row, grad_source, grad_column, hot_segments = self._index_tensors
        self._offsets = check.offsets("segment_offsets", segment_offsets, grad_row.shape[0])
        if hot_segments is not None:
            _check_hot_segments(check, self._offsets.tolist(), hot_segments.tolist())
        self.slots = check.indices("unique_slots", unique_slots, slots)
        self._source = None if grad_source is None else check.indices("grad_source", grad_source, len(self._grads))
        rows = [grad.shape[0] for grad in self._grads]
        self._row = check.indices_by_source("grad_row", grad_row, self._source, rows)
        begins = [grad.shape[1] - self._dim + 1 for grad in self._grads]
        self._column = None
        if grad_column is not None:
            self._column = check.indices_by_source("grad_column", grad_column, self._source, begins)

    def sums(self) -> torch.Tensor:
        """Sums the scaled gradients of each row's lookups, float32 `[U, D]`. Call `check_contents` first."""
        terms = self._gradient_rows()
        if self._scale is not None:
            terms = self._scale[:, None] * terms
        return segment_sums(terms, self._offsets)

    def _gradient_rows(self) -> torch.Tensor:
        if self._source is None or len(self._grads) == 1:
            return self._read(self._grads[0], slice(None))
        terms = self._grads[0].new_empty((len(self._row), self._dim))
        for i, grad in enumerate(self._grads):
            lookups = (self._source == i).nonzero()[:, 0]
            if len(lookups):
                terms[lookups] = self._read(grad, lookups)
        return terms

    def _read(self, grad: torch.Tensor, lookups: torch.Tensor | slice) -> torch.Tensor:
        rows = self._row[lookups]
        if len(rows) == 0:
            return grad.new_empty((0, self._dim))
        if self._column is None:
            return grad[:, : self._dim].index_select(0, rows)
        columns = self._column[lookups][:, None] + torch.arange(self._dim, device=rows.device)
        return grad[rows[:, None], columns]


def check_gradients(check: Checker, grads: list[torch.Tensor]) -> None:
    """Checks that `grads` has at least one element and that all elements are float32 matrices."""
    check.require(len(grads) > 0, "grads must have at least one gradient, got none")
    for i, grad in enumerate(grads):
        check.matrix(f"grads[{i}]", grad)


def _check_hot_segments(check: Checker, offsets: list[int], segments: list[list[int]]) -> None:
    """Checks that `hot_segments` matches the offsets, which other kernels require. Default kernels do not use it."""
    found = chunks = 0
    for row, (first, end) in enumerate(itertools.pairwise(offsets)):
        if end - first <= HOT_LOOKUPS:
            continue
        check.require(
            found < len(segments),
            f"hot_segments must have every segment of more than {HOT_LOOKUPS} lookups, or be None; the segment of "
            f"row {row} is missing",
        )
        wanted = [row, first, (end - first) // HOT_LOOKUPS, chunks]
        text = ["{}, {}, {}, {}".format(*numbers) for numbers in (wanted, segments[found])]
        check.require(
            segments[found] == wanted,
            f"hot_segments must be (row, first lookup, chunks, chunks before): {text[0]} at index {found}, got "
            f"{text[1]}",
        )
        found, chunks = found + 1, chunks + wanted[2]
    check.require(
        found == len(segments),
        f"hot_segments must have the {found} segments of more than {HOT_LOOKUPS} lookups, got {len(segments)}",
    )


def accumulate_rows(
    pending: torch.Tensor,
    grads: list[torch.Tensor],
    unique_slots: torch.Tensor,
    segment_offsets: torch.Tensor,
    grad_row: torch.Tensor,
    grad_source: _Optional,
    grad_column: _Optional,
    scale: _Optional,
    hot_segments: _Optional = None,
) -> Write:
    """Adds gradients to accumulation buffers; see op_kernels/accumulate_rows/README.md."""
    check = Checker("accumulate_rows", pending)
    check_gradients(check, grads)
    check.tensor("pending", pending, torch.float32, 2)
    check.contiguous("pending", pending)
    width = pending.shape[1]
    check.require(width >= 2 and width % 2 == 0, f"pending must have 2 * dim columns (sum, compensation), got {width}")
    check.require(width <= 2 * MAX_DIM, f"pending must have at most {2 * MAX_DIM} columns, got {width}")
    dim = width // 2
    lookups = unique_slots, segment_offsets, grad_row, grad_source, grad_column, scale, hot_segments
    gradients = Gradients(check, grads, dim, *lookups)
    gradients.check_contents(check, pending.shape[0])
    rows = pending.index_select(0, gradients.slots)
    return Write(pending, gradients.slots, torch.cat(_two_sum(rows[:, :dim], rows[:, dim:], gradients.sums()), dim=1))


def _two_sum(before: torch.Tensor, compensation: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds `g` to a compensated sum; returns the new sum and compensation (Knuth's two-sum, renormalised)."""
    total = before + g
    virtual = total - before
    compensation = compensation + ((before - (total - virtual)) + (g - virtual))
    after = total + compensation
    return after, compensation - (after - total)
