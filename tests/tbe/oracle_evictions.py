"""Evictions in the oracle: takes evicted rows and puts some back, in the embedding and in the reference."""

from __future__ import annotations

from typing import Any

import torch
from oracle_scenarios import Scenario
from reference import EvictedRow, Reference

from rec_sdk_torch.tbe import EvictedRows, TableBatchedEmbedding, TableConfig

Result = dict[str, torch.Tensor]


def keeps_evicted(table: TableConfig) -> bool:
    return table.lifecycle is not None and table.lifecycle.keep_evicted


def take_evicted_rows(embedding: TableBatchedEmbedding, name: str, result: Result, when: object) -> EvictedRows:
    """Takes a table's evicted rows in two calls, and records them in `result`."""
    view = embedding.view(name)
    waiting = embedding.cache_stats(name)["evicted_waiting"]
    parts = [view.take_evicted(waiting // 2), view.take_evicted()]
    whole = [torch.cat(each) for each in zip(*(list(vars(part).values())[:2] for part in parts), strict=True)]
    states = {key: torch.cat([part.states[key] for part in parts]) for key in parts[0].states}
    columns = {key: torch.cat([part.columns[key] for part in parts]) for key in parts[0].columns}
    rows = EvictedRows(*whole, states, columns, torch.cat([part.reason for part in parts]))
    assert len(rows) == waiting
    named = {"ids": rows.ids, "weight": rows.weight, "reason": rows.reason, **states}
    named |= {f"column {key}": values for key, values in columns.items()}
    result.update({f"{name}.left{when} {key}": values for key, values in named.items()})
    return rows


def exercise_evictions(embedding: TableBatchedEmbedding, scenario: Scenario, index: int, result: Result) -> None:
    """Takes evicted rows, puts rows with even ids back, and removes ids; records the result of each call."""
    for place, table in enumerate(scenario.tables):
        view = embedding.view(table.name)
        if keeps_evicted(table):
            rows = take_evicted_rows(embedding, table.name, result, index)
            even, overwrite = rows[rows.ids % 2 == 0], scenario.overwrites(index)
            result[f"{table.name}.back{index}"] = torch.tensor(view.put_back(even, overwrite=overwrite))
        ids = torch.tensor(scenario.removed(place, index), dtype=torch.int64)
        try:
            removed = view.remove(ids)
            if table.hashed:  # an index table's count also depends on which rows are cached
                result[f"{table.name}.removed{index}"] = torch.tensor(removed)
        except RuntimeError as error:
            if "in flight" not in str(error) and "open accumulation window" not in str(error):
                raise
            result[f"{table.name}.removed{index}"] = torch.tensor(-1)


def exercise_reference_evictions(
    reference: Reference, scenario: Scenario, index: int, in_flight: list[Any], result: Result
) -> None:
    """Does with the reference what `exercise_evictions` does, and records the expected results."""
    for place, table in enumerate(scenario.tables):
        if keeps_evicted(table):
            rows, reference.evicted[place] = reference.evicted[place], []
            record_evicted(table.name, rows, result, index)
            even = [row for row in rows if row.id % 2 == 0]
            result[f"{table.name}.back{index}"] = torch.tensor(
                reference.put_back(place, even, scenario.overwrites(index))
            )
        removed = reference.remove(place, scenario.removed(place, index), in_flight)
        counted = -1 if removed is None else removed
        if table.hashed:
            result[f"{table.name}.removed{index}"] = torch.tensor(counted)


def record_evicted(name: str, rows: list[EvictedRow], result: Result, when: object) -> None:
    prefix = f"{name}.left{when} "
    result[f"{prefix}ids"] = torch.tensor([row.id for row in rows], dtype=torch.int64)
    result[f"{prefix}reason"] = torch.tensor([row.reason for row in rows], dtype=torch.uint8)
    if rows:
        result[f"{prefix}weight"] = torch.stack([row.weight for row in rows])
        result |= {f"{prefix}{key}": torch.stack([row.states[key] for row in rows]) for key in rows[0].states}
        for key in ("count", "last_use", "clicks", "timestamp", "score"):
            result[f"{prefix}column {key}"] = torch.tensor([float(getattr(row.counted, key)) for row in rows]).double()


def compare_evicted(name: str, result: Result, expected: Result) -> None:
    """Checks one recorded value against the reference; ids, reasons and counts must be equal, other values close."""
    if " column " in name and name not in result:
        return  # the table lacks this column, because no rule needs it
    value, right = result[name].double(), expected[name].double()
    assert value.shape == right.shape, f"{name}: {value.shape}, expected {right.shape}"
    exact = name.endswith((" ids", " reason")) or " " not in name
    torch.testing.assert_close(value, right, rtol=0 if exact else 1e-4, atol=0 if exact else 1e-4, msg=name)
    assert not exact or torch.equal(result[name].long(), expected[name].long()), name
