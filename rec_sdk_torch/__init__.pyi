# What `import rec_sdk_torch` offers: for type checkers, and read by __init__.py. The names are listed nowhere else.
from .checkpoint.errors import CheckpointError as CheckpointError
from .checkpoint.saver import Saver as Saver
from .distributed.prefetch import prefetch as prefetch
from .distributed.sharders import EmbCacheEmbeddingBagCollectionSharder as EmbCacheEmbeddingBagCollectionSharder
from .distributed.sharders import EmbCacheEmbeddingCollectionSharder as EmbCacheEmbeddingCollectionSharder
from .distributed.sharders import HashEmbeddingBagCollectionSharder as HashEmbeddingBagCollectionSharder
from .distributed.sharders import get_default_hybrid_sharders as get_default_hybrid_sharders
from .distributed.train_pipeline import EmbCacheTrainPipelineSparseDist as EmbCacheTrainPipelineSparseDist
from .distributed.train_pipeline import HybridTrainPipelineSparseDist as HybridTrainPipelineSparseDist
from .modules.cache_log import CacheLog as CacheLog
from .modules.configs import AdmitAndEvictConfig as AdmitAndEvictConfig
from .modules.configs import AdmitAndEvictPolicyType as AdmitAndEvictPolicyType
from .modules.configs import EmbCacheEmbeddingBagConfig as EmbCacheEmbeddingBagConfig
from .modules.configs import EmbCacheEmbeddingConfig as EmbCacheEmbeddingConfig
from .modules.configs import HashEmbeddingBagConfig as HashEmbeddingBagConfig
from .modules.configs import ShowClickParams as ShowClickParams
from .modules.embedding_collections import EmbCacheEmbeddingBagCollection as EmbCacheEmbeddingBagCollection
from .modules.embedding_collections import EmbCacheEmbeddingCollection as EmbCacheEmbeddingCollection
from .modules.embedding_collections import HashEmbeddingBagCollection as HashEmbeddingBagCollection
from .optim.accumulate import AccumulateAdagrad as AccumulateAdagrad
from .optim.accumulate import AccumulateAdam as AccumulateAdam
from .optim.accumulate import AccumulateAdamW as AccumulateAdamW
from .optim.accumulate import AccumulateSGD as AccumulateSGD
from .optim.accumulate_torchrec import AccumulateLAMB as AccumulateLAMB
from .optim.accumulate_torchrec import AccumulateLarsSGD as AccumulateLarsSGD
from .optim.accumulate_torchrec import AccumulatePartialRowWiseAdam as AccumulatePartialRowWiseAdam
from .optim.accumulate_torchrec import AccumulatePartialRowWiseLAMB as AccumulatePartialRowWiseLAMB
from .optim.accumulate_torchrec import AccumulateRowWiseAdagrad as AccumulateRowWiseAdagrad
from .optim.in_backward import apply_optimizer_in_backward as apply_optimizer_in_backward
from .optim.sparse_gradients import SparseGradients as SparseGradients
from .sparse.jagged_tensor_with_timestamp import JaggedTensorWithTimestamp as JaggedTensorWithTimestamp
from .sparse.jagged_tensor_with_timestamp import KeyedJaggedTensorWithTimestamp as KeyedJaggedTensorWithTimestamp
from .sparse.jagged_tensor_with_timestamp import with_click_labels as with_click_labels
from .tbe import BoundsCheckMode as BoundsCheckMode
from .tbe import CacheTooSmallError as CacheTooSmallError
from .tbe import CapacityError as CapacityError
from .tbe import InitializerType as InitializerType
from .tbe import Pooling as Pooling
from .tbe import TableBatchedEmbedding as TableBatchedEmbedding
from .tbe import TableConfig as TableConfig
from .tbe import TableLife as TableLife
from .tbe import TableOptimizer as TableOptimizer

__version__: str
__all__: list[str]
