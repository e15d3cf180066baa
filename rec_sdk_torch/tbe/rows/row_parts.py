"""Parts of rows, the weight and the states, in the cache and in the host's table."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from ..cache.batch import Int64Array
from ..cache.device_cache import Group
from ..cache.eviction import read_known
from ..config.table import TableConfig

WEIGHT = "weight"
"""The part of a row that every table has; the others are named as its optimizer's states."""


def as_stored(config: TableConfig, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parts of rows as the cache has them, with the weight as the host's table has it."""
    return {name: part.to(config.weight_dtype) if name == WEIGHT else part for name, part in parts.items()}


def read_parts(group: Group, table: int, ids: Int64Array, places: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Parts of the rows of `ids` as the cache has them, copies on the host, by name; `places`: -1 is the weight."""
    result: dict[str, list[torch.Tensor]] = {name: [] for name in places}
    for begin in range(0, len(ids), group.chunk):
        records = read_records(group, table, ids[begin : begin + group.chunk])
        for name, place in places.items():
            result[name].append(part_view(group, place)(records).clone())
    return {name: _joined(group, places[name], chunks) for name, chunks in result.items()}


def write_parts(group: Group, table: int, ids: Int64Array, parts: Mapping[int, torch.Tensor]) -> None:
    """Sets parts of rows, which the table knows, by their places: -1 is the weight, else a state."""
    for begin in range(0, len(ids), group.chunk):
        piece = slice(begin, begin + group.chunk)
        rows, slots = group.engine.tables.find_rows(table, ids[piece])
        records = read_known(group, table, ids[piece], rows, slots)
        for place, values in parts.items():
            part_view(group, place)(records).copy_(values[piece])
        group.engine.tables.write_rows(table, ids[piece], rows, records.numpy())
        resident = np.flatnonzero(slots >= 0)
        if len(resident):
            group.scatter(slots[resident], records[torch.from_numpy(resident)])


def all_ids(group: Group, table: int) -> Int64Array:
    """Ids of all rows of a table, in row order. All must be settled."""
    return group.engine.tables.rows(table)[0]


def insert_owned_ids(group: Group, table: int) -> None:
    """Makes rows of those that the table has though no batch has met them; counts of them are 0."""
    if table in group.owned_ids:
        rows, _ = group.engine.tables.insert(table, group.owned_ids[table]())
        group.engine.tables.reserve_rows(table, rows)


def part_view(group: Group, place: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """The part of records, as a view: the weight for -1, else a state."""
    if place < 0:
        return group.layout.weight
    return lambda records: group.layout.state(records, place)


def part_bytes(group: Group, place: int, values: torch.Tensor) -> tuple[np.ndarray, int]:
    """A part of records as these have it, uint8 `[n, bytes]`, and its first byte in a record."""
    layout = group.layout
    dtype, begin = (layout.weight_dtype, 0) if place < 0 else (layout.state_dtype(place), layout.state_offset(place))
    return values.to(dtype).contiguous().view(torch.uint8).numpy(), begin


def _joined(group: Group, place: int, chunks: list[torch.Tensor]) -> torch.Tensor:
    if len(chunks) == 1:
        return chunks[0]
    empty = torch.empty((0, group.layout.bytes), dtype=torch.uint8, device="cpu")
    return torch.cat([part_view(group, place)(empty), *chunks])


def read_records(group: Group, table: int, ids: Int64Array) -> torch.Tensor:
    """Records of `ids`, uint8 `[n, bytes]`, initial ones for those that are not known."""
    rows, slots = group.engine.tables.find_rows(table, ids)
    unknown = rows < 0
    if not unknown.any():
        return read_known(group, table, ids, rows, slots)
    records = torch.empty((len(ids), group.layout.bytes), dtype=torch.uint8, device="cpu")
    fresh = records.numpy()[: int(unknown.sum())].copy()
    group.engine.tables.initial_records(table, ids[unknown], fresh)
    records[torch.from_numpy(unknown)] = torch.from_numpy(fresh)
    known = ~unknown
    if known.any():
        records[torch.from_numpy(known)] = read_known(group, table, ids[known], rows[known], slots[known])
    return records
