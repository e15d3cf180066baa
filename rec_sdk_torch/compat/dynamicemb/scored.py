"""The calls that scripts make on the tables of one module: scores, dumps, increments."""

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
    """Tables with scores. A subclass has them in `_scores`, by name, and says which ids are at home on this rank."""

    _scores: dict[str, TableScores]

    def _owned(self, name: str, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which ids of a table are at home here; without sharding every rank has those that `dist_type` says.

        Raises:
            NotImplementedError: `continuous` on several ranks, whose blocks a module does not know by itself.
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
        """Does nothing: reads and dumps see rows wherever they are."""

    def set_learning_rate(self, lr: float) -> None:
        """Sets the learning rate of the updates to come."""
        for scores in self._scores.values():
            optimizer = scores.view.layout.optimizer_of(scores.name)
            if optimizer is not None:
                optimizer.options["lr"] = lr

    def set_score(self, named_score: Mapping[str, int]) -> None:
        """Sets the scores of the batches to come, by table.

        Raises:
            ValueError: no whole number above 0, or a table whose scores are not CUSTOMIZED.
        """
        for name, score in named_score.items():
            self._scores[name].set(score)

    def get_score(self) -> dict[str, int]:
        """The score that the next batch has, by table; with TIMESTAMP, the time."""
        return {name: scores.now() for name, scores in self._scores.items()}

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
        """Writes the rows of this rank into a folder that exists, see `files.py`."""
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
        """Reads the rows that are at home here from what any number of ranks dumped.

        Raises:
            FileNotFoundError, ValueError: a dump that is not whole, or of another kind of table.
        """
        for scores in self._selected(table_names):
            owns = partial(self._owned, scores.name)
            load_table(scores, Path(save_dir), owns, optim=optim, counter=counter)

    def export_keys_values(
        self, table_name: str, device: torch.device, batch_size: int = 65536
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and weights of a table on this rank, int64 `[n]` and `[n, D]`."""
        view = self._scores[table_name].view
        ids = view.ids()
        return ids.to(device), view.read(ids, [WEIGHT]).parts[WEIGHT].to(device)

    def incremental_dump(
        self, named_thresholds: Mapping[str, int], pg: dist.ProcessGroup | None = None
    ) -> tuple[dict[str, tuple[torch.Tensor, torch.Tensor]], dict[str, int]]:
        """Rows whose scores are at least the given ones, ids int64 `[n]` and weights `[n, D]` on the host, by table.

        With `pg`, those of all its ranks. The second dict has the thresholds of the next increment.
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
            ids = ids[table.of(ids) >= threshold]
            rows[name] = _gathered((ids, table.view.read(ids, [WEIGHT]).parts[WEIGHT]), pg)
            scores[name] = table.now()
        return rows, scores


def _gathered(
    rows: tuple[torch.Tensor, torch.Tensor], pg: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if pg is None or not dist.is_initialized() or dist.get_world_size(pg) == 1:
        return rows
    every: list[Any] = [None] * dist.get_world_size(pg)
    dist.all_gather_object(every, rows, group=pg)
    ids, weights = zip(*every, strict=True)
    return torch.cat(ids), torch.cat(weights)
