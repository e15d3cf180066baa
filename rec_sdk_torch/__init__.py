"""Embedding tables larger than device memory, for TorchRec models on Ascend NPUs, CUDA GPUs and CPUs.

Public names are those of `__init__.pyi`. They are imported when first used: the package itself imports without
TorchRec, and even where torch cannot. Once `torchrec.optim` is imported, it has the Accumulate optimizers too
(`optim/torchrec_hooks.py`), TorchRec's planner takes NPUs (`_topology.py`), and its `state_dict_gather` takes
tables of this package (`_gathering.py`), as torch.distributed.checkpoint does (`_torch_checkpoints.py`); modules around
collections that cannot work say so (`_wrapped_collections.py`).
"""

from . import _gathering, _process_groups, _topology, _torch_checkpoints, _wrapped_collections
from ._lazy import attach as _attach
from .optim import torchrec_hooks as _torchrec_hooks

__version__ = "0.2.0"
__getattr__, __dir__, __all__ = _attach(__name__, __file__)
_torchrec_hooks.install()
_process_groups.install()
_topology.install()
_gathering.install()
_torch_checkpoints.install()
_wrapped_collections.install()
