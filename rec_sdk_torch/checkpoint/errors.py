"""Errors that say what is wrong with a save."""

from __future__ import annotations


class CheckpointError(RuntimeError, ValueError):
    """A save is missing, damaged, or of something else; the message names the file.

    It is a ValueError as well, which Rec SDK raises there.
    """
