"""FBGEMM's `SplitTableBatchedEmbeddingBagsCodegen` and its enums, implemented with this package's tables.

`rec_sdk_torch.compat.fbgemm` provides the same names. Only torch is required; FBGEMM is not imported.
"""

from types import ModuleType as _Module

from .enums import BoundsCheckMode as BoundsCheckMode
from .enums import CacheAlgorithm as CacheAlgorithm
from .enums import ComputeDevice as ComputeDevice
from .enums import CounterBasedRegularizationDefinition as CounterBasedRegularizationDefinition
from .enums import CounterWeightDecayMode as CounterWeightDecayMode
from .enums import CowClipDefinition as CowClipDefinition
from .enums import EmainplaceModeDefinition as EmainplaceModeDefinition
from .enums import EmbeddingLocation as EmbeddingLocation
from .enums import EnsembleModeDefinition as EnsembleModeDefinition
from .enums import GlobalWeightDecayDefinition as GlobalWeightDecayDefinition
from .enums import GradSumDecay as GradSumDecay
from .enums import LearningRateMode as LearningRateMode
from .enums import MultiPassPrefetchConfig as MultiPassPrefetchConfig
from .enums import OptimType as OptimType
from .enums import PoolingMode as PoolingMode
from .enums import RecordCacheMetrics as RecordCacheMetrics
from .enums import SparseType as SparseType
from .enums import StepMode as StepMode
from .enums import TailIdThreshold as TailIdThreshold
from .enums import UserEnabledConfigDefinition as UserEnabledConfigDefinition
from .enums import WeightDecayMode as WeightDecayMode
from .module import SplitTableBatchedEmbeddingBagsCodegen as SplitTableBatchedEmbeddingBagsCodegen

__all__ = [name for name, value in globals().items() if name[0] != "_" and not isinstance(value, _Module)]
