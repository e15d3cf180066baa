"""Moves rows to groups with another record layout or on another device."""

from __future__ import annotations

from collections.abc import Sequence

from ...rules import Sketch
from ..cache.device_cache import Group
from .row_parts import part_view, read_records, write_parts


def move_rows(old: Sequence[Group], new: Sequence[Group]) -> None:
    """Copies all rows except unchanged initial ones to new groups: weights, and states if the layouts are equal."""
    targets = {member.config.name: (group, index) for group in new for index, member in enumerate(group.members)}
    for source in old:
        source.swap.settle()
        for table, member in enumerate(source.members):
            source.before_change(table)  # a running save copies all rows now: it cannot read the new group
            target, index = targets[member.config.name]
            same = source.layout == target.layout
            ids = source.engine.saves.ids_with_records(table)
            for begin in range(0, len(ids), source.chunk):
                chunk = ids[begin : begin + source.chunk]
                records = read_records(source, table, chunk)
                parts = range(-1, len(source.layout.state_elements) if same else 0)
                rows, _ = target.engine.tables.insert(index, chunk)
                target.engine.tables.reserve_rows(index, rows)
                write_parts(target, index, chunk, {part: part_view(source, part)(records) for part in parts})
            if member.config.lifecycle is not None:
                _move_lifecycle(source, table, target, index)


def _move_lifecycle(source: Group, table: int, target: Group, index: int) -> None:
    """Copies clocks, row columns, candidates and the sketch of a table."""
    old, new = source.engine, target.engine
    new.lifecycle.set_clock(index, *old.lifecycle.clock(table))
    ids, _, rows = old.tables.rows(table)
    columns = old.lifecycle.read_columns(table, rows)
    new.lifecycle.write_columns(index, new.tables.insert(index, ids)[0], columns)
    new.lifecycle.set_candidates(index, *old.lifecycle.candidates(table))
    lifecycle = source.members[table].config.lifecycle
    if lifecycle is not None and lifecycle.rule(Sketch):
        new.lifecycle.set_sketch(index, [old.lifecycle.sketch(table)])
