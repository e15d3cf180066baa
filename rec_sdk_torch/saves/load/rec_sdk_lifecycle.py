"""Reads counts and timestamps of ids, for admission and eviction, from checkpoints of Rec SDK.

`admit_count/slice.data`, int64 `[n]`, has the count of each id in `key/slice.data`; -1 means no count.
`evict_timestamp/` has its own list of ids, all that a rank looked up: `slice_evict_key.data` has the ids and
`slice_evict_ts.data` their timestamps, int64, with one `slice.attribute` for both. Several ranks may list the same id.
For a rank with a single id, Rec SDK writes neither counts nor timestamps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ...runtime.warn import SaveWarning, warn
from ...tbe import NEVER, TableView
from ..format import files
from ..format.errors import CheckpointError
from ..owners import TableOwner

_COUNTS, _STAMPS = "admit_count", "evict_timestamp"
_DATA, _STAMP_IDS, _STAMP_TIMES = "slice.data", "slice_evict_key.data", "slice_evict_ts.data"
_MAX_COUNT = 2**32 - 1
"""Largest count that a row can store."""


@dataclass(frozen=True, eq=False)
class SavedLifecycle:
    """Saved counts and timestamps of the ids of a table that this rank owns.

    Attributes:
        counts: the ids that have a count, and their counts.
        stamps: distinct ids, and the latest timestamp of each.
        latest: latest timestamp of all ids on all ranks.
    """

    counts: tuple[np.ndarray, np.ndarray]
    stamps: tuple[np.ndarray, np.ndarray]
    latest: int

    def apply_to(self, view: TableView) -> None:
        """Writes counts and timestamps to the table's rows; later timestamps and clocks of the table stay unchanged."""
        ids, counts = _select_known(view, *self.counts)
        if len(ids):
            view.write_row_columns(ids, {"count": counts})
        ids, stamps = _select_known(view, *self.stamps)
        if len(ids):
            before = view.row_columns(ids)["timestamp"]
            view.write_row_columns(ids, {"timestamp": torch.maximum(before, stamps)})
        view.set_clocks({"timestamp": max(self.latest, view.clocks()["timestamp"])})


def _select_known(view: TableView, ids: np.ndarray, values: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    wanted = torch.from_numpy(ids)
    known = view.knows(wanted)
    return wanted[known], torch.from_numpy(values)[known]


def read_lifecycle(
    owner: TableOwner, name: str, save: Path, ranks: Sequence[tuple[Path, np.ndarray]]
) -> SavedLifecycle | None:
    """Reads the counts and timestamps that the rules of a table need; returns None if they need none.

    Args:
        owner: module that holds the table.
        name: name of the table.
        save: folder of the save.
        ranks: for each rank that wrote the save, the folder of the table's parts and the ids in it.

    Raises:
        CheckpointError: a file is damaged.
    """
    lifecycle = owner.embedding.view(name).config.lifecycle
    columns = lifecycle.columns() if lifecycle else []
    if "count" not in columns and "timestamp" not in columns:
        return None
    empty = np.empty(0, np.int64)
    counts, stamps = [(empty, empty)], [(empty, empty)]
    for folder, ids in ranks:
        if "count" in columns:
            counts.append(_read_counts(save, folder / _COUNTS, np.array(ids)))
        if "timestamp" in columns:
            stamps.append(_read_stamps(save, folder / _STAMPS))
    times = np.concatenate([each for _, each in stamps])
    latest = int(times.max()) if len(times) else NEVER
    return SavedLifecycle(
        _select_owned(owner, name, counts), _latest_stamps(*_select_owned(owner, name, stamps)), latest
    )


def _select_owned(
    owner: TableOwner, name: str, pairs: Sequence[tuple[np.ndarray, np.ndarray]]
) -> tuple[np.ndarray, np.ndarray]:
    ids, values = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
    owned = owner.owned(name, ids)
    return ids[owned], values[owned]


def _latest_stamps(ids: np.ndarray, stamps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Removes duplicate ids and keeps the latest timestamp of each id."""
    order = np.lexsort((stamps, ids))
    ids, stamps = ids[order], stamps[order]
    last = np.append(ids[1:] != ids[:-1], True)[: len(ids)]
    return ids[last], stamps[last]


def _read_counts(save: Path, folder: Path, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    counts = _read_int64(save, folder / _DATA)
    if len(counts) > len(ids):
        raise CheckpointError(f"{folder / _DATA}: has {len(counts)} counts for {len(ids)} ids")
    if len(counts) < len(ids):
        warn(
            f"{folder}: has counts of {len(counts)} of {len(ids)} ids, but does not name the ids: "
            "all counts start at 0",
            SaveWarning,
        )
        return ids[:0], counts[:0]
    has_count = counts != -1
    return ids[has_count], np.minimum(counts[has_count].view(np.uint64), _MAX_COUNT).astype(np.int64)


def _read_stamps(save: Path, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    ids, stamps = (_read_int64(save, folder / name) for name in (_STAMP_IDS, _STAMP_TIMES))
    if len(ids) != len(stamps):
        raise CheckpointError(f"{folder}: damaged, it has {len(ids)} ids and {len(stamps)} timestamps")
    return ids, stamps


def _read_int64(save: Path, path: Path) -> np.ndarray:
    """Reads a file of int64 numbers; returns an empty array if the file does not exist."""
    try:
        raw = files.read_regular_file(path, save) if files.is_regular_file(path) else b""
    except OSError as error:
        raise CheckpointError(f"{error.filename}: cannot be read: {error.strerror}") from error
    if len(raw) % 8:
        raise CheckpointError(f"{path}: damaged, it has {len(raw)} bytes, not a multiple of 8")
    return np.frombuffer(raw, np.int64).copy()
