"""The interface of dynamicemb (`dynamic_emb` in Rec SDK 2), implemented with this package's cached tables.

Under `rec_sdk_torch.compat`, scripts import these names from `dynamicemb`, `dynamic_emb` and their submodules. The
porting guide describes the effect of each option.
"""

from types import ModuleType as _Module

from fbgemm_gpu.split_embedding_configs import EmbOptimType as EmbOptimType
from torchrec.modules.embedding_configs import data_type_to_dtype as data_type_to_dtype

from .admission import AdmissionStrategy as AdmissionStrategy
from .admission import Counter as Counter
from .admission import FrequencyAdmissionStrategy as FrequencyAdmissionStrategy
from .admission import KVCounter as KVCounter
from .dump_load import DynamicEmbDump as DynamicEmbDump
from .dump_load import DynamicEmbLoad as DynamicEmbLoad
from .enums import BATCH_SIZE_PER_DUMP as BATCH_SIZE_PER_DUMP
from .enums import BUCKET_ALIGNMENT as BUCKET_ALIGNMENT
from .enums import DEMB_TABLE_ALIGN_SIZE as DEMB_TABLE_ALIGN_SIZE
from .enums import MAX_BUCKET_CAPACITY as MAX_BUCKET_CAPACITY
from .enums import DynamicEmbCheckMode as DynamicEmbCheckMode
from .enums import DynamicEmbEvictStrategy as DynamicEmbEvictStrategy
from .enums import DynamicEmbInitializerArgs as DynamicEmbInitializerArgs
from .enums import DynamicEmbInitializerMode as DynamicEmbInitializerMode
from .enums import DynamicEmbPoolingMode as DynamicEmbPoolingMode
from .enums import DynamicEmbScoreStrategy as DynamicEmbScoreStrategy
from .enums import ScoreStrategy as ScoreStrategy
from .enums import data_type_to_dyn_emb as data_type_to_dyn_emb
from .enums import dyn_emb_to_torch as dyn_emb_to_torch
from .enums import string_to_evict_strategy as string_to_evict_strategy
from .enums import torch_to_dyn_emb as torch_to_dyn_emb
from .options import DynamicEmbTableOptions as DynamicEmbTableOptions
from .options import align_to_table_size as align_to_table_size
from .options import get_sharded_table_capacity as get_sharded_table_capacity
from .options import get_table_value_bytes as get_table_value_bytes

__all__ = [name for name, value in globals().items() if name[0] != "_" and not isinstance(value, _Module)]
