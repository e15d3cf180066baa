"""Eviction and removal of ids. Running saves and `take_evicted` receive the rows as they were before."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import starmap

import numpy as np
import numpy.typing as npt
import torch

from ...rules import Norm
from ..config.lifecycle import EvictReason
from .batch import Int64Array
from .device_cache import Group
from .evicted import EvictedChunk, EvictedRows
from .update_journal import Call, UpdateJournal


def end_step(group: Group, journal: UpdateJournal) -> None:
    """Ends a training step whose plans are released, and evicts ids of tables whose eviction interval has ended.

    After an interrupt, the function must be called again with the same journal.
    """
    if not group.has_lifecycles:
        return
    calls: list[Call] = [(group.engine.lifecycle.end_step, group.intervals)]
    pending = not journal.has((group, "end"))
    if pending and group.evicts_by_norm:
        mark_small_rows(group, group.engine.lifecycle.measured_tables(group.intervals))
    if pending and group.engine.lifecycle.evicts(group.intervals):
        group.swap.settle()
        for table in group.snapshots.keys() | group.evicted.keys():
            calls += _prepare_eviction(group, table, *group.engine.lifecycle.evictable_ids(table, group.intervals))
    # One C call makes all calls: an interrupt cannot come between the eviction and keeping its rows.
    journal.run((group, "end"), list, starmap(operator.call, calls))


def evict(group: Group, table: int) -> int:
    """Evicts the ids that the rules of a table choose now; returns how many had rows. Call `Swap.settle` first."""
    lifecycle = group.members[table].config.lifecycle
    if lifecycle is not None and lifecycle.rule(Norm):
        mark_small_rows(group, [table])
    calls: list[Call] = [(group.engine.lifecycle.evict, table)]
    if table in group.snapshots or table in group.evicted:
        calls += _prepare_eviction(group, table, *group.engine.lifecycle.evictable_ids(table))
    return _run_calls(calls)


def remove(group: Group, table: int, ids: Int64Array) -> int:
    """Removes ids from a table; returns how many of them the table contained. Call `Swap.settle` first.

    Raises:
        RuntimeError: a batch in flight uses one of the ids; nothing was removed.
    """
    calls: list[Call] = [(group.engine.tables.remove, table, ids)]
    group.before_change(table, ids)
    if table in group.evicted:
        known = np.unique(ids)
        known = known[group.engine.tables.find_rows(table, known)[0] >= 0]
        calls += _calls_to_keep_rows(group, table, known, np.full(len(known), EvictReason.REMOVED, np.uint8))
    return _run_calls(calls)


def _prepare_eviction(group: Group, table: int, ids: Int64Array, reasons: np.ndarray) -> list[Call]:
    """Prepares the eviction of `ids` for `reasons`, uint8 `[n]`; returns calls to make right after the eviction."""
    group.before_change(table, ids)
    return _calls_to_keep_rows(group, table, ids, reasons) if table in group.evicted else []


def _calls_to_keep_rows(group: Group, table: int, ids: Int64Array, reasons: np.ndarray) -> list[Call]:
    """Reads the rows of `ids`; returns the call that adds them to the buffer of evicted rows (none without ids)."""
    if not len(ids):
        return []
    return [(group.evicted[table].chunks.append, EvictedChunk.now(_read_rows(group, table, ids, reasons)))]


def _run_calls(calls: list[Call]) -> int:
    """Makes the calls inside one C call, until one of them fails; returns the result of the first call."""
    results: list[int] = list(starmap(operator.call, calls))
    return results[0]


def _read_rows(group: Group, table: int, ids: Int64Array, reasons: np.ndarray) -> EvictedRows:
    member, layout = group.members[table], group.layout
    states = member.optimizer.spec.states if member.optimizer else ()
    rows, slots = group.engine.tables.find_rows(table, ids)
    columns = group.engine.lifecycle.read_columns(table, rows)
    weights: list[torch.Tensor] = []
    state_chunks: list[list[torch.Tensor]] = [[] for _ in states]
    for begin in range(0, len(ids), group.chunk):
        chunk = slice(begin, begin + group.chunk)
        records = read_known_records(group, table, ids[chunk], rows[chunk], slots[chunk])
        weights.append(layout.weight(records).to(member.config.weight_dtype, copy=True))
        for index, chunks in enumerate(state_chunks):
            chunks.append(layout.state(records, index).clone())
    return EvictedRows(
        torch.from_numpy(ids),
        torch.cat(weights),
        {state.name: torch.cat(chunks) for state, chunks in zip(states, state_chunks, strict=True)},
        {name: torch.from_numpy(values) for name, values in columns.items()},
        torch.from_numpy(reasons),
    )


def read_known_records(group: Group, table: int, ids: Int64Array, rows: Int64Array, slots: np.ndarray) -> torch.Tensor:
    """Reads the records of ids that the table contains. Call `Swap.settle` first.

    Args:
        group: the group of the table.
        table: its index in the group.
        ids: int64 `[n]`.
        rows, slots: `[n]`, the result of the engine's `find_rows` for the ids.

    Returns:
        uint8 `[n, bytes]` on the host.
    """
    records = torch.empty((len(rows), group.layout.bytes), dtype=torch.uint8, device="cpu")
    group.engine.tables.read_rows(table, ids, rows, records.numpy())
    resident = np.flatnonzero(slots >= 0)
    if len(resident):
        records[torch.from_numpy(resident)] = group.gather(slots[resident])
    return records


# ---- eviction by the norm of weights


def row_norms(weight: torch.Tensor) -> npt.NDArray[np.float64]:
    """Returns the 2-norms of rows `[n, D]` on the host, float64 `[n]`, bit-identical on every machine.

    The squares are summed in the order of the columns. NumPy's square root is correctly rounded; torch's is not in all
    of its builds.
    """
    total = np.zeros(len(weight), np.float64)
    for column in weight.double().T.contiguous().numpy():
        total += column * column
    return np.sqrt(total)


def mark_small_rows(group: Group, tables: Sequence[int]) -> None:
    """Marks rows whose norm is below the bound of the tables' `Norm` rules, for the engine's next eviction.

    Norms are computed here because the engine does not read weights in the cache. Batches may be in flight, but no plan
    may be made between this call and the eviction.
    """
    if not tables:
        return
    group.swap.settle()
    for table in tables:
        config = group.members[table].config
        rule = config.lifecycle and config.lifecycle.rule(Norm)
        assert rule
        small = [np.empty(0, np.int64)]
        ids = group.engine.tables.rows(table)[0]
        for begin in range(0, len(ids), group.chunk):
            chunk = ids[begin : begin + group.chunk]
            rows, slots = group.engine.tables.find_rows(table, chunk)
            records = read_known_records(group, table, chunk, rows, slots)
            weight = group.layout.weight(records).to(config.weight_dtype)
            small.append(rows[row_norms(weight) < rule.least])
        group.engine.lifecycle.mark_small(table, np.concatenate(small))
