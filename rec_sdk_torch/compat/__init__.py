"""Compatibility with Rec SDK 26: runs its scripts on CPU, CUDA and NPU.

    import rec_sdk_torch.compat                      # first, before Rec SDK's names
    python -m rec_sdk_torch.compat script.py ...     # or, with no edit to the script (also `-m module`)

Afterwards `torchrec_embcache`, `hybrid_torchrec` and `dynamicemb` (`dynamic_emb` in Rec SDK 2) can be imported;
`names.py` lists their modules. The import also makes the changes listed in `adjustments.py`: torch and TorchRec accept
what they accept in Rec SDK's patched wheels, defaults are Rec SDK's, and processes that the script spawns import compat
too. Importing compat again changes nothing. The porting guide in the docs shows how to port a script.

Raises:
    ImportError: TorchRec is missing, or a package with one of these names was imported before.
"""

from . import adjustments as _adjustments
from . import names as _names

__all__: list[str] = []

_names.install()
_adjustments.install()
