"""Fills the device caches after a load, preferably with the rows that were cached when the save was made."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ...runtime.warn import PerformanceWarning, warn
from ...tbe import Int64Array, TableView
from ..format.manifest import CACHED
from ..format.validation import open_file
from ..owners import TableOwner
from .save_reader import TableMatch


def warm_tables(matches: Sequence[TableMatch]) -> None:
    """Fills the caches of loaded tables with the rows that the save lists as cached, else with the most used rows."""
    for match in matches:
        ids, heats = _hottest_ids(match)
        if len(ids):
            _warm(match.view, ids, heats)
        else:
            _warm_by_counts(match.view)


def warm_by_counts(owners: Sequence[TableOwner]) -> None:
    """Fills the caches with the rows of highest count or latest timestamp, for saves that do not list cached rows."""
    for owner in owners:
        for name in owner.configs:
            _warm_by_counts(owner.embedding.view(name))


def _hottest_ids(match: TableMatch) -> tuple[Int64Array, np.ndarray]:
    """Returns this rank's ids that any rank had cached, and their heats (decayed use counts), hottest first."""
    ids, heats, positions = [np.empty(0, np.int64)], [np.empty(0, np.float16)], [np.empty(0)]
    folder, manifest, table = match.table_chain.saves[-1]
    files = manifest.files_of(table.key, CACHED)
    for file in files:
        with open_file(folder, manifest, file) as reader:
            rank_ids, rank_heats = reader.array("ids"), reader.array("heats")
        owned = match.owned(rank_ids)
        if owned is None and len(files) == 1 and (rank_heats[1:] <= rank_heats[:-1]).all():
            return rank_ids, rank_heats  # the only file lists its ids hottest first already
        chosen = slice(None) if owned is None else owned
        ids.append(rank_ids[chosen])
        heats.append(rank_heats[chosen])
        # Ties of heat are broken by the relative position in the file, so that rows of several ranks are interleaved.
        positions.append(np.arange(file.rows)[chosen] / file.rows)
    heat = np.concatenate(heats)
    order = np.lexsort((np.concatenate(positions), -heat))
    return np.concatenate(ids)[order], heat[order]


def _warm_by_counts(view: TableView) -> None:
    """Fills the cache with the rows of highest score; a table without scores uses counts, last uses or timestamps."""
    if view.config.lifecycle is None:
        return
    lifecycle = view.config.lifecycle
    column = next((name for name in ("score", "count", "last_use", "timestamp") if name in lifecycle.columns()), None)
    ids = view.ids()
    if column is None or not len(ids):
        return
    columns = view.row_columns(ids)
    values = columns[column]
    if lifecycle.score and lifecycle.score.half_life:  # a stored score has not decayed since the row's last batch
        values = values * torch.exp2((columns["last_use"] - columns["last_use"].max()) / lifecycle.score.half_life)
    chosen = ids[values.argsort(descending=True, stable=True)].numpy()
    _warm(view, chosen, np.ones(len(chosen)))


def _warm(view: TableView, ids: Int64Array, heats: np.ndarray) -> None:
    """Fills the cache. An error only causes a warning, because the table itself is loaded correctly."""
    try:
        view.warm_hottest(ids, heats.astype(np.float32))
    except Exception as error:
        warn(
            f"table {view.config.name!r} is loaded, but its hot rows could not be copied to the cache: {error}",
            PerformanceWarning,
        )
