"""Rows that move to groups of another layout or another device."""

from __future__ import annotations

from collections.abc import Sequence

from ...rules import Sketch
from ..cache.device_cache import Group
from .row_parts import part_view, read_records, write_parts


def move_rows(old: Sequence[Group], new: Sequence[Group]) -> None:
    """Copies rows that are not as they were initialised to groups of other layouts: weights, and states where alike."""
    places = {member.config.name: (group, place) for group in new for place, member in enumerate(group.members)}
    for source in old:
        source.swap.settle()
        for table, member in enumerate(source.members):
            source.before_change(table)  # its rows are taken from the new group from now on
            target, place = places[member.config.name]
            same = source.layout == target.layout
            ids = source.engine.saves.ids_with_records(table)
            for begin in range(0, len(ids), source.chunk):
                chosen = ids[begin : begin + source.chunk]
                records = read_records(source, table, chosen)
                parts = range(-1, len(source.layout.state_elements) if same else 0)
                rows, _ = target.engine.tables.insert(place, chosen)
                target.engine.tables.reserve_rows(place, rows)
                write_parts(target, place, chosen, {part: part_view(source, part)(records) for part in parts})
            if member.config.lifecycle is not None:
                _move_lifecycle(source, table, target, place)


def _move_lifecycle(source: Group, table: int, target: Group, place: int) -> None:
    """Copies what is counted of the ids of a table."""
    old, new = source.engine, target.engine
    new.lifecycle.set_clock(place, *old.lifecycle.clock(table))
    ids, _, rows = old.tables.rows(table)
    columns = old.lifecycle.read_columns(table, rows)
    new.lifecycle.write_columns(place, new.tables.insert(place, ids)[0], columns)
    new.lifecycle.set_candidates(place, *old.lifecycle.candidates(table))
    lifecycle = source.members[table].config.lifecycle
    if lifecycle is not None and lifecycle.rule(Sketch):
        new.lifecycle.set_sketch(place, [old.lifecycle.sketch(table)])
