"""Warnings: their categories, by which they can be silenced or raised, and the line of the user's code they name."""

from __future__ import annotations

import os
import sys
import warnings


class RecSdkWarning(UserWarning):
    """Every warning of this package is one. `warnings.filterwarnings("ignore", category=...)` silences a category."""


class InputWarning(RecSdkWarning):
    """Something in a batch or a call could not be used as it was given: ids, timestamps, offsets, names of tables."""


class TrainingWarning(RecSdkWarning):
    """A training step did something to rows that may not be meant: gradients not finite, not clipped, rows evicted."""


class PerformanceWarning(RecSdkWarning):
    """Results are right, and take longer than they have to: a small cache, plans in vain, no kernel for a device."""


class SaveWarning(RecSdkWarning):
    """A save, a state dict or a dump is loaded in part, or a reader of saves cannot follow."""


class ConfigurationWarning(RecSdkWarning):
    """An option, a device or an installed package is legal and probably not meant."""


class DeprecatedWarning(RecSdkWarning, FutureWarning):
    """A spelling that a later version will not accept; the message has the new one."""


class MonitoringWarning(RecSdkWarning):
    """Something that watches the training failed, and the training goes on."""


def warn(message: str, category: type[RecSdkWarning]) -> None:
    """Warns at the innermost line that is neither ours nor torch's nor TorchRec's."""
    packages = [sys.modules[name] for name in ("rec_sdk_torch", "torch", "torchrec") if name in sys.modules]
    inside = tuple(os.path.join(os.path.dirname(str(package.__file__)), "") for package in packages)
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
