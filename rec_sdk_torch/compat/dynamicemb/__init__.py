"""The names of dynamicemb (Rec SDK 2: `dynamic_emb`) over the cached tables of this package.

Under `rec_sdk_torch.compat` the modules `dynamicemb` and `dynamic_emb` have them, by the paths that scripts import. The
porting guide says what each option does here.
"""

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.modules.embedding_configs import data_type_to_dtype

from .admission import AdmissionStrategy, Counter, FrequencyAdmissionStrategy, KVCounter
from .dump_load import DynamicEmbDump, DynamicEmbLoad
from .enums import (
    BATCH_SIZE_PER_DUMP,
    BUCKET_ALIGNMENT,
    DEMB_TABLE_ALIGN_SIZE,
    MAX_BUCKET_CAPACITY,
    DynamicEmbCheckMode,
    DynamicEmbEvictStrategy,
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    DynamicEmbPoolingMode,
    DynamicEmbScoreStrategy,
    ScoreStrategy,
    data_type_to_dyn_emb,
    dyn_emb_to_torch,
    string_to_evict_strategy,
    torch_to_dyn_emb,
)
from .options import DynamicEmbTableOptions, align_to_table_size, get_sharded_table_capacity, get_table_value_bytes

__all__ = [
    "BATCH_SIZE_PER_DUMP",
    "BUCKET_ALIGNMENT",
    "DEMB_TABLE_ALIGN_SIZE",
    "MAX_BUCKET_CAPACITY",
    "AdmissionStrategy",
    "Counter",
    "DynamicEmbCheckMode",
    "DynamicEmbDump",
    "DynamicEmbEvictStrategy",
    "DynamicEmbInitializerArgs",
    "DynamicEmbInitializerMode",
    "DynamicEmbLoad",
    "DynamicEmbPoolingMode",
    "DynamicEmbScoreStrategy",
    "DynamicEmbTableOptions",
    "EmbOptimType",
    "FrequencyAdmissionStrategy",
    "KVCounter",
    "ScoreStrategy",
    "align_to_table_size",
    "data_type_to_dtype",
    "data_type_to_dyn_emb",
    "dyn_emb_to_torch",
    "get_sharded_table_capacity",
    "get_table_value_bytes",
    "string_to_evict_strategy",
    "torch_to_dyn_emb",
]
