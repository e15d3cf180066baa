"""Records to which saves each embedding was last written, and from which it was last loaded.

An incremental save (a delta) follows a recorded save, its base.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...tbe import Group, TableBatchedEmbedding, forget_changes
from ..format.folders import SaveLocation
from ..format.manifest import RowFormats

MAX_BASE_SAVES = 4
"""Maximum number of recorded saves per embedding. The log of removed ids reaches back to the oldest recorded save."""


@dataclass(frozen=True, eq=False)
class BaseSave:
    """A save that an embedding was written to or loaded from, and the versions of its tables at that time.

    Attributes:
        location: id, chain position and folder of the save.
        formats: formats of the saved model's tables; None if no delta may follow the save.
        versions: version of each group of tables at the time of the save.
        groups: groups of tables of the embedding at the time of the save.
        evicted: by table, a serial number greater than the serials of all evicted rows of this rank in the save. A
            table is missing if its evicted rows may have another order in the save.
    """

    location: SaveLocation
    formats: RowFormats | None
    versions: list[int]
    groups: list[weakref.ref[Group]]
    evicted: Mapping[str, int]

    def is_valid_for(self, embedding: TableBatchedEmbedding) -> bool:
        """Returns whether the embedding still has the groups that the versions belong to."""
        return [ref() for ref in self.groups] == embedding.groups


_base_saves: weakref.WeakKeyDictionary[TableBatchedEmbedding, dict[str, BaseSave]] = weakref.WeakKeyDictionary()
"""For each embedding, the latest save in each folder, by folder; the oldest save comes first."""


def base_saves_of(embedding: TableBatchedEmbedding) -> list[BaseSave]:
    """Returns the recorded saves (one per folder) that a delta can follow, the newest first."""
    return [save for save in reversed(_base_saves.get(embedding, {}).values()) if save.is_valid_for(embedding)]


def save_locations_of(embedding: TableBatchedEmbedding) -> list[SaveLocation]:
    """Returns the locations of all recorded saves (one per folder), also those that no delta can follow."""
    return [save.location for save in _base_saves.get(embedding, {}).values()]


def set_base_save(
    embedding: TableBatchedEmbedding,
    location: SaveLocation,
    formats: RowFormats | None,
    versions: Sequence[int],
    groups: Sequence[Group] | None = None,
    evicted: Mapping[str, int] | None = None,
) -> None:
    """Records that the tables of an embedding were saved or loaded at these versions.

    Logged removals of ids that no recorded save needs any longer are dropped.

    Args:
        embedding: the embedding.
        location: id, chain position and folder of the save.
        formats: formats of the tables; None if no delta may follow. The save is recorded in either case, because new
            saves must get later names than this one.
        versions: version of each group at the time of the save.
        groups: groups at the time of the save; None for the current ones.
        evicted: by table, a serial number greater than the serials of this rank's evicted rows in the save; without
            tables whose evicted rows are in another order in the save.
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
    """Drops all recorded saves, so that the next save is a full save."""
    _base_saves.pop(embedding, None)
