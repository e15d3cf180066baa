"""`rec_sdk_torch.fbgemm`, beside Rec SDK's names: importing this imports `rec_sdk_torch.compat` with all it does."""

from ..fbgemm import *  # noqa: F403
from ..fbgemm import __all__  # noqa: F401
