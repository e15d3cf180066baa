"""Enumerations and data types of dynamicemb, with its names and values."""

from __future__ import annotations

import enum
import os
from dataclasses import dataclass

import torch
from torchrec.modules.embedding_configs import data_type_to_dtype
from torchrec.types import DataType

from ...operators.record import WEIGHT_DTYPES
from ...tbe import Home

KEY_TYPE = torch.int64
EMBEDDING_TYPE = torch.float32
SCORE_TYPE = torch.int64
OPT_STATE_TYPE = torch.float32
COUNTER_TYPE = torch.int64
DEFAULT_INDEX_TYPE = torch.int64
DEMB_TABLE_ALIGN_SIZE = 16
BUCKET_ALIGNMENT = DEMB_TABLE_ALIGN_SIZE
MAX_BUCKET_CAPACITY = 2**63 - 1
"""A `bucket_capacity` that makes the whole table of a rank one bucket."""
DEFAULT_BUCKET_CAPACITY = 128
BATCH_SIZE_PER_DUMP = 65536
HOMES = {"continuous": Home.CONTINUOUS, "roundrobin": Home.MODULO, "hash_roundrobin": Home.HASH}
"""Ownership rules by `dist_type`.

dynamicemb uses another hash and treats negative ids as large unsigned ones, so its owner of an id may be another rank.
"""
SUPPORTED_DIST_TYPES = tuple(HOMES)
DYNAMICEMB_CSTM_SCORE_CHECK = "DYNAMICEMB_CSTM_SCORE_CHECK"
DynamicEmbKernel = "DynamicEmb"
DTYPE_NUM_BYTES = {dtype: dtype.itemsize for dtype in WEIGHT_DTYPES}


@enum.unique
class EvictStrategy(enum.Enum):
    """Order in which a full table evicts rows. Dumps contain the member's `str()`."""

    KLru = 0
    KLfu = 1
    KEpochLru = 2
    KEpochLfu = 3
    KCustomized = 4


@enum.unique
class DynamicEmbEvictStrategy(enum.Enum):
    """Members of `EvictStrategy` under the names used in options. A table's score strategy determines the member."""

    LRU = EvictStrategy.KLru
    LFU = EvictStrategy.KLfu
    EPOCH_LRU = EvictStrategy.KEpochLru
    EPOCH_LFU = EvictStrategy.KEpochLfu
    CUSTOMIZED = EvictStrategy.KCustomized


@enum.unique
class DynamicEmbCheckMode(enum.IntEnum):
    """Handling of ids for which the table has no space. All modes behave alike, because tables always have space."""

    ERROR = 0
    WARNING = 1
    IGNORE = 2


class DynamicEmbPoolingMode(enum.IntEnum):
    """Pooling of a bag: the sum of its rows, their mean, or none."""

    SUM = 0
    MEAN = 1
    NONE = 2


class DynamicEmbScoreStrategy(enum.IntEnum):
    """Score of a row; a full table evicts the rows with the lowest scores.

    TIMESTAMP: time of the row's last batch; STEP: number of the row's last batch; CUSTOMIZED: number set by
    `set_score` before the row's last batch; LFU: number of the row's lookups; NO_EVICTION: no score, and the table
    grows.
    """

    TIMESTAMP = 0
    STEP = 1
    CUSTOMIZED = 2
    LFU = 3
    NO_EVICTION = 4


ScoreStrategy = DynamicEmbScoreStrategy | tuple[DynamicEmbScoreStrategy, ...]

_COMPOUND = {DynamicEmbScoreStrategy.TIMESTAMP, DynamicEmbScoreStrategy.LFU}


def normalize_score_strategy(score_strategy: ScoreStrategy | None) -> ScoreStrategy | None:
    """Returns the strategy, unpacked if it is a tuple of one; None stays None.

    Raises:
        TypeError: `score_strategy` is neither a strategy nor a tuple of strategies.
        NotImplementedError: the tuple contains other strategies than TIMESTAMP and LFU.
    """
    if score_strategy is None:
        return None
    strategies = score_strategy if isinstance(score_strategy, tuple) else (score_strategy,)
    for each in strategies:
        if not isinstance(each, DynamicEmbScoreStrategy):
            raise TypeError(
                f"score_strategy is {score_strategy!r}, expected DynamicEmbScoreStrategy or a tuple of them"
            )
    if len(strategies) == 1:
        return strategies[0]
    if len(strategies) != len(_COMPOUND) or set(strategies) != _COMPOUND:
        raise NotImplementedError(
            f"score_strategy {strategies}: the only supported tuple is TIMESTAMP with LFU, in any order"
        )
    return strategies


def evicts_by(score_strategy: ScoreStrategy) -> DynamicEmbScoreStrategy:
    """Returns the strategy that chooses rows to evict; for the tuple of TIMESTAMP and LFU it is LFU."""
    if isinstance(score_strategy, tuple):
        return DynamicEmbScoreStrategy.LFU
    return score_strategy


def is_timed(score_strategy: ScoreStrategy) -> bool:
    """Returns whether incremental dumps compare timestamps, because TIMESTAMP is among the strategies."""
    return DynamicEmbScoreStrategy.TIMESTAMP in (
        score_strategy if isinstance(score_strategy, tuple) else (score_strategy,)
    )


def warns_of_lower_scores() -> bool:
    """Returns whether to warn if a score is below the previous one; DYNAMICEMB_CSTM_SCORE_CHECK=0 turns it off."""
    return os.getenv(DYNAMICEMB_CSTM_SCORE_CHECK) != "0"


class DynamicEmbInitializerMode(enum.Enum):
    """Distribution of initial weights."""

    NORMAL = "normal"
    TRUNCATED_NORMAL = "truncated_normal"
    UNIFORM = "uniform"
    CONSTANT = "constant"
    DEBUG = "debug"


@dataclass(eq=False)
class DynamicEmbInitializerArgs:
    """Arguments for initial weights. Two objects are equal if the mode and the parameters that the mode uses are equal.

    Attributes:
        mode: the distribution.
        mean, std_dev: parameters of NORMAL and TRUNCATED_NORMAL.
        lower, upper: bounds for UNIFORM and TRUNCATED_NORMAL; None for the default.
        value: the weight for CONSTANT.
    """

    mode: DynamicEmbInitializerMode = DynamicEmbInitializerMode.UNIFORM
    mean: float = 0.0
    std_dev: float = 1.0
    lower: float | None = None
    upper: float | None = None
    value: float = 0.0

    def _key(self) -> tuple[object, ...]:
        mode = DynamicEmbInitializerMode
        normal, bounds = (self.mean, self.std_dev), (self.lower, self.upper)
        numbers: dict[DynamicEmbInitializerMode, tuple[object, ...]] = {
            mode.NORMAL: normal,
            mode.TRUNCATED_NORMAL: normal + bounds,
            mode.UNIFORM: bounds,
            mode.CONSTANT: (self.value,),
        }
        return (self.mode, *numbers.get(self.mode, ()))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DynamicEmbInitializerArgs):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())


@enum.unique
class DynamicEmbDataType(enum.Enum):
    """Data types under the names that dynamicemb's kernels use."""

    Float32 = "float32"
    BFloat16 = "bfloat16"
    Float16 = "float16"
    Int64 = "int64"
    UInt64 = "uint64"
    Int32 = "int32"
    UInt32 = "uint32"
    Size_t = "size_t"
    Int8 = "int8"
    UInt8 = "uint8"


def dyn_emb_to_torch(data_type: DynamicEmbDataType) -> torch.dtype:
    """Returns torch's data type for one of dynamicemb's; int64 for Size_t."""
    name = "int64" if data_type is DynamicEmbDataType.Size_t else data_type.value
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def torch_to_dyn_emb(dtype: torch.dtype) -> DynamicEmbDataType:
    """Returns dynamicemb's data type for one of torch's.

    Raises:
        ValueError: dynamicemb has no such type.
    """
    return DynamicEmbDataType(str(dtype).removeprefix("torch."))


def data_type_to_dyn_emb(data_type: DataType) -> DynamicEmbDataType:
    """Returns dynamicemb's data type for one of TorchRec's.

    Raises:
        ValueError: dynamicemb has no such type.
    """
    return torch_to_dyn_emb(data_type_to_dtype(data_type))


def string_to_evict_strategy(strategy_str: str) -> EvictStrategy:
    """Returns the strategy with a name such as `KLru`.

    Raises:
        ValueError: no strategy has this name.
    """
    try:
        return EvictStrategy[strategy_str]
    except KeyError:
        raise ValueError(f"{strategy_str!r} is no EvictStrategy, there are {[s.name for s in EvictStrategy]}") from None
