"""Embedding tables larger than device memory, for TorchRec models on Ascend NPUs, CUDA GPUs and CPUs.

Public names are those of `__init__.pyi`. They are imported when first used: the package itself imports without
TorchRec, and even where torch cannot. Once they are imported, torch and TorchRec are changed where they would take a
collection of this package for one of theirs: `patches/`, and `optim/torchrec_hooks.py`.
"""

from . import patches as _patches
from .optim import torchrec_hooks as _torchrec_hooks
from .runtime.lazy import attach as _attach

__version__ = "0.2.0"
__getattr__, __dir__, __all__ = _attach(__name__, __file__)
_torchrec_hooks.install()
_patches.install()
