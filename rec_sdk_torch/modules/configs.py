"""Configurations of tables, as TorchRec and Rec SDK users write them."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, unique

import torch
from torchrec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    data_type_to_dtype,
)

from ..tbe import InitializerType, Pooling, TableConfig
from ..tbe.table import InitFn

_FEATURE_NAME = re.compile(r"[A-Za-z0-9_]+")


@unique
class PolicyType(Enum):
    """What admission and eviction of features go by."""

    POLICY_COUNT = "count"
    POLICY_SHOWCLICK = "showclick"


@dataclass
class ShowClickParams:
    """Score of a feature: `alpha * show + beta * click`, decayed by `score_decay`."""

    alpha: float = 1
    beta: float = 0
    admit_threshold: float = 0
    evict_percentage: float = 0
    score_decay: float = 1


@dataclass
class AdmitAndEvictConfig:
    """Admission and eviction of features. The defaults mean: every id is admitted, none is evicted."""

    admit_threshold: int = -1
    not_admitted_default_value: float = 0.0
    evict_threshold: int = 0
    evict_step_interval: int = 0
    showclick_params: ShowClickParams = field(default_factory=ShowClickParams)
    policy_type: PolicyType = PolicyType.POLICY_COUNT

    @property
    def enabled(self) -> bool:
        """Whether anything differs from the defaults."""
        return self != AdmitAndEvictConfig()


@dataclass
class _HashTableFields:
    """What a hash table's config has beyond TorchRec's."""

    weight_init_mean: float = 0.0
    weight_init_stddev: float = 0.05
    initializer_type: InitializerType = InitializerType.LINEAR
    admit_and_evict_config: AdmitAndEvictConfig = field(default_factory=AdmitAndEvictConfig)
    is_incremental: bool = False

    def __post_init__(self) -> None:
        """Leaves `init_fn` as given: TorchRec's fills it in, and a user's choice could not be told apart."""


@dataclass
class EmbCacheEmbeddingConfig(_HashTableFields, EmbeddingConfig):
    """A sequence table whose ids are any int64; rows live in host memory, hot ones in the device cache.

    `num_embeddings` sizes cache and planner and is no limit. `initializer_type`: LINEAR and UNIFORM go from
    `weight_init_min` to `weight_init_max` (None: -/+ sqrt(1 / num_embeddings)), TRUNCATED_NORMAL has
    `weight_init_mean` and `weight_init_stddev`, cut at two standard deviations. `init_fn`, when given, fills
    blocks of new rows instead, and initial weights then depend on the order in which ids arrive.
    """


@dataclass
class EmbCacheEmbeddingBagConfig(_HashTableFields, EmbeddingBagConfig):
    """As `EmbCacheEmbeddingConfig`, for a pooled table (`pooling`: SUM or MEAN)."""


@dataclass
class HashEmbeddingBagConfig(_HashTableFields, EmbeddingBagConfig):
    """A pooled table whose ids are any int64, wholly in device memory: `num_embeddings` is its capacity."""


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


def feature_names(config: BaseEmbeddingConfig) -> list[str]:
    """The features of a table: those named, else one of the table's own name, as in TorchRec.

    Raises:
        ValueError: a name that is not `[A-Za-z0-9_]+`, or one that is there twice.
    """
    names = list(config.feature_names) or [config.name]
    for name in names:
        if not isinstance(name, str) or not _FEATURE_NAME.fullmatch(name):
            raise ValueError(f"table {config.name!r}: feature name {name!r}: letters, digits and underscores only")
    if len(set(names)) < len(names):
        raise ValueError(f"table {config.name!r}: a feature is named twice in {names}")
    return names


def _check_not_yet(admission: AdmitAndEvictConfig, is_incremental: bool, name: str) -> None:
    if admission.enabled:
        raise NotImplementedError(f"table {name!r}: admission and eviction of features are not supported yet")
    if is_incremental:
        raise NotImplementedError(f"table {name!r}: incremental saves are not supported yet")


def table_config(config: BaseEmbeddingConfig, *, capacity: bool = False) -> TableConfig:
    """What the engine needs of a collection's config, which is not changed.

    A config of this module makes a hash table, a plain TorchRec one an index table. `capacity` makes
    `num_embeddings` a hash table's limit.

    Raises:
        ValueError, TypeError: a field that cannot be met; the message names table and field.
        NotImplementedError: a feature that is not built yet.
    """
    hashed = isinstance(config, _HashTableFields)
    name = config.name
    initializer, mean, stddev = InitializerType.UNIFORM, 0.0, 0.05
    if isinstance(config, _HashTableFields):
        _check_not_yet(config.admit_and_evict_config, config.is_incremental, name)
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
        init_min=config.weight_init_min,
        init_max=config.weight_init_max,
        init_mean=mean,
        init_stddev=stddev,
        init_fn=_init_fn(config),
    )


def check_kind(tables: Sequence[BaseEmbeddingConfig], kind: type[BaseEmbeddingConfig], collection: str) -> None:
    """Raises TypeError for a table config that the collection cannot take."""
    for table in tables:
        if not isinstance(table, kind):
            raise TypeError(f"{collection} takes {kind.__name__} tables, got {type(table).__name__}")
