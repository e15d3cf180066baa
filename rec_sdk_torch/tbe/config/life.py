"""When an id of a hash table gets a row, and when it loses it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum, unique
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ... import _engine
from ...runtime.warn import InputWarning, TrainingWarning, warn
from .numbers import as_int, is_number

NEVER = -(2**63)
"""The timestamp of a table that has seen none."""
MOST_SKETCH_DEPTH = 16
"""More than these make a sketch slower, and its errors hardly rarer."""

DIVIDED_RULES = ("max_rows", "max_bytes", "sketch_bytes", "sketch_halve_after")
"""Each rank of a sharded table has its part of these."""


@unique
class EvictReason(IntEnum):
    """Why a row left its table: the rule that took it out, of several the first here, or `remove`.

    The numbers are those that saves have.

    Example:
        >>> from rec_sdk_torch import EvictReason
        >>> EvictReason(4).name
        'BOUND'
    """

    AGE = 1
    IDLE = 2
    NORM = 6
    SCORE = 3
    BOUND = 4
    REMOVED = 5


@dataclass(frozen=True)
class TableLife:
    """Admission and eviction of a hash table's ids; every rule is off by default. See docs/life.md.

    `score = alpha * shows + beta * clicks`: how often the id was looked up by training batches, and was clicked then,
    in its whole life in the table.

    Attributes:
        admit_threshold: an id gets a row in the batch with which its score reaches this; None admits every id.
        default_value: what every element of the row of an id without one is read as.
        alpha: factor of the shows in the score.
        beta: factor of the clicks.
        evict_share: of the rows, those with the lowest decayed scores leave, and at least one; 0 turns it off.
        score_half_life: a row's decayed score is what the batches that had it add, `alpha * shows + beta * clicks`
            each, of which half is left after so many batches of the table; 0: as `score_decay` says.
        score_decay: a row's decayed score is its score at first, then `(old + score) * score_decay` in each batch that
            has it.
        evict_age: an id leaves when the table's latest timestamp is more seconds after its own; 0 turns it off.
        evict_idle_steps: an id leaves that none of so many batches, the latest ones, had; 0 turns it off.
        admit_probability: or an id gets a row with this probability in each batch that has it, and nothing is counted
            until then; None: by its score.
        evict_norm: an id leaves when the 2-norm of its row's weight is less; 0 turns it off.
        evict_step_interval: training steps between evictions by these four rules; 0: only by
            `TableBatchedEmbedding.evict`.
        max_rows: at the end of a step with more rows, those with the least score, or count without `evict_share` and
            `score_half_life`, leave, down to 7/8 of it; the same for ids that are not admitted. 0 for no bound.
        max_bytes: the same for the bytes of the rows' records; the smaller of the two bounds counts.
        keep_evicted: rows that leave, by these rules or `TableView.remove`, wait for `TableView.take_evicted`.
        sketch_bytes: ids without a row are counted in a sketch of so many bytes, which never counts too little and so
            admits an id with the batch that reaches the threshold or before; 0: each id has a counter of its own.
        sketch_depth: cells of an id in the sketch.
        sketch_halve_after: lookups in the sketch with which all its cells are halved, at the end of a step; 0: never.

    Raises:
        ValueError: a field that is not finite, negative, or no whole number where one is needed.

    Example:
        >>> from rec_sdk_torch import TableConfig, TableLife
        >>> rules = TableLife(admit_threshold=3, evict_idle_steps=1000, evict_step_interval=100)
        >>> TableConfig("item", num_embeddings=100, embedding_dim=4, life=rules).life.admits
        True
    """

    admit_threshold: float | None = None
    default_value: float = 0.0
    alpha: float = 1.0
    beta: float = 0.0
    evict_share: float = 0.0
    score_decay: float = 1.0
    evict_age: int = 0
    evict_idle_steps: int = 0
    evict_step_interval: int = 0
    max_rows: int = 0
    max_bytes: int = 0
    keep_evicted: bool = False
    admit_probability: float | None = None
    evict_norm: float = 0.0
    score_half_life: int = 0
    sketch_bytes: int = 0
    sketch_depth: int = 4
    sketch_halve_after: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.keep_evicted, bool):
            raise TypeError(f"TableLife: keep_evicted is {self.keep_evicted!r}, expected a bool")
        numbers = ("default_value", "alpha", "beta", "evict_share", "score_decay", "evict_norm")
        for name in (*numbers, "admit_threshold", "admit_probability"):
            number = getattr(self, name)
            if not (is_number(number) or (number is None and name.startswith("admit_"))):
                raise ValueError(f"TableLife: {name} is {number!r}, must be a number")
        for name in numbers:
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"TableLife: {name} is {getattr(self, name)}, must be finite")
        self._check_probability()
        if self.evict_norm < 0:
            raise ValueError(f"TableLife: evict_norm is {self.evict_norm}, must be 0 or more")
        for name in ("evict_share", "score_decay"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"TableLife: {name} is {getattr(self, name)}, must be in [0, 1]")
        ages = ("evict_age", "evict_idle_steps", "evict_step_interval", "max_rows", "max_bytes")
        for name in (*ages, "score_half_life", "sketch_bytes", "sketch_halve_after"):
            whole = as_int(getattr(self, name))
            if whole is None or whole < 0:
                raise ValueError(f"TableLife: {name} is {getattr(self, name)!r}, must be an int, 0 or more")
            if whole >= 2**63:
                raise ValueError(f"TableLife: {name} is {whole}, must be below 2**63")
        self._check_sketch()
        self._check_half_life()

    def _check_probability(self) -> None:
        if self.admit_probability is None:
            return
        if not 0 < self.admit_probability <= 1:
            raise ValueError(f"TableLife: admit_probability is {self.admit_probability}, must be above 0 and at most 1")
        if self.admit_threshold is not None or self.sketch_bytes:
            raise ValueError(
                f"TableLife: admit_probability is {self.admit_probability} beside admit_threshold "
                f"{self.admit_threshold} and sketch_bytes {self.sketch_bytes}: ids are admitted by chance or by counts"
            )

    def _check_half_life(self) -> None:
        if not self.score_half_life:
            return
        if self.score_decay != 1:
            raise ValueError(
                f"TableLife: score_half_life is {self.score_half_life} beside score_decay {self.score_decay}: scores "
                "decay by one of them"
            )
        if not (self.evict_share or self.max_rows or self.max_bytes):
            raise ValueError(
                f"TableLife: score_half_life is {self.score_half_life}, and no rule goes by scores: give evict_share, "
                "max_rows or max_bytes too"
            )

    def _check_sketch(self) -> None:
        depth = as_int(self.sketch_depth)
        if depth is None or not 1 <= depth <= MOST_SKETCH_DEPTH:
            raise ValueError(
                f"TableLife: sketch_depth is {self.sketch_depth!r}, must be an int from 1 to {MOST_SKETCH_DEPTH}"
            )
        if not self.sketch_bytes:
            for name in ("sketch_halve_after", "sketch_depth"):
                if getattr(self, name) != getattr(type(self), name):
                    raise ValueError(
                        f"TableLife: {name} is {getattr(self, name)} without sketch_bytes: there is no sketch"
                    )
            return
        if not self.counts_candidates:
            raise ValueError(
                f"TableLife: sketch_bytes is {self.sketch_bytes} without an admit_threshold: there is nothing to count"
            )
        if self.alpha <= 0 or self.beta:
            raise ValueError(
                f"TableLife: a sketch counts lookups alone, so alpha has to be above 0 and beta 0, got {self.alpha} "
                f"and {self.beta}: correct these, or leave sketch_bytes 0"
            )

    @property
    def admits(self) -> bool:
        """Whether ids have to be admitted."""
        return self.counts_candidates or self.admit_probability is not None

    @property
    def counts_candidates(self) -> bool:
        """Whether something is counted of ids without a row."""
        return self.admit_threshold is not None

    def any(self) -> bool:
        """Whether some rule is on, or rows that leave are kept."""
        rules = self.evict_share, self.evict_age, self.evict_idle_steps, self.max_rows, self.max_bytes
        return self.admits or any(rules) or self.evict_norm > 0 or self.keep_evicted

    @property
    def sketches(self) -> bool:
        """Whether ids without a row are counted in a sketch."""
        return self.sketch_bytes > 0

    @property
    def counts_shows(self) -> bool:
        """Whether it matters how often a batch has an id."""
        return self.counts_candidates or "count" in self.columns()

    @property
    def needs_clicks(self) -> bool:
        """Whether a batch has to come with clicks."""
        return bool(self.beta and (self.counts_candidates or self.scores))

    @property
    def scores(self) -> bool:
        """Whether each row has a score."""
        return bool(self.evict_share or self.score_half_life)

    def columns(self) -> list[str]:
        """Columns that are kept for each row, by the engine's names."""
        bounded = bool(self.max_rows or self.max_bytes)
        kept = []
        if self.scores or bounded:  # a row's admission is over
            kept.append("count")
        if self.evict_idle_steps or self.score_half_life or bounded:
            kept.append("last_use")
        if self.scores:
            kept.append("score")
        if self.scores and self.needs_clicks:
            kept.append("clicks")
        if self.evict_age:
            kept.append("timestamp")
        return kept

    def of_engine(self, record_bytes: int) -> _engine.Life:
        """The rules as the engine takes them."""
        return _engine.Life(rules=list(self._rules(record_bytes)))

    def _rules(self, record_bytes: int) -> Iterator[tuple[str, dict[str, int | float]]]:
        """Generates the names and numbers of the rules, as the engine takes them."""
        if self.admit_probability is not None:
            yield "probability", {"probability": self.admit_probability}
        elif self.admit_threshold is not None and self.sketches:
            sketch = {"bytes": self.sketch_bytes, "depth": self.sketch_depth, "halve_after": self.sketch_halve_after}
            yield "sketch", {"threshold": self.admit_threshold, "alpha": self.alpha, **sketch}
        elif self.admit_threshold is not None:
            yield "showclick", {"threshold": self.admit_threshold, "alpha": self.alpha, "beta": self.beta}
        if self.scores:
            decay = {"half_life": self.score_half_life} if self.score_half_life else {"decay": self.score_decay}
            yield "score", {"alpha": self.alpha, "beta": self.beta, **decay}
        if self.evict_age:
            yield "age", {"seconds": self.evict_age}
        if self.evict_idle_steps:
            yield "idle", {"batches": self.evict_idle_steps}
        if self.evict_norm:
            yield "norm", {"least": self.evict_norm}
        if self.evict_share:
            yield "share", {"share": self.evict_share}
        bounds = [self.max_rows] if self.max_rows else []
        if self.max_bytes:
            bounds.append(max(1, self.max_bytes // record_bytes))
        if bounds:
            yield "rows", {"most": min(bounds)}


def warn_of_timestamps(found: Sequence[tuple[str, int, int, int, int]]) -> None:
    """`found`: table, how many, an id, its timestamp, the table's latest."""
    for table, count, one, timestamp, latest in found:
        warn(
            f"table {table!r}: {count} timestamps are more than ten years after the latest of the table, {latest} (id "
            f"{one} came with {timestamp}): they were set aside, and count as {latest}. Timestamps are seconds. Where "
            "these are right, set_clocks moves the clock of the table: docs/life.md",
            InputWarning,
        )


def warn_of_evictions(found: Sequence[tuple[str, int, int, int]]) -> None:
    """`found`: table, rows that left, of how many, the table's latest timestamp."""
    for table, evicted, rows, latest in found:
        clock = "" if latest == NEVER else f" The latest timestamp of the table is {latest}; set_clocks corrects it."
        warn(
            f"table {table!r}: {evicted} of its {rows} rows were evicted at once, by age, idleness or norm.{clock}",
            TrainingWarning,
        )


class Seen(NamedTuple):
    """Facts about each lookup of a batch beside its id, for tables that admit or evict ids.

    Attributes:
        shows: integers `[n]`, how often the id was seen, 1 or more; None: once.
        clicks: integers `[n]`, of which negative ones are none; None where no table needs them.
        timestamps: integers `[n]`, seconds; None where no table needs them.
        latest: int64 `[K]`, the latest timestamp of each key, where more than `timestamps` are known; None: of those.
    """

    shows: torch.Tensor | None = None
    clicks: torch.Tensor | None = None
    timestamps: torch.Tensor | None = None
    latest: torch.Tensor | None = None

    def arrays(self, lookups: int) -> SeenArrays:
        """In host memory.

        Raises:
            TypeError: something that is not integers.
            ValueError: another number of them than of ids, or one out of range.
        """
        return SeenArrays(
            _array("shows", self.shows, np.int32, lookups, 1),
            _array("clicks", self.clicks, np.int32, lookups, None),
            _array("timestamps", self.timestamps, np.int64, lookups, NEVER + 1),
            None if self.latest is None else self.latest.numpy(),
        )


class SeenArrays(NamedTuple):
    """`Seen` in host memory."""

    shows: npt.NDArray[np.int32] | None = None
    clicks: npt.NDArray[np.int32] | None = None
    timestamps: npt.NDArray[np.int64] | None = None
    latest: npt.NDArray[np.int64] | None = None

    def same(self, other: SeenArrays) -> bool:
        """Whether both say the same."""
        pairs = zip(self, other, strict=True)
        return all(a is b or (a is not None and b is not None and np.array_equal(a, b)) for a, b in pairs)

    def part(self, lookups: npt.NDArray[np.int64], keys: npt.NDArray[np.int64]) -> SeenArrays:
        """The facts about some lookups, by place; `keys`: about these keys, by place."""
        shows, clicks, timestamps, latest = self
        return SeenArrays(
            None if shows is None else shows[lookups],
            None if clicks is None else clicks[lookups],
            None if timestamps is None else timestamps[lookups],
            None if latest is None else latest[keys],
        )


NOTHING_SEEN = SeenArrays()
"""Ids alone."""


def _array(
    name: str, values: torch.Tensor | None, dtype: type[np.signedinteger[Any]], lookups: int, least: int | None
) -> npt.NDArray[Any] | None:
    if values is None:
        return None
    if values.dtype.is_floating_point or values.dtype.is_complex:
        raise TypeError(f"{name} are {values.dtype}, expected integers")
    if values.dim() != 1 or values.numel() != lookups:
        raise ValueError(f"{name} have shape {tuple(values.shape)}, expected one for each of {lookups} ids")
    return in_range(name, values.detach().cpu().contiguous().numpy(), dtype, least)


def in_range(
    name: str, values: npt.NDArray[Any], dtype: type[np.signedinteger[Any]], least: int | None
) -> npt.NDArray[Any]:
    """`values` as `dtype`; with `least` None, negative ones are -1.

    Raises:
        ValueError: one that is less, or more than `dtype` has.
    """
    most = int(np.iinfo(dtype).max)
    if values.size:
        lowest, highest = values.min().item(), values.max().item()
        wrong = highest if highest > most else lowest if least is not None and lowest < least else None
        if wrong is not None:
            allowed = f"{least}" if least is not None else "0, or a negative number for none,"
            raise ValueError(f"{name} has {wrong!r} among them, allowed are {allowed} to {most}")
        if least is None and lowest < -1:
            values = np.maximum(values, -1)
    return values.astype(dtype, copy=False)
