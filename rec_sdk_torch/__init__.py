"""Embedding tables larger than device memory, for TorchRec models on Ascend NPUs, CUDA GPUs and CPUs.

Names are imported when first used: the package itself imports without TorchRec, and even where torch cannot.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .optim import torchrec_hooks

if TYPE_CHECKING:
    from .modules.configs import (
        AdmitAndEvictConfig,
        EmbCacheEmbeddingBagConfig,
        EmbCacheEmbeddingConfig,
        HashEmbeddingBagConfig,
        PolicyType,
        ShowClickParams,
    )
    from .modules.embedding_collections import (
        EmbCacheEmbeddingBagCollection,
        EmbCacheEmbeddingCollection,
        HashEmbeddingBagCollection,
    )
    from .optim.accumulate import AccumulateAdagrad, AccumulateAdam, AccumulateSGD
    from .optim.in_backward import apply_optimizer_in_backward
    from .tbe import (
        BoundsCheckMode,
        CacheTooSmallError,
        CapacityError,
        InitializerType,
        TableBatchedEmbedding,
    )

_EXPORTS = {
    "AccumulateAdagrad": "optim.accumulate",
    "AccumulateAdam": "optim.accumulate",
    "AccumulateSGD": "optim.accumulate",
    "AdmitAndEvictConfig": "modules.configs",
    "BoundsCheckMode": "tbe",
    "CacheTooSmallError": "tbe",
    "CapacityError": "tbe",
    "EmbCacheEmbeddingBagCollection": "modules.embedding_collections",
    "EmbCacheEmbeddingBagConfig": "modules.configs",
    "EmbCacheEmbeddingCollection": "modules.embedding_collections",
    "EmbCacheEmbeddingConfig": "modules.configs",
    "HashEmbeddingBagCollection": "modules.embedding_collections",
    "HashEmbeddingBagConfig": "modules.configs",
    "InitializerType": "tbe",
    "PolicyType": "modules.configs",
    "ShowClickParams": "modules.configs",
    "TableBatchedEmbedding": "tbe",
    "apply_optimizer_in_backward": "optim.in_backward",
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
        from .backends.emulator import HINT

        raise ImportError(
            f"rec_sdk_torch.{name}: torch cannot be imported, since torch_npu is installed and does not load "
            f"({error.__cause__}). {HINT}, and to leave NPUs out, set TORCH_DEVICE_BACKEND_AUTOLOAD=0"
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
