"""Embedding tables larger than device memory, for TorchRec models on Ascend NPUs, CUDA GPUs and CPUs.

`__init__.pyi` lists the public names. Each is loaded at its first use, so that the package itself can be imported
without TorchRec, and even where torch cannot be imported. When torch and TorchRec are imported, they are patched where
they would treat a collection of this package like their own; see `patches/` and `optim/torchrec_hooks.py`.
"""

from . import patches as _patches
from .optim import torchrec_hooks as _torchrec_hooks
from .runtime.lazy import attach as _attach

__version__ = "0.2.0"
__getattr__, __dir__, __all__ = _attach(__name__, __file__)
_torchrec_hooks.install()
_patches.install()
