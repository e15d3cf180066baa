"""The kernel of update_rows: sums the gradients of each row, clips the sum, and applies the optimizer's formula."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...formulas import FORMULAS, Coefficients, Rows
from ..record import WEIGHT_DTYPES, RecordLayout
from .checks import MAX_DIM, Checker
from .gradients import Gradients, check_gradients
from .rounding import round_to, rounding_bits
from .sums import lane_sums
from .write import Write

COEFFICIENTS = 16
"""The number of coefficients of a table: `kCoefficients` of op_kernels/common/arguments.h."""
_Optional = torch.Tensor | None


def update_rows(
    cache: torch.Tensor,
    grads: list[torch.Tensor],
    unique_slots: torch.Tensor,
    table_offsets: torch.Tensor,
    segment_offsets: torch.Tensor,
    grad_row: torch.Tensor,
    grad_source: _Optional,
    grad_column: _Optional,
    scale: _Optional,
    coefficients: torch.Tensor,
    optimizer: str,
    dim: int,
    weight_dtype: torch.dtype,
    row_ids: _Optional = None,
    rounding_seeds: _Optional = None,
    state_dtypes: Sequence[int] = (),
    hot_segments: _Optional = None,
    row_norms: _Optional = None,
) -> Write:
    """Updates rows with the gradients of their lookups; see op_kernels/update_rows/README.md."""
    check = Checker("update_rows", cache)
    check_gradients(check, grads)
    layout = _check_layout(check, cache, optimizer, dim, weight_dtype, state_dtypes)
    lookups = unique_slots, segment_offsets, grad_row, grad_source, grad_column, scale, hot_segments
    gradients = Gradients(check, grads, dim, *lookups)
    count = unique_slots.shape[0]
    _check_tables(check, table_offsets, coefficients, row_ids, rounding_seeds, count)
    if row_norms is not None:
        check.tensor("row_norms", row_norms, torch.float32, 2)
        check.contiguous("row_norms", row_norms)
        check.require(
            tuple(row_norms.shape) == (2, count),
            f"row_norms must be [2, {count}], got {list(row_norms.shape)}",
        )
    table_ends = check.offsets("table_offsets", table_offsets, count)
    gradients.check_contents(check, cache.shape[0])

    table = torch.repeat_interleave(table_ends.diff())
    of_row = coefficients.index_select(0, table)
    records = cache.index_select(0, gradients.slots)
    weights = layout.weight(records)
    states = [layout.state(records, s) for s in range(len(layout.state_elements))]
    formula = FORMULAS[optimizer]
    sums = gradients.sums()
    if row_norms is not None:
        row_norms[0] = lane_sums(sums * sums)[:, 0]
        row_norms[1] = sums.abs().amax(1)
    g = clip(sums, of_row[:, :1])
    named = Coefficients(of_row, formula.coefficients)
    rows = Rows(weights.float(), g, [state.float() for state in states], named, lane_sums)
    formula.update(rows)
    random = None
    if row_ids is not None and rounding_seeds is not None and weight_dtype != torch.float32:
        random = rounding_bits(row_ids, rounding_seeds[table], dim)
    weights.copy_(round_to(rows.w, weight_dtype, random))
    for state, values in zip(states, rows.states, strict=True):
        state.copy_(round_to(values, state.dtype))
    return Write(cache, gradients.slots, records)


def clip(g: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """Clips `g` elementwise to `[-bound, bound]`; keeps NaNs."""
    below = torch.where(bound < g, bound, g)
    return torch.where(below < -bound, -bound, below)


def _check_layout(
    check: Checker,
    cache: torch.Tensor,
    optimizer: str,
    dim: int,
    weight_dtype: torch.dtype,
    state_dtypes: Sequence[int],
) -> RecordLayout:
    check.require(1 <= dim <= MAX_DIM, f"dim must be in [1, {MAX_DIM}], got {dim}")
    check.storage_dtype("weight_dtype", weight_dtype)
    names = f"optimizer must be one of {', '.join(FORMULAS)}; got '{optimizer}'"
    check.require(optimizer in FORMULAS, names)
    elements, count = FORMULAS[optimizer].state_elements(dim), len(state_dtypes)
    check.require(
        count in (0, len(elements)),
        f"state_dtypes must be empty or have {len(elements)} element(s), one for each state of {optimizer}, got "
        f"{count}",
    )
    for index, code in enumerate(state_dtypes):
        known = f"state_dtypes must be of 0 (Float), 1 (Half) or 2 (BFloat16), got {code} at index {index}"
        check.require(0 <= code < len(WEIGHT_DTYPES), known)
    layout = RecordLayout(dim, weight_dtype, elements, tuple(WEIGHT_DTYPES[code] for code in state_dtypes))
    check.tensor("cache", cache, torch.uint8, 2)
    check.contiguous("cache", cache)
    check.require(
        cache.shape[1] == layout.bytes,
        f"cache must have {layout.bytes} bytes per row for {optimizer} with dim {dim}, got {cache.shape[1]}",
    )
    check.require(cache.data_ptr() % 4 == 0, "cache must be aligned to 4 bytes")
    return layout


def _check_tables(
    check: Checker,
    table_offsets: torch.Tensor,
    coefficients: torch.Tensor,
    row_ids: _Optional,
    rounding_seeds: _Optional,
    rows: int,
) -> None:
    check.vector("table_offsets", table_offsets, torch.int32)
    tables = table_offsets.shape[0] - 1
    check.require(tables >= 0, "table_offsets must have tables + 1 elements, got none")
    check.tensor("coefficients", coefficients, torch.float32, 2)
    check.contiguous("coefficients", coefficients)
    wanted, found = [tables, COEFFICIENTS], list(coefficients.shape)
    check.require(found == wanted, f"coefficients must be {wanted}, got {found}")
    check.require(
        (row_ids is None) == (rounding_seeds is None),
        "row_ids and rounding_seeds belong together: give both, or neither to round to nearest",
    )
    if row_ids is not None and rounding_seeds is not None:
        check.vector("row_ids", row_ids, torch.int64, rows)
        check.vector("rounding_seeds", rounding_seeds, torch.int64, tables)
