"""When an id of a hash table gets a row, and when it loses it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, unique
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ... import _engine
from ...rules import COLUMNS, Score, Share
from ...rules.rule import Admission, Bound, Eviction, Rule
from ...runtime.numbers import BOOL_FIELD, cast_in_range, check_fields, float_field, int_field
from ...runtime.warn import InputWarning, TrainingWarning, warn
from .former_fields import accepts_former_fields

NEVER = -(2**63)
"""The timestamp of a table that has seen none."""
_KINDS = {"admission": Admission, "eviction": Eviction, "bound": Bound, "score": Score}
"""The kind of the rules in each field of `TableLifecycle`."""


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


Chosen = TypeVar("Chosen", bound=Rule)


@accepts_former_fields
@dataclass(frozen=True, kw_only=True)
class TableLifecycle:
    """Admission and eviction of a hash table's ids, by rules of `rec_sdk_torch.rules`: docs/admission_eviction.md.

    Attributes:
        admission: the rule by which ids get a row: `Count`, `ShowClick`, `Sketch` or `Probability`. None: all get one.
        eviction: the rules by which ids lose it: `Age`, `Idle`, `Norm` or `Share`, or a list of these.
        every: training steps between evictions by them; 0: only by `TableBatchedEmbedding.evict`.
        bound: `Rows` or `Bytes`, or a list of both, of which the smaller counts; checked after each step.
        score: the `Score` by which `Share` and bounds choose rows. None: `Score()` for `Share`; for a bound alone the
            count of lookups.
        keep_evicted: rows that leave, by these rules or `TableView.remove`, are kept for `TableView.take_evicted`.
        default_value: every element of the row that a lookup of an id without one reads.

    Raises:
        TypeError: a rule in another field than its own, two of one class, a score without a rule that goes by it.
        ValueError: a number out of range.

    Example:
        >>> from rec_sdk_torch import TableConfig, TableLifecycle, rules
        >>> lifecycle = TableLifecycle(admission=rules.Count(3), eviction=[rules.Idle(1000)], every=100)
        >>> TableConfig("item", num_embeddings=100, embedding_dim=4, lifecycle=lifecycle).lifecycle.columns()
        ['last_use']
    """

    admission: Admission | None = None
    eviction: Eviction | Sequence[Eviction] = ()
    every: int = field(default=0, metadata=int_field(0))
    bound: Bound | Sequence[Bound] = ()
    score: Score | None = None
    keep_evicted: bool = field(default=False, metadata=BOOL_FIELD)
    default_value: float = field(default=0.0, metadata=float_field())

    def __post_init__(self) -> None:
        check_fields(self)
        for name, kind in _KINDS.items():
            value, several = getattr(self, name), kind in (Eviction, Bound)
            given = _as_list(value) if several else [each for each in [value] if each is not None]
            if len({type(each) for each in given if isinstance(each, kind)}) < len(given):
                allowed = ", ".join(each.__name__ for each in kind.__subclasses__() or [kind])
                raise TypeError(f"TableLifecycle: {name} is {value!r}, expected {allowed}{', each once' * several}")
            if several:
                object.__setattr__(self, name, tuple(sorted(given, key=repr)))
        if self.score is None and self.rule(Share):
            object.__setattr__(self, "score", Score())
        if self.score is not None and not (self.bound or self.rule(Share)):
            raise TypeError(f"TableLifecycle: no rule goes by {self.score}: give rules.Share or a bound too")

    @property
    def rules(self) -> list[Rule]:
        """All rules."""
        return [each for name in _KINDS for each in _as_list(getattr(self, name))]

    def rule(self, kind: type[Chosen]) -> Chosen | None:
        """Returns the rule of a class; None where there is none."""
        return next((each for each in self.rules if isinstance(each, kind)), None)

    def any(self) -> bool:
        """Whether some rule is on, or rows that leave are kept."""
        return bool(self.rules) or self.keep_evicted

    @property
    def admits(self) -> bool:
        """Whether ids have to be admitted."""
        return self.admission is not None

    @property
    def counts_candidates(self) -> bool:
        """Whether something is counted of ids without a row."""
        return self.admission is not None and self.admission.counts

    @property
    def counts_shows(self) -> bool:
        """Whether it matters how often a batch has an id."""
        return self.counts_candidates or "count" in self.columns()

    @property
    def needs_clicks(self) -> bool:
        """Whether a batch has to come with clicks."""
        return any(rule.needs_clicks() for rule in self.rules)

    def columns(self) -> list[str]:
        """Columns that are kept for each row, by the engine's names."""
        needed = {name for rule in self.rules for name in rule.columns()}
        return [name for name in COLUMNS if name in needed]

    def part(self, divide: Callable[[int], int]) -> TableLifecycle:
        """Returns the rules on one rank; `divide` returns the rank's part of a number."""
        eviction, bound = ([each.part(divide) for each in _as_list(several)] for several in (self.eviction, self.bound))
        return replace(self, admission=self.admission and self.admission.part(divide), eviction=eviction, bound=bound)

    def to_engine(self, record_bytes: int) -> _engine.Rules:
        """The rules as the engine takes them: of several with one name, as two bounds, the smaller number counts."""
        rules: dict[str, dict[str, float]] = {}
        for name, numbers in (rule.numbers(record_bytes) for rule in self.rules):
            former = rules.get(name, numbers)
            rules[name] = {each: min(number, former[each]) for each, number in numbers.items()}
        return _engine.Rules(rules=list(rules.items()))


def _as_list(value: object) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [] if value is None else [value]


def warn_of_timestamps(found: Sequence[tuple[str, int, int, int, int]]) -> None:
    """`found`: table, how many, an id, its timestamp, the table's latest."""
    for table, count, one, timestamp, latest in found:
        warn(
            f"table {table!r}: {count} timestamps are more than ten years after the latest of the table, {latest} (id "
            f"{one} came with {timestamp}): they were set aside, and count as {latest}. Timestamps are seconds. Where "
            "these are right, set_clocks moves the clock of the table: docs/admission_eviction.md",
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


class IdSignals(NamedTuple):
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

    def arrays(self, lookups: int) -> IdSignalArrays:
        """In host memory.

        Raises:
            TypeError: something that is not integers.
            ValueError: another number of them than of ids, or one out of range.
        """
        return IdSignalArrays(
            _array("shows", self.shows, np.int32, lookups, 1),
            _array("clicks", self.clicks, np.int32, lookups, None),
            _array("timestamps", self.timestamps, np.int64, lookups, NEVER + 1),
            None if self.latest is None else self.latest.numpy(),
        )


class IdSignalArrays(NamedTuple):
    """`IdSignals` in host memory."""

    shows: npt.NDArray[np.int32] | None = None
    clicks: npt.NDArray[np.int32] | None = None
    timestamps: npt.NDArray[np.int64] | None = None
    latest: npt.NDArray[np.int64] | None = None

    def same(self, other: IdSignalArrays) -> bool:
        """Whether both say the same."""
        pairs = zip(self, other, strict=True)
        return all(a is b or (a is not None and b is not None and np.array_equal(a, b)) for a, b in pairs)

    def part(self, lookups: npt.NDArray[np.int64], keys: npt.NDArray[np.int64]) -> IdSignalArrays:
        """The facts about some lookups, by place; `keys`: about these keys, by place."""
        shows, clicks, timestamps, latest = self
        return IdSignalArrays(
            None if shows is None else shows[lookups],
            None if clicks is None else clicks[lookups],
            None if timestamps is None else timestamps[lookups],
            None if latest is None else latest[keys],
        )


NO_SIGNALS = IdSignalArrays()
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
    return cast_in_range(name, values.detach().cpu().contiguous().numpy(), dtype, least)
