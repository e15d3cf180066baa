"""Scores of a table's rows: the score of the last batch that contained the row, or the row's number of lookups."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence

import numpy as np
import torch

from ...runtime.warn import InputWarning, SaveWarning, warn
from ...tbe import TableMethods, TableView
from .enums import (
    DynamicEmbEvictStrategy,
    DynamicEmbScoreStrategy,
    EvictStrategy,
    evicts_by,
    is_timed,
    warns_of_lower_scores,
)
from .options import DynamicEmbTableOptions

_LAST_SCORE = 2**63 - 1
_LAST_COUNT = 2**32 - 1
_EVICTS = {
    DynamicEmbScoreStrategy.TIMESTAMP: DynamicEmbEvictStrategy.LRU,
    DynamicEmbScoreStrategy.LFU: DynamicEmbEvictStrategy.LFU,
}
_FIRST = {DynamicEmbScoreStrategy.STEP: 1, DynamicEmbScoreStrategy.LFU: 1}


def device_timestamp() -> int:
    """Returns the current time in nanoseconds, the score that TIMESTAMP uses."""
    return time.time_ns()


def counts_of_dump(table: str, scores: torch.Tensor) -> torch.Tensor:
    """Returns the scores of a dump as lookup counts, int64 `[n]`, clamped to 2**32 - 1 with a warning.

    A negative score is a uint64 above 2**63 - 1 in the dump.
    """
    beyond = (scores < 0) | (scores > _LAST_COUNT)
    if beyond.any():
        warn(
            f"table {table!r}: {int(beyond.sum())} counts of the dump exceed 2**32 - 1, the maximum here, and "
            "are set to it",
            SaveWarning,
        )
    return scores.masked_fill(beyond, _LAST_COUNT)


class TableScores:
    """The scores of the rows of one table on one rank.

    The engine stores, for each row, the number of the last batch that contained it and the number of its lookups. This
    class stores the score of each batch, by batch number.

    Attributes:
        name: the table's name.
        current: the score of the next batch, unless scores are timestamps.
    """

    def __init__(self, tables: TableMethods, name: str, options: DynamicEmbTableOptions) -> None:
        assert options.score_strategy is not None
        self.name = name
        self.options = options
        self._tables = tables
        self._strategy = options.score_strategy
        self._kind = evicts_by(options.score_strategy)
        self._timed = is_timed(options.score_strategy)
        self._counts = self._kind is DynamicEmbScoreStrategy.LFU
        self._dated = self._timed or self._kind in (DynamicEmbScoreStrategy.STEP, DynamicEmbScoreStrategy.CUSTOMIZED)
        self._of_batches = array("q")
        self.current = _FIRST.get(self._kind, 0)
        options.evict_strategy = _EVICTS.get(self._kind, DynamicEmbEvictStrategy.CUSTOMIZED)

    @property
    def view(self) -> TableView:
        """The table's `TableView`."""
        return self._tables.view(self.name)

    @property
    def evict_strategy(self) -> EvictStrategy:
        """The eviction strategy, as dumps name it."""
        strategy: EvictStrategy = self.options.evict_strategy.value
        return strategy

    @property
    def is_age_in_dumps(self) -> bool:
        """Whether dumps contain the time since a row's last batch instead of its score."""
        return self._strategy is DynamicEmbScoreStrategy.TIMESTAMP

    def next_score(self) -> int:
        """Returns the score of the next batch: as a threshold, it selects the rows of batches from now on."""
        return device_timestamp() if self._timed else self.current

    def set_next_score(self, score: int) -> None:
        """Sets the score of later batches.

        Raises:
            ValueError: the score is not a positive integer, or the table's scores are not CUSTOMIZED.
        """
        if isinstance(score, bool) or not isinstance(score, int) or not 0 < score <= _LAST_SCORE:
            raise ValueError(f"table {self.name!r}: the score is {score!r}, expected an int from 1 to 2**63 - 1")
        if self._strategy is not DynamicEmbScoreStrategy.CUSTOMIZED:
            raise ValueError(
                f"table {self.name!r}: its score_strategy is {self._strategy!r}, set_score needs CUSTOMIZED"
            )
        if score < self.current and warns_of_lower_scores():
            warn(f"table {self.name!r}: the new score {score} is less than {self.current}", InputWarning)
        self.current = score

    def record_scores(self, ids: torch.Tensor) -> None:
        """Records the score of a training batch whose rows were just looked up.

        Args:
            ids: ids of the table that this rank owns, int64 `[n]`.
        """
        if self._dated:
            number = self.view.clocks()["batches"]
            del self._of_batches[number - 1 :]  # failed batches left these scores
            self._of_batches.append(self.next_score())
        if self._kind is DynamicEmbScoreStrategy.CUSTOMIZED:
            self._write_current_score(ids.unique())
        if self._kind is DynamicEmbScoreStrategy.STEP:
            self.current += 1

    def _write_current_score(self, ids: torch.Tensor) -> None:
        ids = ids[self.view.knows(ids)]
        scores = torch.full((len(ids),), float(self.current), dtype=torch.float64, device="cpu")
        self.view.write_row_columns(ids, {"score": scores})

    def increment_scores(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the scores that incremental dumps compare with the threshold, int64 `[n]`; ids must have rows."""
        return self._scores_by_strategy(ids)[DynamicEmbScoreStrategy.TIMESTAMP if self._timed else self._kind]

    def dump_scores(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the scores in the layout of a dump, int64 `[n, width]`."""
        columns = self._scores_by_strategy(ids)
        return torch.stack([columns[kind] for kind in self._strategies()], dim=1)

    def _strategies(self) -> Sequence[DynamicEmbScoreStrategy]:
        return self._strategy if isinstance(self._strategy, tuple) else (self._strategy,)

    @property
    def width(self) -> int:
        """Number of scores of a row in a dump."""
        return len(self._strategies())

    def _scores_by_strategy(self, ids: torch.Tensor) -> dict[DynamicEmbScoreStrategy, torch.Tensor]:
        """Returns the scores of `ids` for each strategy of the table, int64 `[n]`."""
        if not self._counts and not self._dated:
            return {self._kind: torch.zeros(len(ids), dtype=torch.int64, device="cpu")}
        kept = self.view.row_columns(ids)
        scores_by_strategy = {DynamicEmbScoreStrategy.LFU: kept["count"]} if self._counts else {}
        if self._dated:
            # Entry 0 is for rows that were in no batch; the last entry is for batches that are planned but not trained.
            scores = np.array([0, *self._of_batches, self.next_score()], np.int64)
            positions = np.minimum(kept["last_use"].numpy(), len(scores) - 1)
            kind = DynamicEmbScoreStrategy.TIMESTAMP if self._timed else self._kind
            scores_by_strategy[kind] = torch.from_numpy(scores[positions])
        return scores_by_strategy

    def restore(self, ids: torch.Tensor, scores: torch.Tensor) -> None:
        """Sets rows' scores from a dump, as if batches with those rows had followed the table's own batches.

        Args:
            ids: int64 `[n]`; each id must have a row.
            scores: scores as `dump_scores` returned them, int64 `[n, width]`.
        """
        columns = dict(zip(self._strategies(), scores.unbind(1), strict=True))
        written = {}
        if self._counts:
            written["count"] = counts_of_dump(self.name, columns[DynamicEmbScoreStrategy.LFU])
        if self._dated:
            (dates,) = (column for kind, column in columns.items() if kind is not DynamicEmbScoreStrategy.LFU)
            distinct, position = dates.unique(return_inverse=True)
            number = self.view.clocks()["batches"]
            del self._of_batches[number:]
            self._of_batches.extend([self.next_score()] * (number - len(self._of_batches)))
            self._of_batches.extend(distinct.tolist())
            self.view.set_clocks({"batches": len(self._of_batches)})
            written["last_use"] = position + number + 1
            if self._kind is DynamicEmbScoreStrategy.CUSTOMIZED:
                written["score"] = dates.double()
        if written and len(ids):
            self.view.write_row_columns(ids, written)
