"""Reads and writes the parts of rows (weight and optimizer states), whether the rows are in the cache or not.

A part has an index: -1 is the weight, i >= 0 is state i.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from ..cache.batch import Int64Array
from ..cache.device_cache import Group
from ..cache.eviction import read_known_records
from ..config.table import TableConfig

WEIGHT = "weight"
"""Name of the weight among the parts of a row; the other parts have the names of the optimizer's states."""


@dataclass(frozen=True, eq=False)
class Chunk:
    """Rows of a table with their values.

    Attributes:
        ids: int64 `[n]`.
        parts: parts of these rows by name: `weight`, `[n, D]` in the table's data type, and optimizer states, `[n, D]`
            or `[n, 1]` in their data types.
    """

    ids: torch.Tensor
    parts: dict[str, torch.Tensor]


def as_stored(config: TableConfig, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Converts the weight in `parts`, if there is one, from the cache's data type to the table's."""
    return {name: part.to(config.weight_dtype) if name == WEIGHT else part for name, part in parts.items()}


def read_parts(group: Group, table: int, ids: Int64Array, indices: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Reads parts of the rows of `ids`; unknown ids have initial values.

    Args:
        group: the group of the table.
        table: its index in the group.
        ids: int64 `[n]`.
        indices: the indices of the parts, by name.

    Returns:
        Copies on the host, by name of the part, `[n, ...]`, in the data types of the cache.
    """
    result: dict[str, list[torch.Tensor]] = {name: [] for name in indices}
    for begin in range(0, len(ids), group.chunk):
        records = read_records(group, table, ids[begin : begin + group.chunk])
        for name, index in indices.items():
            result[name].append(part_view(group, index)(records).clone())
    return {name: _concatenate(group, indices[name], chunks) for name, chunks in result.items()}


def write_parts(group: Group, table: int, ids: Int64Array, parts: Mapping[int, torch.Tensor]) -> None:
    """Writes parts, by index, of the rows of `ids`, all of which the table must contain. Other parts do not change."""
    for begin in range(0, len(ids), group.chunk):
        chunk = slice(begin, begin + group.chunk)
        rows, slots = group.engine.tables.find_rows(table, ids[chunk])
        records = read_known_records(group, table, ids[chunk], rows, slots)
        for index, values in parts.items():
            part_view(group, index)(records).copy_(values[chunk])
        group.engine.tables.write_rows(table, ids[chunk], rows, records.numpy())
        resident = np.flatnonzero(slots >= 0)
        if len(resident):
            group.scatter(slots[resident], records[torch.from_numpy(resident)])


def all_ids(group: Group, table: int) -> Int64Array:
    """Returns the ids of all rows of a table, in row order. Call `Swap.settle` first."""
    return group.engine.tables.rows(table)[0]


def insert_owned_ids(group: Group, table: int) -> None:
    """Inserts the `owned_ids` of a table that have no row yet, with counts of 0."""
    if table in group.owned_ids:
        rows, _ = group.engine.tables.insert(table, group.owned_ids[table]())
        group.engine.tables.reserve_rows(table, rows)


def part_view(group: Group, index: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function that takes records `[n, bytes]` and returns a view of their part `index`."""
    if index < 0:
        return group.layout.weight
    return lambda records: group.layout.state(records, index)


def part_bytes(group: Group, index: int, values: torch.Tensor) -> tuple[np.ndarray, int]:
    """Converts values of the part `index` to bytes, uint8 `[n, bytes]`; also returns their offset in a record."""
    layout = group.layout
    dtype, begin = (layout.weight_dtype, 0) if index < 0 else (layout.state_dtype(index), layout.state_offset(index))
    return values.to(dtype).contiguous().view(torch.uint8).numpy(), begin


def _concatenate(group: Group, index: int, chunks: list[torch.Tensor]) -> torch.Tensor:
    if len(chunks) == 1:
        return chunks[0]
    empty = torch.empty((0, group.layout.bytes), dtype=torch.uint8, device="cpu")
    return torch.cat([part_view(group, index)(empty), *chunks])


def read_records(group: Group, table: int, ids: Int64Array) -> torch.Tensor:
    """Reads the records of `ids`, uint8 `[n, bytes]`; unknown ids have initial records."""
    rows, slots = group.engine.tables.find_rows(table, ids)
    unknown = rows < 0
    if not unknown.any():
        return read_known_records(group, table, ids, rows, slots)
    records = torch.empty((len(ids), group.layout.bytes), dtype=torch.uint8, device="cpu")
    fresh = records.numpy()[: int(unknown.sum())].copy()
    group.engine.tables.initial_records(table, ids[unknown], fresh)
    records[torch.from_numpy(unknown)] = torch.from_numpy(fresh)
    known = ~unknown
    if known.any():
        records[torch.from_numpy(known)] = read_known_records(group, table, ids[known], rows[known], slots[known])
    return records
