"""Methods that scripts call on the dynamic tables of one module: scores, dumps and incremental dumps."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from ...distributed.placement import RowWise
from ...runtime.warn import InputWarning, warn
from ...tbe import WEIGHT, Home
from .files import dump_table, load_table
from .scores import TableScores


class ScoredTables:
    """Base class of tables with scores.

    A subclass sets `_scores`, by table name, and may override `_owned`.
    """

    _scores: dict[str, TableScores]

    def _owned(self, name: str, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Returns which of `ids` this rank owns, bool `[n]`, by the table's `dist_type`.

        Raises:
            NotImplementedError: `dist_type` is `continuous` and there are several ranks. An unsharded module has no
                information about the blocks of ids that other ranks own.
        """
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        config = self._scores[name].view.config
        if config.home is Home.CONTINUOUS and world_size > 1:
            raise NotImplementedError(
                f"table {name!r}: dist_type is 'continuous', and a module alone does not know the blocks of "
                f"{world_size} ranks: shard a collection, or give it 'roundrobin' or 'hash_roundrobin'"
            )
        return RowWise(rank, world_size, config.home).owns(ids)

    @property
    def table_names(self) -> list[str]:
        """Names of the tables."""
        return list(self._scores)

    def flush(self) -> None:
        """Does nothing: reads and dumps include rows in the cache as well as rows in the host store."""

    def set_learning_rate(self, lr: float) -> None:
        """Sets the learning rate of later updates."""
        for scores in self._scores.values():
            optimizer = scores.view.layout.optimizer_of(scores.name)
            if optimizer is not None:
                optimizer.options["lr"] = lr

    def set_score(self, named_score: Mapping[str, int]) -> None:
        """Sets the score of later batches for each table in `named_score`.

        Raises:
            ValueError: a score is not a positive integer, or a table's scores are not CUSTOMIZED.
        """
        for name, score in named_score.items():
            self._scores[name].set_next_score(score)

    def get_score(self) -> dict[str, int]:
        """Returns the score of the next batch, by table name; with TIMESTAMP, the current time in nanoseconds."""
        return {name: scores.next_score() for name, scores in self._scores.items()}

    def _selected(self, names: Sequence[str] | None) -> Iterator[TableScores]:
        for name, scores in self._scores.items():
            if names is None or name in names:
                yield scores

    def dump(
        self,
        save_dir: str | os.PathLike[str],
        optim: bool = False,
        counter: bool = False,
        table_names: Sequence[str] | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> None:
        """Writes this rank's rows into an existing folder, in the format that `files.py` describes."""
        ranks = (dist.get_rank(pg), dist.get_world_size(pg)) if dist.is_initialized() else (0, 1)
        for scores in self._selected(table_names):
            dump_table(scores, Path(save_dir), *ranks, optim=optim, counter=counter)

    def load(
        self,
        save_dir: str | os.PathLike[str],
        optim: bool = False,
        counter: bool = False,
        table_names: Sequence[str] | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> None:
        """Loads the rows that this rank owns from a dump that any number of ranks wrote.

        Raises:
            FileNotFoundError, ValueError: the dump is incomplete, or its tables are of another kind.
        """
        for scores in self._selected(table_names):
            owns = partial(self._owned, scores.name)
            load_table(scores, Path(save_dir), owns, optim=optim, counter=counter)

    def export_keys_values(
        self, table_name: str, device: torch.device, batch_size: int = 65536
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the ids, int64 `[n]`, and weights, `[n, D]`, of this rank's rows of a table, on `device`."""
        view = self._scores[table_name].view
        ids = view.ids()
        return ids.to(device), view.read(ids, [WEIGHT]).parts[WEIGHT].to(device)

    def incremental_dump(
        self, named_thresholds: Mapping[str, int], pg: dist.ProcessGroup | None = None
    ) -> tuple[dict[str, tuple[torch.Tensor, torch.Tensor]], dict[str, int]]:
        """Returns rows whose scores are at least their table's threshold, and thresholds for the next incremental dump.

        The rows of a table are ids int64 `[n]` and weights `[n, D]` in host memory. With `pg`, the rows of all ranks
        of the group are gathered.
        """
        unknown = sorted(named_thresholds.keys() - self._scores.keys())
        if unknown:
            warn(f"there are no tables {unknown}, only {self.table_names}", InputWarning)
        rows, scores = {}, {}
        for name, threshold in named_thresholds.items():
            if name not in self._scores:
                continue
            table = self._scores[name]
            ids = table.view.ids()
            ids = ids[table.increment_scores(ids) >= threshold]
            rows[name] = _gather_rows((ids, table.view.read(ids, [WEIGHT]).parts[WEIGHT]), pg)
            scores[name] = table.next_score()
        return rows, scores


def _gather_rows(
    rows: tuple[torch.Tensor, torch.Tensor], pg: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if pg is None or not dist.is_initialized() or dist.get_world_size(pg) == 1:
        return rows
    gathered: list[Any] = [None] * dist.get_world_size(pg)
    dist.all_gather_object(gathered, rows, group=pg)
    ids, weights = zip(*gathered, strict=True)
    return torch.cat(ids), torch.cat(weights)
