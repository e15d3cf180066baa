"""Table-batched embeddings: many tables, one call. Needs torch only; the collections stand on it."""

from .._engine import CacheTooSmallError, CapacityError
from ..formulas import SPECS, OptimizerSpec, StateSpec
from .cache.evicted import EvictedRows
from .config.cache_size import BatchHint, CacheOption
from .config.life import EvictReason, TableLife
from .config.optimizer import TableOptimizer
from .config.table import BoundsCheckMode, Home, InitializerType, Pooling, TableConfig
from .embedding import TableBatchedEmbedding
from .options import EmbeddingOptions

__all__ = [
    "SPECS",
    "BatchHint",
    "BoundsCheckMode",
    "CacheOption",
    "CacheTooSmallError",
    "CapacityError",
    "EmbeddingOptions",
    "EvictReason",
    "EvictedRows",
    "Home",
    "InitializerType",
    "OptimizerSpec",
    "Pooling",
    "StateSpec",
    "TableBatchedEmbedding",
    "TableConfig",
    "TableLife",
    "TableOptimizer",
]
