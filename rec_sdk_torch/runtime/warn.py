"""Warning categories of the package, and `warn`, which attributes a warning to the user's line."""

from __future__ import annotations

import os
import sys
import warnings


class RecSdkWarning(UserWarning):
    """The base of this package's warnings. `warnings.filterwarnings("ignore", category=...)` silences a category."""


class InputWarning(RecSdkWarning):
    """A warning about input that was corrected or ignored: ids, timestamps, offsets or table names."""


class TrainingWarning(RecSdkWarning):
    """A warning about a possibly unintended training step: gradients not finite or not clipped, or rows evicted."""


class PerformanceWarning(RecSdkWarning):
    """A warning about avoidable slowness: a small cache, unused prefetched plans, or a device without kernels."""


class SaveWarning(RecSdkWarning):
    """A warning about a save, state dict or dump that is loaded in part, or a reader that cannot follow new saves."""


class ConfigurationWarning(RecSdkWarning):
    """A warning about an option, a device or an installed package that is valid but probably not intended."""


class DeprecatedWarning(RecSdkWarning, FutureWarning):
    """A warning about a name or an option that a later version will not accept; the message states the new one."""


class MonitoringWarning(RecSdkWarning):
    """A warning that monitoring, such as a log of the training, has failed; the training continues."""


def warn(message: str, category: type[RecSdkWarning]) -> None:
    """Issues a warning at the innermost line outside of this package, torch and TorchRec."""
    packages = [sys.modules[name] for name in ("rec_sdk_torch", "torch", "torchrec") if name in sys.modules]
    inside = tuple(os.path.join(os.path.dirname(str(package.__file__)), "") for package in packages)
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
