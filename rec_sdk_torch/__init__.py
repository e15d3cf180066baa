"""Embedding tables larger than device memory, for TorchRec models on Ascend NPUs, CUDA GPUs and CPUs.

Names are imported when first used: the package itself imports without TorchRec, and even where torch cannot.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import torchrec_hooks

if TYPE_CHECKING:
    from .accumulate import AccumulateAdagrad, AccumulateAdam, AccumulateSGD
    from .configs import (
        AdmitAndEvictConfig,
        EmbCacheEmbeddingBagConfig,
        EmbCacheEmbeddingConfig,
        HashEmbeddingBagConfig,
        PolicyType,
        ShowClickParams,
    )
    from .embedding_collections import (
        EmbCacheEmbeddingBagCollection,
        EmbCacheEmbeddingCollection,
        HashEmbeddingBagCollection,
    )
    from .in_backward import apply_optimizer_in_backward
    from .tbe import (
        BoundsCheckMode,
        CacheTooSmallError,
        CapacityError,
        InitializerType,
        TableBatchedEmbedding,
    )

_EXPORTS = {
    "AccumulateAdagrad": "accumulate",
    "AccumulateAdam": "accumulate",
    "AccumulateSGD": "accumulate",
    "AdmitAndEvictConfig": "configs",
    "BoundsCheckMode": "tbe",
    "CacheTooSmallError": "tbe",
    "CapacityError": "tbe",
    "EmbCacheEmbeddingBagCollection": "embedding_collections",
    "EmbCacheEmbeddingBagConfig": "configs",
    "EmbCacheEmbeddingCollection": "embedding_collections",
    "EmbCacheEmbeddingConfig": "configs",
    "HashEmbeddingBagCollection": "embedding_collections",
    "HashEmbeddingBagConfig": "configs",
    "InitializerType": "tbe",
    "PolicyType": "configs",
    "ShowClickParams": "configs",
    "TableBatchedEmbedding": "tbe",
    "apply_optimizer_in_backward": "in_backward",
}

__all__ = [
    "AccumulateAdagrad",
    "AccumulateAdam",
    "AccumulateSGD",
    "AdmitAndEvictConfig",
    "BoundsCheckMode",
    "CacheTooSmallError",
    "CapacityError",
    "EmbCacheEmbeddingBagCollection",
    "EmbCacheEmbeddingBagConfig",
    "EmbCacheEmbeddingCollection",
    "EmbCacheEmbeddingConfig",
    "HashEmbeddingBagCollection",
    "HashEmbeddingBagConfig",
    "InitializerType",
    "PolicyType",
    "ShowClickParams",
    "TableBatchedEmbedding",
    "apply_optimizer_in_backward",
]
__version__ = "0.1.0"

torchrec_hooks.install()


def __getattr__(name: str) -> Any:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f".{module}", __name__), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in {"torchrec", "fbgemm_gpu"}:
            raise
        raise ImportError(f"rec_sdk_torch.{name} needs torchrec, which is not installed: {error}") from error
    except RuntimeError as error:
        if "torch_npu" not in str(error):  # which torch loads when it is imported itself
            raise
        from .emulate import HINT  # not above, where it would be imported twice by `python -m rec_sdk_torch.emulate`

        raise ImportError(
            f"rec_sdk_torch.{name}: torch cannot be imported, since torch_npu is installed and does not load "
            f"({error.__cause__}). {HINT}, and to leave NPUs out, set TORCH_DEVICE_BACKEND_AUTOLOAD=0"
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
