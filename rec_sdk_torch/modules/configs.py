"""Table configs with the interfaces of TorchRec and Rec SDK."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields

import torch
from torchrec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    data_type_to_dtype,
)

from ..tbe import InitFn, InitializerType, Pooling, TableConfig, TableLifecycle
from .admission_eviction import AdmitAndEvictConfig
from .defaults import config_defaults, hashes_torchrec_configs, warn_changed_default

# `@` is reserved: it separates feature and table in the output name of a shared feature.
_FEATURE_NAME = re.compile(r"[^\s@]+")


@dataclass
class _HashTableFields:
    """Fields of a hash table's config that TorchRec's config does not have."""

    weight_init_mean: float = 0.0
    weight_init_stddev: float = 0.05
    initializer_type: InitializerType | None = None
    admit_and_evict_config: AdmitAndEvictConfig | TableLifecycle | None = field(default_factory=AdmitAndEvictConfig)
    is_incremental: bool = False

    def __post_init__(self) -> None:
        """Leaves `init_fn` unset; TorchRec's method would fill it in and hide whether the user set it."""


@dataclass
class EmbCacheEmbeddingConfig(_HashTableFields, EmbeddingConfig):
    """Config of a hash table for sequences. Ids are any int64; rows are in host memory, hot rows in the device cache.

    The fields and errors are the same as in `EmbCacheEmbeddingBagConfig`, except that there is no `pooling`.

    Example:
        >>> from rec_sdk_torch import EmbCacheEmbeddingConfig
        >>> config = EmbCacheEmbeddingConfig(name="t", num_embeddings=100, embedding_dim=4, feature_names=["item"])
        >>> config.is_incremental
        False
    """


@dataclass
class EmbCacheEmbeddingBagConfig(_HashTableFields, EmbeddingBagConfig):
    """Config of a hash table for bags. Ids are any int64; rows are in host memory, hot rows in the device cache.

    Attributes:
        num_embeddings: expected number of ids, at least 1. It is not a limit: it determines the sizes of the cache
            and of the planner's data, and the default range of initial weights.
        embedding_dim: D, the number of columns, 1 to 4096.
        name: table name: 1 to 100 letters, digits and underscores, unique in its collection.
        feature_names: keys of the batch that look up the table.
        data_type: data type of the weights: `DataType.FP32`, `FP16` or `BF16`.
        pooling: pooling of a bag: `PoolingType.SUM` or `MEAN`.
        weight_init_min: minimum initial weight. None: -sqrt(1 / num_embeddings), or for TRUNCATED_NORMAL two standard
            deviations below the mean.
        weight_init_max: maximum initial weight. None: sqrt(1 / num_embeddings), or for TRUNCATED_NORMAL two standard
            deviations above the mean.
        weight_init_mean: mean for TRUNCATED_NORMAL.
        weight_init_stddev: standard deviation for TRUNCATED_NORMAL.
        initializer_type: LINEAR, UNIFORM or TRUNCATED_NORMAL, see `InitializerType`. None: UNIFORM; LINEAR under
            `rec_sdk_torch.compat`.
        init_fn: function that fills a block of new rows `[n, D]` in place, instead of an initializer. Initial weights
            then depend on the order in which ids are first looked up.
        admit_and_evict_config: rules for admission and eviction: Rec SDK's `AdmitAndEvictConfig`, or a `TableLifecycle`
            of `rules`. None or the default: every id gets a row and keeps it.
        is_incremental: whether each row records when it last changed, which `Saver.save(incremental=True)` needs; it
            takes 8 to 10 bytes per row.

    Other fields of TorchRec's config must keep their defaults.

    Raises:
        ValueError, TypeError: raised by the collection if a field is out of range or has another type; the message
            names table and field.

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
    """Config of a hash table for bags whose rows are all in device memory, for `HashEmbeddingBagCollection`.

    The fields are the same as in `EmbCacheEmbeddingBagConfig`, except:

    Attributes:
        num_embeddings: capacity of the table; an id beyond it raises `CapacityError`.
        initializer_type: None means UNIFORM, also under `rec_sdk_torch.compat`.

    Example:
        >>> from rec_sdk_torch import HashEmbeddingBagConfig
        >>> config = HashEmbeddingBagConfig(name="t", num_embeddings=100, embedding_dim=4, feature_names=["item"])
    """


def _user_init_fn(config: BaseEmbeddingConfig) -> InitFn | None:
    """Returns the user's `init_fn`; None if TorchRec filled in its own, which draws the same range as UNIFORM."""
    fn: InitFn | None = config.init_fn
    if isinstance(fn, functools.partial) and fn.func is torch.nn.init.uniform_ and not fn.args:
        return None if fn.keywords == {"a": config.get_weight_init_min(), "b": config.get_weight_init_max()} else fn
    return fn


def feature_names(config: BaseEmbeddingConfig) -> list[str]:
    """Returns the features of a table: `feature_names`, or if it is empty, one feature named after the table.

    Raises:
        TypeError: `feature_names` is not a list, for example a single string.
        ValueError: a name is empty, contains spaces or `@`, or occurs twice.
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


def _initializer(config: BaseEmbeddingConfig, *, cached: bool) -> InitializerType:
    """Returns a config's initializer; without one, warns once per process and returns the table kind's default."""
    name, initializer = config.name, getattr(config, "initializer_type", None)
    if initializer is None:
        if config.init_fn is None and isinstance(config, _HashTableFields):
            warn_changed_default(name)
        return config_defaults.cached_initializer if cached else InitializerType.UNIFORM
    if not isinstance(initializer, InitializerType):
        raise TypeError(f"table {name!r}: initializer_type is {initializer!r}, not InitializerType")
    return initializer


def table_config(config: BaseEmbeddingConfig, *, capacity: bool = False) -> TableConfig:
    """Returns the `TableConfig` for a collection's config, which is not changed.

    A config class of this module defines a hash table; TorchRec's own class defines an index table, or under compat
    also a hash table. `capacity` makes `num_embeddings` a hash table's limit, as in `HashEmbeddingBagCollection`.

    Raises:
        ValueError, TypeError: a field is invalid; the message names table and field.
        NotImplementedError: a feature is not supported.
    """
    _check_fields_without_effect(config)
    hashed = hashes_torchrec_configs() or isinstance(config, _HashTableFields)
    name = config.name
    mean, stddev = 0.0, 0.05
    lifecycle: TableLifecycle | None = None
    if isinstance(config, _HashTableFields):
        if not isinstance(config.is_incremental, bool):
            raise TypeError(f"table {name!r}: is_incremental is {config.is_incremental!r}, expected a bool")
        rules = config.admit_and_evict_config
        lifecycle = rules.table_lifecycle() if isinstance(rules, AdmitAndEvictConfig) else rules
        if not isinstance(lifecycle, (TableLifecycle, type(None))):
            raise TypeError(
                f"table {name!r}: admit_and_evict_config is {rules!r}, expected AdmitAndEvictConfig or TableLifecycle"
            )
        mean, stddev = config.weight_init_mean, config.weight_init_stddev
    pooling = Pooling.NONE
    if isinstance(config, EmbeddingBagConfig):
        if config.pooling not in (PoolingType.SUM, PoolingType.MEAN):
            raise ValueError(f"table {config.name!r}: pooling {config.pooling}, allowed are SUM and MEAN")
        pooling = Pooling[config.pooling.name]
    try:
        dtype = data_type_to_dtype(config.data_type)
    except (ValueError, AttributeError):
        raise ValueError(f"table {config.name!r}: data type {config.data_type!r} is unknown") from None
    cached = hashed and not capacity
    kind = _initializer(
        config, cached=cached or isinstance(config, (EmbCacheEmbeddingConfig, EmbCacheEmbeddingBagConfig))
    )
    low, high = config_defaults.cached_range if cached and config_defaults.cached_range else (None, None)
    return TableConfig(
        name=config.name,
        num_embeddings=config.num_embeddings,
        embedding_dim=config.embedding_dim,
        num_features=len(feature_names(config)),
        pooling=pooling,
        hashed=hashed,
        capacity=config.num_embeddings if capacity and hashed else 0,
        weight_dtype=dtype,
        initializer_type=kind,
        init_min=low if config.weight_init_min is None else config.weight_init_min,
        init_max=high if config.weight_init_max is None else config.weight_init_max,
        init_mean=mean,
        init_stddev=stddev,
        init_fn=_user_init_fn(config),
        track_changes=isinstance(config, _HashTableFields) and config.is_incremental,
        lifecycle=lifecycle,
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
"""Fields of TorchRec's configs that must keep their default; older versions of TorchRec lack some of them."""


def _check_fields_without_effect(config: BaseEmbeddingConfig) -> None:
    defaults = {each.name: each.default for each in fields(BaseEmbeddingConfig)}
    for name in _WITHOUT_EFFECT:
        if name in defaults and getattr(config, name) != defaults[name]:
            raise ValueError(
                f"table {config.name!r}: {name} is {getattr(config, name)!r}, which would have no effect on a table of "
                f"rec_sdk_torch: leave it {defaults[name]!r}"
            )


def check_config_class(
    tables: Sequence[BaseEmbeddingConfig], kind: type[BaseEmbeddingConfig], collection: str, *, capacity: bool
) -> None:
    """Raises TypeError if `tables` is not a list, or contains a config that the collection does not support.

    Only a collection with `capacity` supports `HashEmbeddingBagConfig`.
    """
    if isinstance(tables, str) or not isinstance(tables, Sequence):
        raise TypeError(f"{collection} takes a list of {kind.__name__} tables, got {type(tables).__name__}")
    for table in tables:
        if not isinstance(table, kind):
            raise TypeError(f"{collection} takes {kind.__name__} tables, got {type(table).__name__}")
        if not isinstance(table.name, str):
            raise TypeError(f"{collection} has a table whose name is {table.name!r}, expected a string")
        if isinstance(table, HashEmbeddingBagConfig) and not capacity:
            raise TypeError(
                f"table {table.name!r}: HashEmbeddingBagConfig means that num_embeddings is a capacity and that "
                f"all rows are in device memory, neither of which holds in {collection}: give it "
                "EmbCacheEmbeddingBagConfig, or use HashEmbeddingBagCollection"
            )
