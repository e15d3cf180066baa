"""Notes the saves that an embedding's tables were last written to or read from: a delta follows one of them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...tbe import Group, TableBatchedEmbedding, forget_changes
from ..format.folders import SaveLocation
from ..format.manifest import TableFormats

MAX_BASE_SAVES = 4
"""Folders of saves that one embedding keeps a mark for; ids that were removed are remembered for the oldest."""


@dataclass(frozen=True, eq=False)
class BaseSave:
    """The moment of a save.

    Attributes:
        place: where the save is.
        formats: of the tables of the model that was saved; None where no delta can follow.
        versions: of each group, then.
        groups: of the embedding, then.
        evicted: by table, a serial after those of this rank's evicted rows in the save; a table is left out where the
            save may have them in another order.
    """

    location: SaveLocation
    formats: TableFormats | None
    versions: list[int]
    groups: list[weakref.ref[Group]]
    evicted: Mapping[str, int]

    def is_valid_for(self, embedding: TableBatchedEmbedding) -> bool:
        """Whether the versions are those of the groups that the embedding has now."""
        return [ref() for ref in self.groups] == embedding.groups


_base_saves: weakref.WeakKeyDictionary[TableBatchedEmbedding, dict[str, BaseSave]] = weakref.WeakKeyDictionary()
"""By the folder of saves, the latest save in each; the latest of all is the last one."""


def base_saves_of(embedding: TableBatchedEmbedding) -> list[BaseSave]:
    """The latest save in each folder, if a delta can follow it; the latest of all first."""
    return [save for save in reversed(_base_saves.get(embedding, {}).values()) if save.is_valid_for(embedding)]


def save_locations_of(embedding: TableBatchedEmbedding) -> list[SaveLocation]:
    """Where the latest save in each folder is, whether or not a delta can follow it."""
    return [save.location for save in _base_saves.get(embedding, {}).values()]


def set_base_save(
    embedding: TableBatchedEmbedding,
    location: SaveLocation,
    formats: TableFormats | None,
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
    saves = _base_saves.setdefault(embedding, {})
    saves.pop(location.folders[0], None)
    group_refs = [weakref.ref(group) for group in (embedding.groups if groups is None else groups)]
    saves[location.folders[0]] = BaseSave(location, formats, list(versions), group_refs, evicted or {})
    for other in [key for key, save in saves.items() if not save.is_valid_for(embedding)]:
        del saves[other]
    while len(saves) > MAX_BASE_SAVES:
        del saves[next(iter(saves))]
    followed = [each.versions for each in saves.values() if each.formats is not None]
    if followed:
        by_group = zip(*followed, strict=True)
        forget_changes(embedding.layout, [min(versions_of_group) for versions_of_group in by_group])


def drop_base_saves(embedding: TableBatchedEmbedding) -> None:
    """Forgets all marks: no delta can follow any save."""
    _base_saves.pop(embedding, None)
