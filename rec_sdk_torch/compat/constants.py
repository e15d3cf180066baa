"""Constants that Rec SDK's scripts import. The limits are Rec SDK's: tables here do not have them."""

MAX_NUM_EMBEDDINGS = 1_000_000_000
MAX_EMBEDDINGS_DIM = 4096
EMBEDDINGS_DIM_ALIGNMENT = 8
MAX_NUM_TABLES = 10_000
MAX_MULTI_HOT_SIZE = 102_400
MAX_WORLD_SIZE = 10_000
MAX_BATCH_SIZE = 102_400
MAX_CACHINE_MEM_SIZE = 64 * 2**30
"""In bytes; the name is Rec SDK's."""

SAVE_PATH_MAX_LEN = 1024
"""Characters of a path; `check_path` here holds to it."""
TIMESTAMP_FORMAT = "%Y%m%d%H%M%S"
"""Names of folders of saves; of a second's later saves, microseconds are behind it here."""
