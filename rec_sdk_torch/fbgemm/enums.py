"""FBGEMM's enums and definitions, with their names and values, without importing FBGEMM."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch

from ..runtime.numbers import as_int

E = TypeVar("E", bound=enum.Enum)


class OptimType(enum.Enum):
    """Optimizers (FBGEMM's `EmbOptimType`); docs/fbgemm.md lists the supported ones."""

    SGD = "sgd"
    EXACT_SGD = "exact_sgd"
    LAMB = "lamb"
    ADAM = "adam"
    EXACT_ADAGRAD = "exact_adagrad"
    EXACT_ROWWISE_ADAGRAD = "exact_row_wise_adagrad"
    LARS_SGD = "lars_sgd"
    PARTIAL_ROWWISE_ADAM = "partial_row_wise_adam"
    PARTIAL_ROWWISE_LAMB = "partial_row_wise_lamb"
    ROWWISE_ADAGRAD = "row_wise_adagrad"
    SHAMPOO = "shampoo"
    SHAMPOO_V2 = "shampoo_v2"
    MADGRAD = "madgrad"
    EXACT_ROWWISE_WEIGHTED_ADAGRAD = "exact_row_wise_weighted_adagrad"
    ENSEMBLE_ROWWISE_ADAGRAD = "ensemble_row_wise_adagrad"
    EMAINPLACE_ROWWISE_ADAGRAD = "ema_in_place_row_wise_adagrad"
    NONE = "none"

    def __eq__(self, other: object) -> bool:
        """Compares by name, so that a member equals FBGEMM's own member of the same name."""
        named = isinstance(other, enum.Enum) and type(other).__name__ in ("EmbOptimType", "OptimType")
        return named and self.name == other.name  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash(self.name)  # same as enum.Enum's, which defining __eq__ removes


class SparseType(enum.Enum):
    """Data types of weights, cached weights and outputs."""

    FP32 = "fp32"
    FP16 = "fp16"
    FP8 = "fp8"
    INT8 = "int8"
    INT4 = "int4"
    INT2 = "int2"
    BF16 = "bf16"
    MX4 = "mx4"
    NFP8 = "nfp8"

    def as_dtype(self) -> torch.dtype:
        """Returns torch's dtype.

        Raises:
            ValueError: tables do not support this data type.
        """
        if self not in _DTYPES:
            raise ValueError(f"{self} has no table here, supported are {[str(known) for known in _DTYPES]}")
        return _DTYPES[self]


_DTYPES = {SparseType.FP32: torch.float32, SparseType.FP16: torch.float16, SparseType.BF16: torch.bfloat16}


class EmbeddingLocation(enum.IntEnum):
    """Memory that contains the rows of a table."""

    DEVICE = 0
    MANAGED = 1
    MANAGED_CACHING = 2
    HOST = 3
    MTIA = 4


class ComputeDevice(enum.IntEnum):
    """Device that runs the kernels; CUDA means any accelerator, including an NPU."""

    CPU = 0
    CUDA = 1
    MTIA = 2


class PoolingMode(enum.IntEnum):
    """Pooling of a bag to one row."""

    SUM = 0
    MEAN = 1
    NONE = 2


class BoundsCheckMode(enum.IntEnum):
    """Handling of invalid ids and offsets. V2_ modes, which in FBGEMM select another kernel, have no effect here."""

    FATAL = 0
    WARNING = 1
    IGNORE = 2
    NONE = 3
    V2_IGNORE = 4
    V2_WARNING = 5
    V2_FATAL = 6


class CacheAlgorithm(enum.Enum):
    """Policy that chooses victims of a full cache."""

    LRU = 0
    LFU = 1


class WeightDecayMode(enum.IntEnum):
    """Weight decay of exact row-wise Adagrad."""

    NONE = 0
    L2 = 1
    DECOUPLE = 2
    COUNTER = 3
    COWCLIP = 4
    DECOUPLE_GLOBAL = 5


class CounterWeightDecayMode(enum.IntEnum):
    """Kind of weight decay that COUNTER and COWCLIP apply."""

    NONE = 0
    L2 = 1
    DECOUPLE = 2
    ADAGRADW = 3


class StepMode(enum.IntEnum):
    """Step count that the ensemble optimizer uses."""

    NONE = 0
    USE_COUNTER = 1
    USE_ITER = 2


class LearningRateMode(enum.IntEnum):
    """Scaling of learning rates by counts, with COUNTER."""

    EQUAL = -1
    TAIL_ID_LR_INCREASE = 0
    TAIL_ID_LR_DECREASE = 1
    COUNTER_SGD = 2


class GradSumDecay(enum.IntEnum):
    """Decay of the sum of squared gradients, with COUNTER."""

    NO_DECAY = -1
    CTR_DECAY = 0


@dataclass(frozen=True)
class TailIdThreshold:
    """Count up to which an id counts as rare."""

    val: float = 0
    is_ratio: bool = False


@dataclass(frozen=True)
class CounterBasedRegularizationDefinition:
    """Options of WeightDecayMode.COUNTER."""

    counter_weight_decay_mode: CounterWeightDecayMode = CounterWeightDecayMode.NONE
    counter_halflife: int = -1
    adjustment_iter: int = -1
    adjustment_ub: float = 1.0
    learning_rate_mode: LearningRateMode = LearningRateMode.EQUAL
    grad_sum_decay: GradSumDecay = GradSumDecay.NO_DECAY
    tail_id_threshold: TailIdThreshold = field(default_factory=TailIdThreshold)
    max_counter_update_freq: int = 1000


@dataclass(frozen=True)
class CowClipDefinition:
    """Options of WeightDecayMode.COWCLIP."""

    counter_weight_decay_mode: CounterWeightDecayMode = CounterWeightDecayMode.NONE
    counter_halflife: int = -1
    weight_norm_coefficient: float = 0.0
    lower_bound: float = 0.0


@dataclass(frozen=True)
class GlobalWeightDecayDefinition:
    """Options of WeightDecayMode.DECOUPLE_GLOBAL."""

    start_iter: int = 0
    lower_bound: float = 0.0


@dataclass(frozen=True)
class UserEnabledConfigDefinition:
    """Optional modes of optimizers."""

    use_rowwise_bias_correction: bool = False
    use_writeback_bwd_prehook: bool = False
    writeback_first_feature_only: bool = False
    precompute_writeback: bool = False


@dataclass(frozen=True)
class EnsembleModeDefinition:
    """Options of ENSEMBLE_ROWWISE_ADAGRAD."""

    step_ema: float = 10000
    step_swap: float = 10000
    step_start: float = 0
    step_ema_coef: float = 0.6
    step_mode: StepMode = StepMode.USE_ITER


@dataclass(frozen=True)
class EmainplaceModeDefinition:
    """Options of EMAINPLACE_ROWWISE_ADAGRAD."""

    step_ema: float = 10
    step_start: float = 0
    step_ema_coef: float = 0.6


class RecordCacheMetrics(NamedTuple):
    """Cache counters to record."""

    record_cache_miss_counter: bool
    record_tablewise_cache_miss: bool


class MultiPassPrefetchConfig(NamedTuple):
    """FBGEMM's division of a prefetch into several passes."""

    num_passes: int = 12
    min_splitable_pass_size: int = 6 * 1024 * 1024


def member(kind: type[E], option: str, value: object) -> E:
    """Returns the member of `kind` that `value` denotes.

    `value` is a member of `kind`, a member of FBGEMM's enum with the same name as `kind`, or a member's name. For an
    IntEnum it may also be the number. `option` names the argument in error messages.

    Raises:
        TypeError: `value` is neither a member nor a name.
        ValueError: `kind` has no member with this name or number.
    """
    number = as_int(value) if issubclass(kind, enum.IntEnum) and not isinstance(value, enum.Enum) else None
    if number is not None:
        if number not in [known.value for known in kind]:
            raise ValueError(f"{option} is {number}, allowed are {[known.value for known in kind]}")
        return kind(number)
    name = value if isinstance(value, str) else getattr(value, "name", None)
    if not isinstance(name, str):
        raise TypeError(f"{option} is {value!r}, expected a member of FBGEMM's {kind.__name__}, or its name")
    try:
        return kind[name.upper()]
    except KeyError:
        raise ValueError(f"{option} is {value!r}, allowed are {[known.name for known in kind]}") from None


def sparse_type(option: str, value: object) -> SparseType:
    """Returns the SparseType for a value that `member` accepts, or for a torch dtype."""
    if isinstance(value, torch.dtype):
        for known, dtype in _DTYPES.items():
            if dtype is value:
                return known
        raise ValueError(f"{option} is {value}, allowed are {list(_DTYPES.values())}")
    return member(SparseType, option, value)
