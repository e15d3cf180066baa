"""Table-batched embeddings: many tables, one call. Needs torch only; the collections stand on it."""

from .._engine import CacheTooSmallError, CapacityError
from .cache_size import BatchHint, CacheOption
from .embedding import TableBatchedEmbedding
from .life import TableLife
from .optimizer import SPECS, OptimizerSpec, StateSpec, TableOptimizer
from .table import BoundsCheckMode, InitializerType, Pooling, TableConfig

__all__ = [
    "SPECS",
    "BatchHint",
    "BoundsCheckMode",
    "CacheOption",
    "CacheTooSmallError",
    "CapacityError",
    "InitializerType",
    "OptimizerSpec",
    "Pooling",
    "StateSpec",
    "TableBatchedEmbedding",
    "TableConfig",
    "TableLife",
    "TableOptimizer",
]
