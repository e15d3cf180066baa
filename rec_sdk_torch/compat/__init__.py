"""Lets scripts that were written for Rec SDK 26 run here, on CPU, CUDA and NPU.

    import rec_sdk_torch.compat                      # first, before Rec SDK's names
    python -m rec_sdk_torch.compat script.py ...     # or without an edit: a script, or `-m` and a module

Then `torchrec_embcache` and `hybrid_torchrec` can be imported, and `dynamicemb`, or `dynamic_emb` as Rec SDK 2 calls it
(`names.py` lists their modules), and what is in `adjustments.py` holds: three places of torch and TorchRec accept what
Rec SDK's patched wheels do, defaults are Rec SDK's, and processes that the script spawns are like it.
Importing it again changes nothing. The porting guide of the docs walks through a script.

Raises:
    ImportError: TorchRec is missing, or a package of these names was imported before.
"""

from . import adjustments as _adjustments
from . import names as _names

__all__: list[str] = []

_names.install()
_adjustments.install()
