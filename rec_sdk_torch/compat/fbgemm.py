"""`rec_sdk_torch.fbgemm` under compat: importing it imports `rec_sdk_torch.compat` with all of its effects."""

from ..fbgemm import *  # noqa: F403
from ..fbgemm import __all__  # noqa: F401
