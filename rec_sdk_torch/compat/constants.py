"""Constants that Rec SDK's scripts import. The limits are Rec SDK's: tables here do not have them."""

import importlib.metadata

TORCH_REC_VERSION = tuple(int(part) for part in importlib.metadata.version("torchrec").partition("+")[0].split(".")[:3])
IS_TORCH_REC_120 = TORCH_REC_VERSION == (1, 2, 0)
IS_TORCH_REC_150 = TORCH_REC_VERSION == (1, 5, 0)

MAX_NUM_EMBEDDINGS = 1_000_000_000
MAX_EMBEDDINGS_DIM = 4096
EMBEDDINGS_DIM_ALIGNMENT = 8
MAX_NUM_TABLES = 10_000
MAX_MULTI_HOT_SIZE = 102_400
MAX_WORLD_SIZE = 10_000
MAX_BATCH_SIZE = 102_400
MAX_CACHINE_MEM_SIZE = 64 * 2**30
"""In bytes; the name is Rec SDK's."""
MAX_LOCAL_UNIQUE_PARALLEL_BATCH_NUM = 24
MIN_EVICT_STEP_INTERVAL = 10
MAX_PIPE_N_BATCH = 12
"""The pipelines here hold to it."""

SAVE_PATH_MAX_LEN = 1024
"""Characters of a path; `check_path` here holds to it."""
TIMESTAMP_FORMAT = "%Y%m%d%H%M%S"
"""Names of folders of saves; of a second's later saves, microseconds are behind it here."""
