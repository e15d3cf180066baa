"""Lifecycle of ids in hash tables: admission, eviction, and the per-id signals that their rules read."""

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
from ...runtime.former_names import accepts_former_members
from ...runtime.numbers import BOOL_FIELD, cast_in_range, check_fields, float_field, int_field
from ...runtime.warn import InputWarning, TrainingWarning, warn
from .former_fields import accepts_former_fields

NEVER = -(2**63)
"""The latest timestamp of a table that has not received any timestamp."""
_KINDS = {"admission": Admission, "eviction": Eviction, "bound": Bound, "score": Score}
"""The class of the rules in each field of `TableLifecycle`."""


@unique
class EvictReason(IntEnum):
    """The reason why a row was evicted: a rule, or `remove`. If several rules apply, it is the first one listed here.

    The numbers are part of the save format.

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


@accepts_former_members(of_engine="to_engine")
@accepts_former_fields
@dataclass(frozen=True, kw_only=True)
class TableLifecycle:
    """Admission and eviction of a hash table's ids, by rules of `rec_sdk_torch.rules`: docs/admission_eviction.md.

    Attributes:
        admission: the rule by which ids get a row: `Count`, `ShowClick`, `Sketch` or `Probability`. None: every id gets
            a row at once.
        eviction: the rules by which ids are evicted: `Age`, `Idle`, `Norm` or `Share`, or a list of these.
        every: number of training steps between evictions by these rules; 0: only `TableBatchedEmbedding.evict` evicts.
        bound: a bound of the table's size, `Rows` or `Bytes`, or a list of both; checked after each training step.
        score: the `Score` by which `Share` and bounds choose rows. None: `Score()` for `Share`; the number of lookups
            for a bound without `Share`.
        keep_evicted: whether evicted and removed rows are kept for `TableView.take_evicted`.
        default_value: the value that lookups of an id without a row return for each element.

    Raises:
        TypeError: a rule in the wrong field, two rules of one class, or a score that no rule uses.
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
            rules = _as_list(value) if several else [each for each in [value] if each is not None]
            if len({type(each) for each in rules if isinstance(each, kind)}) < len(rules):
                allowed = ", ".join(each.__name__ for each in kind.__subclasses__() or [kind])
                raise TypeError(f"TableLifecycle: {name} is {value!r}, expected {allowed}{', each once' * several}")
            if several:
                object.__setattr__(self, name, tuple(sorted(rules, key=repr)))
        if self.score is None and self.rule(Share):
            object.__setattr__(self, "score", Score())
        if self.score is not None and not (self.bound or self.rule(Share)):
            raise TypeError(f"TableLifecycle: no rule uses {self.score}: add rules.Share or a bound")

    @property
    def rules(self) -> list[Rule]:
        """All rules, and the score."""
        return [each for name in _KINDS for each in _as_list(getattr(self, name))]

    def rule(self, kind: type[Chosen]) -> Chosen | None:
        """Returns the rule of class `kind`; None if there is none."""
        return next((each for each in self.rules if isinstance(each, kind)), None)

    def any(self) -> bool:
        """Returns whether there is any rule, or evicted rows are kept."""
        return bool(self.rules) or self.keep_evicted

    @property
    def admits(self) -> bool:
        """Whether an admission rule decides which ids get a row."""
        return self.admission is not None

    @property
    def counts_candidates(self) -> bool:
        """Whether the admission rule counts ids that have no row yet."""
        return self.admission is not None and self.admission.counts

    @property
    def counts_shows(self) -> bool:
        """Whether a rule reads how many times a batch contains an id."""
        return self.counts_candidates or "count" in self.columns()

    @property
    def needs_clicks(self) -> bool:
        """Whether a training batch must have clicks."""
        return any(rule.needs_clicks() for rule in self.rules)

    def columns(self) -> list[str]:
        """Returns the names of the columns that the engine keeps for each row."""
        needed = {name for rule in self.rules for name in rule.columns()}
        return [name for name in COLUMNS if name in needed]

    def part(self, divide: Callable[[int], int]) -> TableLifecycle:
        """Returns the rules for one rank of a sharded table; `divide` computes the rank's share of a number."""
        eviction, bound = ([each.part(divide) for each in _as_list(several)] for several in (self.eviction, self.bound))
        return replace(self, admission=self.admission and self.admission.part(divide), eviction=eviction, bound=bound)

    def to_engine(self, record_bytes: int) -> _engine.Rules:
        """Converts the rules to the engine's form; if rules have the same engine name, the smaller numbers apply."""
        rules: dict[str, dict[str, float]] = {}
        for name, numbers in (rule.numbers(record_bytes) for rule in self.rules):
            former = rules.get(name, numbers)
            rules[name] = {each: min(number, former[each]) for each, number in numbers.items()}
        return _engine.Rules(rules=list(rules.items()))


def _as_list(value: object) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [] if value is None else [value]


def warn_of_timestamps(rejected: Sequence[tuple[str, int, int, int, int]]) -> None:
    """Warns of rejected timestamps: (table, number rejected, an id, its timestamp, the table's latest timestamp)."""
    for table, count, one, timestamp, latest in rejected:
        warn(
            f"table {table!r}: {count} timestamps are more than ten years after the latest of the table, {latest} (id "
            f"{one} came with {timestamp}): they count as {latest}. Timestamps are seconds. If "
            "these are correct, set the clock of the table with set_clocks: docs/admission_eviction.md",
            InputWarning,
        )


def warn_of_evictions(evictions: Sequence[tuple[str, int, int, int]]) -> None:
    """Warns of large evictions: (table, rows evicted, rows before the eviction, the table's latest timestamp)."""
    for table, evicted, rows, latest in evictions:
        clock = "" if latest == NEVER else f" The latest timestamp of the table is {latest}; set_clocks corrects it."
        warn(
            f"table {table!r}: {evicted} of its {rows} rows were evicted at once, by age, idleness or norm.{clock}",
            TrainingWarning,
        )


class IdSignals(NamedTuple):
    """Shows, clicks and timestamps of each lookup of a batch, for tables that admit or evict ids.

    Attributes:
        shows: integers `[n]`, the number of occurrences that each lookup stands for, at least 1; None: 1 for each.
        clicks: integers `[n]`, the clicks of each lookup; negative values count as 0. None if no table needs them.
        timestamps: integers `[n]`, in seconds; None if no table needs them.
        latest: int64 `[K]`, the latest timestamp of each key, if the batch is a part of a larger one. None: it is
            computed from `timestamps`.
    """

    shows: torch.Tensor | None = None
    clicks: torch.Tensor | None = None
    timestamps: torch.Tensor | None = None
    latest: torch.Tensor | None = None

    def arrays(self, lookups: int) -> IdSignalArrays:
        """Checks the signals, and returns them as NumPy arrays in host memory.

        Args:
            lookups: n, the number of lookups in the batch.

        Raises:
            TypeError: values that are not integers.
            ValueError: another shape than `[n]`, or a value out of range.
        """
        return IdSignalArrays(
            _array("shows", self.shows, np.int32, lookups, 1),
            _array("clicks", self.clicks, np.int32, lookups, None),
            _array("timestamps", self.timestamps, np.int64, lookups, NEVER + 1),
            None if self.latest is None else self.latest.numpy(),
        )


class IdSignalArrays(NamedTuple):
    """`IdSignals` as NumPy arrays in host memory."""

    shows: npt.NDArray[np.int32] | None = None
    clicks: npt.NDArray[np.int32] | None = None
    timestamps: npt.NDArray[np.int64] | None = None
    latest: npt.NDArray[np.int64] | None = None

    def same(self, other: IdSignalArrays) -> bool:
        """Returns whether all signals are equal."""
        pairs = zip(self, other, strict=True)
        return all(a is b or (a is not None and b is not None and np.array_equal(a, b)) for a, b in pairs)

    def part(self, lookups: npt.NDArray[np.int64], keys: npt.NDArray[np.int64]) -> IdSignalArrays:
        """Returns the signals of some lookups and keys, which are selected by index."""
        shows, clicks, timestamps, latest = self
        return IdSignalArrays(
            None if shows is None else shows[lookups],
            None if clicks is None else clicks[lookups],
            None if timestamps is None else timestamps[lookups],
            None if latest is None else latest[keys],
        )


NO_SIGNALS = IdSignalArrays()
"""The signals of a batch that has only ids."""


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
