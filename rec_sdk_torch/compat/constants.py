"""Constants that Rec SDK's scripts import. The limits are Rec SDK's; tables of this package do not have them."""

import importlib.metadata
import re


def release(package: str) -> tuple[int, int, int]:
    """Returns the first three numbers of a package's version, without the suffixes of pre-releases and nightly builds.

    Returns (0, 0, 0) if no package of this name is installed; nightly builds may use another package name.
    """
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return 0, 0, 0
    numbers = re.match(r"\d+(\.\d+)*", version)
    first = [int(number) for number in numbers[0].split(".")[:3]] if numbers else []
    major, minor, patch = [*first, 0, 0, 0][:3]
    return major, minor, patch


TORCH_REC_VERSION = release("torchrec")
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
"""In bytes; the spelling is Rec SDK's."""
MAX_LOCAL_UNIQUE_PARALLEL_BATCH_NUM = 24
MIN_EVICT_STEP_INTERVAL = 10
MAX_PIPE_N_BATCH = 12
"""The pipelines here have the same limit."""

SAVE_PATH_MAX_LEN = 1024
"""Maximum number of characters of a path; `check_path` here has the same limit."""
TIMESTAMP_FORMAT = "%Y%m%d%H%M%S"
"""Format of the folder names of saves; this package appends microseconds for a second save within the same second."""
