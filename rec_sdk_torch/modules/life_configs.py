"""Rules of admission and eviction, as Rec SDK users write them."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, field
from enum import Enum, unique
from typing import Any

from ..tbe import TableLife
from ..tbe.config.numbers import as_float, as_int


@unique
class AdmitAndEvictPolicyType(Enum):
    """The rule that admission and eviction of ids go by.

    NONE: every id is admitted, none is evicted. POLICY_COUNT: by the number of times that an id was seen, and its age.
    POLICY_SHOWCLICK: by a score of shows and clicks.

    Example:
        >>> from rec_sdk_torch import AdmitAndEvictConfig, AdmitAndEvictPolicyType
        >>> AdmitAndEvictConfig(policy_type=AdmitAndEvictPolicyType.NONE).is_feature_filter_enabled()
        False
    """

    NONE = 0
    POLICY_COUNT = 1
    POLICY_SHOWCLICK = 2


def _check_int(owner: str, name: str, value: object, low: int) -> None:
    number = as_int(value)
    if number is None:
        raise TypeError(f"{owner}: {name} is {value!r}, expected an int")
    if not low <= number < 2**63:
        raise ValueError(f"{owner}: {name} is {number}, must be at least {low} and below 2^63")


def _check_float(owner: str, name: str, value: object, low: float = -math.inf, high: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{owner}: {name} is {value!r}, expected a number")
    number = as_float(value)
    if not low <= number <= high or math.isinf(number):  # also for NaN
        raise ValueError(f"{owner}: {name} is {value}, must be finite and in [{low}, {high}]")


@dataclass
class ShowClickParams:
    """Score of a feature: `alpha * show + beta * click`, decayed by `score_decay`; see docs/life.md.

    Attributes:
        alpha: factor of the times that an id was looked up.
        beta: factor of the times that it was clicked.
        admit_threshold: an id is admitted from this score on; 0: every id is.
        evict_percentage: the share of the rows, 0 to 1, with the lowest decayed scores that leaves; 0: none does.
        score_decay: factor of a row's score in each batch that has it, 0 to 1.

    Raises:
        TypeError: a field that is not a number.
        ValueError: a field that is not finite, a negative threshold, a share or decay outside [0, 1].

    Example:
        >>> from rec_sdk_torch import AdmitAndEvictConfig, AdmitAndEvictPolicyType, ShowClickParams
        >>> params = ShowClickParams(alpha=1, beta=10, evict_percentage=0.1)
        >>> AdmitAndEvictConfig(
        ...     showclick_params=params, policy_type=AdmitAndEvictPolicyType.POLICY_SHOWCLICK, evict_step_interval=1000
        ... ).is_feature_evict_enabled()
        True
    """

    alpha: float = 1
    beta: float = 0
    admit_threshold: float = 0
    evict_percentage: float = 0
    score_decay: float = 1

    def __post_init__(self) -> None:
        """Checks the fields."""
        owner = "ShowClickParams"
        _check_float(owner, "alpha", self.alpha)
        _check_float(owner, "beta", self.beta)
        _check_float(owner, "admit_threshold", self.admit_threshold, low=0)
        _check_float(owner, "evict_percentage", self.evict_percentage, low=0, high=1)
        _check_float(owner, "score_decay", self.score_decay, low=0, high=1)


@dataclass
class AdmitAndEvictConfig:
    """Admission and eviction of features, which the defaults leave off: every id is admitted, none is evicted.

    Attributes:
        admit_threshold: POLICY_COUNT admits an id that was seen this often; -1 (or None): off.
        not_admitted_default_value: what an id that is not admitted is looked up as. Without admission it means nothing.
        evict_threshold: POLICY_COUNT evicts an id that was not seen for more seconds; 0 (or None): off.
        evict_step_interval: steps between evictions. Without eviction it means nothing.
        showclick_params: of POLICY_SHOWCLICK, which reads neither threshold.
        policy_type: which of the rules, or NONE, which reads none of the others.
        evict_idle_steps: evicts an id that none of so many batches, the latest ones, had; 0: off.
        max_rows: ids beyond so many leave, those with the smallest count (POLICY_COUNT) or score; 0: off.
        max_bytes: the same for the bytes of the rows; 0: off.
        keep_evicted: rows that leave wait for `take_evicted` of the collection.
        admit_probability: POLICY_COUNT admits an id with this probability in each batch that has it, in place of
            `admit_threshold`, and counts nothing until then; None: off.
        evict_norm: evicts an id when the 2-norm of its row's weight is less; 0: off.
        score_half_life: scores of rows that leave are what batches add to them, of which half is left after so many
            batches; 0: counts (POLICY_COUNT) or scores as `showclick_params` says.
        sketch_bytes: ids without a row are counted in a sketch of so many bytes, which never counts too little; 0: each
            has a counter of its own.
        sketch_depth: cells of an id in the sketch, up to 16.
        sketch_halve_after: lookups in the sketch with which its cells are halved; 0: never.

    Raises:
        TypeError: a field of the wrong type.
        ValueError: `admit_threshold` below -1, another number that is negative, a `not_admitted_default_value` that is
            not finite; a rule beside NONE that it would not read, of those that Rec SDK does not have; a sketch
            without admission, or beside clicks that it would not count.

    Example:
        >>> from rec_sdk_torch import AdmitAndEvictConfig
        >>> rules = AdmitAndEvictConfig(admit_threshold=3, evict_threshold=86_400, evict_step_interval=1000)
        >>> rules.is_feature_admit_enabled(), rules.is_feature_evict_enabled()
        (True, True)
    """

    admit_threshold: int | None = -1
    not_admitted_default_value: float | None = 0.0
    evict_threshold: int | None = 0
    evict_step_interval: int | None = 0
    showclick_params: ShowClickParams = field(default_factory=ShowClickParams)
    policy_type: AdmitAndEvictPolicyType = AdmitAndEvictPolicyType.POLICY_COUNT
    evict_idle_steps: int | None = field(default=0, kw_only=True)
    max_rows: int | None = field(default=0, kw_only=True)
    max_bytes: int | None = field(default=0, kw_only=True)
    keep_evicted: bool = field(default=False, kw_only=True)
    admit_probability: float | None = field(default=None, kw_only=True)
    evict_norm: float | None = field(default=0.0, kw_only=True)
    score_half_life: int | None = field(default=0, kw_only=True)
    sketch_bytes: int | None = field(default=0, kw_only=True)
    sketch_depth: int = field(default=4, kw_only=True)
    sketch_halve_after: int | None = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        """Checks the fields."""
        owner = "AdmitAndEvictConfig"
        for name, low in (
            ("admit_threshold", -1),
            ("evict_threshold", 0),
            ("evict_step_interval", 0),
            ("evict_idle_steps", 0),
            ("max_rows", 0),
            ("max_bytes", 0),
            ("score_half_life", 0),
            ("sketch_bytes", 0),
            ("sketch_depth", 1),
            ("sketch_halve_after", 0),
        ):
            value = getattr(self, name)
            if value is not None:
                _check_int(owner, name, value, low)
        if not isinstance(self.keep_evicted, bool):
            raise TypeError(f"{owner}: keep_evicted is {self.keep_evicted!r}, expected a bool")
        if self.not_admitted_default_value is not None:
            _check_float(owner, "not_admitted_default_value", self.not_admitted_default_value)
        if self.evict_norm is not None:
            _check_float(owner, "evict_norm", self.evict_norm, low=0)
        if not isinstance(self.showclick_params, ShowClickParams):
            raise TypeError(f"{owner}: showclick_params is {self.showclick_params!r}, expected ShowClickParams")
        given: object = self.policy_type
        if isinstance(given, int) and not isinstance(given, bool):
            self.policy_type = AdmitAndEvictPolicyType(given)
        if not isinstance(self.policy_type, AdmitAndEvictPolicyType):
            raise TypeError(f"{owner}: policy_type is {self.policy_type!r}, expected AdmitAndEvictPolicyType")
        if self.policy_type is AdmitAndEvictPolicyType.NONE and self._bounds():
            raise ValueError(f"{owner}: policy_type is NONE, which evicts nothing, beside {self._bounds()}")
        self._check_probability()
        self._check_sketch()
        if self.score_half_life and not self.is_feature_filter_enabled():
            raise ValueError(
                f"{owner}: score_half_life is {self.score_half_life}, and no rule goes by scores: give max_rows, "
                "max_bytes or evict_percentage too"
            )
        self.table_life()  # which says what else cannot be

    def _check_probability(self) -> None:
        if self.admit_probability is None:
            return
        _check_float("AdmitAndEvictConfig", "admit_probability", self.admit_probability, low=0, high=1)
        if self.policy_type is not AdmitAndEvictPolicyType.POLICY_COUNT or not self.admit_probability:
            raise ValueError(
                f"AdmitAndEvictConfig: admit_probability is {self.admit_probability} with {self.policy_type}: it must "
                "be above 0, and is a way of POLICY_COUNT"
            )

    def _check_sketch(self) -> None:
        for name in ("sketch_halve_after", "sketch_depth"):
            value = getattr(self, name)
            if not self.sketch_bytes and value is not None and value != getattr(type(self), name):
                raise ValueError(f"AdmitAndEvictConfig: {name} is {value} without sketch_bytes: there is no sketch")
        if self.sketch_bytes and not self.is_feature_admit_enabled():
            raise ValueError(
                f"AdmitAndEvictConfig: sketch_bytes is {self.sketch_bytes}, and every id is admitted at once: give an "
                "admit_threshold too"
            )

    def _bounds(self) -> dict[str, float]:
        """The rules that hold beside either policy, where they are given."""
        names = ("evict_idle_steps", "max_rows", "max_bytes", "evict_norm")
        return {name: getattr(self, name) for name in names if getattr(self, name)}

    def is_feature_admit_enabled(self) -> bool:
        """Whether ids have to be admitted."""
        if self.policy_type is AdmitAndEvictPolicyType.NONE:
            return False
        if self.policy_type is AdmitAndEvictPolicyType.POLICY_SHOWCLICK:
            return self.showclick_params.admit_threshold > 0
        return self.admit_threshold not in (None, -1) or self.admit_probability is not None

    def is_feature_evict_enabled(self) -> bool:
        """Whether ids leave their table."""
        if self.policy_type is AdmitAndEvictPolicyType.NONE:
            return False
        if self._bounds():
            return True
        if self.policy_type is AdmitAndEvictPolicyType.POLICY_SHOWCLICK:
            return self.showclick_params.evict_percentage > 0
        return self.evict_threshold not in (None, 0)

    def is_feature_filter_enabled(self) -> bool:
        """Whether either is on."""
        return self.is_feature_admit_enabled() or self.is_feature_evict_enabled()

    def table_life(self) -> TableLife | None:
        """The rules as the table-batched embedding takes them; None where all are off."""
        if not self.is_feature_filter_enabled():
            return TableLife(keep_evicted=True) if self.keep_evicted else None
        common: dict[str, Any] = {
            "default_value": float(self.not_admitted_default_value or 0.0),
            "evict_step_interval": self.evict_step_interval or 0,
            "evict_idle_steps": self.evict_idle_steps or 0,
            "max_rows": self.max_rows or 0,
            "max_bytes": self.max_bytes or 0,
            "keep_evicted": self.keep_evicted,
            "evict_norm": float(self.evict_norm or 0.0),
            "score_half_life": self.score_half_life or 0,
            "sketch_bytes": self.sketch_bytes or 0,
            "sketch_depth": self.sketch_depth,
            "sketch_halve_after": self.sketch_halve_after or 0,
        }
        admits = self.is_feature_admit_enabled()
        if self.policy_type is AdmitAndEvictPolicyType.POLICY_COUNT:
            threshold = None if self.admit_threshold in (None, -1) else float(self.admit_threshold or 0)
            common |= {"admit_probability": self.admit_probability, "evict_age": self.evict_threshold or 0}
            return TableLife(admit_threshold=threshold, **common)
        params = self.showclick_params
        return TableLife(
            admit_threshold=float(params.admit_threshold) if admits else None,
            alpha=float(params.alpha),
            beta=float(params.beta),
            evict_share=float(params.evict_percentage),
            score_decay=float(params.score_decay),
            **common,
        )
