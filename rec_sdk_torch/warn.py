"""Warnings that name the line of the user's code."""

from __future__ import annotations

import os
import sys
import warnings


def warn(message: str) -> None:
    """A UserWarning at the innermost line that is neither ours nor torch's nor TorchRec's."""
    packages = [sys.modules[name] for name in ("rec_sdk_torch", "torch", "torchrec") if name in sys.modules]
    inside = tuple(os.path.join(os.path.dirname(str(package.__file__)), "") for package in packages)
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
