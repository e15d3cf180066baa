"""Notes the save that an embedding's tables were last written to or read from: a delta follows it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from ..tbe import TableBatchedEmbedding
from ..tbe.cache.device_cache import Group
from ..tbe.rows.pieces import forget_changes

MOST_PATHS = 4
"""Folders of saves that one embedding keeps a mark for; ids that were removed are remembered for the oldest."""


@dataclass(frozen=True, eq=False)
class Mark:
    """The moment of a save.

    Attributes:
        save, base, sequence: its id, that of its full save, and its number in the chain.
        versions: of each group, then.
        groups: of the embedding, then.
    """

    save: str
    base: str
    sequence: int
    versions: list[int]
    groups: list[weakref.ref[Group]]

    def holds(self, embedding: TableBatchedEmbedding) -> bool:
        """Whether the versions are those of the groups that the embedding has now."""
        return [ref() for ref in self.groups] == embedding.groups


_marks: weakref.WeakKeyDictionary[TableBatchedEmbedding, dict[str, Mark]] = weakref.WeakKeyDictionary()


def mark_of(embedding: TableBatchedEmbedding, path: str) -> Mark | None:
    """The mark of the latest save in the folder `path`, if a delta can follow it."""
    mark = _marks.get(embedding, {}).get(path)
    return mark if mark is not None and mark.holds(embedding) else None


def set_mark(
    embedding: TableBatchedEmbedding,
    path: str,
    save: str,
    base: str,
    sequence: int,
    versions: Sequence[int],
    groups: Sequence[Group] | None = None,
) -> None:
    """Notes that the tables were those of a save in the folder `path` when they had these versions.

    `groups`: of the embedding then; None: those of now.
    """
    marks = _marks.setdefault(embedding, {})
    marks.pop(path, None)
    of_then = [weakref.ref(group) for group in (embedding.groups if groups is None else groups)]
    marks[path] = Mark(save, base, sequence, list(versions), of_then)
    for other in [key for key, mark in marks.items() if not mark.holds(embedding)]:
        del marks[other]
    while len(marks) > MOST_PATHS:
        del marks[next(iter(marks))]
    if marks:
        of_groups = zip(*(each.versions for each in marks.values()), strict=True)
        forget_changes(embedding.layout, [min(of_group) for of_group in of_groups])


def drop_marks(embedding: TableBatchedEmbedding) -> None:
    """Forgets all marks: no delta can follow any save."""
    _marks.pop(embedding, None)
