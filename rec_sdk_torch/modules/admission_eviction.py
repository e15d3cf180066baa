"""Rules of admission and eviction, as Rec SDK users write them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Enum, unique

from ..rules.flat_options import rules_from_options
from ..rules.sketch import MOST_DEPTH
from ..runtime.numbers import BOOL_FIELD, check_fields, float_field, int_field
from ..tbe import TableLifecycle


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


@dataclass
class ShowClickParams:
    """Score of a feature: `alpha * show + beta * click`, decayed by `score_decay`; see docs/admission_eviction.md.

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
        given: object = self.policy_type
        if isinstance(given, int) and not isinstance(given, bool):
            self.policy_type = AdmitAndEvictPolicyType(given)
        if not isinstance(self.policy_type, AdmitAndEvictPolicyType):
            raise TypeError(
                f"AdmitAndEvictConfig: policy_type is {self.policy_type!r}, expected AdmitAndEvictPolicyType"
            )
        self.table_lifecycle()  # which checks that the rules fit together

    def is_feature_admit_enabled(self) -> bool:
        """Whether ids have to be admitted."""
        lifecycle = self.table_lifecycle()
        return lifecycle is not None and lifecycle.admits

    def is_feature_evict_enabled(self) -> bool:
        """Whether ids leave their table."""
        lifecycle = self.table_lifecycle()
        return lifecycle is not None and bool(lifecycle.eviction or lifecycle.bound)

    def is_feature_filter_enabled(self) -> bool:
        """Whether either is on."""
        return self.is_feature_admit_enabled() or self.is_feature_evict_enabled()

    def table_lifecycle(self) -> TableLifecycle | None:
        """The rules as the table-batched embedding takes them; None where all are off."""
        kinds, params, owner = AdmitAndEvictPolicyType, self.showclick_params, type(self).__name__
        ours = [each for each in fields(self) if each.kw_only and getattr(self, each.name) not in (None, each.default)]
        options = {each.name: getattr(self, each.name) for each in ours}
        if self.policy_type is kinds.NONE:
            if options.keys() - {"keep_evicted"}:
                raise ValueError(f"{owner}: policy_type is NONE, which admits and evicts nothing, beside {options}")
            return TableLifecycle(keep_evicted=True) if self.keep_evicted else None
        if self.policy_type is kinds.POLICY_COUNT:
            options |= {"admit_threshold": self.admit_threshold, "evict_age": self.evict_threshold or 0}
            if self.admit_threshold == -1:
                options["admit_threshold"] = None
        elif self.admit_probability is not None:
            raise ValueError(f"{owner}: admit_probability is {self.admit_probability}, which is a way of POLICY_COUNT")
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
