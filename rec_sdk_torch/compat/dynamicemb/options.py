"""`DynamicEmbTableOptions`, and functions that compute table sizes from the options."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, data_type_to_dtype

from .admission import AdmissionStrategy
from .enums import (
    BUCKET_ALIGNMENT,
    DEFAULT_BUCKET_CAPACITY,
    DEMB_TABLE_ALIGN_SIZE,
    MAX_BUCKET_CAPACITY,
    SUPPORTED_DIST_TYPES,
    DynamicEmbCheckMode,
    DynamicEmbEvictStrategy,
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    DynamicEmbScoreStrategy,
    ScoreStrategy,
    normalize_score_strategy,
)


@dataclass(eq=False)
class DynamicEmbTableOptions:
    """Options of a table; the porting guide describes their effects.

    The planner computes `dim`, `max_capacity`, `init_capacity` and `local_hbm_for_values`, and fills in missing data
    types and missing bounds of initial weights.

    Attributes:
        embedding_dtype, dim: data type of the weights, and number of columns.
        max_capacity: maximum number of rows on a rank.
        evict_strategy: derived from `score_strategy`.
        local_hbm_for_values: bytes of a rank's device cache.
        device_id: accepted without effect.
        training: False if the table is only read.
        initializer_args: initial weights.
        eval_initializer_args: weights that evaluation reads for an id without a row; the mode must be CONSTANT.
        caching, init_capacity, max_load_factor, safe_check_mode: accepted without effect.
        score_strategy: score by which a full table chooses rows to evict.
        bucket_capacity: rows of a bucket; `max_capacity` is rounded up to a multiple of it.
        global_hbm_for_values: bytes of the device caches of all ranks together; 0 lets the library choose.
        external_storage: must be None.
        index_type: int64 or int32.
        dist_type: rule by which ranks own ids.
        admit_strategy, admission_counter: rule by which ids are admitted.

    Raises:
        ValueError: `eval_initializer_args` are not CONSTANT, or `dist_type` is unknown.
        TypeError, NotImplementedError: `score_strategy` is no strategy, or an unsupported tuple.
    """

    embedding_dtype: torch.dtype | None = None
    dim: int | None = None
    max_capacity: int | None = None
    evict_strategy: DynamicEmbEvictStrategy = DynamicEmbEvictStrategy.LRU
    local_hbm_for_values: int = 0
    device_id: int | None = None

    training: bool = True
    initializer_args: DynamicEmbInitializerArgs = field(default_factory=DynamicEmbInitializerArgs)
    eval_initializer_args: DynamicEmbInitializerArgs = field(
        default_factory=lambda: DynamicEmbInitializerArgs(mode=DynamicEmbInitializerMode.CONSTANT)
    )
    caching: bool = False
    init_capacity: int | None = None
    max_load_factor: float = 0.5
    score_strategy: ScoreStrategy | None = DynamicEmbScoreStrategy.TIMESTAMP
    bucket_capacity: int = DEFAULT_BUCKET_CAPACITY
    safe_check_mode: DynamicEmbCheckMode = DynamicEmbCheckMode.IGNORE
    global_hbm_for_values: int = 0
    external_storage: Any = None
    index_type: torch.dtype | None = None
    dist_type: str = "roundrobin"
    admit_strategy: AdmissionStrategy | None = None
    admission_counter: Any = None

    def __post_init__(self) -> None:
        if self.eval_initializer_args.mode is not DynamicEmbInitializerMode.CONSTANT:
            raise ValueError(f"eval_initializer_args are {self.eval_initializer_args}, must be CONSTANT")
        if self.dist_type not in SUPPORTED_DIST_TYPES:
            raise ValueError(f"dist_type is {self.dist_type!r}, allowed are {list(SUPPORTED_DIST_TYPES)}")
        self.score_strategy = normalize_score_strategy(self.score_strategy)

    def get_grouped_key(self) -> dict[str, Any]:
        """Returns the options that must be equal for all tables of a lookup module.

        Two option objects compare equal if these options are equal.
        """
        names = "training caching external_storage index_type dist_type score_strategy admit_strategy"
        return {name: getattr(self, name) for name in names.split()}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DynamicEmbTableOptions):
            return NotImplemented
        return self.get_grouped_key() == other.get_grouped_key()

    def __hash__(self) -> int:
        return hash(tuple(self.get_grouped_key().items()))


# ---- initial weights


def complete_initializer_args(
    initializer_args: DynamicEmbInitializerArgs, *, embedding_config: BaseEmbeddingConfig | None = None
) -> DynamicEmbInitializerArgs:
    """Returns the arguments; for UNIFORM, missing bounds are filled in.

    The default bounds are -/+ sqrt(1 / num_embeddings), or 0 and 1 without a config.
    """
    if initializer_args.mode is not DynamicEmbInitializerMode.UNIFORM:
        return initializer_args
    low, high = 0.0, 1.0
    if embedding_config is not None:
        high = math.sqrt(1.0 / embedding_config.num_embeddings)
        low = -high
    return replace(
        initializer_args,
        lower=low if initializer_args.lower is None else initializer_args.lower,
        upper=high if initializer_args.upper is None else initializer_args.upper,
    )


# ---- sizes


def align_to_table_size(n: int, alignment: int = DEMB_TABLE_ALIGN_SIZE) -> int:
    """Returns `n` rounded up to a multiple of `alignment`, at least `alignment`."""
    return max(1, -(-int(n) // alignment)) * alignment


def bucket_layout(embedding_config: BaseEmbeddingConfig, world_size: int, bucket_capacity: int) -> tuple[int, int]:
    """Returns the number of buckets on a rank, and the number of rows in a bucket.

    Raises:
        ValueError: the world size or the bucket capacity is invalid.
    """
    if world_size <= 0:
        raise ValueError(f"world_size is {world_size}, must be at least 1")
    rows = -(-int(embedding_config.num_embeddings) // world_size)
    if bucket_capacity == MAX_BUCKET_CAPACITY:
        return 1, align_to_table_size(rows, BUCKET_ALIGNMENT)
    if bucket_capacity <= 0 or bucket_capacity % BUCKET_ALIGNMENT:
        raise ValueError(
            f"bucket_capacity is {bucket_capacity}, must be a multiple of {BUCKET_ALIGNMENT}, or MAX_BUCKET_CAPACITY"
        )
    return align_to_table_size(rows, bucket_capacity) // bucket_capacity, bucket_capacity


def get_sharded_table_capacity(embedding_config: BaseEmbeddingConfig, world_size: int, bucket_capacity: int) -> int:
    """Returns the maximum number of rows of a table on each rank: the rank's share, rounded up to whole buckets.

    Raises:
        ValueError: see `bucket_layout`.
    """
    buckets, width = bucket_layout(embedding_config, world_size, bucket_capacity)
    return buckets * width


_STATES: dict[EmbOptimType, Callable[[int, int], int]] = {
    EmbOptimType.ADAM: lambda dim, itemsize: 2 * dim,
    EmbOptimType.EXACT_ADAGRAD: lambda dim, itemsize: dim,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: lambda dim, itemsize: 16 // itemsize,
}


def get_optimizer_state_dim(optimizer_type: EmbOptimType, dim: int, dtype: torch.dtype | None = None) -> int:
    """Returns the number of elements of optimizer state per row, in dynamicemb's layout.

    Raises:
        ValueError: `optimizer_type` is EXACT_ROWWISE_ADAGRAD and `dtype` is None.
    """
    if optimizer_type is EmbOptimType.EXACT_ROWWISE_ADAGRAD and dtype is None:
        raise ValueError("dtype is None, EXACT_ROWWISE_ADAGRAD needs one")
    elements = _STATES.get(optimizer_type)
    return 0 if elements is None else elements(dim, (dtype or torch.float32).itemsize)


def row_bytes(dim: int, dtype: torch.dtype, optimizer_type: EmbOptimType) -> int:
    """Returns the size in bytes of a row with its optimizer states."""
    return (dim + get_optimizer_state_dim(optimizer_type, dim, dtype)) * dtype.itemsize


def get_table_value_bytes(
    embedding_config: BaseEmbeddingConfig,
    optimizer_type: EmbOptimType,
    world_size: int,
    bucket_capacity: int = DEFAULT_BUCKET_CAPACITY,
) -> int:
    """Returns the size in bytes of a table's rows with their optimizer states, summed over all ranks.

    Raises:
        ValueError: see `bucket_layout`.
    """
    rows = get_sharded_table_capacity(embedding_config, world_size, bucket_capacity) * world_size
    dtype = data_type_to_dtype(embedding_config.data_type)
    return rows * row_bytes(embedding_config.embedding_dim, dtype, optimizer_type)
