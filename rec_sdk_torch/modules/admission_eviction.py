"""Configs of the rules of admission and eviction, with Rec SDK's names."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Enum, unique

from ..rules.flat_options import rules_from_options
from ..rules.sketch import MOST_DEPTH
from ..runtime.numbers import BOOL_FIELD, check_fields, float_field, int_field
from ..tbe import TableLifecycle


@unique
class AdmitAndEvictPolicyType(Enum):
    """The kind of rule for admission and eviction of ids.

    NONE: every id is admitted, none is evicted. POLICY_COUNT: rules use the number of lookups of an id, and its age.
    POLICY_SHOWCLICK: rules use a score of shows and clicks.

    Example:
        >>> from rec_sdk_torch import AdmitAndEvictConfig, AdmitAndEvictPolicyType
        >>> AdmitAndEvictConfig(policy_type=AdmitAndEvictPolicyType.NONE).is_feature_filter_enabled()
        False
    """

    NONE = 0
    POLICY_COUNT = 1
    POLICY_SHOWCLICK = 2


@dataclass
class ShowClickParams:
    """Score of an id: `alpha * show + beta * click`, decayed by `score_decay`; see docs/admission_eviction.md.

    Attributes:
        alpha: factor of the number of lookups.
        beta: factor of the number of clicks.
        admit_threshold: an id is admitted when its score reaches this value; 0 admits every id.
        evict_percentage: fraction of the rows, 0 to 1, that each eviction removes: the rows with the lowest decayed
            scores. 0 evicts none.
        score_decay: factor, 0 to 1, by which a row's score is multiplied in each batch that contains the row.

    Raises:
        TypeError: a field is not a number.
        ValueError: a field is not finite, a threshold is negative, a fraction or decay is outside [0, 1].

    Example:
        >>> from rec_sdk_torch import AdmitAndEvictConfig, AdmitAndEvictPolicyType, ShowClickParams
        >>> params = ShowClickParams(alpha=1, beta=10, evict_percentage=0.1)
        >>> AdmitAndEvictConfig(
        ...     showclick_params=params, policy_type=AdmitAndEvictPolicyType.POLICY_SHOWCLICK, evict_step_interval=1000
        ... ).is_feature_evict_enabled()
        True
    """

    alpha: float = field(default=1, metadata=float_field())
    beta: float = field(default=0, metadata=float_field())
    admit_threshold: float = field(default=0, metadata=float_field(0))
    evict_percentage: float = field(default=0, metadata=float_field(0, 1))
    score_decay: float = field(default=1, metadata=float_field(0, 1))

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_fields(self)


@dataclass
class AdmitAndEvictConfig:
    """Admission and eviction of ids, both off by default: every id is admitted, none is evicted.

    Attributes:
        admit_threshold: POLICY_COUNT admits an id after this many lookups; -1 or None turns this rule off.
        not_admitted_default_value: value of every element that a lookup returns for an id that is not admitted. It has
            no effect without admission.
        evict_threshold: POLICY_COUNT evicts an id that was not looked up for more than this many seconds; 0 or None
            turns this rule off.
        evict_step_interval: training steps between evictions. It has no effect without eviction.
        showclick_params: parameters of POLICY_SHOWCLICK, which ignores both thresholds.
        policy_type: kind of rule; NONE allows no other rule.
        evict_idle_steps: an id that was in none of this many latest batches is evicted; 0 turns this rule off.
        max_rows: maximum number of rows; beyond it, ids with the smallest count (POLICY_COUNT) or score are evicted. 0
            means no limit.
        max_bytes: maximum size of the rows in bytes, with the same effect. 0 means no limit.
        keep_evicted: whether evicted rows are kept for the collection's `take_evicted`.
        admit_probability: used instead of `admit_threshold`: POLICY_COUNT admits an id with this probability in each
            batch that contains it, and counts no lookups before. None turns this rule off.
        evict_norm: an id is evicted if the 2-norm of its row's weights is below this value; 0 turns this rule off.
        score_half_life: number of batches after which a score has decayed to one half; eviction then removes the
            smallest scores. With 0, eviction uses counts (POLICY_COUNT) or scores with `score_decay`.
        sketch_bytes: size of a sketch that counts the lookups of ids without a row; it may overestimate a count, but
            never underestimates it. 0 uses one exact counter for each id instead.
        sketch_depth: number of the sketch's cells that each id increments, up to 16.
        sketch_halve_after: number of lookups after which the sketch's cells are halved; 0 never halves them.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: `admit_threshold` is below -1, another number is negative, `not_admitted_default_value` is not
            finite; NONE is combined with another rule; a sketch is used without admission, or with clicks, which it
            would not count.

    Example:
        >>> from rec_sdk_torch import AdmitAndEvictConfig
        >>> rules = AdmitAndEvictConfig(admit_threshold=3, evict_threshold=86_400, evict_step_interval=1000)
        >>> rules.is_feature_admit_enabled(), rules.is_feature_evict_enabled()
        (True, True)
    """

    admit_threshold: int | None = field(default=-1, metadata=int_field(-1))
    not_admitted_default_value: float | None = field(default=0.0, metadata=float_field())
    evict_threshold: int | None = field(default=0, metadata=int_field(0))
    evict_step_interval: int | None = field(default=0, metadata=int_field(0))
    showclick_params: ShowClickParams = field(default_factory=ShowClickParams)
    policy_type: AdmitAndEvictPolicyType = AdmitAndEvictPolicyType.POLICY_COUNT
    evict_idle_steps: int | None = field(default=0, kw_only=True, metadata=int_field(0))
    max_rows: int | None = field(default=0, kw_only=True, metadata=int_field(0))
    max_bytes: int | None = field(default=0, kw_only=True, metadata=int_field(0))
    keep_evicted: bool = field(default=False, kw_only=True, metadata=BOOL_FIELD)
    admit_probability: float | None = field(default=None, kw_only=True, metadata=float_field(above=0, most=1))
    evict_norm: float | None = field(default=0.0, kw_only=True, metadata=float_field(0))
    score_half_life: int | None = field(default=0, kw_only=True, metadata=int_field(0))
    sketch_bytes: int | None = field(default=0, kw_only=True, metadata=int_field(0))
    sketch_depth: int = field(default=4, kw_only=True, metadata=int_field(1, MOST_DEPTH))
    sketch_halve_after: int | None = field(default=0, kw_only=True, metadata=int_field(0))

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_fields(self, optional=True)
        if not isinstance(self.showclick_params, ShowClickParams):
            raise TypeError(
                f"AdmitAndEvictConfig: showclick_params is {self.showclick_params!r}, expected ShowClickParams"
            )
        value: object = self.policy_type
        if isinstance(value, int) and not isinstance(value, bool):
            self.policy_type = AdmitAndEvictPolicyType(value)
        if not isinstance(self.policy_type, AdmitAndEvictPolicyType):
            raise TypeError(
                f"AdmitAndEvictConfig: policy_type is {self.policy_type!r}, expected AdmitAndEvictPolicyType"
            )
        self.table_lifecycle()  # raises if the rules are incompatible

    def is_feature_admit_enabled(self) -> bool:
        """Returns whether an admission rule is on."""
        lifecycle = self.table_lifecycle()
        return lifecycle is not None and lifecycle.admits

    def is_feature_evict_enabled(self) -> bool:
        """Returns whether an eviction rule is on."""
        lifecycle = self.table_lifecycle()
        return lifecycle is not None and bool(lifecycle.eviction or lifecycle.bound)

    def is_feature_filter_enabled(self) -> bool:
        """Returns whether admission or eviction is on."""
        return self.is_feature_admit_enabled() or self.is_feature_evict_enabled()

    def table_lifecycle(self) -> TableLifecycle | None:
        """Returns the rules for a `TableConfig`; None if all are off."""
        kinds, params, owner = AdmitAndEvictPolicyType, self.showclick_params, type(self).__name__
        extensions = [
            each for each in fields(self) if each.kw_only and getattr(self, each.name) not in (None, each.default)
        ]
        options = {each.name: getattr(self, each.name) for each in extensions}
        if self.policy_type is kinds.NONE:
            if options.keys() - {"keep_evicted"}:
                raise ValueError(f"{owner}: policy_type is NONE, which has no rules, but the config has {options}")
            return TableLifecycle(keep_evicted=True) if self.keep_evicted else None
        if self.policy_type is kinds.POLICY_COUNT:
            options |= {"admit_threshold": self.admit_threshold, "evict_age": self.evict_threshold or 0}
            if self.admit_threshold == -1:
                options["admit_threshold"] = None
        elif self.admit_probability is not None:
            raise ValueError(
                f"{owner}: admit_probability is {self.admit_probability}, which only POLICY_COUNT supports"
            )
        else:
            options |= {
                "admit_threshold": params.admit_threshold or None,
                "alpha": params.alpha,
                "beta": params.beta,
                "evict_share": params.evict_percentage,
                "score_decay": params.score_decay,
            }
        options["evict_step_interval"] = self.evict_step_interval or 0
        lifecycle = TableLifecycle(
            **rules_from_options(owner, default_value=self.not_admitted_default_value or 0.0, **options)
        )
        return lifecycle if lifecycle.any() else None
