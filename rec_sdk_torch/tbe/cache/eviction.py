"""Ids that leave their tables, by rules or when asked: saves and `take_evicted` have their rows as they were."""

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
    """A training step has ended, and its pins: ids leave whose time has come.

    May be begun again after an interrupt, with the same journal.
    """
    if not group.has_lifecycles:
        return
    calls: list[Call] = [(group.engine.lifecycle.end_step, group.intervals)]
    begins = not journal.has((group, "end"))
    if begins and group.evicts_by_norm:
        mark_small_rows(group, group.engine.lifecycle.measured_tables(group.intervals))
    if begins and group.engine.lifecycle.evicts(group.intervals):
        group.swap.settle()
        for table in group.snapshots.keys() | group.evicted.keys():
            calls += _prepare_eviction(group, table, *group.engine.lifecycle.leaving_ids(table, group.intervals))
    # One call of C: the rows wait if and only if they have left.
    journal.run((group, "end"), list, starmap(operator.call, calls))


def evict(group: Group, table: int) -> int:
    """Takes out the ids that the rules of a table choose now; how many had rows. All must be settled."""
    lifecycle = group.members[table].config.lifecycle
    if lifecycle is not None and lifecycle.rule(Norm):
        mark_small_rows(group, [table])
    calls: list[Call] = [(group.engine.lifecycle.evict, table)]
    if table in group.snapshots or table in group.evicted:
        calls += _prepare_eviction(group, table, *group.engine.lifecycle.leaving_ids(table))
    return _run_calls(calls)


def remove(group: Group, table: int, ids: Int64Array) -> int:
    """Takes these ids out; how many of them were known. All must be settled.

    Raises:
        RuntimeError: a batch in flight uses one of them; nothing was removed.
    """
    calls: list[Call] = [(group.engine.tables.remove, table, ids)]
    group.before_change(table, ids)
    if table in group.evicted:
        known = np.unique(ids)
        known = known[group.engine.tables.find_rows(table, known)[0] >= 0]
        calls += _calls_to_keep_rows(group, table, known, np.full(len(known), EvictReason.REMOVED, np.uint8))
    return _run_calls(calls)


def _prepare_eviction(group: Group, table: int, ids: Int64Array, reasons: np.ndarray) -> list[Call]:
    """To be called before `ids` leave, for `reasons`, uint8 `[n]`: calls to be made when they have left."""
    group.before_change(table, ids)
    return _calls_to_keep_rows(group, table, ids, reasons) if table in group.evicted else []


def _calls_to_keep_rows(group: Group, table: int, ids: Int64Array, reasons: np.ndarray) -> list[Call]:
    """The call that lets the rows of `ids`, as they are now, wait to be taken."""
    if not len(ids):
        return []
    return [(group.evicted[table].chunks.append, EvictedChunk.now(_rows(group, table, ids, reasons)))]


def _run_calls(calls: list[Call]) -> int:
    """Makes all calls as one of C, or none that comes behind one that fails; what the first one returned."""
    results: list[int] = list(starmap(operator.call, calls))
    return results[0]


def _rows(group: Group, table: int, ids: Int64Array, reasons: np.ndarray) -> EvictedRows:
    member, layout = group.members[table], group.layout
    states = member.optimizer.spec.states if member.optimizer else ()
    rows, slots = group.engine.tables.find_rows(table, ids)
    columns = group.engine.lifecycle.read_columns(table, rows)
    weights: list[torch.Tensor] = []
    of_states: list[list[torch.Tensor]] = [[] for _ in states]
    for begin in range(0, len(ids), group.chunk):
        piece = slice(begin, begin + group.chunk)
        records = read_known(group, table, ids[piece], rows[piece], slots[piece])
        weights.append(layout.weight(records).to(member.config.weight_dtype, copy=True))
        for place, parts in enumerate(of_states):
            parts.append(layout.state(records, place).clone())
    return EvictedRows(
        torch.from_numpy(ids),
        torch.cat(weights),
        {state.name: torch.cat(parts) for state, parts in zip(states, of_states, strict=True)},
        {name: torch.from_numpy(values) for name, values in columns.items()},
        torch.from_numpy(reasons),
    )


def read_known(group: Group, table: int, ids: Int64Array, rows: Int64Array, slots: np.ndarray) -> torch.Tensor:
    """Records of `ids`, uint8 `[n, bytes]` on the host, whose rows and slots the engine gave. All must be settled."""
    records = torch.empty((len(rows), group.layout.bytes), dtype=torch.uint8, device="cpu")
    group.engine.tables.read_rows(table, ids, rows, records.numpy())
    resident = np.flatnonzero(slots >= 0)
    if len(resident):
        records[torch.from_numpy(resident)] = group.gather(slots[resident])
    return records


# ---- rows that leave as their weights are small


def row_norms(weight: torch.Tensor) -> npt.NDArray[np.float64]:
    """The 2-norms of rows `[n, D]` on the host, float64 `[n]`: elements in their order, the same bits everywhere.

    NumPy's square root is rounded correctly, which torch's is not in all of its builds.
    """
    total = np.zeros(len(weight), np.float64)
    for column in weight.double().T.contiguous().numpy():
        total += column * column
    return np.sqrt(total)


def mark_small_rows(group: Group, tables: Sequence[int]) -> None:
    """Tells the engine which rows of these tables leave with the next eviction, by the weights that they have now.

    The cache has newer weights than the host, the engine has neither. Batches may be in flight. No plan may be made
    until then.
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
            some = ids[begin : begin + group.chunk]
            rows, slots = group.engine.tables.find_rows(table, some)
            records = read_known(group, table, some, rows, slots)
            weight = group.layout.weight(records).to(config.weight_dtype)
            small.append(rows[row_norms(weight) < rule.least])
        group.engine.lifecycle.mark_small(table, np.concatenate(small))
