"""Configurations of tables, as TorchRec and Rec SDK users write them."""

from __future__ import annotations

import functools
import math
import numbers
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum, unique
from typing import Any

import torch
from torchrec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    data_type_to_dtype,
)

from ..tbe import InitializerType, Pooling, TableConfig, TableLife
from ..tbe.config.numbers import as_int
from ..tbe.config.table import InitFn
from .conventions import conventions, hashes_plain

# `@` joins a shared feature's name with its table's.
_FEATURE_NAME = re.compile(r"[^\s@]+")


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
    if number < low:
        raise ValueError(f"{owner}: {name} is {number}, must be at least {low}")


def _check_float(owner: str, name: str, value: object, low: float = -math.inf, high: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{owner}: {name} is {value!r}, expected a number")
    if not low <= float(value) <= high or math.isinf(value):  # also for NaN
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


@dataclass
class _HashTableFields:
    """The fields that a hash table's config has beyond TorchRec's."""

    weight_init_mean: float = 0.0
    weight_init_stddev: float = 0.05
    initializer_type: InitializerType = InitializerType.LINEAR
    admit_and_evict_config: AdmitAndEvictConfig | None = field(default_factory=AdmitAndEvictConfig)
    is_incremental: bool = False

    def __post_init__(self) -> None:
        """Leaves `init_fn` as given: TorchRec's fills it in, and a user's choice could not be told apart."""


@dataclass
class EmbCacheEmbeddingConfig(_HashTableFields, EmbeddingConfig):
    """A hash table of sequences: its ids are any int64, its rows are in host memory, hot ones in the device cache.

    Attributes:
        num_embeddings: how many ids to expect, from 1 on. It sizes cache and planner, sets the default range of initial
            weights, and is no limit.
        embedding_dim: D, columns of a row, 1 to 4096.
        name: of the table: letters, digits and underscores, 1 to 100 of them, unique in its collection.
        feature_names: keys of the batch that look the table up.
        data_type: of the weights: `DataType.FP32`, `FP16` or `BF16`.
        weight_init_min: least initial weight. None: -sqrt(1 / num_embeddings); of a TRUNCATED_NORMAL two standard
            deviations below the mean.
        weight_init_max: the greatest, likewise.
        weight_init_mean: mean of a TRUNCATED_NORMAL.
        weight_init_stddev: its standard deviation.
        initializer_type: LINEAR, UNIFORM or TRUNCATED_NORMAL, see `InitializerType`.
        init_fn: fills blocks of new rows `[n, D]` in place instead. Initial weights then depend on the order in which
            ids arrive.
        admit_and_evict_config: which ids get a row, and when they lose it; None or the default: all do, and keep it.
        is_incremental: rows know when they changed last, which `Saver.save(incremental=True)` needs; 8 to 10 bytes
            for each row.

    Other fields of TorchRec's config have to keep their defaults.

    Raises:
        ValueError, TypeError: by the collection that takes the config, where a field is out of range or of another
            type; the message names table and field.

    Example:
        >>> from rec_sdk_torch import EmbCacheEmbeddingConfig
        >>> config = EmbCacheEmbeddingConfig(name="t", num_embeddings=100, embedding_dim=4, feature_names=["item"])
        >>> config.is_incremental
        False
    """


@dataclass
class EmbCacheEmbeddingBagConfig(_HashTableFields, EmbeddingBagConfig):
    """A hash table of bags: its ids are any int64, its rows are in host memory, hot ones in the device cache.

    Attributes:
        num_embeddings: how many ids to expect, from 1 on. It sizes cache and planner, sets the default range of initial
            weights, and is no limit.
        embedding_dim: D, columns of a row, 1 to 4096.
        name: of the table: letters, digits and underscores, 1 to 100 of them, unique in its collection.
        feature_names: keys of the batch that look the table up.
        data_type: of the weights: `DataType.FP32`, `FP16` or `BF16`.
        pooling: what a bag becomes: `PoolingType.SUM` or `MEAN`.
        weight_init_min: least initial weight. None: -sqrt(1 / num_embeddings); of a TRUNCATED_NORMAL two standard
            deviations below the mean.
        weight_init_max: the greatest, likewise.
        weight_init_mean: mean of a TRUNCATED_NORMAL.
        weight_init_stddev: its standard deviation.
        initializer_type: LINEAR, UNIFORM or TRUNCATED_NORMAL, see `InitializerType`.
        init_fn: fills blocks of new rows `[n, D]` in place instead. Initial weights then depend on the order in which
            ids arrive.
        admit_and_evict_config: which ids get a row, and when they lose it; None or the default: all do, and keep it.
        is_incremental: rows know when they changed last, which `Saver.save(incremental=True)` needs; 8 to 10 bytes
            for each row.

    Other fields of TorchRec's config have to keep their defaults.

    Raises:
        ValueError, TypeError: by the collection that takes the config, where a field is out of range or of another
            type; the message names table and field.

    Example:
        >>> from torchrec import DataType, PoolingType
        >>> from rec_sdk_torch import EmbCacheEmbeddingBagConfig
        >>> config = EmbCacheEmbeddingBagConfig(
        ...     name="t",
        ...     num_embeddings=100,
        ...     embedding_dim=4,
        ...     feature_names=["item"],
        ...     pooling=PoolingType.MEAN,
        ...     data_type=DataType.BF16,
        ... )
    """


@dataclass
class HashEmbeddingBagConfig(_HashTableFields, EmbeddingBagConfig):
    """A hash table of bags that is wholly in device memory, of a `HashEmbeddingBagCollection`.

    Its fields are those of `EmbCacheEmbeddingBagConfig`, but for this one:

    Attributes:
        num_embeddings: the capacity: one id more is a `CapacityError`.

    Example:
        >>> from rec_sdk_torch import HashEmbeddingBagConfig
        >>> config = HashEmbeddingBagConfig(name="t", num_embeddings=100, embedding_dim=4, feature_names=["item"])
    """

    initializer_type: InitializerType = field(default_factory=lambda: conventions.hash_initializer)


_POOLING = {PoolingType.SUM: Pooling.SUM, PoolingType.MEAN: Pooling.MEAN}


def _is_torchrec_default(config: BaseEmbeddingConfig) -> bool:
    """Whether `init_fn` is what TorchRec's `__post_init__` fills in, which is UNIFORM under another name."""
    fn = config.init_fn
    return (
        isinstance(fn, functools.partial)
        and fn.func is torch.nn.init.uniform_
        and not fn.args
        and fn.keywords == {"a": config.get_weight_init_min(), "b": config.get_weight_init_max()}
    )


def _init_fn(config: BaseEmbeddingConfig) -> InitFn | None:
    return None if config.init_fn is None or _is_torchrec_default(config) else config.init_fn


def _init_range(config: BaseEmbeddingConfig, *, cached: bool) -> tuple[float | None, float | None]:
    low, high = conventions.cached_range if cached and conventions.cached_range else (None, None)
    given_low, given_high = config.weight_init_min, config.weight_init_max
    return low if given_low is None else given_low, high if given_high is None else given_high


def feature_names(config: BaseEmbeddingConfig) -> list[str]:
    """The features of a table: those named, else one of the table's own name, as in TorchRec.

    Raises:
        TypeError: no list of names, such as a single string.
        ValueError: a name that is empty or has spaces or `@`, or one that is there twice.
    """
    if isinstance(config.feature_names, str) or not isinstance(config.feature_names, Iterable):
        raise TypeError(
            f"table {config.name!r}: feature_names is {config.feature_names!r}, expected a list of the features' names"
        )
    names = list(config.feature_names) or [config.name]
    for name in names:
        if not isinstance(name, str) or not _FEATURE_NAME.fullmatch(name):
            raise ValueError(f"table {config.name!r}: feature name {name!r}: a string without spaces and '@' is needed")
    if len(set(names)) < len(names):
        raise ValueError(f"table {config.name!r}: a feature is named twice in {names}")
    return names


def _check_admission(admission: AdmitAndEvictConfig | None, name: str) -> None:
    if not isinstance(admission, (AdmitAndEvictConfig, type(None))):
        raise TypeError(f"table {name!r}: admit_and_evict_config is {admission!r}, expected AdmitAndEvictConfig")


def table_config(config: BaseEmbeddingConfig, *, capacity: bool = False) -> TableConfig:
    """The engine's config of a table, from a collection's config, which is not changed.

    A config of this module makes a hash table, a plain TorchRec one an index table (under compat a hash table too).
    `capacity` makes `num_embeddings` a hash table's limit, as in `HashEmbeddingBagCollection`.

    Raises:
        ValueError, TypeError: a field that cannot be met; the message names table and field.
        NotImplementedError: a feature that is not built yet.
    """
    _check_fields_without_effect(config)
    hashed = hashes_plain() or isinstance(config, _HashTableFields)
    name = config.name
    initializer, mean, stddev = InitializerType.UNIFORM, 0.0, 0.05
    if hashed:
        initializer = conventions.hash_initializer if capacity else InitializerType.LINEAR
    life: TableLife | None = None
    if isinstance(config, _HashTableFields):
        _check_admission(config.admit_and_evict_config, name)
        life = config.admit_and_evict_config.table_life() if config.admit_and_evict_config else None
        initializer = config.initializer_type
        mean, stddev = config.weight_init_mean, config.weight_init_stddev
        if not isinstance(initializer, InitializerType):
            raise TypeError(f"table {name!r}: initializer_type is {initializer!r}, not InitializerType")
    pooling = Pooling.NONE
    if isinstance(config, EmbeddingBagConfig):
        if config.pooling not in _POOLING:
            raise ValueError(f"table {config.name!r}: pooling {config.pooling}, allowed are SUM and MEAN")
        pooling = _POOLING[config.pooling]
    try:
        dtype = data_type_to_dtype(config.data_type)
    except (ValueError, AttributeError):
        raise ValueError(f"table {config.name!r}: data type {config.data_type!r} is unknown") from None
    low, high = _init_range(config, cached=hashed and not capacity)
    return TableConfig(
        name=config.name,
        num_embeddings=config.num_embeddings,
        embedding_dim=config.embedding_dim,
        num_features=len(feature_names(config)),
        pooling=pooling,
        hashed=hashed,
        capacity=config.num_embeddings if capacity and hashed else 0,
        weight_dtype=dtype,
        initializer_type=initializer,
        init_min=low,
        init_max=high,
        init_mean=mean,
        init_stddev=stddev,
        init_fn=_init_fn(config),
        track_changes=isinstance(config, _HashTableFields) and config.is_incremental,
        life=life,
    )


_WITHOUT_EFFECT = (
    "num_embeddings_post_pruning",
    "need_pos",
    "input_dim",
    "total_num_buckets",
    "use_virtual_table",
    "virtual_table_eviction_policy",
    "enable_embedding_update",
    "stash_weights",
)
"""Fields of TorchRec's configs that tables of this package cannot follow; older versions of TorchRec have fewer."""


def _check_fields_without_effect(config: BaseEmbeddingConfig) -> None:
    defaults = {each.name: each.default for each in fields(BaseEmbeddingConfig)}
    for name in _WITHOUT_EFFECT:
        if name in defaults and getattr(config, name) != defaults[name]:
            raise ValueError(
                f"table {config.name!r}: {name} is {getattr(config, name)!r}, which would have no effect on a table of "
                f"rec_sdk_torch: leave it {defaults[name]!r}"
            )


def can_track(config: BaseEmbeddingConfig) -> bool:
    """Whether a config has `is_incremental`, which TorchRec's own have not."""
    return isinstance(config, _HashTableFields)


def check_kind(
    tables: Sequence[BaseEmbeddingConfig], kind: type[BaseEmbeddingConfig], collection: str, *, capacity: bool
) -> None:
    """Raises TypeError for tables that are no list, or a table config that the collection cannot take.

    Only a collection with `capacity` can keep what `HashEmbeddingBagConfig` says.
    """
    if isinstance(tables, str) or not isinstance(tables, Sequence):
        raise TypeError(f"{collection} takes a list of {kind.__name__} tables, got {type(tables).__name__}")
    for table in tables:
        if not isinstance(table, kind):
            raise TypeError(f"{collection} takes {kind.__name__} tables, got {type(table).__name__}")
        if isinstance(table, HashEmbeddingBagConfig) and not capacity:
            raise TypeError(
                f"table {table.name!r}: HashEmbeddingBagConfig means that num_embeddings is a capacity and that "
                f"all rows are in device memory, neither of which holds in {collection}: give it "
                "EmbCacheEmbeddingBagConfig, or use HashEmbeddingBagCollection"
            )
