"""Notes the saves that an embedding's tables were last written to or read from: a delta follows one of them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...tbe import Group, TableBatchedEmbedding, forget_changes
from ..format.folders import Place
from ..format.manifest import Formats

MOST_PATHS = 4
"""Folders of saves that one embedding keeps a mark for; ids that were removed are remembered for the oldest."""


@dataclass(frozen=True, eq=False)
class Mark:
    """The moment of a save.

    Attributes:
        place: where the save is.
        formats: of the tables of the model that was saved; None where no delta can follow.
        versions: of each group, then.
        groups: of the embedding, then.
        evicted: by table, a serial after those of this rank's evicted rows in the save; a table is left out where the
            save may have them in another order.
    """

    place: Place
    formats: Formats | None
    versions: list[int]
    groups: list[weakref.ref[Group]]
    evicted: Mapping[str, int]

    def holds(self, embedding: TableBatchedEmbedding) -> bool:
        """Whether the versions are those of the groups that the embedding has now."""
        return [ref() for ref in self.groups] == embedding.groups


_marks: weakref.WeakKeyDictionary[TableBatchedEmbedding, dict[str, Mark]] = weakref.WeakKeyDictionary()
"""By the folder of saves, the latest save in each; the latest of all is the last one."""


def marks_of(embedding: TableBatchedEmbedding) -> list[Mark]:
    """The latest save in each folder, if a delta can follow it; the latest of all first."""
    return [mark for mark in reversed(_marks.get(embedding, {}).values()) if mark.holds(embedding)]


def places_of(embedding: TableBatchedEmbedding) -> list[Place]:
    """Where the latest save in each folder is, whether or not a delta can follow it."""
    return [mark.place for mark in _marks.get(embedding, {}).values()]


def set_mark(
    embedding: TableBatchedEmbedding,
    place: Place,
    formats: Formats | None,
    versions: Sequence[int],
    groups: Sequence[Group] | None = None,
    evicted: Mapping[str, int] | None = None,
) -> None:
    """Notes that the tables were those of a save when they had these versions.

    Args:
        formats: of the tables; None where no delta can follow the save, after which later saves are named all the same.
        groups: of the embedding then; None: those of now.
        evicted: by table, a serial of then, where the save has this rank's evicted rows as they were.
    """
    marks = _marks.setdefault(embedding, {})
    marks.pop(place.folders[0], None)
    of_then = [weakref.ref(group) for group in (embedding.groups if groups is None else groups)]
    marks[place.folders[0]] = Mark(place, formats, list(versions), of_then, evicted or {})
    for other in [key for key, mark in marks.items() if not mark.holds(embedding)]:
        del marks[other]
    while len(marks) > MOST_PATHS:
        del marks[next(iter(marks))]
    followed = [each.versions for each in marks.values() if each.formats is not None]
    if followed:
        of_groups = zip(*followed, strict=True)
        forget_changes(embedding.layout, [min(of_group) for of_group in of_groups])


def drop_marks(embedding: TableBatchedEmbedding) -> None:
    """Forgets all marks: no delta can follow any save."""
    _marks.pop(embedding, None)
