"""FBGEMM's `SplitTableBatchedEmbeddingBagsCodegen` over our tables, and its enums, without importing FBGEMM.

`rec_sdk_torch.compat.fbgemm` has the same names. Needs torch only.
"""

from .enums import (
    BoundsCheckMode,
    CacheAlgorithm,
    ComputeDevice,
    CounterBasedRegularizationDefinition,
    CounterWeightDecayMode,
    CowClipDefinition,
    EmainplaceModeDefinition,
    EmbeddingLocation,
    EnsembleModeDefinition,
    GlobalWeightDecayDefinition,
    GradSumDecay,
    LearningRateMode,
    MultiPassPrefetchConfig,
    OptimType,
    PoolingMode,
    RecordCacheMetrics,
    SparseType,
    StepMode,
    TailIdThreshold,
    UserEnabledConfigDefinition,
    WeightDecayMode,
)
from .module import SplitTableBatchedEmbeddingBagsCodegen

__all__ = [
    "BoundsCheckMode",
    "CacheAlgorithm",
    "ComputeDevice",
    "CounterBasedRegularizationDefinition",
    "CounterWeightDecayMode",
    "CowClipDefinition",
    "EmainplaceModeDefinition",
    "EmbeddingLocation",
    "EnsembleModeDefinition",
    "GlobalWeightDecayDefinition",
    "GradSumDecay",
    "LearningRateMode",
    "MultiPassPrefetchConfig",
    "OptimType",
    "PoolingMode",
    "RecordCacheMetrics",
    "SparseType",
    "SplitTableBatchedEmbeddingBagsCodegen",
    "StepMode",
    "TailIdThreshold",
    "UserEnabledConfigDefinition",
    "WeightDecayMode",
]
